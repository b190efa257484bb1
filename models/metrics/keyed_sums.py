"""Pairs of sums by key, which can be added over batches and workers in any order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

MAX_CHUNKS = 256
"""Number of chunks above which they are merged."""


@dataclass(frozen=True)
class KeyedSums:
    """Two sums for each key."""

    chunks: tuple[tuple[Tensor, Tensor], ...]
    """Pairs of arrays, one pair per batch: (n,) int64 keys, and (2, n) float64 sums."""

    def __add__(self, other: KeyedSums | float) -> Self:
        if not isinstance(other, KeyedSums):
            return self  # the 0 that `sum` starts with
        joined = type(self)((*self.chunks, *other.chunks))
        if len(joined.chunks) > MAX_CHUNKS:
            return type(self)((joined.merge_chunks(),))
        return joined

    __radd__ = __add__

    def cpu(self) -> Self:
        """Copy the sums to CPU memory."""
        return type(self)(tuple((keys.cpu(), sums.cpu()) for keys, sums in self.chunks))

    def merge_chunks(self) -> tuple[Tensor, Tensor]:
        """Return all keys (n,), ascending, and their sums (2, n)."""
        keys, index = torch.cat([keys for keys, _ in self.chunks]).unique(
            return_inverse=True
        )
        sums = torch.cat([sums for _, sums in self.chunks], 1)
        return keys, sums.new_zeros(2, len(keys)).index_add(1, index, sums)
