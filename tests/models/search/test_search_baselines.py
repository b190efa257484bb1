"""Baselines of search: click rates are columns of the tables as of the request, the best
number is chosen on training searches, and the shown order is never served.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from core.schemas import Category, CustomFeatures, Number
from models.metrics.ranking_metrics import request_auc
from models.search.baselines.best_number import BestNumber, BestNumberConfig
from models.search.baselines.click_rates import (
    BaselineConfig,
    ItemCtr,
    PairCtr,
    ShownOrder,
    ShownOrderConfig,
)
from models.search.catalogue import SearchCatalogue, SearchText
from models.search.requests import SearchBatch
from tests.fixtures.batches import fill_batch

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
        (lambda: PairCtr(BaselineConfig(), build_catalogue()), 3),
        (lambda: ItemCtr(BaselineConfig(), build_catalogue()), 1),
    ],
)
def test_a_click_rate_is_the_column_of_the_longest_window(model, column):
    features = torch.rand(6, len(RATES))
    batch = fill_batch(SearchBatch, {}, features=features)

    chances = model().score(batch)[:, 0].sigmoid()

    torch.testing.assert_close(chances, features[:, column])


def test_the_shown_order_is_scored_by_the_click_rate_of_the_first_position():
    model = ShownOrder(ShownOrderConfig(), build_catalogue())
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


@pytest.mark.parametrize("sign", [1, -1])
def test_the_best_number_is_that_of_a_slow_loop(sign):
    custom = CustomFeatures(
        (Number("num_price", 0, 1, True), Number("num_stars", 0, 1, False)),
        (Category("cat_city", ("a", "b")),),
    )
    catalogue = SearchCatalogue(
        3,
        2,
        ("click",),
        ("position", *custom.names),
        SearchText.empty(3, 2),
        custom_features=custom,
    )
    rng = np.random.default_rng(0)
    request = np.repeat(np.arange(60), rng.integers(1, 9, 60))
    features = rng.integers(0, 6, (len(request), 4)).astype(np.float32)
    clicked = rng.random(len(request)) < np.exp(sign * features[:, 1] - 6 * (sign > 0))
    features[:, [0, 3]] = clicked[:, None]  # neither a position nor a category counts
    features[rng.random(len(request)) < 0.2, 1] = np.nan
    batch = fill_batch(
        SearchBatch,
        {"R": 60},
        candidate_request=torch.from_numpy(request),
        candidate_valid=torch.ones(len(request), dtype=torch.bool),
        features=torch.from_numpy(features),
        labels=torch.from_numpy(clicked[:, None]),
    )
    aucs: dict[str, list[float]] = {}
    for name, column in (("price", 1), ("stars", 2)):
        for direction, order in (("descending", 1), ("ascending", -1)):
            for number in range(60):
                rows = request == number
                if len({*clicked[rows]}) == 2:
                    # a missing value ranks last
                    scores = np.nan_to_num(order * features[rows, column], nan=-99)
                    auc = roc_auc_score(clicked[rows], scores)
                    aucs.setdefault(f"{name}, {direction}", []).append(auc)
    means = {name: np.mean(values) for name, values in aucs.items()}
    model = BestNumber(BestNumberConfig(), catalogue)

    model.fit_in_one_pass([batch])

    assert model.ranks_by == max(means, key=means.__getitem__)
    assert model.ranks_by.startswith("price")
    auc, valid = request_auc(
        model.score(batch)[:, 0], batch.labels[:, 0], batch.candidate_request
    )
    assert float(auc[valid].mean()) == pytest.approx(means[model.ranks_by])
    assert model.score(batch).abs().max() <= 1
