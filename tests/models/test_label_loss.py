"""The loss over labels equals a loop over labels and rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from core.errors import UserError
from core.schemas import Inputs
from models.dataset.dataset import Dataset
from models.label_loss import (
    label_loss,
    resolve_masks,
    resolve_weights,
    select_learned,
)
from models.search import metrics
from models.search.catalogue import SearchCatalogue
from models.search.ranker import Ranker, RankerConfig
from models.search.requests import SEARCH, SearchBatch, SearchSelection
from tests.fixtures.search_tables import write_search

LABELS = ("click", "purchase", "share")


def to_probability(logit: torch.Tensor) -> float:
    return 1 / (1 + math.exp(-float(logit)))


def get_counted_rows(
    labels: torch.Tensor, name: str, masks: dict[str, str]
) -> list[int]:
    """Return the rows whose mask label, if a label has one, is true."""
    if name not in masks:
        return list(range(len(labels)))
    return labels[:, LABELS.index(masks[name])].nonzero().flatten().tolist()


def compute_loss_by_loop(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: dict[str, float],
    masks: dict[str, str],
) -> float:
    """Return the weighted sum of the mean cross-entropies of all labels."""
    total = 0.0
    for column, name in enumerate(LABELS):
        terms = []
        for row in get_counted_rows(labels, name, masks):
            chance = to_probability(logits[row, column])
            terms.append(-math.log(chance if labels[row, column] else 1 - chance))
        if terms:
            total += weights.get(name, 1.0) * sum(terms) / len(terms)
    return total


@pytest.mark.parametrize(
    "masks", [{}, {"purchase": "click"}, {"purchase": "click", "share": "purchase"}]
)
@pytest.mark.parametrize(
    "weights", [{}, {"click": 0.5, "share": 3.0}, {"purchase": 0.0}]
)
def test_the_loss_equals_a_loop_over_labels_and_rows(
    masks: dict[str, str], weights: dict[str, float]
) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 3), torch.rand(40, 3) < 0.4
    mask_columns = resolve_masks(LABELS, masks)
    is_measured = select_learned(labels, mask_columns) if masks else None

    loss = label_loss(logits, labels, resolve_weights(LABELS, weights), is_measured)

    expected = compute_loss_by_loop(logits, labels, weights, masks)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_masks": {"purchas": "click"}}, "unknown 'purchas' in label_masks"),
        ({"label_masks": {"purchase": "clik"}}, "unknown 'clik' in label_masks"),
        ({"label_masks": {"click": "click"}}, "for itself"),
        ({"label_weights": {"likes": 2.0}}, "unknown 'likes' in label_weights"),
    ],
)
def test_invalid_options_are_rejected(
    search, options: dict[str, Any], message: str
) -> None:
    catalogue, _ = search
    with pytest.raises((UserError, ValueError), match=message):
        Ranker(RankerConfig(**options), catalogue)


@pytest.fixture(scope="module")
def search(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[SearchCatalogue, SearchBatch]:
    tables, text = write_search(tmp_path_factory.mktemp("labels"))
    catalogue = SearchCatalogue.load(Inputs(tables, text=text))
    selection = SearchSelection("train", "user", 8, text=catalogue.text)
    examples = Dataset.open(SEARCH, catalogue.versions["sequences"], selection)
    return catalogue, examples.collate(np.arange(12))


def test_a_masked_label_is_trained_and_measured_only_where_the_mask_is_true(
    search,
) -> None:
    catalogue, batch = search
    config = RankerConfig(dropout=0.0, label_masks={"purchase": "click"})
    model = Ranker(config, catalogue)
    clicked = batch.labels[:, 0]
    assert 0 < clicked.sum() < len(clicked)
    labels = batch.labels.clone()
    labels[~clicked, 1] = ~labels[~clicked, 1]
    other = replace(batch, labels=labels)

    assert torch.equal(model(batch)["loss"], model(other)["loss"])
    model.eval()
    values = metrics.means(metrics.measure(model, batch))
    other_values = metrics.means(metrics.measure(model, other))
    assert values["purchase/log_loss"] == other_values["purchase/log_loss"]
    with torch.no_grad():
        logits = model.score(batch)[clicked, 1]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, batch.labels[clicked, 1].float()
    )
    assert values["purchase/log_loss"] == pytest.approx(float(expected), rel=1e-4)
