"""The trie contains exactly the catalogue's codes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import UserError
from models.retrieval.search.trie import Trie
from tests.fixtures.search_problems import catalogues, draw_subset


def list_prefixes(codes, length):
    """Return the distinct prefixes of a length, sorted."""
    return sorted({code[:length] for code in codes})


@settings(max_examples=60)
@given(catalogues())
def test_edges_are_the_prefixes_of_the_codes_level_by_level(catalogue):
    sizes, codes = catalogue
    levels = len(sizes)
    prefixes = [list_prefixes(codes, length) for length in range(levels + 1)]
    expected = []
    for level in range(levels):
        for child, prefix in enumerate(prefixes[level + 1]):
            parent = prefixes[level].index(prefix[:-1])
            item = codes.index(prefix) if level == levels - 1 else -1
            expected.append((level, parent, prefix[-1], child, item))

    trie = Trie(torch.tensor(codes), sizes)

    columns = trie.edge_columns()
    names = ("level", "node", "token", "child", "item_index")
    edges = zip(*(columns[name].tolist() for name in names), strict=True)
    assert list(edges) == expected
    counts = [len(level) for level in prefixes]
    assert trie.edges == counts[1:]
    assert trie.branching() == [
        after / before for before, after in itertools.pairwise(counts)
    ]
    assert trie.max_branching == [
        int(trie.offsets(level).diff().max()) for level in range(levels)
    ]
    assert not trie.state_dict()  # checkpoints do not contain the trie


@settings(max_examples=60)
@given(catalogues())
def test_lookup_finds_each_item_and_no_other_tuple(catalogue):
    sizes, codes = catalogue
    trie = Trie(torch.tensor(codes), sizes)
    tuples = list(itertools.product(*(range(size) for size in sizes)))
    expected = [codes.index(code) if code in codes else -1 for code in tuples]
    assert trie.lookup(torch.tensor(tuples)).tolist() == expected


@settings(max_examples=60)
@given(catalogues(), st.integers(0, 2**20))
def test_the_edges_to_some_items_are_their_prefixes(catalogue, seed):
    sizes, codes = catalogue
    trie = Trie(torch.tensor(codes), sizes)
    is_selected, selected = draw_subset(codes, seed)
    expected = []
    for length in range(1, len(sizes) + 1):
        selected_prefixes = list_prefixes(selected, length)
        for prefix in list_prefixes(codes, length):
            expected.append(prefix in selected_prefixes)

    edges = trie.mark_edges(is_selected)

    assert edges.tolist() == expected
    items = trie.lookup(torch.tensor(codes), edges)
    all_items = torch.arange(len(codes))
    assert torch.equal(items, torch.where(is_selected, all_items, -1))


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([[1, 1], [0, 1], [1, 1]], r"items 0 and 2 have the same codes \[1, 1\]"),
        (
            [[0, 2]],
            "code 2 at level 1 is outside of its codebook of 2",
        ),
        ([[0, 1], [-1, 0]], "code -1 at level 0 is outside of its codebook of 2"),
    ],
)
def test_equal_codes_and_codes_outside_of_the_codebook_are_rejected(codes, message):
    with pytest.raises(UserError, match=message):
        Trie(torch.tensor(codes), (2, 2))
