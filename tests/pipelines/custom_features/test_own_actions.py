"""Own features of a log of actions: from the mapping file to tables, models and
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

from models.actions.data import ActionsDataset
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join, read_manifest, read_table
from models.training.fit import EpochEvent, FitConfig, fit
from pipelines import tracking
from pipelines.data.sequences import custom_features
from pipelines.serving import package
from pipelines.serving.registered_model import register
from tests.fixtures.audited import broken, rewrite
from tests.fixtures.custom_features_log import (
    FEED,
    FEED_PREPARE,
    make,
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
    folder = tmp_path_factory.mktemp("feed")
    write_log(folder, users=1)
    write_feed(folder)
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, feed: Path) -> str:
    return make(tmp_path_factory.mktemp("own"), feed, FEED, of_kind=FEED_PREPARE)


def test_events_have_what_was_known_when_they_are_scored(tables: str) -> None:
    info = read_manifest(f"{tables}/sequences").info
    assert [number["name"] for number in info["own"]["numbers"]] == [
        "num_score",
        "num_price",
    ]
    assert [category["name"] for category in info["own"]["categories"]] == ["cat_state"]
    assert info["viewers"] == {"device": ["phone", "tablet"]}
    assert broken(tables) == {}


def later_price(rows: list[dict], info: dict) -> None:
    row = next(row for row in rows if row["train_end"] > 2)
    row["num_price"][0] += 1.0


def whole_log(rows: list[dict], info: dict) -> None:
    info["own"]["numbers"][1]["std"] *= 1.1


@pytest.mark.parametrize(
    ("change", "rules"),
    [(later_price, {"behaviours", "features"}), (whole_log, {"features"})],
)
def test_the_audit_finds_what_was_not_known(
    tables: str, tmp_path: Path, change: Any, rules: set[str]
) -> None:
    assert set(broken(rewrite(tables, tmp_path, change))) == rules


def test_a_category_with_too_many_values_is_hashed(
    feed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_features, "MAX_VALUES", 1)
    tables = make(tmp_path, feed, FEED, of_kind=FEED_PREPARE)
    info = read_manifest(f"{tables}/sequences").info
    assert info["viewers"] == {}
    hashed = [
        {"name": name, "values": [], "buckets": custom_features.BUCKETS}
        for name in ("cat_device", "cat_state")
    ]
    assert info["own"]["categories"] == hashed
    assert broken(tables) == {}
    batch = ActionsDataset.load(
        join(tables, "sequences"), "test", max_history=16
    ).collate(np.arange(8))
    assert len(batch.custom[batch.valid][:, 2].unique()) == 2


@pytest.mark.long
def test_models_learn_from_them_and_serve_by_name(
    tables: str, feed: Path, tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    new_store(tmp_path)
    auc = {}
    plain = {
        key: value for key, value in FEED.items() if key not in ("numbers", "as_of")
    }
    without = make(tmp_path / "without", feed, plain, of_kind=FEED_PREPARE)
    for name, made in (("without", without), ("own", tables)):
        setup = build_training(MVP, FIT, Inputs(made))
        ends = fit(
            setup.model, setup.train, setup.validate, setup.fit, means=setup.means
        )
        auc[name] = max(
            event.metrics["mean/auc"] for event in ends if isinstance(event, EpochEvent)
        )
    assert auc["own"] > auc["without"] + 0.15
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = {"model": setup.model.config_to_dict(setup.config), "tables": tables}
    run = tracking.open_run(
        uri,
        "mvp/own",
        "mvp",
        str(tmp_path),
        config=config,
        hashes=setup.catalogue.hashes,
    )
    checkpoint.save(
        tmp_path / "mvp", setup.model, setup.checkpoint(epoch=1, tracking=run.to_dict())
    )
    tracking.Logger(run).tag(checkpoint=str(tmp_path / "mvp"))
    register(run, "mvp")
    with package.use_store(uri):
        served = mlflow.pyfunc.load_model("models:/mvp/1")
    examples = ActionsDataset.load(join(tables, "sequences"), "test", max_history=16)
    batch = examples.collate(np.array([0]))
    valid, past = batch.candidate_valid[0], batch.valid[0]
    batch.candidate_viewer[:] = batch.candidate_viewer[:, :1]
    with torch.no_grad():
        want = torch.sigmoid(setup.model.eval().score(batch)[:, 0]).tolist()  # type: ignore[operator]
    items = read_table(f"{tables}/items")["item_id"].to_pylist()
    own = {
        name: setup.catalogue.custom_features.names.index(name)
        for name in setup.catalogue.custom_features.names
    }
    states = (None, *setup.catalogue.custom_features.categories[0].values)
    devices = (None, "phone", "tablet")

    def given(prefix: str, there: torch.Tensor) -> dict[str, Any]:
        values = getattr(batch, f"{prefix}custom")[0][there]
        numbers = {
            name: values[:, own[f"num_{name}"]].tolist() for name in ("score", "price")
        }
        return {
            "numbers": numbers,
            "categories": {
                "state": [states[int(i)] for i in values[:, own["cat_state"]]]
            },
        }

    kept = sorted(
        set(range(int(valid.sum()))), key=lambda i: int(batch.candidate_item[0, i])
    )
    unique = {
        int(batch.candidate_item[0, i]): i for i in kept
    }  # scores are told by item
    chosen = torch.tensor(sorted(unique.values()))
    row = {
        "candidates": [items[int(batch.candidate_item[0, i])] for i in chosen],
        "features": batch.candidate_feature[0][chosen].tolist(),
        "history": [items[int(i)] for i in batch.item[0][past]],
        "history_actions": batch.action[0][past].tolist(),
        "viewer_device": devices[int(batch.candidate_viewer[0, 0, 0])],
        "history_viewer_device": [devices[int(i)] for i in batch.viewer[0][past][:, 0]],
        **given("candidate_", chosen),
        **{f"history_{name}": value for name, value in given("", past).items()},
    }
    ranked = served.predict(pd.DataFrame([row]))
    found = dict(zip(ranked["item_id"][0], ranked["score"][0], strict=True))
    assert [found[item] for item in row["candidates"]] == pytest.approx(
        [want[int(i)] for i in chosen], abs=1e-5
    )
    for column in ("numbers", "history_numbers", "categories"):
        other = served.predict(pd.DataFrame([row | {column: None}]))
        assert sorted(other["score"][0]) != pytest.approx(
            sorted(ranked["score"][0]), abs=1e-6
        ), column
    with pytest.raises(
        UserError,
        match="numbers has 'scoer', which the model does not read; the nearest is 'score'",
    ):
        served.predict(
            pd.DataFrame([row | {"numbers": {"scoer": [1.0] * len(row["candidates"])}}])
        )
