"""What is computed from a module's weights once and used until they change: folded matrices, tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

T = TypeVar("T")

Weights = list[tuple[Tensor, int]]


def derived(owner: nn.Module, name: str, make: Callable[[], T]) -> T:
    """`make()`, kept on `owner` under `name` until a parameter of it is changed, replaced or moved.

    Holds the parameters' storage, so that no new one can come to lie at the same place. No part of the state
    dict, nor a submodule. Parameters made under `torch.inference_mode` keep no count of changes: for a module
    with such ones `make` runs every time.
    """
    current = (
        None
        if any(p.is_inference() for p in owner.parameters())
        else [(p.detach(), p._version) for p in owner.parameters()]
    )
    kept: tuple[Weights, T] | None = owner.__dict__.get(name)
    if kept is None or current is None or not _same(kept[0], current):
        kept = (current or [], make())
        owner.__dict__[name] = kept
    return kept[1]


def _same(before: Weights, now: Weights) -> bool:
    return len(before) == len(now) and all(
        old.data_ptr() == new.data_ptr() and version == count and old.shape == new.shape
        for (old, version), (new, count) in zip(before, now, strict=True)
    )
