"""Test registering checkpoints, and requests to a registered retrieval model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from core.errors import UserError
from core.schemas import Inputs, RunRef
from jobs.compare import Config, run
from models.loaded_model import load_model
from models.retrieval.data import Catalogue, HistoryBatch
from models.training import checkpoint
from pipelines import tracking
from pipelines.serving import package
from pipelines.serving.registered_model import register
from tests.fixtures.commands import count_train_targets, read_column
from tests.fixtures.served_models import load_registered, save_tiger_run
from tests.fixtures.training_tables import write_tables

RANK_IN_NEW_PROCESS = """
import json, sys
import mlflow, pandas
import core
uri, model = sys.argv[1:]
mlflow.set_tracking_uri(uri)
loaded = mlflow.pyfunc.load_model(model)
ranked = loaded.predict(pandas.DataFrame({"history": json.loads(sys.stdin.read())}), params={"k": 5})
import models
assert core.OWN == models.OWN == "of the caller"
print(json.dumps(ranked["item_id"].tolist()))
"""


@pytest.fixture(scope="module")
def folder(new_store, tmp_path_factory) -> Path:
    """Log a sweep of two trials; the second one is the best."""
    folder = tmp_path_factory.mktemp("registered")
    write_tables(folder / "small")
    tags = {
        tracking.KIND_TAG: "sweep",
        "sweep.axes": '["fit.seed"]',
        "sweep.metric": "val/ndcg@10",
    }
    uri = new_store(folder)
    sweep = tracking.open_run(
        uri, "retrieval/small", "seeds", str(folder), config={}, hashes={}, tags=tags
    )
    for seed, ndcg in ((1, 0.2), (2, 0.3)):
        save_tiger_run(folder, f"tiger-{seed}", sweep.run_id, seed, ndcg)
    tracking.Logger(sweep).end()
    return folder


def register_first_trial(folder: Path, name: str) -> RunRef:
    """Register the checkpoint of the sweep's first trial, and return its run."""
    uri = f"sqlite:///{folder}/mlflow.db"
    (run,) = tracking.connect(uri).search_runs(["1"], "attributes.run_name = 'tiger-1'")
    ref = RunRef(uri, "retrieval/small", run.info.run_id)
    register(ref, name)
    return ref


def load_first_trial(folder: Path, name: str) -> Any:
    """Register the sweep's first trial and load it through MLflow's pyfunc interface."""
    return load_registered(register_first_trial(folder, name).uri, name)


def test_a_damaged_table_is_not_packaged(tmp_path):
    write_tables(tmp_path)
    [part] = (tmp_path / "tables/items").glob("*.parquet")
    part.write_bytes(part.read_bytes()[::-1])
    with pytest.raises(UserError, match=part.name):
        package.copy_table(str(part.parent), tmp_path / "copy", manifest_only=False)


@pytest.mark.long
def test_the_best_trial_of_a_sweep_ranks_the_same_in_a_new_process(folder, capsys):
    uri = f"sqlite:///{folder}/mlflow.db"

    run(Config(sweep="seeds", tracking_uri=uri, register="small"))

    message = "version 1 of small is the best checkpoint of tiger-2"
    assert message in capsys.readouterr().out
    (version,) = tracking.connect(uri).search_model_versions("name = 'small'")
    weights_hash = checkpoint.weights_hash(str(folder / "tiger-2"))
    assert version.tags[tracking.WEIGHTS_TAG] == weights_hash
    hashes = checkpoint.read(folder / "tiger-2").hashes
    assert {name: version.tags[f"table.{name}"] for name in hashes} == hashes
    assert {"table.trie", "table.sids", "table.items"} <= version.tags.keys()
    assert version.description == "tiger-2: val/ndcg@10 0.3000"

    model, _ = load_model(
        folder / "tiger-2",
        Catalogue.load(Inputs(f"{folder}/small/tables", f"{folder}/small/sids")),
    )
    history = torch.tensor([[1, 8, -1], [5, 4, 23]])
    users = torch.zeros(2, dtype=torch.int64)
    items, _ = model.recommend(
        HistoryBatch(
            history=history,
            history_length=torch.tensor([2, 3]),
            user=users,
        ),
        5,
    )  # type: ignore[operator]
    names = [
        [f"item-{item:03d}" for item in row if item >= 0] for row in history.tolist()
    ]
    for name in ("core", "models"):
        (folder / f"{name}.py").write_text('OWN = "of the caller"')
    ranking = subprocess.run(
        [sys.executable, "-c", RANK_IN_NEW_PROCESS, uri, "models:/small/1"],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert ranking.returncode == 0, ranking.stderr
    assert json.loads(ranking.stdout.splitlines()[-1]) == [
        [f"item-{i:03d}" for i in row] for row in items.tolist()
    ]


def test_registering_a_checkpoint_again_keeps_its_version(folder):
    run = register_first_trial(folder, "other")
    (version,) = tracking.connect(run.uri).search_model_versions("name = 'other'")

    assert register(run, "other").version == version.version

    assert len(tracking.connect(run.uri).search_model_versions("name = 'other'")) == 1


def test_unknown_items_are_counted_and_integers_are_ids(folder):
    model = load_first_trial(folder, "counted")

    def predict(*histories: Any) -> pd.DataFrame:
        frame = pd.DataFrame({"history": list(histories)})
        return model.predict(frame, params={"k": 3})

    answers = predict(["item-001", "new"], ["new", "newer"], [], ["item-001"])
    assert answers["unknown_items"].tolist() == [1, 2, 0, 0]
    assert answers["item_id"][0] == answers["item_id"][3]

    index = model.unwrap_python_model().requests.index
    index["17"] = index["item-001"]  # as in a catalogue whose ids are digits
    for history in ([17], [np.int64(17)], ["17"]):
        assert predict(history)["item_id"][0] == answers["item_id"][3]


def test_visitors_without_a_known_item_get_the_most_popular_allowed_items(folder):
    model = load_first_trial(folder, "popular")
    by_index = count_train_targets(folder / "small/tables")
    items = read_column(folder / "small/tables", "items", "item_id")
    counts = {item: by_index[index] for index, item in enumerate(items)}
    histories = [["item-001"], [], ["new"]]
    frame = pd.DataFrame({"history": histories})

    for allowed in (items, items[5:12], ["item-023"]):
        for params in ({}, {"unseen": True}):
            params = {**params, "k": 10, "allowed": allowed}
            answers = model.predict(frame, params=params)
            popular = sorted(allowed, key=lambda item: (-counts[item], item))[:10]
            assert answers["fallback"].tolist() == ["", "popularity", "popularity"]
            assert answers["item_id"][1] == answers["item_id"][2] == popular
            assert answers["score"][1] == [counts[item] for item in popular]
