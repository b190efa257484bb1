"""A metric user by user, so that two models can be compared on the same users (`pipelines/comparison/over_users.py`).

    value = ByUser.of(batch["user_row"], ndcg)          # of a batch; those of batches and workers add up
    users, means, counts = value.whole()

Shapes: `n` values of a batch, `U` users.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST = 100_000
"""Users whose values are kept, at most; of more, those of every so-manieth row of the table."""

PREFIX = "by_user/"
"""What names of such values begin with among the sums of a batch."""


def stride_of(users: int) -> int:
    """Every so-manieth user is kept."""
    return max(1, -(-users // MOST))


@dataclass(frozen=True)
class ByUser:
    """What adds up, over batches and workers in any order."""

    chunks: tuple[tuple[Tensor, Tensor], ...]
    """Each: (u,) int64, rows of users in the sequences table; (2, u) float64, sums and counts of their values."""

    @classmethod
    def of(cls, user: Tensor, values: Tensor, stride: int = 1) -> Self:
        """Of `values` (n,), NaN where there is none, of the users with these rows (n,): every `stride`th row."""
        kept = (user % stride == 0) & ~values.isnan()
        rows, place = user[kept].unique(return_inverse=True)
        table = torch.zeros(2, len(rows), dtype=torch.float64, device=user.device)
        table[0].index_add_(0, place, values[kept].double())
        table[1] = torch.bincount(place, minlength=len(rows))
        return cls(((rows, table),))

    def __add__(self, other: ByUser | float) -> ByUser:
        return (
            ByUser((*self.chunks, *other.chunks)) if isinstance(other, ByUser) else self
        )  # a sum begins with 0

    __radd__ = __add__

    def cpu(self) -> ByUser:
        """The same in the memory of the CPU."""
        return ByUser(tuple((rows.cpu(), table.cpu()) for rows, table in self.chunks))

    def whole(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """(users ascending, means of their values, their numbers), each (U,)."""
        rows, place = torch.cat([rows for rows, _ in self.chunks]).unique(
            return_inverse=True
        )
        added = torch.cat([table for _, table in self.chunks], 1)
        total = added.new_zeros(2, len(rows)).index_add(1, place, added)
        return rows.numpy(), (total[0] / total[1]).numpy(), total[1].long().numpy()

    def packed(self) -> dict[str, str]:
        """As text for a file: means in half precision, counts, and a hash by which two are told to be of the same
        users and counts."""
        rows, means, counts = self.whole()
        same = hashlib.sha256(rows.tobytes() + counts.tobytes()).hexdigest()[:16]
        return {
            "users": same,
            "means": text(means.astype("<f2")),
            "counts": text(counts.astype("<u4")),
        }


def unpacked(fields: dict[str, str]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(means, counts), each (U,), of what `packed` gives."""
    means, counts = (
        np.frombuffer(zlib.decompress(base64.b64decode(fields[name])), kind)
        for name, kind in (("means", "<f2"), ("counts", "<u4"))
    )
    return means.astype(np.float64), counts.astype(np.int64)


def text(values: NDArray) -> str:
    """Its bytes, compressed, in letters."""
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode()
