"""Click rates are columns of the tables as of the request; the log's order is measured
apart and never served.
"""

from __future__ import annotations

from pathlib import Path
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
    rate_columns,
)
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join
from models.training.fit import FitConfig
from pipelines.evaluation.inference import infer_all
from tests.fixtures.batches import fill_batch
from tests.fixtures.trainings import build_training

RATES = ("pair_ctr_7d", "item_ctr_30d", "item_ctr_1.5d", "pair_ctr_30d", "position")


def small_catalogue(features: tuple[str, ...] = RATES) -> SearchCatalogue:
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
        (lambda: PairCtr(PairCtrConfig(), small_catalogue()), 3),
        (lambda: ItemCtr(ItemCtrConfig(), small_catalogue()), 1),
    ],
)
def test_a_click_rate_is_the_column_of_the_longest_window(
    model: Any, column: int
) -> None:
    features = torch.rand(6, len(RATES))
    batch = fill_batch(SearchBatch, {}, features=features)

    chances = model().score(batch)[:, 0].sigmoid()
    torch.testing.assert_close(chances, features[:, column])


def test_windows_are_ordered_by_their_days() -> None:
    assert rate_columns(RATES, "item") == ["item_ctr_1.5d", "item_ctr_30d"]
    assert rate_columns(("query_ctr_7d", "pair_clicks_7d"), "pair") == []


def test_all_results_tie_in_tables_without_click_rates() -> None:
    catalogue = small_catalogue(("pair_ctr_7d",))

    model = ItemCtr(ItemCtrConfig(), catalogue)

    batch = fill_batch(SearchBatch, {}, features=torch.rand(4, 1))
    assert model.score(batch).tolist() == [[0.0]] * 4
    (line,) = model.prepare_training(catalogue, {})
    assert line.startswith("the tables have no click rates by item")


def test_the_log_s_order_ranks_by_position_with_the_first_one_s_click_rate() -> None:
    position = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    labels = torch.tensor([[1, 0, 0, 1, 1, 0, 0]], dtype=torch.bool).T
    model = LogOrder(LogOrderConfig(), small_catalogue())

    batch = fill_batch(
        SearchBatch,
        {},
        candidate_position=position,
        candidate_valid=torch.ones(7, dtype=torch.bool),
        labels=labels,
    )

    model.fit_counts([batch])

    chances = model.score(batch)[:, 0].sigmoid()
    assert chances[0] == pytest.approx(3 / 5)  # 2 of 3 clicked, one added to each
    odds = chances / (1 - chances)
    torch.testing.assert_close(
        odds[:3] / odds[0], 1 / torch.tensor([1.0, 2, 3]).double()
    )


def test_the_log_s_order_has_no_metric_by_which_models_are_chosen(
    search: tuple[str, str], tmp_path: Path
) -> None:
    tables, _ = search
    fit = FitConfig(batch_size=16, metric="with_position/gauc")
    setup = build_training({"name": "log_order"}, fit, Inputs(tables))
    setup.fit_counts()

    sums, _ = setup.validate(setup.model)

    metrics = setup.means(sums)
    assert set(setup.model.metric_names(setup.catalogue)) == set(metrics)
    assert metrics.pop("requests") == len(setup.val)
    assert all(name.startswith("with_position/") for name in metrics)
    assert setup.model.format_metrics(metrics)[0].startswith("  with_position/")
    uri = join(tables, "sequences")
    examples = SearchDataset.load(uri, "val", unit="request")
    batch = examples.collate(np.arange(len(examples)))
    auc, valid = request_auc(
        -batch.candidate_position, batch.labels[:, 0], batch.candidate_request
    )
    expected = float(auc[valid].mean())
    assert metrics["with_position/gauc"] == pytest.approx(expected)
    by_user = setup.model.measure(batch, by_user=1)
    assert "by_user/with_position/gauc" in by_user

    checkpoint.save(tmp_path / "best", setup.model, setup.checkpoint(epoch=1))
    assert LogOrder.reason_not_served()
    with pytest.raises(UserError, match="known only after results were shown"):
        infer_all(str(tmp_path / "best"), Inputs(tables), str(tmp_path / "scores"))


def test_a_click_rate_is_trained_measured_and_inferred(
    search: tuple[str, str], tmp_path: Path
) -> None:
    tables, _ = search
    fit = FitConfig(batch_size=16, metric="gauc")
    setup = build_training({"name": "pair_ctr"}, fit, Inputs(tables))
    setup.fit_counts()

    metrics = setup.means(setup.validate(setup.model)[0])

    batch = setup.val.collate(np.arange(len(setup.val)))
    rate = batch.features[:, setup.catalogue.features.index("pair_ctr_7d")]
    auc, valid = request_auc(rate, batch.labels[:, 0], batch.candidate_request)
    assert metrics["gauc"] == pytest.approx(float(auc[valid].mean()))
    checkpoint.save(tmp_path / "best", setup.model, setup.checkpoint(epoch=1))
    manifest, _ = infer_all(
        str(tmp_path / "best"), Inputs(tables), str(tmp_path / "scores")
    )
    assert manifest.rows > 0
