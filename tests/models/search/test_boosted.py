"""Boosted trees score in torch as in scikit-learn, learn from clicks of training alone, and come back as tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

from models import checkpoint, registry
from models.fit import FitConfig
from models.inputs import Inputs
from models.own_features import Category, Number, OwnFeatures
from models.search.boosted import Boosted, BoostedConfig
from models.search.data import SearchCatalogue, SearchExamples, no_text
from models.setup import load_catalogue, set_up
from models.tables import UserError, join, read_table
from pipelines.evaluation.importance import importance
from pipelines.evaluation.inference import infer_all

ITEMS, QUERIES, T, SHOWN = 9, 4, 6, 5
COUNTED = ("pair_ctr_7d", "position", "hour_sin")
OWN = OwnFeatures(
    (Number("num_bm25", 0.0, 1.0, True),),
    (Category("cat_many", buckets=300), Category("cat_city", tuple("abcdefg"))),
)
FIT = FitConfig(batch_size=16, metric="gauc")
Batch = dict[str, torch.Tensor]


def small_catalogue() -> SearchCatalogue:
    return SearchCatalogue(
        ITEMS,
        QUERIES,
        ("click", "purchase"),
        (*COUNTED, *OWN.names),
        **no_text(ITEMS, QUERIES),
        feature_mean=torch.zeros(3),
        feature_std=torch.ones(3),
        own=OWN,
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


def searches(seed: int, count: int = 400, cities: int = 6) -> Batch:
    """Clicks follow a number that is missing at times, the city, and earlier clicks on the item; the place too."""
    rng = np.random.default_rng(seed)
    batch = {
        "history": rng.integers(0, ITEMS, (count, T)),
        "history_query": rng.integers(-1, QUERIES, (count, T)),
        "request_row": rng.permutation(count),
        "request_end": rng.integers(0, T + 1, count),
        "request_query": rng.integers(-1, QUERIES, count),
        "candidate": rng.integers(0, ITEMS, count * SHOWN),
        "candidate_request": np.repeat(np.arange(count), SHOWN),
    }
    found: Any = {name: torch.from_numpy(value) for name, value in batch.items()}
    found["features"] = features(rng, (count * SHOWN,), cities)
    found["history_features"] = features(rng, (count, T), cities)
    wants = (
        found["features"][:, 3].nan_to_num(1.0)
        + (found["features"][:, 5] % 2)
        + found["features"][:, 1]
    )
    wants = wants + torch.tensor([len(alike) for alike in of_item(found)])
    click = torch.from_numpy(rng.random(count * SHOWN)) < torch.sigmoid(2 * (wants - 2))
    return {**found, "labels": torch.stack([click, torch.zeros_like(click)], 1)}


def of_item(batch: Batch) -> list[list[int]]:
    """For each candidate the places of earlier clicks on its item."""
    return [
        [
            t
            for t in range(int(batch["request_end"][r]))
            if batch["history"][batch["request_row"][r], t] == item
        ]
        for item, r in zip(batch["candidate"], batch["candidate_request"], strict=True)
    ]


def rows(batch: Batch) -> np.ndarray:
    """What the model reads of each candidate, one by one: the city, numbers that are known before, and clicks."""
    found = []
    for n, r in enumerate(batch["candidate_request"].tolist()):
        own, row, end = (
            batch["features"][n],
            int(batch["request_row"][r]),
            int(batch["request_end"][r]),
        )
        past, asked = (
            batch["history_features"][row, :end],
            int(batch["request_query"][r]),
        )
        city = float(own[5]) or np.nan
        alike = [
            float(((past[:, place] == own[place]) & (own[place] > 0)).sum())
            for place in (4, 5)
        ]
        after = sum(
            int(query) == asked >= 0 for query in batch["history_query"][row, :end]
        )
        found.append(
            [city, *own[[0, 2, 3]].tolist(), end, len(of_item(batch)[n]), after, *alike]
        )
    return np.array(found)


def fitted(batches: list[Batch], seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = Boosted(BoostedConfig(max_iter=20, **options), small_catalogue())
    model.fit_counts(batches)
    return model.eval()


def test_scores_are_those_of_scikit_learn_on_the_same_rows() -> None:
    train, other = (
        searches(0, 60),
        searches(1, 60, cities=8),
    )  # of cities that training has not seen
    assert train["features"][:, 5].max() < 6 < other["features"][:, 5].max()
    trees = HistGradientBoostingClassifier(
        max_iter=20,
        max_depth=8,
        categorical_features=[0],
        early_stopping=False,
        random_state=0,
    ).fit(rows(train), train["labels"][:, 0].numpy())
    model = fitted([train])
    assert roc_auc_score(other["labels"][:, 0], model.score(other)[:, 0]) > 0.7
    for batch in (train, other):
        assert batch["features"].isnan().any()
        np.testing.assert_allclose(
            model.score(batch)[:, 0], trees.decision_function(rows(batch)), rtol=1e-9
        )
    splits = {
        int(feature) for feature in model.feature[model.below[0] != model.below[1]]
    }
    assert {
        0,
        3,
        5,
    } <= splits  # the city, the missing number and clicks on the item decide


def test_what_is_not_known_before_the_search_is_not_read() -> None:
    model, batch = fitted([searches(0)]), searches(1)
    late = (
        torch.arange(T)
        >= batch["request_end"]
        .new_empty(len(batch["request_end"]))
        .scatter_(0, batch["request_row"], batch["request_end"])[:, None]
    )
    changed = {
        **batch,
        "history": torch.where(late, 0, batch["history"]),
        "history_query": torch.where(late, 0, batch["history_query"]),
        "history_features": torch.where(
            late[..., None], 1.0, batch["history_features"]
        ),
        "features": batch["features"].index_fill(1, torch.tensor(1), 9.0),  # the place
        "labels": ~batch["labels"],
    }
    assert torch.equal(model.score(batch), model.score(changed))
    past = {**batch, "history": torch.where(late, batch["history"], 0)}
    assert not torch.equal(model.score(batch), model.score(past))


def test_columns_are_drawn_by_the_seed() -> None:
    train = searches(0)
    one, same, other = (
        fitted([train], seed, max_features=0.3).score(train) for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_it_trains_without_text_and_comes_back_as_it_was(
    search: tuple[str, str], tmp_path: Path
) -> None:
    tables, _ = search
    setup = set_up({"name": "boosted", "max_iter": 30}, FIT, Inputs(tables))
    model: Any = setup.model
    model.fit_counts(setup.train(0, 0))
    assert setup.validate(model)[1] == len(setup.val)
    checkpoint.save(tmp_path / "best", model, setup.checkpoint(epoch=1))
    loaded, about = registry.load(
        tmp_path / "best", load_catalogue("boosted", Inputs(tables)), "boosted"
    )
    assert set(about.files) == {"model.safetensors"}
    assert set(about.hashes) == {"items", "queries", "sequences"}
    batch = setup.val.collate(np.arange(len(setup.val)))
    assert torch.equal(loaded.score(batch), model.score(batch))  # type: ignore[operator]
    examples = SearchExamples.of_model(setup.config).load(
        join(tables, "sequences"), "train", unit="request"
    )
    again = Boosted(setup.config, setup.catalogue)
    again.fit_counts(
        [examples.collate(np.arange(len(examples)))]
    )  # of the train split, in another order
    torch.testing.assert_close(again.score(batch), model.score(batch))
    found = importance(str(tmp_path / "best"), Inputs(tables), repeats=1)
    assert {"history", "features: cross"} <= set(found.losses)
    assert "text" not in found.losses
    infer_all(
        str(tmp_path / "best"), Inputs(tables), str(tmp_path / "scores")
    )  # of the click, not of other labels
    assert read_table(str(tmp_path / "scores"), "scores").column_names[-2:] == [
        "item_id",
        "score_click",
    ]


def test_what_cannot_be_learned_or_read_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = searches(0)
    with pytest.raises(
        UserError, match="all 2,000 training candidates have the same 'click'"
    ):
        fitted([{**train, "labels": torch.zeros_like(train["labels"])}])
    with pytest.raises(ValueError, match=r"max_features 0 is not in \(0, 1\]"):
        BoostedConfig(max_features=0)
    monkeypatch.setattr(Boosted, "logits", lambda self, columns: columns[:, 0])
    with pytest.raises(RuntimeError, match="torch does not score as scikit-learn"):
        fitted([train])
