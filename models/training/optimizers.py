"""Build optimizers and parameter groups, and describe their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn


def make_optimizer(
    model: nn.Module,
    name: Literal["adamw", "adagrad"],
    weight_decay: float,
    lr_multipliers: Mapping[str, float],
) -> tuple[torch.optim.Optimizer, list[float]]:
    """Build the optimizer of a model's trained parameters.

    The training loop sets the learning rate before each step.

    Args:
        model: The model, on its device.
        name: Name of the optimizer.
        weight_decay: Weight decay, except for the `no_decay_parameters()` of modules.
        lr_multipliers: Factors on the learning rate by prefix of parameter names.

    Returns:
        The optimizer, and the factor on the learning rate of each parameter group.
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
        optimizer = kind(options, weight_decay=weight_decay)
    else:
        optimizer = torch.optim.AdamW(
            options, weight_decay=weight_decay, fused=True, capturable=on_gpu
        )
    return optimizer, [factor for factor, _ in groups]


class CapturableAdagrad(torch.optim.Adagrad):
    """Adagrad with foreach operations and a learning rate tensor, for CUDA graphs.

    A CUDA graph of its step can be replayed with another learning rate.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step; `closure` is ignored."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients: Any = [p.grad for p in parameters]
            sums = [self.state[p]["sum"] for p in parameters]
            if group["weight_decay"]:
                gradients = torch._foreach_add(
                    gradients, parameters, alpha=group["weight_decay"]
                )
            torch._foreach_addcmul_(sums, gradients, gradients)
            scales = torch._foreach_add(torch._foreach_sqrt(sums), group["eps"])
            scaled_gradients = torch._foreach_div(gradients, scales)
            updates: Any = torch._foreach_mul(scaled_gradients, group["lr"])
            torch._foreach_sub_(parameters, updates)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state for a checkpoint, with learning rates as floats."""
    state = optimizer.state_dict()
    state["param_groups"] = [
        {**group, "lr": float(group["lr"])} for group in state["param_groups"]
    ]
    return state


def group_parameters(
    model: nn.Module, lr_multipliers: Mapping[str, float]
) -> dict[tuple[float, bool], list[nn.Parameter]]:
    """Group the trained parameters by learning rate factor and weight decay.

    Args:
        model: Model whose parameters are optimized.
        lr_multipliers: Factors on the learning rate by prefix of parameter names. The
            first matching prefix applies; other parameters have a factor of 1.

    Returns:
        Parameters by their factor and whether weight decay applies.
    """
    no_decay_ids = set()
    for module in model.modules():
        exempt: list[nn.Parameter] = getattr(module, "no_decay_parameters", list)()
        no_decay_ids |= {id(parameter) for parameter in exempt}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        prefixes = [prefix for prefix in lr_multipliers if name.startswith(prefix)]
        factor = lr_multipliers[prefixes[0]] if prefixes else 1.0
        key = (factor, id(parameter) not in no_decay_ids)
        groups.setdefault(key, []).append(parameter)
    return groups
