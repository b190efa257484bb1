"""What is computed from a module's weights once and used until they change: folded matrices, tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn

T = TypeVar("T")

Weights = list[tuple[Tensor, int]]


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


def derived(owner: nn.Module, name: str, make: Callable[[], T], *others: nn.Module) -> T:
    """`make()`, kept with `owner` until `owner.train()` or `owner.eval()` is called or a parameter, of `owner` or of
    the `others`, is changed in place, replaced or moved. Changes that torch does not count (by a fused optimizer,
    through `.data`) need such a call after them.

    Holds the parameters' storage, so that no new one can come to lie at the same place.
    """
    if "derived" not in owner._modules:
        owner.add_module("derived", Derived())
    made = cast(Derived, owner.derived).made
    now = [(p.detach(), -1 if p.is_inference() else p._version) for m in (owner, *others) for p in m.parameters()]
    if name not in made or not _same(made[name][0], now):
        with torch.autocast(now[0][0].device.type, enabled=False):  # what is kept is of the weights' own precision
            made[name] = now, make()
    return cast(T, made[name][1])


def _same(before: Weights, now: Weights) -> bool:
    return len(before) == len(now) and all(
        old.data_ptr() == new.data_ptr() and count == recount >= 0
        for (old, count), (new, recount) in zip(before, now, strict=True)
    )
