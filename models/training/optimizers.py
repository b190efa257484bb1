"""Optimizers, and which parameters have a learning rate of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from models.storage.tables import UserError


def make_optimizer(
    model: nn.Module,
    name: Literal["adamw", "adagrad"],
    lr: float,
    weight_decay: float,
    lr_multipliers: Mapping[str, float],
) -> tuple[torch.optim.Optimizer, list[float]]:
    """The optimizer of the trained parameters, and of each of its groups the factor on the learning rate."""
    groups = grouped(model, lr_multipliers)
    given: list[dict[str, Any]] = [
        {"params": parameters}
        if decays
        else {"params": parameters, "weight_decay": 0.0}
        for (_, decays), parameters in groups.items()
    ]
    on_gpu = given[0]["params"][0].device.type == "cuda"
    optimizer: torch.optim.Optimizer
    if name == "adagrad":
        kind = CapturableAdagrad if on_gpu else torch.optim.Adagrad
        optimizer = kind(given, lr=lr, weight_decay=weight_decay)
    else:
        optimizer = torch.optim.AdamW(
            given, lr=lr, weight_decay=weight_decay, fused=True, capturable=on_gpu
        )
    return optimizer, [factor for factor, _ in groups]


class CapturableAdagrad(torch.optim.Adagrad):
    """PyTorch's Adagrad by operations on all parameters at once, which a CUDA graph can repeat with another rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients: Any = [p.grad for p in parameters]
            sums = [self.state[p]["sum"] for p in parameters]
            if group["weight_decay"]:
                gradients = torch._foreach_add(
                    gradients, parameters, alpha=group["weight_decay"]
                )
            torch._foreach_addcmul_(sums, gradients, gradients)
            spread = torch._foreach_add(torch._foreach_sqrt(sums), group["eps"])
            updates: Any = torch._foreach_mul(
                torch._foreach_div(gradients, spread), group["lr"]
            )
            torch._foreach_sub_(parameters, updates)


def set_rate(
    optimizer: torch.optim.Optimizer, factors: Sequence[float], lr: float
) -> None:
    """Sets the learning rate `lr`, times its factor in each group; on a GPU in a tensor that a CUDA graph reads."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        device = group["params"][0].device
        if "capturable" in group:  # a loaded state has that of another machine
            group["capturable"] = device.type == "cuda"
        if device.type != "cuda":
            group["lr"] = lr * factor
        elif isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * factor)
        else:  # new, or loaded
            group["lr"] = torch.tensor(lr * factor, device=device)


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint keeps: the state, with learning rates as numbers."""
    state = optimizer.state_dict()
    state["param_groups"] = [
        {**group, "lr": float(group["lr"])} for group in state["param_groups"]
    ]
    return state


@runtime_checkable
class Spares(Protocol):
    """A module that spares some of its parameters weight decay."""

    def no_decay_parameters(self) -> list[nn.Parameter]:
        """Those parameters."""


def grouped(
    model: nn.Module, declared: Mapping[str, float]
) -> dict[tuple[float, bool], list[nn.Parameter]]:
    """The trained parameters by their factor on the learning rate, and whether their weights decay.

    `declared` has a factor by the beginning of parameters' names, of which the first that fits counts; all others have
    1. Weights decay but for those that a module of the model gives as `no_decay_parameters()`, as its published code spares them.
    UserError for a beginning that no trained parameter has.
    """
    spared = {
        id(p)
        for module in model.modules()
        if isinstance(module, Spares)
        for p in module.no_decay_parameters()
    }
    found: dict[tuple[float, bool], list[nn.Parameter]] = {}
    used = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            prefix = next(
                (prefix for prefix in declared if name.startswith(prefix)), None
            )
            used.add(prefix)
            factor = 1.0 if prefix is None else float(declared[prefix])
            found.setdefault((factor, id(parameter) not in spared), []).append(
                parameter
            )
    for prefix in declared.keys() - used:
        raise UserError(
            f"lr_multipliers has '{prefix}', but no trained parameter's name begins so; leave it out"
        )
    return found
