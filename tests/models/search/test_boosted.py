"""Boosted trees of search: scores equal LightGBM's on features computed one by one,
boosting stops on validation, and checkpoints hold no pickle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightgbm
import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from core.schemas import Category, CustomFeatures, Number
from models.metrics.ranking_metrics import request_auc
from models.search.baselines.boosted import Boosted, BoostedConfig, select_ranked
from models.search.catalogue import SearchCatalogue, SearchText
from models.search.requests import SearchBatch
from models.training import checkpoint
from models.warm_start import load_extended_weights
from tests.fixtures.batches import fill_batch

NUM_ITEMS, NUM_QUERIES, HISTORY, NUM_SHOWN = 9, 4, 6, 5
BUILT_IN = ("pair_ctr_7d", "position", "hour_sin")
CUSTOM_FEATURES = CustomFeatures(
    (Number("num_bm25", 0.0, 1.0, True),),
    (Category("cat_many", buckets=300), Category("cat_city", tuple("abcdefg"))),
)
# columns of the features
PAIR_CTR, POSITION, HOUR, BM25, MANY, CITY = range(6)


def build_catalogue(
    custom_features: CustomFeatures = CUSTOM_FEATURES,
) -> SearchCatalogue:
    return SearchCatalogue(
        NUM_ITEMS,
        NUM_QUERIES,
        ("click", "purchase"),
        (*BUILT_IN, *custom_features.names),
        SearchText.empty(NUM_ITEMS, NUM_QUERIES),
        feature_mean=torch.zeros(3),
        feature_std=torch.ones(3),
        custom_features=custom_features,
    )


def draw_features(
    rng: np.random.Generator, shape: tuple[int, ...], cities: int
) -> torch.Tensor:
    """Draw features (*shape, 6); a fifth of BM25 is missing."""
    numbers = rng.normal(size=(*shape, 4))
    numbers[..., BM25][rng.random(shape) < 0.2] = np.nan
    codes = [rng.integers(0, 301, shape), rng.integers(0, cities, shape)]
    values = np.concatenate([numbers, np.stack(codes, -1)], -1)
    return torch.from_numpy(values.astype(np.float32))


def draw_searches(seed: int, count: int = 400, cities: int = 6) -> SearchBatch:
    """Draw searches in which clicks follow BM25, the city, the position and the number of
    earlier clicks on the item.
    """
    rng = np.random.default_rng(seed)
    candidates = count * NUM_SHOWN
    batch = fill_batch(
        SearchBatch,
        {"B": count, "R": count, "N": candidates, "T": HISTORY},
        history=torch.from_numpy(rng.integers(0, NUM_ITEMS, (count, HISTORY))),
        history_query=torch.from_numpy(rng.integers(-1, NUM_QUERIES, (count, HISTORY))),
        request_row=torch.from_numpy(rng.permutation(count)),
        request_end=torch.from_numpy(rng.integers(0, HISTORY + 1, count)),
        request_query=torch.from_numpy(rng.integers(-1, NUM_QUERIES, count)),
        candidate=torch.from_numpy(rng.integers(0, NUM_ITEMS, candidates)),
        candidate_request=torch.arange(count).repeat_interleave(NUM_SHOWN),
        candidate_valid=torch.ones(candidates, dtype=torch.bool),
        features=draw_features(rng, (candidates,), cities),
        history_features=draw_features(rng, (count, HISTORY), cities),
    )
    utility = batch.features[:, BM25].nan_to_num(1.0)
    utility = utility + (batch.features[:, CITY] % 2)
    utility = utility + batch.features[:, POSITION]
    utility = utility + torch.tensor(count_item_clicks(batch))
    chance = torch.sigmoid(2 * (utility - 2))
    click = torch.from_numpy(rng.random(candidates)) < chance
    return replace(batch, labels=torch.stack([click, torch.zeros_like(click)], 1))


def hide_labels(batch: SearchBatch) -> SearchBatch:
    """Return the searches with all labels of every second search removed."""
    has_labels = batch.candidate_request % 2 == 0
    return replace(batch, labels=batch.labels & has_labels[:, None])


def count_item_clicks(batch: SearchBatch) -> list[int]:
    """Return the number of earlier clicks on each candidate's item."""
    counts = []
    for item, request in zip(batch.candidate, batch.candidate_request, strict=True):
        end = int(batch.request_end[request])
        history = batch.history[batch.request_row[request], :end]
        counts.append(int((history == item).sum()))
    return counts


def compute_inputs(batch: SearchBatch) -> np.ndarray:
    """Return the model's inputs (N, 15), computed candidate by candidate: the city, the
    numbers without the position, their differences to the list's mean and their ranks in
    the list, and counts of earlier clicks.
    """
    item_clicks = count_item_clicks(batch)
    inputs = []
    for n, request in enumerate(batch.candidate_request.tolist()):
        features = batch.features[n]
        row, end = int(batch.request_row[request]), int(batch.request_end[request])
        past = batch.history_features[row, :end]
        query = int(batch.request_query[request])
        query_clicks = 0
        if query >= 0:
            query_clicks = int((batch.history_query[row, :end] == query).sum())
        category_clicks = []
        for column in (MANY, CITY):
            is_same = (past[:, column] == features[column]) & (features[column] > 0)
            category_clicks.append(float(is_same.sum()))
        city = float(features[CITY]) or np.nan
        columns = [PAIR_CTR, HOUR, BM25]
        numbers = features[columns]
        of_list = batch.features[batch.candidate_request == request][:, columns]
        difference = (numbers.double() - of_list.double().nanmean(0)).float()
        rank = torch.where(numbers.isnan(), torch.nan, (of_list < numbers).sum(0))
        relative = [*difference.tolist(), *rank.tolist()]
        counts = [end, item_clicks[n], query_clicks, *category_clicks]
        inputs.append([city, *numbers.tolist(), *relative, *counts])
    return np.array(inputs)


def test_columns_of_sessions_are_counts_and_recency_of_the_candidate():
    rng = np.random.default_rng(0)
    searches = draw_searches(0, 40)
    shape = searches.history.shape
    batch = replace(
        searches,
        history_type=torch.from_numpy(rng.integers(0, 3, shape)),
        history_time=torch.from_numpy(rng.integers(0, 10**9, shape)).sort(1).values,
        request_time=torch.full((40,), 2 * 10**9),
    )
    catalogue = replace(build_catalogue(), session_types=("view", "cart"))
    expected = []
    for item, request in zip(batch.candidate, batch.candidate_request, strict=True):
        row, end = batch.request_row[request], int(batch.request_end[request])
        kinds = [
            (position, int(batch.history_type[row, position]))
            for position in range(end)
            if batch.history[row, position] == item
            and batch.history_type[row, position]
        ]
        columns = [sum(kind == number for _, kind in kinds) for number in (1, 2)]
        if kinds:
            latest = kinds[-1][0]
            hours = (2 * 10**9 - int(batch.history_time[row, latest])) / 3_600_000
            columns += [end - 1 - latest, hours]
        else:
            columns += [np.nan, np.nan]
        expected.append(columns)

    columns = Boosted(BoostedConfig(), catalogue).columns(batch)

    np.testing.assert_allclose(columns[:, -4:], expected, rtol=1e-6)
    # sessions are no clicks
    clicks = replace(batch, history_type=torch.zeros_like(batch.history_type))
    same = Boosted(BoostedConfig(), build_catalogue()).columns(clicks)
    assert (columns[:, -9] <= same[:, -5]).all()
    assert (columns[:, -9] < same[:, -5]).any()


def train_trees(
    train: list[SearchBatch], val: list[SearchBatch], seed: int = 0, **options: Any
) -> Any:
    """Train small trees and return the model."""
    torch.manual_seed(seed)
    small = {"num_leaves": 15, "max_depth": 4, "min_data_in_leaf": 20}
    config = BoostedConfig(**{**small, "feature_fraction": 1.0, **options})
    model = Boosted(config, build_catalogue())
    model.fit_in_one_pass(train, val)
    return model.eval()


def train_lightgbm(
    train: SearchBatch, val: SearchBatch, objective: str
) -> tuple[lightgbm.Booster, int]:
    """Train LightGBM on the computed inputs; return it and its best number of trees."""
    datasets = []
    for batch in (train, val):
        inputs, labels = compute_inputs(batch), batch.labels[:, 0].numpy()
        group = None
        if objective == "lambdarank":
            grades = batch.labels.sum(1).view(-1, NUM_SHOWN)
            used = (grades.max(1).values > 0).repeat_interleave(NUM_SHOWN).numpy()
            inputs, labels = inputs[used], grades.flatten().numpy()[used]
            group = [NUM_SHOWN] * (len(labels) // NUM_SHOWN)
        datasets.append(
            lightgbm.Dataset(inputs, labels, group=group, categorical_feature=[0])
        )
    datasets[1].set_reference(datasets[0])
    parameters = {
        "objective": objective,
        "metric": {"binary": "binary_logloss", "lambdarank": "ndcg"}[objective],
        "eval_at": 10,
        "learning_rate": 0.1,
        "num_leaves": 15,
        "max_depth": 4,
        "min_data_in_leaf": 20,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbosity": -1,
    }
    results: dict[str, Any] = {}
    trees = lightgbm.train(
        parameters,
        datasets[0],
        200,
        valid_sets=datasets[1:],
        callbacks=[lightgbm.record_evaluation(results)],
    )
    ((name, values),) = results["valid_0"].items()
    best = np.argmin(values) if name == "binary_logloss" else np.argmax(values)
    return trees, int(best) + 1


@pytest.mark.parametrize("objective", ["binary", "lambdarank"])
def test_scores_are_those_of_the_lightgbm_with_the_higher_gauc(objective):
    """Searches without a click mislead only trees that predict clicks."""
    count = {"binary": 60, "lambdarank": 150}[objective]
    train, val = draw_searches(0, count), draw_searches(1, count, cities=8)
    if objective == "lambdarank":
        train, val = hide_labels(train), hide_labels(val)
    scores = {}
    for name in ("binary", "lambdarank"):
        trees, num_trees = train_lightgbm(train, val, name)
        scores[name] = torch.from_numpy(
            trees.predict(compute_inputs(val), raw_score=True, num_iteration=num_trees)
        )
    gaucs = {}
    for name, values in scores.items():
        auc, valid = request_auc(values, val.labels[:, 0], val.candidate_request)
        gaucs[name] = float(auc[valid].mean())

    model = train_trees([train], [val])

    assert max(gaucs, key=gaucs.__getitem__) == objective
    expected = scores[objective]
    if objective == "lambdarank":
        assert model.slope > 0
        expected = model.slope * expected + model.intercept
        rate = float(val.labels[:, 0].float().mean())
        assert float(expected.sigmoid().mean()) == pytest.approx(rate, abs=0.01)
    torch.testing.assert_close(model.score(val)[:, 0], expected, rtol=1e-5, atol=1e-8)
    assert val.features.isnan().any()
    assert roc_auc_score(val.labels[:, 0], model.score(val)[:, 0]) > 0.7


def test_lambdarank_learns_from_short_parts_of_lists_with_a_positive(
    monkeypatch, capsys
):
    monkeypatch.setattr("models.search.baselines.boosted.MAX_LIST", 2)
    grade, sizes = np.array([0, 2, 1, 0, 0, 1]), np.array([3, 2, 1])

    used, used_sizes = select_ranked(grade, sizes)

    assert used.tolist() == [True, True, False, False, False, True]
    assert used_sizes.tolist() == [2, 1]
    assert "first 2 results" in capsys.readouterr().out


def test_trees_score_tables_with_a_new_category_value_as_before(tmp_path):
    batch = draw_searches(1)
    model = train_trees([draw_searches(0)], [batch])
    checkpoint.save(tmp_path / "best", model, checkpoint.Checkpoint({"name": "x"}))
    metadata = checkpoint.read(tmp_path / "best")
    with_new_city = CustomFeatures(
        CUSTOM_FEATURES.numbers,
        (CUSTOM_FEATURES.categories[0], Category("cat_city", tuple("Aabcdefg"))),
    )
    extended = Boosted(BoostedConfig(), build_catalogue(with_new_city))

    path = tmp_path / "best"
    assert load_extended_weights(extended, path, metadata, NUM_ITEMS) == []

    def shift_codes(values: torch.Tensor) -> torch.Tensor:
        """Shift each city by the new first city."""
        shifted = values.clone()
        shifted[..., CITY] += shifted[..., CITY] > 0
        return shifted

    shifted = replace(
        batch,
        features=shift_codes(batch.features),
        history_features=shift_codes(batch.history_features),
    )
    assert torch.equal(extended.score(shifted), model.score(batch))
