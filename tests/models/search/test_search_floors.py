"""Baselines of search: click rates are columns of the tables as of the request; the order
of the log has separate metrics and is never served.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.metrics.ranking_metrics import request_auc
from models.search.catalogue import SearchCatalogue, SearchText
from models.search.data import SearchBatch, SearchDataset
from models.search.floors.click_rates import (
    ItemCtr,
    ItemCtrConfig,
    LogOrder,
    LogOrderConfig,
    PairCtr,
    PairCtrConfig,
)
from models.storage.inputs import Inputs
from models.storage.tables import join
from models.training.fit import FitConfig
from tests.fixtures.batches import fill_batch
from tests.fixtures.trainings import build_training

RATES = ("pair_ctr_7d", "item_ctr_30d", "item_ctr_1.5d", "pair_ctr_30d", "position")


def build_catalogue(features: tuple[str, ...] = RATES) -> SearchCatalogue:
    return SearchCatalogue(
        3,
        2,
        ("click", "purchase"),
        features,
        SearchText.empty(3, 2),
        feature_mean=torch.zeros(len(features)),
        feature_std=torch.ones(len(features)),
    )


@pytest.mark.parametrize(
    ("model", "column"),
    [
        (lambda: PairCtr(PairCtrConfig(), build_catalogue()), 3),
        (lambda: ItemCtr(ItemCtrConfig(), build_catalogue()), 1),
    ],
)
def test_a_click_rate_is_the_column_of_the_longest_window(
    model: Any, column: int
) -> None:
    features = torch.rand(6, len(RATES))
    batch = fill_batch(SearchBatch, {}, features=features)

    chances = model().score(batch)[:, 0].sigmoid()

    torch.testing.assert_close(chances, features[:, column])


def test_all_results_tie_in_tables_without_click_rates() -> None:
    catalogue = build_catalogue(("pair_ctr_7d",))

    model = ItemCtr(ItemCtrConfig(), catalogue)

    batch = fill_batch(SearchBatch, {}, features=torch.rand(4, 1))
    assert model.score(batch).tolist() == [[0.0]] * 4
    (line,) = model.prepare_training(catalogue, {})
    assert line.startswith("the tables have no click rates by item")


def test_the_order_of_the_log_is_scored_by_the_click_rate_of_the_first_position() -> (
    None
):
    model = LogOrder(LogOrderConfig(), build_catalogue())
    batch = fill_batch(
        SearchBatch,
        {},
        candidate_position=torch.tensor([0, 1, 2, 0, 1, 2, 0]),
        candidate_valid=torch.ones(7, dtype=torch.bool),
        labels=torch.tensor([[1, 0, 0, 1, 1, 0, 0]], dtype=torch.bool).T,
    )

    model.fit_in_one_pass([batch])

    chances = model.score(batch)[:, 0].sigmoid()
    # 2 of 3 first results are clicked; one click and one skip are added
    assert chances[0] == pytest.approx(3 / 5)
    odds = chances / (1 - chances)
    expected = 1 / torch.tensor([1.0, 2, 3]).double()
    torch.testing.assert_close(odds[:3] / odds[0], expected)


def test_the_order_of_the_log_has_metrics_with_the_position_only(
    search: tuple[str, str],
) -> None:
    tables, _ = search
    fit = FitConfig(batch_size=16, metric="with_position/gauc")
    run = build_training({"name": "log_order"}, fit, Inputs(tables))
    run.fit_in_one_pass()

    sums, _ = run.validate(run.model)

    metrics = run.means(sums)
    assert set(run.model.metric_names(run.catalogue)) == set(metrics)
    assert metrics.pop("requests") == len(run.val)
    assert all(name.startswith("with_position/") for name in metrics)
    assert run.model.format_metrics(metrics)[0].startswith("  with_position/")
    uri = join(tables, "sequences")
    examples = SearchDataset.load(uri, "val", unit="request")
    batch = examples.collate(np.arange(len(examples)))
    auc, valid = request_auc(
        -batch.candidate_position, batch.labels[:, 0], batch.candidate_request
    )
    expected = float(auc[valid].mean())
    assert metrics["with_position/gauc"] == pytest.approx(expected)
    by_user = run.model.measure(batch, by_user=1)
    assert "by_user/with_position/gauc" in by_user
