"""What is computed from a module's weights once and used until they change: folded matrices, tables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from models.cpu.matmul import products

T = TypeVar("T")

Weights = list[tuple[Tensor, Tensor, int]]
"""Parameters, what they held, and how often that had been changed."""


class Derived(nn.Module):
    """Holds what was made of a module's weights; without parameters, and empty in a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, tuple[Weights, Any]] = {}

    def train(self, mode: bool = True) -> Self:
        """Forgets all: torch counts changes of a tensor, but not those by a fused optimizer, which follow this."""
        self.made = {}
        return super().train(mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> Derived:
        return Derived()

    def __reduce__(self) -> tuple[type[Derived], tuple[()]]:
        return Derived, ()


def derived(
    owner: nn.Module, name: str, make: Callable[[], T], *others: nn.Module
) -> T:
    """`make()`, kept with `owner` until `owner.train()` or `owner.eval()` is called or a parameter, of `owner` or of
    the `others`, is changed in place or moved. Changes that torch does not count (by a fused optimizer, through
    `.data`) and new parameters in the place of old ones need such a call after them.

    Holds the parameters' storage, so that no new one can come to lie at the same place.
    """
    if "derived" not in owner._modules:
        owner.add_module("derived", Derived())
    made = cast(Derived, owner.derived).made
    if torch.compiler.is_compiling() and name in made:  # which cannot look at versions
        return cast(T, made[name][1])
    if name not in made or any(
        p.data_ptr() != held.data_ptr() or not 0 <= count == _version(p)
        for p, held, count in made[name][0]
    ):
        now: Weights = [
            (p, p.detach(), _version(p))
            for module in (owner, *others)
            for p in module.parameters()
        ]
        device = (
            now[0][0].device.type if now else "cpu"
        )  # of a model that counts, which has buffers alone
        whole = products("highest") if device == "cuda" else nullcontext()
        with (
            torch.autocast(device, enabled=False),
            whole,
        ):  # what is kept is of the weights' own precision
            made[name] = now, make()
    return cast(T, made[name][1])


def _version(parameter: Tensor) -> int:
    """How often it was changed; of an inference tensor, which does not count, -1."""
    return -1 if parameter.is_inference() else parameter._version
