"""Nearest items equal a comparison of all pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.loaded_model import build_model
from models.retrieval.data import Catalogue
from tests.fixtures.small_retrieval import TEACHER, build_catalogue

ITEMS = 30


def build(name: str, **config: Any) -> Any:
    """Return a model of 30 items with random weights."""
    torch.manual_seed(0)
    catalogue = build_catalogue() if name == "tiger" else Catalogue(ITEMS)
    return build_model({"name": name, **config}, catalogue)


@pytest.mark.parametrize(
    ("name", "config"), [("sasrec", {"dim": 8}), ("tiger", TEACHER)]
)
def test_nearest_items_have_the_highest_cosines_of_item_vectors(
    name: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.retrieval.model.ITEMS_PER_BLOCK", 7)
    model = build(name, **config)
    vectors = model.item_vectors().detach().double().numpy()
    norm = np.linalg.norm(vectors, axis=1)
    cosine = vectors @ vectors.T / np.outer(norm, norm)
    np.fill_diagonal(cosine, -np.inf)

    items, scores = model.nearest_items(5)

    item_cosines = np.take_along_axis(cosine, items.numpy(), 1)
    np.testing.assert_allclose(scores, -np.sort(-cosine)[:, :5], atol=1e-5)
    np.testing.assert_allclose(item_cosines, scores, atol=1e-5)
