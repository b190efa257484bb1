"""Sets of codes: how good they are, and the conflict code, extra last levels that tell items with equal codes apart
(Sec. 3.1 of TIGER).

The conflict code is one level as in TIGER where no codes are shared by more items than a codebook has codes, else two,
whose codes are the digits of the item's rank: items of one text have one embedding, so no number of levels before would
tell them apart. The last level is as wide as the largest group needs, where published tries have 256 codes at each: a
smaller vocabulary and, in models that normalise over it, other probabilities.

Shapes: N items, C levels.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from models.storage.tables import UserError

LIMIT = 256
"""Codes of a conflict level: it must fit a codebook of the usual size."""
LEVELS = 2
"""Most conflict levels."""


def collision_groups(codes: np.ndarray) -> np.ndarray:
    """The group of each row of `codes` (N, C), by rows rising: equal rows have equal numbers, (N,) int64."""
    groups, count = np.zeros(len(codes), dtype=np.int64), 1
    for level in codes.T.astype(np.int64):
        size = int(level.max(initial=0)) + 1
        if count * size >= 2**62:  # then by those that are there
            present, groups = np.unique(groups, return_inverse=True)
            count = len(present)
        groups, count = groups * size + level, count * size
    return np.unique(groups, return_inverse=True)[1].reshape(-1)


def conflict_ranks(codes: np.ndarray) -> np.ndarray:
    """The rank of each item among those with the same `codes` (N, C), in the order of the rows: (N,) int64."""
    groups = collision_groups(codes)
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    starts = np.cumsum(sizes) - sizes
    ranks = np.empty(len(codes), dtype=np.int64)
    ranks[order] = np.arange(len(codes)) - starts[groups[order]]
    return ranks


def with_conflict_levels(codes: np.ndarray, limit: int = LIMIT) -> np.ndarray:
    """`codes` (N, C) with the conflict code as last levels: (N, C + 1) or, where more than `limit` items share their
    codes, (N, C + 2); all rows distinct.

    Raises UserError if a group is larger than two levels of `limit` codes tell apart.
    """
    ranks = conflict_ranks(codes)
    largest = int(ranks.max()) + 1
    if largest > limit**LEVELS:
        raise UserError(
            f"{largest} items share the codes {codes[ranks.argmax()].tolist()}, {LEVELS} conflict codes tell at most "
            f"{limit**LEVELS} apart; use more levels, a larger codebook, a richer --embed.template, or --tokenizer "
            f"psid, which needs no conflict code"
        )
    return np.column_stack(
        [codes, *([ranks // limit] if largest > limit else []), ranks % limit]
    )


def level_measures(codes: np.ndarray, sizes: list[int]) -> list[dict[str, float]]:
    """Per level: codes in `used`, the share `use` of the codebook, and the `entropy_bits` of the codes."""
    measures = []
    for level, size in enumerate(sizes):
        counts = np.bincount(codes[:, level])
        shares = counts[counts > 0] / len(codes)
        entropy = float(-(shares * np.log2(shares)).sum())
        measures.append(
            {
                "used": len(shares),
                "use": len(shares) / size,
                "entropy_bits": entropy + 0.0,
            }
        )
    return measures


def collisions(codes: np.ndarray) -> dict[str, Any]:
    """`collision_rate`: share of items whose codes another item has too; `distinct` code tuples; `duplicates`:
    items beyond the first of each tuple; `largest_group`: most items on one tuple."""
    sizes = np.bincount(collision_groups(codes))
    return {
        "collision_rate": float(sizes[sizes > 1].sum() / len(codes)),
        "distinct": len(sizes),
        "duplicates": int(len(codes) - len(sizes)),
        "largest_group": int(sizes.max()),
    }


def branching(codes: np.ndarray) -> list[float]:
    """Mean number of valid next codes given a valid prefix, per level (Table 7 of SID-MLP)."""
    ordered = codes[np.argsort(collision_groups(codes), kind="stable")]
    new = np.logical_or.accumulate(
        ordered[1:] != ordered[:-1], axis=1
    )  # whether a row's prefix is another
    prefixes = [1, *(new.sum(0) + 1).tolist()]
    return [after / before for before, after in itertools.pairwise(prefixes)]
