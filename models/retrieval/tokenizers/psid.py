"""Purely semantic indexing (PSID, arXiv 2509.16446): unique codes, no conflict code.

PSID is applied to the codebooks of RQ-KMeans. If several items have the same nearest
codes, the closest item gets them. The other items get the best free codes by exhaustive
candidate matching over all combinations of the `width` nearest centroids per level. The
score of codes is score(c) = -sum over levels of the norm of the residual after the
level's centroid. (The paper's recursive residual searching is not implemented.)

Shapes: N items, D width, C levels, K codes per level, P partial codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from core.errors import UserError
from models.retrieval.tokenizers.codes import collision_groups, measure_collisions
from models.retrieval.tokenizers.rqkmeans import Rqkmeans
from models.retrieval.tokenizers.tokenizer import Quantized, Training

WIDTH = 8
"""Number of nearest centroids per level to combine; doubled for an item without free
codes."""


class Psid(Rqkmeans):
    """RQ-KMeans with unique codes, and its options."""

    name = "psid"

    separates_items = True

    def fit(self, embeddings: Tensor, chosen: Tensor | None = None) -> Training:
        """Train the codebooks, and relax the codes of items with equal codes."""
        quantized = yield from super().fit(embeddings, chosen)
        collisions = measure_collisions(quantized.codes.numpy())
        yield f"relaxing the codes of {collisions.duplicates} duplicate items"
        codes = torch.from_numpy(assign_unique_codes(quantized))
        measures = replace(
            quantized.measures,
            collision_rate_before=collisions.collision_rate,
            relaxed_items=int((quantized.codes != codes).any(1).sum()),
        )
        return replace(quantized, codes=codes, measures=measures)


def exhaustive_candidates(
    vector: np.ndarray, codebooks: np.ndarray, width: int
) -> np.ndarray:
    """Return all combinations of the nearest codes of a vector, best first.

    Args:
        vector: (D,) vector.
        codebooks: (C, K, D) centroids.
        width: Number of nearest codes per level.

    Returns:
        (width**C, C) codes. Ties are in order of the nearness of the first code, then
        of the next ones.
    """
    codes = np.empty((1, 0), dtype=np.int64)
    residuals, cost = vector[None], np.zeros(1)
    for codebook in codebooks:
        squares = (
            (codebook**2).sum(1)
            - 2 * residuals @ codebook.T
            + (residuals**2).sum(1, keepdims=True)
        )  # (P, K)
        nearest = np.argsort(squares, axis=1, kind="stable")[:, :width]
        distances = np.take_along_axis(squares, nearest, axis=1)
        fan, chosen = nearest.shape[1], nearest.reshape(-1)
        codes = np.column_stack([np.repeat(codes, fan, axis=0), chosen])
        residuals = np.repeat(residuals, fan, axis=0) - codebook[chosen]
        cost = np.repeat(cost, fan) + np.sqrt(np.maximum(distances, 0)).reshape(-1)
    return codes[np.argsort(cost, kind="stable")]


MAX_CANDIDATES = 200_000
"""Most combinations of codes to rank per item."""


def assign_unique_codes(quantized: Quantized, width: int = WIDTH) -> np.ndarray:
    """Assign unique codes (N, C) to the items of a trained quantiser.

    The item nearest to its centroids keeps the shared codes. The others, in the order
    of item_index, get their nearest free codes.

    Args:
        quantized: The trained quantiser with the items' vectors and codes.
        width: Number of nearest codes per level to combine at first; it grows until a
            combination is free.
    """
    vectors = quantized.vectors.double().numpy()
    codebooks = quantized.codebooks.double().numpy()
    codes = quantized.codes.numpy().copy()
    depth = len(codebooks)
    chosen = codebooks[np.arange(depth), codes]  # (N, C, D)
    distances = np.linalg.norm(vectors - chosen.sum(1), axis=1)
    groups = collision_groups(codes)
    # the closest item of a group keeps the codes; of equally close items the first
    order = np.lexsort((distances, groups))
    _, first_of_group = np.unique(groups[order], return_index=True)
    keeps_codes = np.zeros(len(codes), dtype=bool)
    keeps_codes[order[first_of_group]] = True
    taken = set(map(tuple, codes[keeps_codes].tolist()))
    for item in np.flatnonzero(~keeps_codes):
        free_codes = find_free_codes(
            vectors[item],
            codebooks,
            width,
            lambda candidate: candidate not in taken,
            int(item),
        )
        codes[item] = free_codes
        taken.add(free_codes)
    return codes


def find_free_codes(
    vector: np.ndarray,
    codebooks: np.ndarray,
    width: int,
    is_free: Callable[[tuple[int, ...]], bool],
    item: int,
) -> tuple[int, ...]:
    """Return the best free codes for a vector.

    Args:
        vector: (D,) vector.
        codebooks: (C, K, D) centroids.
        width: Number of nearest codes per level to combine at first.
        is_free: Returns whether a tuple of codes is free.
        item: Number of the item, for messages.
    """
    depth, size = codebooks.shape[:2]
    width = min(width, size)
    while True:
        if width**depth > MAX_CANDIDATES:
            raise UserError(
                f"item {item} has no free SID among its nearest codes, and "
                f"{width**depth} combinations are too many to rank"
            )
        for codes in exhaustive_candidates(vector, codebooks, width).tolist():
            if is_free(tuple(codes)):
                return tuple(codes)
        if width == size:
            raise UserError(
                f"item {item} gets no SID, as all {width**depth} of {depth} levels of "
                f"{size} codes are taken"
            )
        width = min(width * 2, size)


def extend_codes(
    vectors: np.ndarray,
    nearest: np.ndarray,
    taken: np.ndarray,
    codebooks: np.ndarray,
    conflicts: list[int],
    width: int = WIDTH,
) -> np.ndarray:
    """Assign codes to new items without changing the codes of existing items.

    A new item gets its nearest codes with the next conflict code, or, if no conflict
    code is free, the best codes with a free conflict code. New items get codes in their
    order.

    Args:
        vectors: (M, D) vectors of the new items.
        nearest: (M, C) nearest codes of the new items.
        taken: (N, C + conflict levels) codes of the existing items.
        codebooks: (C, K, D) centroids.
        conflicts: Sizes of the conflict levels. These sizes do not change, as they are
            part of a model's vocabulary.
        width: Number of nearest codes per level to combine at first.

    Returns:
        (M, C + conflict levels) codes of the new items.
    """
    depth = codebooks.shape[0]
    items_per_codes = int(np.prod(conflicts))
    used = Counter(map(tuple, taken[:, :depth].tolist()))
    result = np.empty((len(vectors), depth + len(conflicts)), dtype=np.int64)

    def is_free(codes: tuple[int, ...]) -> bool:
        return used[codes] < items_per_codes

    for item, vector in enumerate(vectors):
        codes: tuple[int, ...] = tuple(nearest[item].tolist())
        if not is_free(codes):
            item_index = len(taken) + item
            codes = find_free_codes(vector, codebooks, width, is_free, item_index)
        digits = np.unravel_index(used[codes], conflicts) if conflicts else ()
        result[item] = [*codes, *digits]
        used[codes] += 1
    return result
