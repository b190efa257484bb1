"""A metric without a request is undefined: it selects no checkpoint and is not shown as 0."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from core.errors import UserError
from core.schemas import Inputs
from jobs.evaluate import Config
from jobs.evaluate import run as evaluate
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training_run import TrainingRun
from pipelines import tracking
from pipelines.evaluation.result import load_test_metrics
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.training_tables import change_sequences, write_tables
from tests.fixtures.trainings import CASES, SASREC, build_training


def repeat_one_item(row: dict[str, Any]) -> dict[str, Any]:
    item = row["item_index"][0]
    requests = [request | {"candidates": [item]} for request in row["requests"]]
    return row | {"item_index": [item] * len(row["item_index"]), "requests": requests}


def like_nothing(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"tasks": [[dwell, other, False] for dwell, other, _ in row["tasks"]]}


@pytest.fixture(scope="module")
def repeats(tmp_path_factory) -> str:
    """Folder of the tables of users who repeat one item."""
    tables, _ = write_tables(tmp_path_factory.mktemp("repeats"), users=20)
    change_sequences(tables, repeat_one_item)
    return tables


def build_small_training(
    model: dict[str, Any], inputs: Inputs, **fit: Any
) -> TrainingRun:
    return build_training(model, FitConfig(batch_size=4, **fit), inputs)


def test_a_metric_that_is_not_defined_is_rejected(repeats, tmp_path):
    actions = write_actions(tmp_path / "actions")
    change_sequences(actions, like_nothing)
    entropy = "like/normalised_entropy"
    for model, tables, metric in (
        (SASREC, repeats, "first/ndcg@10"),
        (CASES["attn_mvp"], actions, entropy),
    ):
        run = build_small_training(model, Inputs(tables), metric=metric)
        with pytest.raises(UserError, match=f"fit.metric is {metric}, which is not"):
            run.validate(run.model)


def test_an_undefined_metric_is_null_in_the_evaluation_and_absent_in_mlflow(
    repeats, new_store, tmp_path, capsys
):
    run = build_small_training(SASREC, Inputs(repeats))
    tracked_run = tracking.open_run(
        new_store(tmp_path),
        "retrieval/x",
        "sasrec",
        str(tmp_path),
        config={"model": run.model.config_to_dict(run.model.config), "tables": repeats},
        hashes=run.catalogue.hashes,
    )
    folder = tmp_path / "sasrec"
    metadata = run.checkpoint(epoch=1, tracking=vars(tracked_run))
    checkpoint.save(folder, run.model, metadata)

    result = evaluate(Config(checkpoint=str(folder), tables=repeats))

    assert result is not None
    assert math.isnan(result.metrics["first/ndcg@10"])
    written = json.loads((folder / "evaluation-test.json").read_text())["metrics"]
    assert written["first/ndcg@10"] is None
    assert written["first/recall@1"] is None
    assert written["first/examples"] == 0
    assert written["ndcg@10"] >= 0
    logged = load_test_metrics(tracked_run)
    assert "test/ndcg_at_10" in logged
    assert not [name for name in logged if name.startswith("test/first/ndcg")]
    assert "recall@10 -, ndcg@10 -" in capsys.readouterr().out
