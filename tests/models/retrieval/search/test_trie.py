"""The trie contains exactly the catalogue's codes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.retrieval.search.trie import Trie
from models.storage.tables import UserError


@st.composite
def catalogues(draw):
    """Draw (sizes, codes) of up to 4 levels of up to 4 codes, from one item to all."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    every = list(itertools.product(*map(range, sizes)))
    codes = draw(
        st.lists(st.sampled_from(every), min_size=1, max_size=len(every), unique=True)
    )
    return sizes, codes


@settings(max_examples=60)
@given(catalogues())
def test_it_is_the_trie_of_the_codes_and_finds_each_item(catalogue):
    """Check edges level by level, and the lookup of all tuples inside and outside."""
    sizes, codes = catalogue
    trie, expected = Trie(torch.tensor(codes), sizes), []
    for level in range(len(sizes)):
        parents = sorted({code[:level] for code in codes})
        for rank, prefix in enumerate(sorted({code[: level + 1] for code in codes})):
            item = codes.index(prefix) if level == len(sizes) - 1 else -1
            expected.append((level, parents.index(prefix[:-1]), prefix[-1], rank, item))
    names = ("level", "node", "token", "child", "item_index")
    assert (
        list(zip(*(trie.edge_columns()[name].tolist() for name in names), strict=True))
        == expected
    )
    assert trie.edges == [
        len({code[: level + 1] for code in codes}) for level in range(len(sizes))
    ]
    assert trie.branching() == [
        after / before for before, after in itertools.pairwise([1, *trie.edges])
    ]
    assert trie.max_branching == [
        int(trie.offsets(level).diff().max()) for level in range(len(sizes))
    ]
    assert not trie.state_dict()  # it stays out of checkpoints
    every = list(itertools.product(*(range(-1, size + 1) for size in sizes)))
    found = trie.lookup(torch.tensor(every)).tolist()
    assert found == [codes.index(code) if code in codes else -1 for code in every]


@settings(max_examples=60)
@given(catalogues(), st.integers(0, 2**20))
def test_the_edges_to_some_items_are_their_prefixes(catalogue, seed):
    sizes, codes = catalogue
    trie = Trie(torch.tensor(codes), sizes)
    items = torch.rand(len(codes), generator=torch.Generator().manual_seed(seed)) < 0.4
    some = [code for code, there in zip(codes, items.tolist(), strict=True) if there]
    expected = [
        prefix in {code[: level + 1] for code in some}
        for level in range(len(sizes))
        for prefix in sorted({code[: level + 1] for code in codes})
    ]
    edges = trie.mark_edges(items)
    assert edges.tolist() == expected
    found = trie.lookup(torch.tensor(codes), edges)
    assert found.tolist() == [
        item if there else -1 for item, there in enumerate(items.tolist())
    ]


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([[1, 1], [0, 1], [1, 1]], r"items 0 and 2 have the same codes \[1, 1\]"),
        (
            [[0, 2]],
            "code 2 at level 1 is outside of its codebook of 2; run jobs.tokenize again",
        ),
        ([[0, 1], [-1, 0]], "code -1 at level 0 is outside of its codebook of 2"),
    ],
)
def test_codes_that_make_no_trie_are_refused(codes, message):
    with pytest.raises(UserError, match=message):
        Trie(torch.tensor(codes), (2, 2))


def test_a_trie_of_nothing_is_refused():
    with pytest.raises(UserError, match="there are 0 items"):
        Trie(torch.zeros(0, 2, dtype=torch.long), (2, 2))
