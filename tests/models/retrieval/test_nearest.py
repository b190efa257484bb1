"""Nearest items equal a comparison of all pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.loaded_model import build_model
from tests.fixtures.small_retrieval import build_catalogue
from tests.fixtures.trainings import CASES


@pytest.mark.parametrize("name", ["sasrec", "tiger"])
def test_nearest_items_have_the_highest_cosines_of_item_vectors(name, monkeypatch):
    monkeypatch.setattr("models.retrieval.model.ITEMS_PER_BLOCK", 7)
    torch.manual_seed(0)
    model: Any = build_model(CASES[name], build_catalogue())
    vectors = model.item_vectors().detach().double().numpy()
    norm = np.linalg.norm(vectors, axis=1)
    cosine = vectors @ vectors.T / np.outer(norm, norm)
    np.fill_diagonal(cosine, -np.inf)

    items, scores = model.nearest_items(5)

    item_cosines = np.take_along_axis(cosine, items.numpy(), 1)
    np.testing.assert_allclose(scores, -np.sort(-cosine)[:, :5], atol=1e-5)
    np.testing.assert_allclose(item_cosines, scores, atol=1e-5)
