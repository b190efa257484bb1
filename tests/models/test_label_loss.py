"""The label loss equals a loop, and sampled negatives keep the probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from models.label_loss import (
    LabelOptions,
    label_loss,
    resolve_masks,
    resolve_weights,
    sample_learned,
    select_measured,
)
from models.search import metrics
from models.search.catalogue import SearchCatalogue
from models.search.data import SearchBatch, SearchDataset
from models.search.ranker import Ranker, RankerConfig
from models.storage.tables import UserError, join
from tests.fixtures.search_tables import write_search

LABELS = ("click", "purchase", "share")


def plain_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: dict[str, float],
    masks: dict[str, str],
) -> float:
    total = 0.0
    for place, name in enumerate(LABELS):
        terms = []
        for row in range(len(labels)):
            if name in masks and not labels[row, LABELS.index(masks[name])]:
                continue
            chance = 1 / (1 + math.exp(-float(logits[row, place])))
            terms.append(-math.log(chance if labels[row, place] else 1 - chance))
        total += weights.get(name, 1.0) * (sum(terms) / len(terms) if terms else 0.0)
    return total


@pytest.mark.parametrize(
    "masks", [{}, {"purchase": "click"}, {"purchase": "click", "share": "purchase"}]
)
@pytest.mark.parametrize(
    "weights", [{}, {"click": 0.5, "share": 3.0}, {"purchase": 0.0}]
)
def test_the_loss_is_its_loop(masks: dict[str, str], weights: dict[str, float]) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 3), torch.rand(40, 3) < 0.4
    places = resolve_masks(LABELS, masks)
    there = select_measured(labels, places) if masks else None
    got = label_loss(logits, labels, resolve_weights(LABELS, weights), there)
    assert float(got) == pytest.approx(
        plain_loss(logits, labels, weights, masks), rel=1e-5
    )


def test_a_label_that_nothing_counts_for_has_no_loss() -> None:
    logits, labels = (
        torch.randn(5, 2, requires_grad=True),
        torch.zeros(5, 2, dtype=torch.bool),
    )
    loss = label_loss(logits, labels, [1.0, 1.0], select_measured(labels, [None, 0]))
    loss.backward()
    assert torch.isfinite(loss)
    assert not logits.grad[:, 1].any()  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"label_masks": {"purchas": "click"}},
            "label_masks names 'purchas', which is not a label .*purchase",
        ),
        ({"label_masks": {"purchase": "clik"}}, "label_masks names 'clik'.*click"),
        (
            {"label_weights": {"likes": 2.0}},
            "label_weights names 'likes', which is not a label of the tables",
        ),
        ({"label_weights": {"click": -1}}, "label_weights has -1 for 'click'"),
        ({"label_masks": {"click": "click"}}, "label_masks has 'click' for itself"),
        ({"negative_rate": 0.0}, r"negative_rate 0.0 is not in \(0, 1\]"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], said: str) -> None:
    def use() -> None:
        given = LabelOptions(**options)
        resolve_masks(LABELS, given.label_masks)
        resolve_weights(LABELS, given.label_weights)

    with pytest.raises((UserError, ValueError), match=said):
        use()


def test_the_loss_of_a_share_of_the_negatives_is_in_the_mean_that_of_all_weighted_by_it() -> (
    None
):
    rate, masks = 0.25, {"purchase": "click"}
    torch.manual_seed(0)
    logits, labels = torch.randn(600, 3), torch.rand(600, 3) < 0.2
    places = resolve_masks(LABELS, masks)
    expected = 0.0
    for place, name in enumerate(LABELS):
        cost = weight = 0.0
        for row in range(len(labels)):
            if name in masks and not labels[row, LABELS.index(masks[name])]:
                continue
            positive, chance = (
                bool(labels[row, place]),
                1 / (1 + math.exp(-float(logits[row, place]))),
            )
            share = 1.0 if positive else rate
            cost, weight = (
                cost - share * math.log(chance if positive else 1 - chance),
                weight + share,
            )
        expected += cost / weight
    losses = [
        float(
            label_loss(logits, labels, [1.0] * 3, sample_learned(labels, places, rate))
        )
        for _ in range(400)
    ]
    assert np.mean(losses) == pytest.approx(
        expected, abs=4 * np.std(losses) / 20 + 1e-3
    )
    assert sample_learned(labels, [None] * 3, 1.0) is None  # nothing to draw


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
def test_the_correction_is_the_log_of_the_rate(rate: float) -> None:
    """Bayes: p among the sampled is p rate / (p rate + 1 - p) among all."""
    correction = LabelOptions(negative_rate=rate).correction
    assert correction == math.log(rate)
    p = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    torch.testing.assert_close(
        (p.logit() + correction).sigmoid(), p * rate / (p * rate + 1 - p)
    )


@pytest.fixture(scope="module")
def search(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[SearchCatalogue, SearchBatch]:
    tables, text = write_search(tmp_path_factory.mktemp("labels"))
    catalogue = SearchCatalogue.load(tables, text)
    uri = join(tables, "sequences")
    examples = SearchDataset.load(uri, "train", max_history=8, text=catalogue.text)
    return catalogue, examples.collate(np.arange(12))


def test_a_masked_label_is_learned_and_measured_where_the_mask_is_true(search) -> None:
    catalogue, batch = search
    model = Ranker(
        RankerConfig(dropout=0.0, label_masks={"purchase": "click"}), catalogue
    )
    clicked = batch.labels[:, 0]
    assert 0 < clicked.sum() < len(clicked)
    labels = batch.labels.clone()
    labels[~clicked, 1] = ~labels[~clicked, 1]
    other = replace(batch, labels=labels)
    assert torch.equal(model(batch)["loss"], model(other)["loss"])
    found, again = (
        metrics.means(metrics.measure(model.eval(), of)) for of in (batch, other)
    )
    assert found["purchase/log_loss"] == again["purchase/log_loss"]
    with torch.no_grad():
        logits = model.score(batch)[clicked, 1]
    want = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, batch.labels[clicked, 1].float()
    )
    assert found["purchase/log_loss"] == pytest.approx(float(want), rel=1e-4)


def test_all_positives_and_a_share_of_the_rest_are_learned_from(search) -> None:
    catalogue, batch = search
    torch.manual_seed(0)
    model = Ranker(RankerConfig(negative_rate=0.25), catalogue)
    positive, kept_negatives, negatives = batch.labels.any(1), 0, 0
    for _ in range(30):
        sampled, there = model.sample_candidates(batch)
        labels = sampled.labels
        assert there is not None
        assert bool(there[labels].all())
        assert int(labels.any(1).sum()) == int(positive.sum())
        assert (
            len(sampled.candidate)
            == len(sampled.features)
            == len(sampled.candidate_request)
            == len(labels)
        )
        kept_negatives += len(labels) - int(positive.sum())
        negatives += int((~positive).sum())
    assert kept_negatives / negatives == pytest.approx(0.25, abs=0.03)
