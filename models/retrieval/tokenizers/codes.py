"""Quality of codes, and conflict codes, which separate items with equal codes.

The conflict code (Sec. 3.1 of TIGER) is the rank of an item among the items with equal
codes. It is one more level, or two if a group has more items than a codebook has codes:
items with equal texts have equal embeddings, so further ordinary levels would not
separate them. The last level is as wide as the largest group needs, while published
tries have 256 codes at each level. The vocabulary is therefore smaller, and models that
normalise over the vocabulary compute other probabilities.

Shapes: N items, C levels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from core.errors import UserError
from core.schemas import CodeMeasures, LevelMeasures

MAX_CONFLICT_CODES = 256
"""Most codes of a conflict level, so that it fits a codebook of the usual size."""
MAX_CONFLICT_LEVELS = 2
"""Most conflict levels."""


def collision_groups(codes: np.ndarray) -> np.ndarray:
    """Return the group (N,) int64 of each row of `codes` (N, C).

    Equal rows share a group. Groups are numbered in the order of their codes.
    """
    order = np.lexsort(codes.T[::-1])
    ordered = codes[order]
    groups = np.zeros(len(codes), dtype=np.int64)
    groups[order[1:]] = (ordered[1:] != ordered[:-1]).any(1).cumsum()
    return groups


def conflict_ranks(codes: np.ndarray) -> np.ndarray:
    """Return the rank (N,) int64 of each item among the items with its codes (N, C).

    Ranks follow the order of the rows.
    """
    groups = collision_groups(codes)
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    starts = np.cumsum(sizes) - sizes
    ranks = np.empty(len(codes), dtype=np.int64)
    ranks[order] = np.arange(len(codes)) - starts[groups[order]]
    return ranks


def add_conflict_levels(
    codes: np.ndarray, limit: int = MAX_CONFLICT_CODES
) -> np.ndarray:
    """Append the conflict code to `codes` (N, C), which makes all rows distinct.

    Args:
        codes: (N, C) codes.
        limit: Most codes of a conflict level.

    Returns:
        (N, C + 1), or (N, C + 2) if more than `limit` items share their codes.
    """
    ranks = conflict_ranks(codes)
    largest = int(ranks.max()) + 1
    if largest > limit**MAX_CONFLICT_LEVELS:
        raise UserError(
            f"{largest} items share the codes {codes[ranks.argmax()].tolist()}, "
            f"{MAX_CONFLICT_LEVELS} conflict codes tell at most "
            f"{limit**MAX_CONFLICT_LEVELS} apart"
        )
    digits = [ranks % limit]
    if largest > limit:
        digits.insert(0, ranks // limit)
    return np.column_stack([codes, *digits])


def measure_levels(codes: np.ndarray, sizes: list[int]) -> list[LevelMeasures]:
    """Measure the use of each level's codebook, given codes (N, C) and sizes."""
    measures = []
    for level, size in enumerate(sizes):
        counts = np.bincount(codes[:, level])
        shares = counts[counts > 0] / len(codes)
        entropy = float(-(shares * np.log2(shares)).sum())
        entropy += 0.0  # 0.0 instead of -0.0
        measures.append(LevelMeasures(len(shares), len(shares) / size, entropy))
    return measures


def measure_collisions(
    codes: np.ndarray, measures: CodeMeasures | None = None
) -> CodeMeasures:
    """Return the collisions of codes (N, C) beside other measures."""
    sizes = np.bincount(collision_groups(codes))
    return replace(
        measures or CodeMeasures(),
        collision_rate=float(sizes[sizes > 1].sum() / len(codes)),
        distinct=len(sizes),
        duplicates=int(len(codes) - len(sizes)),
        largest_group=int(sizes.max()),
    )
