"""Functions on rows of different lengths equal loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from core import ragged

LENGTHS = st.lists(st.integers(0, 5), max_size=8).map(
    lambda lengths: np.array(lengths, np.int64)
)


@given(LENGTHS, st.data())
def test_gathered_ranges_are_the_ranges_one_after_another(lengths, data):
    count = len(lengths)
    starts = data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
    expected = []
    for start, length in zip(starts, lengths, strict=True):
        expected += range(start, start + length)
    positions = ragged.gather_ranges(np.array(starts, np.int64), lengths)
    assert positions.tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=12))
def test_a_run_begins_where_any_key_changes(keys):
    expected = [i for i in range(len(keys)) if i == 0 or keys[i] != keys[i - 1]]
    first, second = np.array(keys, np.int64).reshape(-1, 2).T
    assert ragged.run_starts(first, second).tolist() == expected


@given(LENGTHS)
def test_padded_rows_hold_their_values_and_then_the_padding(lengths):
    values = np.arange(100, 100 + lengths.sum())
    starts = ragged.lengths_to_starts(lengths)
    index, inside = ragged.pad_indices(starts, lengths)

    padded = ragged.pad_ragged(values, index, inside, -1)

    assert padded.shape == (len(lengths), max(1, lengths.max(initial=0)))
    for row, length in enumerate(lengths):
        expected = values[starts[row] : starts[row] + length].tolist()
        assert padded[row, :length].tolist() == expected
        assert (padded[row, length:] == -1).all()


@given(st.sets(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_values_are_found_at_their_index_of_a_sorted_array(values, queries):
    ordered = np.array(sorted(values), np.int64)
    index, is_found = ragged.find_sorted(ordered, np.array(queries, np.int64))
    assert is_found.tolist() == [query in values for query in queries]
    assert (ordered[index[is_found]] == np.array(queries)[is_found]).all()
