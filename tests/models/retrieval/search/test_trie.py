"""The trie holds the catalogue's codes, all of them and nothing else."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.retrieval.search.trie import Trie
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


@settings(max_examples=60)
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
    with pytest.raises(UserError, match=r"items 0 and 2 have the same codes \[1, 1\]"):
        Trie.from_codes(torch.tensor([[1, 1], [0, 1], [1, 1]]), (2, 2))
    with pytest.raises(UserError, match="there are 0 items"):
        Trie.from_codes(torch.zeros(0, 2, dtype=torch.long), (2, 2))


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


def replaced(table, column, values):
    kind = table[column].type if max((v for v in values if v is not None), default=0) < 2**15 else pa.int64()
    return table.set_column(table.schema.get_field_index(column), column, pa.array(values, kind))


@pytest.mark.parametrize(
    ("column", "row", "value", "says"),
    [
        ("token", 4, 3, "token 3 at level 1 is outside of its codebook of 3"),
        ("token", 4, 4_000_000_000, "token 4000000000 at level 1 is outside of its codebook of 3"),
        ("item_index", 3, 2, "leaves are not the items 0 to 2, each once"),
        ("item_index", 3, 7, "leaves are not the items 0 to 2, each once"),
        ("item_index", 3, None, "column item_index is missing, has gaps or holds no integers"),
        ("node", 3, None, "column node is missing, has gaps or holds no integers"),
        ("level", 4, 2, "edges outside of its 2 levels"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(column, row, value, says):
    table = table_of([(0, 0), (1, 1), (1, 2)], (2, 3))
    values = table[column].to_pylist()
    values[row] = value
    with pytest.raises(UserError, match=rf"the trie is damaged: .*{says}; run jobs\.tokenize again"):
        Trie.from_table(replaced(table, column, values), (2, 3))


def test_codes_beyond_their_codebook_are_no_trie():
    with pytest.raises(UserError, match="token 2 at level 1 is outside of its codebook of 2"):
        Trie.from_codes(torch.tensor([[0, 2]]), (2, 2))


def test_leaves_are_those_of_the_codes():
    codes = [(0, 0), (1, 1), (1, 2)]
    trie = Trie.from_table(table_of(codes, (2, 3)), (2, 3))
    trie.check_leads_to(torch.tensor(codes))
    with pytest.raises(UserError, match=r"item 1 is not found by \[1, 2\]; run jobs\.tokenize again"):
        trie.check_leads_to(torch.tensor([(0, 0), (1, 2), (1, 1)]))
    with pytest.raises(UserError, match="its 3 leaves are not those of the 2 semantic IDs"):
        trie.check_leads_to(torch.tensor([(0, 0), (1, 1)]))


@settings(max_examples=200)
@given(catalogues(), st.data())
def test_a_damaged_table_is_found_or_is_the_same_trie(catalogue, data):
    sizes, codes = catalogue
    table = table_of(codes, sizes)
    for _ in range(data.draw(st.integers(1, 3))):
        column = data.draw(st.sampled_from(table.column_names))
        values = table[column].to_pylist()
        row = data.draw(st.integers(0, len(values) - 1))
        values[row] = data.draw(
            st.none() | st.integers(-2, 6) | st.sampled_from([255, 65_535, 4_000_000_000, -(2**40)])
        )
        table = table.set_column(table.schema.get_field_index(column), column, pa.array(values, pa.int64()))
    right = Trie.from_codes(torch.tensor(codes), sizes)
    try:
        trie = Trie.from_table(table, sizes)
        trie.check_leads_to(torch.tensor(codes))
    except UserError as error:
        said = str(error)
    else:
        said = "nothing; run jobs.tokenize again"
        assert {k: v.tolist() for k, v in trie.named_buffers()} == {k: v.tolist() for k, v in right.named_buffers()}
    assert said.endswith("run jobs.tokenize again")
    assert "\n" not in said


def test_it_stays_out_of_checkpoints_and_reports_branching():
    trie = Trie.from_codes(torch.tensor([(0, 0), (1, 1), (1, 2)]), (2, 3))
    assert not trie.state_dict()
    assert trie.branching() == [2.0, 1.5]
    assert trie.max_branching == [2, 2]
