"""Purely semantic indexing (PSID, arXiv 2509.16446): unique codes with no conflict code.

On top of the codebooks of RQ-KMeans. Where several items have the same nearest codes, the one closest to them keeps
them; the others relax the nearest-centroid choice until they reach codes that no item has, by exhaustive candidate
matching: the best of all combinations of the `width` nearest centroids per level, by score(c) = -sum over levels of the
norm of the residual after the chosen centroid. (The paper's recursive residual searching is not built.)

Shapes: N items, D width, C levels, K codes per level, P partial codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from models.retrieval.tokenizers.codes import collision_groups
from models.retrieval.tokenizers.config import PsidConfig
from models.retrieval.tokenizers.rqkmeans import Quantized
from models.storage.tables import UserError


def _nearest_first(
    residuals: np.ndarray, codebook: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of each residual (P, D) the `width` nearest centroids, nearest first, and their distances: (P, width) both."""
    squares = (
        (codebook**2).sum(1)
        - 2 * residuals @ codebook.T
        + (residuals**2).sum(1, keepdims=True)
    )  # (P, K)
    codes = np.argsort(squares, axis=1, kind="stable")[:, :width]
    return codes, np.sqrt(np.maximum(np.take_along_axis(squares, codes, axis=1), 0.0))


def exhaustive_candidates(
    vector: np.ndarray, codebooks: np.ndarray, width: int
) -> np.ndarray:
    """All width**C combinations for `vector` (D,), best score first, equal ones in order of nearness: (P, C)."""
    codes = np.empty((1, 0), dtype=np.int64)
    residuals, cost = vector[None], np.zeros(1)
    for codebook in codebooks:
        chosen, distances = _nearest_first(residuals, codebook, width)  # (P, width)
        fan = chosen.shape[1]
        codes = np.column_stack([np.repeat(codes, fan, axis=0), chosen.reshape(-1)])
        residuals = np.repeat(residuals, fan, axis=0) - codebook[chosen.reshape(-1)]
        cost = np.repeat(cost, fan) + distances.reshape(-1)
    return codes[np.argsort(cost, kind="stable")]


def assign(quantized: Quantized, config: PsidConfig) -> np.ndarray:
    """Unique codes (N, C) for the items of a trained quantiser.

    Relaxed items choose in the order of item_index. Raises UserError if there are fewer code
    combinations than items, or if more than `max_candidates` of them would have to be ranked.
    """
    vectors = quantized.vectors.double().numpy()
    codebooks = quantized.codebooks.double().numpy()
    codes = quantized.codes.numpy().copy()
    depth, size = codebooks.shape[:2]
    if size**depth < len(codes):
        raise UserError(
            f"{len(codes)} items need as many SIDs, {depth} levels of {size} codes have {size**depth}; use more levels "
            f"or a larger codebook"
        )
    chosen = codebooks[np.arange(depth), codes]  # (N, C, D)
    distances = np.linalg.norm(vectors - chosen.sum(1), axis=1)
    groups = collision_groups(codes)
    # the closest of each group, of equally close ones the first, keeps the group's codes
    order = np.lexsort((np.arange(len(codes)), distances, groups))
    keeps = np.zeros(len(codes), dtype=bool)
    keeps[order[np.unique(groups[order], return_index=True)[1]]] = True
    taken = set(map(tuple, codes[keeps].tolist()))
    for item in np.flatnonzero(~keeps):
        found = first_free(
            vectors[item],
            codebooks,
            config,
            lambda codes: codes not in taken,
            int(item),
        )
        codes[item] = found
        taken.add(found)
    return codes


def first_free(
    vector: np.ndarray,
    codebooks: np.ndarray,
    config: PsidConfig,
    is_free: Callable[[tuple[int, ...]], bool],
    item: int,
) -> tuple[int, ...]:
    """The best codes for `vector` (D,) that are free. UserError, which names the item, if there are none, or if more
    than `max_candidates` would have to be ranked."""
    depth, size = codebooks.shape[:2]
    width = min(config.width, size)
    while True:
        if width**depth > config.max_candidates:
            raise UserError(
                f"item {item} has no free SID nearby, and {width**depth} combinations are more than "
                f"psid.max_candidates {config.max_candidates}; use a larger codebook"
            )
        for candidate in map(
            tuple, exhaustive_candidates(vector, codebooks, width).tolist()
        ):
            if is_free(candidate):
                return candidate
        if width == size:
            raise UserError(
                f"item {item} gets no SID, as all {width**depth} of {depth} levels of {size} codes are taken; make the "
                f"SIDs anew, with more levels or a larger codebook"
            )
        width = min(width * 2, size)


def extend(
    vectors: np.ndarray,
    nearest: np.ndarray,
    taken: np.ndarray,
    codebooks: np.ndarray,
    conflicts: list[int],
    config: PsidConfig,
) -> np.ndarray:
    """Codes (M, C + conflict levels) of new items (M, D) beside those that are `taken` (N, C + conflict levels): the
    `nearest` ones (M, C) with the next conflict code, or where there is none left the best that have one. `conflicts`
    are the sizes of the conflict levels, which stay as they are: a model's vocabulary is that of its codebooks.

    New items choose in their order. UserError as of `first_free`."""
    depth, most = codebooks.shape[0], int(np.prod(conflicts))
    used = Counter(map(tuple, taken[:, :depth].tolist()))
    codes = np.empty((len(vectors), depth + len(conflicts)), dtype=np.int64)
    for item, vector in enumerate(vectors):
        found: tuple[int, ...] = tuple(nearest[item].tolist())
        if used[found] >= most:
            found = first_free(
                vector,
                codebooks,
                config,
                lambda codes: used[codes] < most,
                len(taken) + item,
            )
        codes[item] = [
            *found,
            *(np.unravel_index(used[found], conflicts) if conflicts else ()),
        ]
        used[found] += 1
    return codes
