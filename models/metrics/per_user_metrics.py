"""Metric values per user, so that two models can be compared on the same users.

    values = PerUserValues.from_batch(batch.user_row, ndcg)
    users, means, counts = values.merge()

Values of batches and workers are added with `+`. `pipelines/comparison/verdicts.py`
compares them.

Shapes: `n` values of a batch, `U` users.
"""

from __future__ import annotations

import base64
import hashlib
import math
import zlib
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_CHUNKS = 256
"""Number of chunks above which they are merged."""

MAX_TRACKED_USERS = 100_000
"""Maximum number of users whose values are stored. Of larger tables, only every
`stride`-th user is stored (`sampling_stride`)."""

PER_USER_PREFIX = "by_user/"
"""Prefix of the names of per-user values among the sums of a batch."""


def sampling_stride(num_users: int) -> int:
    """Return the smallest stride that selects at most `MAX_TRACKED_USERS` users.

    Args:
        num_users: Number of users of the table.
    """
    return max(1, math.ceil(num_users / MAX_TRACKED_USERS))


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


class PerUserValues(KeyedSums):
    """Sums and counts of a metric by the user's table row."""

    @classmethod
    def from_batch(cls, user: Tensor, values: Tensor, stride: int = 1) -> Self:
        """Collect the values of a batch.

        Args:
            user: (n,) rows of the users in the sequences table.
            values: (n,) metric values, NaN where the metric is not defined.
            stride: Only users whose row is a multiple of `stride` are stored.
        """
        stored = (user % stride == 0) & ~values.isnan()
        rows, index = user[stored].unique(return_inverse=True)
        table = torch.zeros(2, len(rows), dtype=torch.float64, device=user.device)
        table[0].index_add_(0, index, values[stored].double())
        table[1] = torch.bincount(index, minlength=len(rows))
        return cls(((rows, table),))

    def merge(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Merge the values of all batches.

        Returns:
            (U,) table rows of the users, ascending; the (U,) mean of each user's
            values; the (U,) number of each user's values.
        """
        users, total = self.merge_chunks()
        return users.numpy(), (total[0] / total[1]).numpy(), total[1].long().numpy()

    def to_text(self) -> dict[str, str]:
        """Encode the values as text for a JSON file.

        Means are stored in half precision. Two models have the same hash under `users`
        if their users and counts are equal, so that their means can be paired.
        """
        rows, means, counts = self.merge()
        users_hash = hashlib.sha256(rows.tobytes() + counts.tobytes()).hexdigest()[:16]
        return {
            "users": users_hash,
            "means": encode_array(means.astype("<f2")),
            "counts": encode_array(counts.astype("<u4")),
        }


def decode_values(
    fields: dict[str, str],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Decode the (U,) means and (U,) counts from the output of `to_text`."""
    means = decode_array(fields["means"], "<f2")
    counts = decode_array(fields["counts"], "<u4")
    return means.astype(np.float64), counts.astype(np.int64)


def encode_array(values: NDArray) -> str:
    """Compress the bytes of an array and encode them in base64."""
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode()


def decode_array(text: str, dtype: str) -> NDArray:
    """Decode a one-dimensional array from the output of `encode_array`."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)
