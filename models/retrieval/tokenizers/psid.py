"""Purely semantic indexing (PSID, arXiv 2509.16446): unique codes with no conflict code.

On top of trained codebooks. Where several items have the same nearest codes, the one closest to them keeps
them; the others relax the nearest-centroid choice until they reach codes that no item has:

- `ecm`, exhaustive candidate matching: the best of all combinations of the `width` nearest centroids per
  level, by score(c) = -sum over levels of the norm of the residual after the chosen centroid;
- `rrs`, recursive residual searching: level by level, trying the centroids nearest to the residual in
  turn and going one level back when all of a prefix's `width` choices are taken.

Shapes: N items, D width, C levels, K codes per level, P partial codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from models.retrieval.tokenizers.conflict import collision_groups
from models.retrieval.tokenizers.residual import Quantized
from models.tables import UserError

Codes = tuple[int, ...]


@dataclass(frozen=True)
class PsidConfig:
    """Unique codes without a conflict code."""

    method: str = "ecm"
    """`ecm` (exhaustive candidate matching) or `rrs` (recursive residual searching)."""
    base: str = "rqkmeans"
    """The tokenizer that trains the codebooks: `rqkmeans` or `rqvae`, with that tokenizer's options."""
    width: int = 8
    """Nearest centroids that an item may choose from per level; doubled for an item that finds none free."""
    max_candidates: int = 200_000
    """Most combinations that `ecm` may rank for one item."""

    def __post_init__(self) -> None:
        if self.method not in ("ecm", "rrs"):
            raise ValueError(f"psid.method is {self.method!r}; it must be 'ecm' or 'rrs'")
        if self.base not in ("rqkmeans", "rqvae"):
            raise ValueError(f"psid.base is {self.base!r}; it must be 'rqkmeans' or 'rqvae'")
        if self.width < 1:
            raise ValueError(f"psid.width is {self.width}; it must be 1 or more")
        if self.max_candidates < 1:
            raise ValueError(f"psid.max_candidates is {self.max_candidates}; it must be 1 or more")


def _nearest_first(residuals: np.ndarray, codebook: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each residual (P, D) the `width` nearest centroids, nearest first, and their distances: (P, width) both."""
    squares = (codebook**2).sum(1) - 2 * residuals @ codebook.T + (residuals**2).sum(1, keepdims=True)  # (P, K)
    codes = np.argsort(squares, axis=1, kind="stable")[:, :width]
    return codes, np.sqrt(np.maximum(np.take_along_axis(squares, codes, axis=1), 0.0))


def exhaustive_candidates(vector: np.ndarray, codebooks: np.ndarray, width: int) -> np.ndarray:
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


def recursive_candidates(vector: np.ndarray, codebooks: np.ndarray, width: int) -> Iterator[Codes]:
    """The combinations for `vector` (D,) depth first: the last level varies fastest, nearest centroid first."""
    chosen, _ = _nearest_first(vector[None], codebooks[0], width)
    for code in chosen[0].tolist():
        if len(codebooks) == 1:
            yield (code,)
        else:
            for rest in recursive_candidates(vector - codebooks[0][code], codebooks[1:], width):
                yield (code, *rest)


def _free(vector: np.ndarray, codebooks: np.ndarray, width: int, config: PsidConfig, taken: set[Codes]) -> Codes | None:
    """The first candidate that no item has, or None."""
    if config.method == "ecm":
        candidates: Iterator[Codes] = map(tuple, exhaustive_candidates(vector, codebooks, width).tolist())
    else:
        candidates = recursive_candidates(vector, codebooks, width)
    return next((candidate for candidate in candidates if candidate not in taken), None)


def assign(quantized: Quantized, config: PsidConfig) -> np.ndarray:
    """Unique codes (N, C) for the items of a trained quantiser.

    Relaxed items choose in the order of item_index. Raises UserError if there are fewer code
    combinations than items, or if `ecm` would have to rank more than `max_candidates` of them.
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
    taken: set[Codes] = set(map(tuple, codes[keeps].tolist()))
    for item in np.flatnonzero(~keeps):
        width, found = min(config.width, size), None
        while found is None:
            if config.method == "ecm" and width**depth > config.max_candidates:
                raise UserError(
                    f"item {item} has no free SID nearby, and {width**depth} combinations are more than "
                    f"psid.max_candidates {config.max_candidates}; use a larger codebook or --psid.method rrs"
                )
            found = _free(vectors[item], codebooks, width, config, taken)
            width = min(width * 2, size)
        codes[item] = found
        taken.add(found)
    return codes
