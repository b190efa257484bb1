"""Attributes of items against a loop over them; those of new items by what the catalogue has."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from models.actions.attributes import Attributes

ITEMS = pa.table(
    {
        "item_id": ["a", "b", "c", "d"],
        "num_price": pa.array([1.0, None, 4.0, 7.0], pa.float32()),
        "num_same": pa.array([2.0] * 4, pa.float32()),
        "num_none": pa.array([None] * 4, pa.float32()),
        "cat_author": ["zoë", None, "abe", "zoë"],
        "cat_kind": ["dog", "cat", "dog", "cat"],
        "cat_blank": ["", "x", "", "y"],
        "cat_none": pa.array([None] * 4, pa.string()),
    }
)


def test_attributes_are_standardised_and_numbered_as_by_hand() -> None:
    numbers, categories = Attributes.of(ITEMS).read(ITEMS)
    price = np.array([1.0, 4.0, 7.0])
    scaled = (price - price.mean()) / price.std()
    assert numbers[:, 0].tolist() == np.insert(scaled, 1, 0).astype(np.float32).tolist()
    assert not numbers[:, 1:].any()
    assert categories.T.tolist() == [[2, 0, 1, 2], [2, 1, 2, 1], [0, 1, 0, 2], [0, 0, 0, 0]]
    assert (numbers.dtype, categories.dtype) == (torch.float32, torch.int64)


def test_new_items_are_read_by_what_the_catalogue_has() -> None:
    attributes = Attributes.of(ITEMS)
    numbers, categories = attributes.read(ITEMS)
    for rows in ([2], [3, 0], []):
        again = attributes.read(ITEMS.take(pa.array(rows, pa.int64())))
        assert torch.equal(again[0], numbers[rows])
        assert torch.equal(again[1], categories[rows])
    unknown = ITEMS.slice(0, 1).set_column(4, "cat_author", [["nobody"]])
    assert attributes.read(unknown)[1].tolist() == [[0, 2, 0, 0]]
    assert Attributes().read(ITEMS)[0].shape == (4, 0)
