"""How good a set of codes is: codebook use, entropy, collisions, branching.

Shapes: N items, C levels.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from models.retrieval.tokenizers.conflict import collision_groups


def level_measures(codes: np.ndarray, sizes: list[int]) -> list[dict[str, float]]:
    """Per level: codes in `used`, the share `use` of the codebook, and the `entropy_bits` of the codes."""
    measures = []
    for level, size in enumerate(sizes):
        counts = np.bincount(codes[:, level])
        shares = counts[counts > 0] / len(codes)
        entropy = float(-(shares * np.log2(shares)).sum())
        used = len(shares)
        measures.append({"used": used, "use": used / size, "entropy_bits": entropy + 0.0})
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
    new = np.logical_or.accumulate(ordered[1:] != ordered[:-1], axis=1)  # whether a row's prefix is another
    prefixes = [1, *(new.sum(0) + 1).tolist()]
    return [after / before for before, after in itertools.pairwise(prefixes)]
