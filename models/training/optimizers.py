"""Optimizers, their parameter groups and learning rates."""

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
    """Build the optimizer of the trained parameters.

    Returns:
        The optimizer; the factor on the learning rate of each of its parameter groups.
    """
    groups = group_parameters(model, lr_multipliers)
    options: list[dict[str, Any]] = []
    for (_, decays), parameters in groups.items():
        decay = {} if decays else {"weight_decay": 0.0}
        options.append({"params": parameters, **decay})
    on_gpu = options[0]["params"][0].device.type == "cuda"
    optimizer: torch.optim.Optimizer
    if name == "adagrad":
        kind = CapturableAdagrad if on_gpu else torch.optim.Adagrad
        optimizer = kind(options, lr=lr, weight_decay=weight_decay)
    else:
        optimizer = torch.optim.AdamW(
            options, lr=lr, weight_decay=weight_decay, fused=True, capturable=on_gpu
        )
    return optimizer, [factor for factor, _ in groups]


class CapturableAdagrad(torch.optim.Adagrad):
    """PyTorch's Adagrad with foreach operations, which a CUDA graph can replay with another learning rate."""

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


def set_learning_rate(
    optimizer: torch.optim.Optimizer, factors: Sequence[float], lr: float
) -> None:
    """Set the learning rate of each group to `lr` times its factor.

    On a GPU it is a tensor, so that a CUDA graph reads the current value.
    """
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        device = group["params"][0].device
        if "capturable" in group:  # it may be loaded from another machine
            group["capturable"] = device.type == "cuda"
        if device.type != "cuda":
            group["lr"] = lr * factor
        elif isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * factor)
        else:  # a new or a loaded optimizer
            group["lr"] = torch.tensor(lr * factor, device=device)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state for a checkpoint, with learning rates as numbers."""
    state = optimizer.state_dict()
    state["param_groups"] = [
        {**group, "lr": float(group["lr"])} for group in state["param_groups"]
    ]
    return state


@runtime_checkable
class NoWeightDecay(Protocol):
    """A module with parameters without weight decay."""

    def no_decay_parameters(self) -> list[nn.Parameter]:
        """Return the parameters without weight decay."""


def group_parameters(
    model: nn.Module, lr_multipliers: Mapping[str, float]
) -> dict[tuple[float, bool], list[nn.Parameter]]:
    """Group the trained parameters by their factor on the learning rate and by weight decay.

    Parameters that a module returns as `no_decay_parameters` have no weight decay.

    Args:
        model: The model.
        lr_multipliers: Factors by the beginning of parameters' names; the first that
            matches counts, and other parameters have 1.

    Raises:
        UserError: If no trained parameter's name has one of the beginnings.
    """
    no_decay = {
        id(p)
        for module in model.modules()
        if isinstance(module, NoWeightDecay)
        for p in module.no_decay_parameters()
    }
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    used = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matching = [prefix for prefix in lr_multipliers if name.startswith(prefix)]
            prefix = matching[0] if matching else None
            used.add(prefix)
            factor = 1.0 if prefix is None else float(lr_multipliers[prefix])
            key = (factor, id(parameter) not in no_decay)
            groups.setdefault(key, []).append(parameter)
    for prefix in lr_multipliers.keys() - used:
        raise UserError(
            f"lr_multipliers has '{prefix}', but no trained parameter's name begins so; leave it out"
        )
    return groups
