"""Optimizers, and which parameters have a learning rate of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from models.tables import UserError


def make_optimizer(
    model: nn.Module,
    name: Literal["adamw", "adagrad"],
    lr: float,
    weight_decay: float,
    lr_multipliers: Mapping[str, float],
) -> tuple[torch.optim.Optimizer, list[float]]:
    """The optimizer of the trained parameters, and of each of its groups the factor on the learning rate."""
    groups = by_factor(model, lr_multipliers)
    given: list[dict[str, Any]] = [{"params": parameters} for parameters in groups.values()]
    optimizer: torch.optim.Optimizer
    if name == "adagrad":
        optimizer = torch.optim.Adagrad(given, lr=lr, weight_decay=weight_decay)
    else:
        optimizer = torch.optim.AdamW(given, lr=lr, weight_decay=weight_decay, fused=True)
    return optimizer, list(groups)


def by_factor(model: nn.Module, declared: Mapping[str, float]) -> dict[float, list[nn.Parameter]]:
    """The trained parameters by their factor on the learning rate.

    `declared` has a factor by the beginning of parameters' names, of which the first that fits counts; all others have
    1. UserError for a beginning that no trained parameter has.
    """
    found: dict[float, list[nn.Parameter]] = {}
    used = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            prefix = next((prefix for prefix in declared if name.startswith(prefix)), None)
            used.add(prefix)
            found.setdefault(1.0 if prefix is None else float(declared[prefix]), []).append(parameter)
    for prefix in declared.keys() - used:
        raise UserError(f"lr_multipliers has '{prefix}', but no trained parameter's name begins so; leave it out")
    return found
