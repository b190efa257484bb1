"""The trie contains exactly the catalogue's codes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings

from core.errors import UserError
from models.retrieval.search import Trie
from tests.fixtures.search_problems import catalogues


@settings(max_examples=60)
@given(catalogues())
def test_lookup_finds_each_item_and_no_other_tuple(catalogue):
    sizes, codes = catalogue
    trie = Trie(torch.tensor(codes), sizes)
    tuples = list(itertools.product(*(range(size) for size in sizes)))
    expected = [codes.index(code) if code in codes else -1 for code in tuples]
    assert trie.lookup(torch.tensor(tuples)).tolist() == expected


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
