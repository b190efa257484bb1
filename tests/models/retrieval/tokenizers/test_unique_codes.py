"""Unique codes: PSID equals brute force, conflict levels, measures of collisions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.retrieval.tokenizers.codes import (
    add_conflict_levels,
    conflict_ranks,
    measure_collisions,
)
from models.retrieval.tokenizers.psid import assign_unique_codes
from models.retrieval.tokenizers.rqkmeans import quantize_vectors
from models.retrieval.tokenizers.tokenizer import Quantized


def rank_candidates(
    vector: np.ndarray, codebooks: np.ndarray, width: int
) -> list[tuple[int, ...]]:
    """Return the candidates of an item, best first.

    A candidate has one of the `width` nearest codes at each level.
    """
    candidates = []
    for codes in itertools.product(*(range(len(book)) for book in codebooks)):
        residual, cost, ranks = vector, 0.0, []
        for book, code in zip(codebooks, codes, strict=True):
            distances = np.linalg.norm(residual - book, axis=1)
            ranks.append(int((distances < distances[code]).sum()))
            cost += distances[code]
            residual = residual - book[code]
        if max(ranks) < width:
            candidates.append((cost, codes))
    return [codes for _, codes in sorted(candidates)]


@pytest.mark.parametrize(
    ("size", "levels", "items", "width"),
    [(3, 3, 27, 3), (4, 2, 14, 2), (4, 3, 30, 2), (5, 1, 5, 5)],
)
@pytest.mark.parametrize("seed", range(5))
def test_the_closest_item_keeps_its_codes_and_others_take_the_best_free_candidate(
    size, levels, items, width, seed
):
    """The width of an item's search doubles until a candidate is free."""
    generator = torch.Generator().manual_seed(seed)
    books = torch.randn(levels, size, 3, generator=generator)
    # the items are close together, so that codes collide
    points = 0.2 * torch.randn(items, 3, generator=generator)
    quantized = Quantized(points, books, quantize_vectors(points, books)[0], 0.0)
    vectors = quantized.vectors.double().numpy()
    codebooks = quantized.codebooks.double().numpy()
    greedy = [tuple(row) for row in quantized.codes.tolist()]

    unique_codes = assign_unique_codes(quantized, width)

    codes = [tuple(row) for row in unique_codes.tolist()]
    assert len(set(codes)) == items
    taken = set()
    for group in set(greedy):
        centre = sum(codebooks[level][code] for level, code in enumerate(group))
        distances = np.linalg.norm(vectors - centre, axis=1)
        members = [item for item in range(items) if greedy[item] == group]
        closest = min(members, key=distances.__getitem__)
        assert codes[closest] == group
        taken.add(group)
    for item in range(items):
        if codes[item] == greedy[item]:
            continue
        free: list[tuple[int, ...]] = []
        item_width = width
        while not free:
            candidates = rank_candidates(vectors[item], codebooks, item_width)
            free = [candidate for candidate in candidates if candidate not in taken]
            item_width = min(2 * item_width, size)
        assert codes[item] == free[0]
        taken.add(codes[item])


CODE_ROWS = st.integers(1, 3).flatmap(
    lambda levels: st.lists(
        st.tuples(*[st.integers(0, 3)] * levels), min_size=1, max_size=60
    )
)


@given(CODE_ROWS)
def test_the_conflict_code_is_the_rank_among_items_with_equal_codes(rows):
    codes = np.array(rows)
    expected = [rows[:index].count(row) for index, row in enumerate(rows)]
    assert conflict_ranks(codes).tolist() == expected
    assert len(np.unique(add_conflict_levels(codes), axis=0)) == len(rows)


def test_more_than_256_items_with_equal_codes_get_two_conflict_levels():
    codes = np.array([[1, 2]] * 257 + [[3, 4]])

    one = add_conflict_levels(codes[1:])
    two = add_conflict_levels(codes)

    assert one[-2:].tolist() == [[1, 2, 255], [3, 4, 0]]
    assert two[[0, 255, 256, 257]].tolist() == [
        [1, 2, 0, 0],
        [1, 2, 0, 255],
        [1, 2, 1, 0],
        [3, 4, 0, 0],
    ]
    assert len(np.unique(two, axis=0)) == 258


@given(CODE_ROWS)
def test_measures_of_collisions_equal_counts(rows):
    counts = [rows.count(row) for row in rows]

    measures = measure_collisions(np.array(rows))

    num_colliding = sum(count > 1 for count in counts)
    assert measures.collision_rate == pytest.approx(num_colliding / len(rows))
    assert measures.distinct == len(set(rows))
    assert measures.duplicates == len(rows) - len(set(rows))
    assert measures.largest_group == max(counts)
