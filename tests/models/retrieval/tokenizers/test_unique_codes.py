"""PSID equals brute force; conflict codes and measures."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.retrieval.tokenizers.codes import (
    add_conflict_levels,
    branching,
    collision_groups,
    conflict_ranks,
    measure_collisions,
    measure_levels,
)
from models.retrieval.tokenizers.config import PsidConfig
from models.retrieval.tokenizers.psid import assign_unique_codes
from models.retrieval.tokenizers.rqkmeans import Quantized, quantize_vectors
from models.storage.tables import UserError


def quantized(
    items: int, size: int, depth: int, seed: int, spread: float = 0.2
) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    codebooks = torch.randn(depth, size, 3, generator=generator)
    vectors = spread * torch.randn(
        items, 3, generator=generator
    )  # close together, so that codes collide
    return Quantized(vectors, codebooks, quantize_vectors(vectors, codebooks)[0], 0.0)


def ranked(
    vector: np.ndarray, codebooks: np.ndarray, width: int
) -> list[tuple[int, ...]]:
    """Return all candidates of an item, best first."""
    found = []
    for codes in itertools.product(*(range(len(book)) for book in codebooks)):
        residual, cost, ranks = vector, 0.0, []
        for book, code in zip(codebooks, codes, strict=True):
            distances = np.linalg.norm(residual - book, axis=1)
            ranks.append(int((distances < distances[code]).sum()))
            cost += distances[code]
            residual = residual - book[code]
        if max(ranks) < width:
            found.append((cost, codes))
    return [codes for _, codes in sorted(found)]


@pytest.mark.parametrize(
    ("size", "depth", "items", "width"),
    [(3, 3, 27, 3), (4, 2, 14, 2), (4, 3, 30, 2), (5, 1, 5, 5)],
)
@pytest.mark.parametrize("seed", range(5))
def test_each_relaxed_item_takes_the_best_candidate_that_is_free(
    size: int, depth: int, items: int, width: int, seed: int
) -> None:
    trained = quantized(items, size, depth, seed)
    codes = [
        tuple(row)
        for row in assign_unique_codes(trained, PsidConfig(width=width)).tolist()
    ]
    assert len(set(codes)) == items
    vectors, codebooks = (
        trained.vectors.double().numpy(),
        trained.codebooks.double().numpy(),
    )
    greedy = [tuple(row) for row in trained.codes.tolist()]
    taken = set()
    for group in set(greedy):  # the closest item of each group keeps its codes
        total = sum(codebooks[level][code] for level, code in enumerate(group))
        members = [i for i in range(items) if greedy[i] == group]
        owner = min(members, key=lambda i: float(np.linalg.norm(vectors[i] - total)))
        assert codes[owner] == group
        taken.add(group)
    for item in range(items):
        if codes[item] == greedy[item]:
            continue
        fan = width
        while not (
            free := [c for c in ranked(vectors[item], codebooks, fan) if c not in taken]
        ):
            fan = min(2 * fan, size)
        assert codes[item] == free[0]
        taken.add(codes[item])


def test_identical_items_get_codes_of_their_own_in_a_fixed_order_down_to_the_last_free_one() -> (
    None
):
    trained = quantized(125, 5, 3, 1, spread=0.0)
    codes = assign_unique_codes(trained, PsidConfig(width=1))
    assert len(np.unique(codes, axis=0)) == 125
    assert codes[0].tolist() == trained.codes[0].tolist()
    assert np.array_equal(codes, assign_unique_codes(trained, PsidConfig(width=1)))


def test_psid_refuses_more_items_than_codes_too_wide_a_search_and_impossible_settings() -> (
    None
):
    with pytest.raises(
        UserError, match="10 items need as many SIDs, 2 levels of 3 codes have 9"
    ):
        assign_unique_codes(quantized(10, 3, 2, 0), PsidConfig())
    with pytest.raises(UserError, match=r"psid\.max_candidates 10"):
        assign_unique_codes(
            quantized(12, 4, 3, 0), PsidConfig(width=4, max_candidates=10)
        )
    with pytest.raises(ValueError, match=r"psid\.width is 0"):
        PsidConfig(width=0)


code_rows = st.integers(1, 3).flatmap(
    lambda depth: st.lists(
        st.tuples(*[st.integers(0, 3)] * depth), min_size=1, max_size=60
    )
)


@given(code_rows)
def test_conflict_code_is_the_rank_among_equals_in_item_order(
    rows: list[tuple[int, ...]],
) -> None:
    codes = np.array(rows)
    seen: dict[tuple[int, ...], int] = {}
    expected = []
    for row in rows:
        expected.append(seen.get(row, 0))
        seen[row] = expected[-1] + 1
    assert conflict_ranks(codes).tolist() == expected
    assert len(np.unique(add_conflict_levels(codes), axis=0)) == len(rows)


def test_more_items_of_equal_codes_than_a_codebook_has_take_two_conflict_levels() -> (
    None
):
    codes = np.array([[1, 2]] * 257 + [[3, 4]])
    one, two = add_conflict_levels(codes[1:]), add_conflict_levels(codes)
    assert one[-2:].tolist() == [[1, 2, 255], [3, 4, 0]]
    assert two[[0, 255, 256, 257]].tolist() == [
        [1, 2, 0, 0],
        [1, 2, 0, 255],
        [1, 2, 1, 0],
        [3, 4, 0, 0],
    ]
    assert len(np.unique(two, axis=0)) == 258


def test_conflict_overflow_is_an_error_with_group_size_limit_and_remedy() -> None:
    codes = np.array([[3, 4]] + [[1, 2]] * 10)
    assert add_conflict_levels(codes[:-1], limit=3).shape == (10, 4)
    with pytest.raises(
        UserError,
        match=r"10 items share the codes \[1, 2\], 2 conflict codes .*at most 9 .*psid",
    ):
        add_conflict_levels(codes, limit=3)


@pytest.mark.parametrize("size", [3, 2**16, 2**40])
def test_groups_are_those_of_equal_rows_also_where_the_codes_exceed_an_integer(
    size: int,
) -> None:
    rng = np.random.default_rng(size)
    codes = rng.integers(size, size=(8, 5))[rng.integers(8, size=60)]
    codes[:, 2] = rng.integers(2, size=60)
    assert (
        collision_groups(codes).tolist()
        == np.unique(codes, axis=0, return_inverse=True)[1].reshape(-1).tolist()
    )


@given(code_rows)
def test_collisions_and_levels_agree_with_counting(rows: list[tuple[int, ...]]) -> None:
    codes = np.array(rows)
    found = measure_collisions(codes)
    assert found["collision_rate"] == pytest.approx(
        sum(rows.count(row) > 1 for row in rows) / len(rows)
    )
    assert found["distinct"] == len(set(rows))
    assert found["duplicates"] == len(rows) - len(set(rows))
    assert found["largest_group"] == max(map(rows.count, rows))
    prefixes = [
        len({row[:depth] for row in rows}) for depth in range(codes.shape[1] + 1)
    ]
    assert branching(codes) == [
        after / before for before, after in itertools.pairwise(prefixes)
    ]
    for level, measures in enumerate(measure_levels(codes, [4] * codes.shape[1])):
        column = codes[:, level].tolist()
        shares = [column.count(code) / len(rows) for code in set(column)]
        assert measures["used"] == len(shares)
        assert measures["use"] == len(shares) / 4
        assert measures["entropy_bits"] == pytest.approx(
            -sum(p * np.log2(p) for p in shares)
        )
