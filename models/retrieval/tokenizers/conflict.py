"""The conflict code: an extra last level that tells items with equal codes apart (Sec. 3.1 of TIGER).

Shapes: N items, C levels.
"""

from __future__ import annotations

import numpy as np

from models.tables import UserError

LIMIT = 256
"""Most items that may share their codes: the conflict code must fit a codebook of the usual size."""


def collision_groups(codes: np.ndarray) -> np.ndarray:
    """The group of each row of `codes` (N, C): equal rows have equal numbers, (N,) int64."""
    return np.unique(codes, axis=0, return_inverse=True)[1].reshape(-1)


def conflict_codes(codes: np.ndarray, limit: int = LIMIT) -> np.ndarray:
    """The rank of each item among those with the same `codes` (N, C), in the order of the rows: (N,) int64.

    Raises UserError if a group is larger than `limit`; wrapping around would name two items alike.
    """
    groups = collision_groups(codes)
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    if sizes.max() > limit:
        largest = codes[groups == sizes.argmax()][0].tolist()
        raise UserError(
            f"{sizes.max()} items share the codes {largest}, a conflict code tells at most {limit} apart; use more "
            f"levels, a larger codebook, a richer --embed.template, or --tokenizer psid, which needs no conflict code"
        )
    starts = np.cumsum(sizes) - sizes
    ranks = np.empty(len(codes), dtype=np.int64)
    ranks[order] = np.arange(len(codes)) - starts[groups[order]]
    return ranks


def with_conflict_level(codes: np.ndarray, limit: int = LIMIT) -> np.ndarray:
    """`codes` (N, C) with the conflict code as a last level: (N, C + 1), all rows distinct."""
    return np.column_stack([codes, conflict_codes(codes, limit)])
