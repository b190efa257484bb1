"""A cache of values computed from the weights of a module, such as folded matrices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from models.cpu.matmul import matmul_precision

T = TypeVar("T")

# each parameter, its storage, and its version (the number of in-place changes)
Weights = list[tuple[Tensor, Tensor, int]]


class DerivedCache(nn.Module):
    """Cached values of a module, with no parameters and an empty state dict.

    Copies and pickles of the module are empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, tuple[Weights, Any]] = {}

    def train(self, mode: bool = True) -> Self:
        """Clear the cache.

        PyTorch counts in-place changes of a tensor, but not changes by a fused
        optimizer. Training calls this method after each such change.
        """
        self.entries = {}
        return super().train(mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> DerivedCache:
        return DerivedCache()

    def __reduce__(self) -> tuple[type[DerivedCache], tuple[()]]:
        return DerivedCache, ()


def cache_until_changed(
    owner: nn.Module, name: str, make: Callable[[], T], *others: nn.Module
) -> T:
    """Return the result of `make`, cached in `owner` until a parameter changes.

    The value is computed again after a call of `owner.train()` or `owner.eval()`, and
    after a parameter of `owner` or `others` was changed in place or moved. Other
    changes need such a call: changes that PyTorch does not count (by a fused optimizer
    or through `.data`), and the replacement of a parameter.

    Args:
        owner: Module that the value belongs to.
        name: Name of the value.
        make: Function that computes the value from the weights.
        others: Other modules whose parameters the value depends on.
    """
    if "derived" not in owner._modules:
        owner.add_module("derived", DerivedCache())
    entries = cast(DerivedCache, owner.derived).entries
    # versions of parameters cannot be traced
    if torch.compiler.is_compiling() and name in entries:
        return cast(T, entries[name][1])
    if name not in entries or _have_changed(entries[name][0]):
        # the entry keeps the storage alive, so that no new parameter reuses its address
        weights: Weights = []
        for module in (owner, *others):
            weights += [(p, p.detach(), _version(p)) for p in module.parameters()]
        # models fitted by counting have no parameters
        device = weights[0][0].device.type if weights else "cpu"
        precision = matmul_precision("highest") if device == "cuda" else nullcontext()
        # cached values have the precision of the weights
        with torch.autocast(device, enabled=False), precision:
            entries[name] = weights, make()
    return cast(T, entries[name][1])


def _have_changed(weights: Weights) -> bool:
    """Return whether a parameter was changed or moved since `weights` was recorded."""
    return any(
        p.data_ptr() != storage.data_ptr() or not 0 <= version == _version(p)
        for p, storage, version in weights
    )


def _version(parameter: Tensor) -> int:
    """Return the number of in-place changes, or -1 for an inference tensor."""
    return -1 if parameter.is_inference() else parameter._version
