"""Custom features of a log of actions, from the mapping file to tables, models and
serving.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch

from core.errors import UserError
from core.schemas import Inputs
from core.tables import read_manifest
from models.actions.batch import ActionsBatch
from models.actions.requests import ACTIONS
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training.loop import fit
from models.training_run import TrainingRun
from pipelines import tracking
from pipelines.prepare.sequences import custom_features
from pipelines.serving import package
from pipelines.serving.registered_model import register
from tests.fixtures.audited_tables import Change, Row, copy_with_change, find_violations
from tests.fixtures.commands import load_split, read_column
from tests.fixtures.custom_features_log import (
    FEED,
    FEED_PREPARE,
    prepare_tables,
    write_feed,
    write_log,
)
from tests.fixtures.trainings import build_training

MVP = {
    "name": "attn_mvp",
    "width": 16,
    "num_layers": 1,
    "num_heads": 2,
    "ffn": 24,
    "expert_width": 8,
    "tower_width": 6,
    "dropout": 0.0,
    "max_history": 16,
}
FIT = FitConfig(
    lr=0.01,
    weight_decay=0,
    batch_size=8,
    max_epochs=8,
    metric="mean/auc",
    schedule="constant",
)


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a feed with custom features and prices."""
    folder = tmp_path_factory.mktemp("feed")
    write_log(folder, users=1)
    write_feed(folder)
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, feed: Path) -> str:
    """Path of the tables of the feed."""
    folder = tmp_path_factory.mktemp("tables")
    return prepare_tables(folder, feed, FEED, prepare_settings=FEED_PREPARE)


def test_the_manifest_describes_the_custom_features(tables: str) -> None:
    info = read_manifest(f"{tables}/sequences").info

    numbers = [number["name"] for number in info["custom"]["numbers"]]
    assert numbers == ["num_score", "num_price"]
    categories = [category["name"] for category in info["custom"]["categories"]]
    assert categories == ["cat_state"]
    assert info["viewers"] == {"device": ["phone", "tablet"]}
    assert find_violations(tables) == {}


def raise_price(rows: list[Row], info: Row) -> None:
    """Raise the price of a behaviour of training."""
    row = next(row for row in rows if row["train_end"] > 2)
    row["num_price"][0] += 1.0


def scale_by_the_whole_log(rows: list[Row], info: Row) -> None:
    """Change the standard deviation of a number, as if it were of the whole log."""
    info["custom"]["numbers"][1]["std"] *= 1.1


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (raise_price, {"behaviours", "features"}),
        (scale_by_the_whole_log, {"features"}),
    ],
)
def test_the_audit_finds_values_that_were_not_known_in_training(
    tables: str, tmp_path: Path, change: Change, rules: set[str]
) -> None:
    assert set(find_violations(copy_with_change(tables, tmp_path, change))) == rules


def test_a_category_with_too_many_values_is_hashed(
    feed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_features, "MAX_VALUES", 1)

    tables = prepare_tables(tmp_path, feed, FEED, prepare_settings=FEED_PREPARE)

    info = read_manifest(f"{tables}/sequences").info
    assert info["viewers"] == {}
    assert info["custom"]["categories"] == [
        {"name": name, "values": [], "buckets": custom_features.BUCKETS}
        for name in ("cat_device", "cat_state")
    ]
    assert find_violations(tables) == {}
    examples = load_split(ACTIONS, f"{tables}/sequences", "test", max_history=16)
    batch = examples.collate(np.arange(8))
    assert len(batch.custom[batch.valid][:, 2].unique()) == 2


def train_model(tables: str) -> tuple[TrainingRun, float]:
    """Train a model; return its training and its best AUC of validation."""
    run = build_training(MVP, FIT, Inputs(tables))
    events = fit(run.model, run.train, run.validate, run.fit)
    epochs = [event for event in events if event.ends_epoch]
    return run, max(epoch.metrics["mean/auc"] for epoch in epochs)


@pytest.fixture(scope="module")
def trained_with_features(tables: str) -> tuple[TrainingRun, float]:
    """Training of a model with custom features, and its best AUC of validation."""
    return train_model(tables)


@pytest.fixture(scope="module")
def served_model(
    trained_with_features: tuple[TrainingRun, float],
    tables: str,
    tmp_path_factory: pytest.TempPathFactory,
    new_store: Callable[[Path], str],
) -> Any:
    """The trained model, registered and loaded by MLflow."""
    run, _ = trained_with_features
    folder = tmp_path_factory.mktemp("served")
    uri = new_store(folder)
    tracked = tracking.open_run(
        uri,
        "mvp/own",
        "mvp",
        str(folder),
        config={"model": run.model.config_to_dict(run.model.config), "tables": tables},
        hashes=run.catalogue.hashes,
    )
    saved = run.checkpoint(epoch=1, tracking=vars(tracked))
    checkpoint.save(folder / "mvp", run.model, saved)
    tracking.Logger(tracked).tag(checkpoint=str(folder / "mvp"))
    register(tracked, "mvp")
    with package.use_store(uri):
        return mlflow.pyfunc.load_model("models:/mvp/1")


DEVICES = (None, "phone", "tablet")


def make_request(
    run: TrainingRun, tables: str, batch: ActionsBatch, candidates: torch.Tensor
) -> Row:
    """Return the request of a batch of one user by names.

    Args:
        candidates: (C,) indices of the candidates to rank.
    """
    items = read_column(tables, "items", "item_id")
    features = run.catalogue.custom_features
    states = (None, *features.categories[0].values)
    columns = {name: index for index, name in enumerate(features.names)}

    def split_features(values: torch.Tensor) -> tuple[Row, Row]:
        """Return numbers and categories of (N, F) values by name."""
        numbers = {
            name: values[:, columns[f"num_{name}"]].tolist()
            for name in ("score", "price")
        }
        state = values[:, columns["cat_state"]].int().tolist()
        return numbers, {"state": [states[code] for code in state]}

    past = batch.valid[0]
    numbers, categories = split_features(batch.candidate_custom[0][candidates])
    history_numbers, history_categories = split_features(batch.custom[0][past])
    candidate_items = batch.candidate_item[0][candidates].tolist()
    past_devices = batch.viewer[0][past][:, 0].tolist()
    return {
        "candidates": [items[item] for item in candidate_items],
        "features": batch.candidate_feature[0][candidates].tolist(),
        "numbers": numbers,
        "categories": categories,
        "viewer_device": DEVICES[int(batch.candidate_viewer[0, 0, 0])],
        "history": [items[item] for item in batch.item[0][past].tolist()],
        "history_actions": batch.action[0][past].tolist(),
        "history_numbers": history_numbers,
        "history_categories": history_categories,
        "history_viewer_device": [DEVICES[device] for device in past_devices],
    }


@pytest.mark.long
def test_a_served_model_reads_custom_features_by_name(
    trained_with_features: tuple[TrainingRun, float], served_model: Any, tables: str
) -> None:
    run, _ = trained_with_features
    examples = load_split(ACTIONS, f"{tables}/sequences", "test", max_history=16)
    batch = examples.collate(np.array([0]))
    # A request has one device, and scores are returned by item.
    batch.candidate_viewer[:] = batch.candidate_viewer[:, :1]
    num_candidates = int(batch.candidate_valid[0].sum())
    candidate_items = batch.candidate_item[0, :num_candidates].tolist()
    last_index = {item: index for index, item in enumerate(candidate_items)}
    candidates = torch.tensor(sorted(last_index.values()))
    request = make_request(run, tables, batch, candidates)
    with torch.no_grad():
        expected = torch.sigmoid(run.model.eval().score(batch)[:, 0])  # type: ignore[operator]

    ranked = served_model.predict(pd.DataFrame([request]))

    scores = dict(zip(ranked["item_id"][0], ranked["score"][0], strict=True))
    assert [scores[item] for item in request["candidates"]] == pytest.approx(
        expected[candidates].tolist(), abs=1e-5
    )
    for column in ("numbers", "history_numbers", "categories"):
        without = served_model.predict(pd.DataFrame([request | {column: None}]))
        other_scores = sorted(without["score"][0])
        assert other_scores != pytest.approx(sorted(ranked["score"][0]), abs=1e-6), (
            column
        )

    misspelt = {"numbers": {"scoer": [1.0] * len(candidates)}}
    with pytest.raises(UserError, match=r"numbers\.scoer"):
        served_model.predict(pd.DataFrame([request | misspelt]))
