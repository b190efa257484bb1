"""Boosted trees score as LightGBM on columns made one by one, stop on validation, and
are no pickle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.metrics import roc_auc_score

from models.build import load_model
from models.custom_features import Category, CustomFeatures, Number
from models.loaded_model import load_catalogue
from models.search.catalogue import SearchCatalogue, SearchText
from models.search.data import SearchBatch
from models.search.floors.boosted import Boosted, BoostedConfig, map_codes
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, read_table
from models.training.fit import FitConfig
from models.warm_start import load_extended_weights
from pipelines.evaluation.inference import infer_all
from tests.fixtures.batches import fill_batch
from tests.fixtures.trainings import build_training

ITEMS, QUERIES, T, SHOWN = 9, 4, 6, 5
COUNTED = ("pair_ctr_7d", "position", "hour_sin")
OWN = CustomFeatures(
    (Number("num_bm25", 0.0, 1.0, True),),
    (Category("cat_many", buckets=300), Category("cat_city", tuple("abcdefg"))),
)
FIT = FitConfig(batch_size=16, metric="gauc")


def small_catalogue(own: CustomFeatures = OWN) -> SearchCatalogue:
    return SearchCatalogue(
        ITEMS,
        QUERIES,
        ("click", "purchase"),
        (*COUNTED, *own.names),
        SearchText.empty(ITEMS, QUERIES),
        feature_mean=torch.zeros(3),
        feature_std=torch.ones(3),
        custom_features=own,
    )


def features(
    rng: np.random.Generator, shape: tuple[int, ...], cities: int
) -> torch.Tensor:
    numbers = rng.normal(size=(*shape, 4))
    numbers[..., 3][rng.random(shape) < 0.2] = np.nan
    codes = [rng.integers(0, 301, shape), rng.integers(0, cities, shape)]
    return torch.from_numpy(
        np.concatenate([numbers, np.stack(codes, -1)], -1).astype(np.float32)
    )


def searches(seed: int, count: int = 400, cities: int = 6) -> SearchBatch:
    """Clicks follow a number that is missing at times, the city, and earlier clicks on
    the item; the place too.
    """
    rng = np.random.default_rng(seed)
    candidates = count * SHOWN
    batch = fill_batch(
        SearchBatch,
        {"B": count, "R": count, "N": candidates, "T": T},
        history=torch.from_numpy(rng.integers(0, ITEMS, (count, T))),
        history_query=torch.from_numpy(rng.integers(-1, QUERIES, (count, T))),
        request_row=torch.from_numpy(rng.permutation(count)),
        request_end=torch.from_numpy(rng.integers(0, T + 1, count)),
        request_query=torch.from_numpy(rng.integers(-1, QUERIES, count)),
        candidate=torch.from_numpy(rng.integers(0, ITEMS, candidates)),
        candidate_request=torch.arange(count).repeat_interleave(SHOWN),
        candidate_valid=torch.ones(candidates, dtype=torch.bool),
        features=features(rng, (candidates,), cities),
        history_features=features(rng, (count, T), cities),
    )
    wants = (
        batch.features[:, 3].nan_to_num(1.0)
        + (batch.features[:, 5] % 2)
        + batch.features[:, 1]
    )
    wants = wants + torch.tensor([len(alike) for alike in of_item(batch)])
    click = torch.from_numpy(rng.random(candidates)) < torch.sigmoid(2 * (wants - 2))
    return replace(batch, labels=torch.stack([click, torch.zeros_like(click)], 1))


def of_item(batch: SearchBatch) -> list[list[int]]:
    """For each candidate the places of earlier clicks on its item."""
    return [
        [
            t
            for t in range(int(batch.request_end[r]))
            if batch.history[batch.request_row[r], t] == item
        ]
        for item, r in zip(batch.candidate, batch.candidate_request, strict=True)
    ]


def rows(batch: SearchBatch) -> np.ndarray:
    """What the model reads of each candidate, one by one: the city, numbers that are
    known before, and clicks.
    """
    found = []
    for n, r in enumerate(batch.candidate_request.tolist()):
        own, row, end = (
            batch.features[n],
            int(batch.request_row[r]),
            int(batch.request_end[r]),
        )
        past, asked = (
            batch.history_features[row, :end],
            int(batch.request_query[r]),
        )
        city = float(own[5]) or np.nan
        alike = [
            float(((past[:, place] == own[place]) & (own[place] > 0)).sum())
            for place in (4, 5)
        ]
        after = sum(
            int(query) == asked >= 0 for query in batch.history_query[row, :end]
        )
        found.append(
            [city, *own[[0, 2, 3]].tolist(), end, len(of_item(batch)[n]), after, *alike]
        )
    return np.array(found)


def fitted(
    train: list[SearchBatch], val: list[SearchBatch], seed: int = 0, **options: Any
) -> Any:
    torch.manual_seed(seed)
    small = {"num_leaves": 15, "max_depth": 4, "min_data_in_leaf": 20}
    settings = {**small, "feature_fraction": 1.0, **options}
    model = Boosted(BoostedConfig(**settings), small_catalogue())
    model.fit_counts(train, val)
    return model.eval()


def test_scores_are_lightgbm_s_on_columns_made_one_by_one() -> None:
    train, val = searches(0, 60), searches(1, 60, cities=8)  # cities 6, 7 are new
    data = lightgbm.Dataset(
        rows(train), train.labels[:, 0].numpy(), categorical_feature=[0]
    )
    settings = {
        "objective": "binary",
        "metric": "binary_logloss",
        "learning_rate": 0.1,
        "num_leaves": 15,
        "max_depth": 4,
        "min_data_in_leaf": 20,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbosity": -1,
    }
    losses: dict[str, Any] = {}
    trees = lightgbm.train(
        settings,
        data,
        200,
        valid_sets=[data.create_valid(rows(val), val.labels[:, 0].numpy())],
        callbacks=[lightgbm.record_evaluation(losses)],
    )
    best = int(np.argmin(losses["valid_0"]["binary_logloss"])) + 1

    model = fitted([train], [val])

    assert 1 < model.booster.num_trees() == best < 200
    for batch in (train, val):
        assert batch.features.isnan().any()
        expected = trees.predict(
            rows(batch), raw_score=True, num_iteration=best, num_threads=1
        )
        np.testing.assert_allclose(model.score(batch)[:, 0], expected, rtol=1e-5)
    assert roc_auc_score(val.labels[:, 0], model.score(val)[:, 0]) > 0.7
    importance = model.booster.feature_importance()
    assert min(importance[[0, 3, 5]]) > 0  # city, missing number, clicks on the item


def test_boosting_stops_on_validation_and_ignores_its_order() -> None:
    train, val = searches(0, 100), searches(1, 100)

    model = fitted([train], [val])
    unrelated = replace(val, labels=val.labels.roll(7, 0))
    stopped = fitted([train], [unrelated])

    assert stopped.booster.num_trees() < model.booster.num_trees() < 200


def test_what_is_not_known_before_the_search_is_not_read() -> None:
    model, batch = fitted([searches(0)], [searches(2)]), searches(1)
    late = (
        torch.arange(T)
        >= batch.request_end.new_empty(len(batch.request_end)).scatter_(
            0, batch.request_row, batch.request_end
        )[:, None]
    )
    changed = replace(
        batch,
        history=torch.where(late, 0, batch.history),
        history_query=torch.where(late, 0, batch.history_query),
        history_features=torch.where(late[..., None], 1.0, batch.history_features),
        features=batch.features.index_fill(1, torch.tensor(1), 9.0),
        labels=~batch.labels,
    )
    assert torch.equal(model.score(batch), model.score(changed))
    past = replace(batch, history=torch.where(late, batch.history, 0))
    assert not torch.equal(model.score(batch), model.score(past))


def test_columns_are_drawn_by_the_seed() -> None:
    train, val = searches(0), searches(1)
    one, same, other = (
        fitted([train], [val], seed, feature_fraction=0.3).score(train)
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_it_trains_without_text_and_comes_back_as_it_was(
    search: tuple[str, str], tmp_path: Path
) -> None:
    tables, _ = search
    small = {"name": "boosted", "num_iterations": 30, "min_data_in_leaf": 5}
    setup = build_training(small, FIT, Inputs(tables))
    model: Any = setup.model
    setup.fit_counts()
    assert setup.validate(model)[1] == len(setup.val)
    checkpoint.save(tmp_path / "best", model, setup.checkpoint(epoch=1))
    loaded, about = load_model(
        tmp_path / "best", load_catalogue("boosted", Inputs(tables)), "boosted"
    )
    assert set(about.files) == {"model.safetensors"}
    assert set(about.hashes) == {"items", "queries", "sequences"}
    batch = setup.val.collate(np.arange(len(setup.val)))
    assert torch.equal(loaded.score(batch), model.score(batch))  # type: ignore[operator]
    infer_all(
        str(tmp_path / "best"), Inputs(tables), str(tmp_path / "scores")
    )  # of the click, not of other labels
    assert read_table(str(tmp_path / "scores"), "scores").column_names[-3:] == [
        "item_id",
        "score_click",
        "label_click",
    ]


def test_trees_read_tables_with_more_values_of_a_category_as_before(
    tmp_path: Path,
) -> None:
    train, batch = searches(0), searches(1)
    model = fitted([train], [batch])
    checkpoint.save(tmp_path / "best", model, checkpoint.Checkpoint({"name": "x"}))
    about = checkpoint.read(tmp_path / "best")
    more = CustomFeatures(
        OWN.numbers, (OWN.categories[0], Category("cat_city", tuple("Aabcdefg")))
    )
    extended = Boosted(BoostedConfig(), small_catalogue(more))

    assert load_extended_weights(extended, tmp_path / "best", about, ITEMS) == []

    def with_new_codes(values: torch.Tensor) -> torch.Tensor:
        """Shift each city by the new first one."""
        changed = values.clone()
        changed[..., 5] += changed[..., 5] > 0
        return changed

    shifted = replace(
        batch,
        features=with_new_codes(batch.features),
        history_features=with_new_codes(batch.history_features),
    )
    assert torch.equal(extended.score(shifted), model.score(batch))


def test_codes_of_values_are_found_by_name() -> None:
    category = Category("cat_city", ("Lima", "Oslo", "Rome"))
    codes = category.codes(pa.array(["Oslo", "Rome", "Lima", "Bergen", None]))

    trained = map_codes(category, ["Oslo", "Lima"])[torch.from_numpy(codes)]

    assert trained.tolist() == [1, 0, 2, 0, 0]


def test_what_cannot_be_learned_or_read_is_refused() -> None:
    train = searches(0)
    with pytest.raises(
        UserError, match="all 2,000 training candidates have the same 'click'"
    ):
        fitted([replace(train, labels=torch.zeros_like(train.labels))], [train])
    with pytest.raises(UserError, match="the val split is empty"):
        fitted([train], [])
    with pytest.raises(ValueError, match=r"feature_fraction 0 is not in \(0, 1\]"):
        BoostedConfig(feature_fraction=0)
    many = Category("cat_city", tuple(map(str, range(300))))
    other = Boosted(
        BoostedConfig(),
        small_catalogue(CustomFeatures(OWN.numbers, (OWN.categories[0], many))),
    )
    state = fitted([train], [train], num_iterations=2).get_extra_state()
    with pytest.raises(UserError, match=r"split by the categories \['cat_city'\]"):
        other.set_extra_state(state)
