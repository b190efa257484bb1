"""The trie holds the catalogue's codes, all of them and nothing else."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.retrieval.decoding.trie import Trie
from models.tables import UserError


@st.composite
def catalogues(draw):
    """(sizes, codes): up to 4 levels of up to 4 codes; from one item to all, so also one child everywhere."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    every = list(itertools.product(*map(range, sizes)))
    codes = draw(st.lists(st.sampled_from(every), min_size=1, max_size=len(every), unique=True))
    return sizes, codes


def table_of(codes, sizes):
    """The `trie` table, edge by edge."""
    rows = []
    for level in range(len(sizes)):
        prefixes = sorted({c[: level + 1] for c in codes})
        parents = sorted({c[:level] for c in codes})
        rows += [
            (level, parents.index(p[:-1]), p[-1], at, codes.index(p) if level == len(sizes) - 1 else None)
            for at, p in enumerate(prefixes)
        ]
    names = ("level", "node", "token", "child", "item_index")
    types = (pa.int16(), pa.int32(), pa.uint16(), pa.int32(), pa.int32())
    return pa.table({n: pa.array(c, t) for n, c, t in zip(names, zip(*rows, strict=True), types, strict=True)})


@settings(max_examples=60, deadline=None)
@given(catalogues())
def test_table_and_codes_give_one_trie_that_finds_each_item(catalogue):
    sizes, codes = catalogue
    trie = Trie.from_codes(torch.tensor(codes), sizes)
    again = Trie.from_table(table_of(codes, sizes), sizes)
    assert {k: v.tolist() for k, v in trie.named_buffers()} == {k: v.tolist() for k, v in again.named_buffers()}
    assert trie.edges == [len({c[: level + 1] for c in codes}) for level in range(len(sizes))]
    every = list(itertools.product(*(range(-1, size + 1) for size in sizes)))
    found = trie.lookup(torch.tensor(every)).tolist()
    assert found == [codes.index(c) if c in codes else -1 for c in every]


def test_items_with_one_tuple_are_named():
    with pytest.raises(UserError, match=r"items 0 and 2 share the codes \[1, 1\]"):
        Trie.from_codes(torch.tensor([[1, 1], [0, 1], [1, 1]]), (2, 2))


@pytest.mark.parametrize(
    ("column", "row", "value"), [("node", 2, 1), ("token", 1, 0), ("child", 2, 1), ("level", 0, 1), ("level", 0, -1)]
)
def test_a_damaged_table_is_refused(column, row, value):
    table = table_of([(0, 0), (1, 1), (1, 2)], (2, 3))
    values = table[column].to_pylist()
    values[row] = value
    damaged = table.set_column(table.schema.get_field_index(column), column, pa.array(values, table[column].type))
    with pytest.raises(UserError, match=r"damaged"):
        Trie.from_table(damaged, (2, 3))


def test_it_stays_out_of_checkpoints_and_reports_branching():
    trie = Trie.from_codes(torch.tensor([(0, 0), (1, 1), (1, 2)]), (2, 3))
    assert not trie.state_dict()
    assert trie.branching() == [2.0, 1.5]
    assert trie.max_branching == [2, 2]
