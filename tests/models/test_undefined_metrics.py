"""A metric without a request is undefined: it selects no checkpoint and is not shown as 0."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs.evaluate import Config, describe_first_time_items
from jobs.evaluate import run as evaluate
from models.metrics.ranking_metrics import format_metric
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join, read_manifest, read_table
from models.training.fit import FitConfig
from models.training_run import TrainingRun
from pipelines import tracking
from pipelines.evaluation.record import load_test_metrics
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.search_tables import write_search
from tests.fixtures.training_tables import write_table, write_tables
from tests.fixtures.trainings import build_training

SASREC = {"name": "sasrec", "dim": 8, "num_layers": 1, "max_history": 12}
BOOSTED = {"name": "boosted"}
MVP = {"name": "attn_mvp", "width": 8, "num_layers": 1, "num_heads": 2, "ffn": 8}


def change_sequences(
    tables: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Overwrite `sequences` with a change of each user's row."""
    uri = join(tables, "sequences")
    manifest, table = read_manifest(uri, "sequences"), read_table(uri, "sequences")
    rows = [change(row) for row in table.to_pylist()]
    content = pa.Table.from_pylist(rows, table.schema)
    write_table(uri, "sequences", content, manifest.info, manifest.inputs)


def repeat_one_item(row: dict[str, Any]) -> dict[str, Any]:
    item = row["item_index"][0]
    requests = [request | {"candidates": [item]} for request in row["requests"]]
    return row | {"item_index": [item] * len(row["item_index"]), "requests": requests}


def click_nothing(row: dict[str, Any]) -> dict[str, Any]:
    requests = [
        request | {"label_click": [False] * len(request["candidates"])}
        for request in row["requests"]
    ]
    return row | {"requests": requests}


def like_nothing(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"tasks": [[dwell, other, False] for dwell, other, _ in row["tasks"]]}


@pytest.fixture(scope="module")
def repeats(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the tables of users who repeat one item."""
    tables, _ = write_tables(tmp_path_factory.mktemp("repeats"), users=20)
    change_sequences(tables, repeat_one_item)
    return tables


def build_small_training(
    model: dict[str, Any], inputs: Inputs, **fit: Any
) -> TrainingRun:
    return build_training(model, FitConfig(batch_size=4, **fit), inputs)


def test_a_retrieval_metric_without_requests_is_rejected_before_training(
    repeats: str,
) -> None:
    with pytest.raises(
        UserError,
        match=r"fit.metric is first/ndcg@10, which is not defined on the 20 rows",
    ):
        build_small_training(
            SASREC, Inputs(repeats), metric="first/ndcg@10"
        ).check_metric()
    build_small_training(SASREC, Inputs(repeats), metric="ndcg@10").check_metric()


@pytest.mark.parametrize("metric", ["gauc", "auc", "normalised_entropy"])
def test_a_search_metric_of_one_class_is_rejected_before_training(
    metric: str, tmp_path: Path
) -> None:
    tables, _ = write_search(tmp_path)
    build_small_training(BOOSTED, Inputs(tables), metric=metric).check_metric()
    change_sequences(tables, click_nothing)
    with pytest.raises(UserError, match=f"fit.metric is {metric}, which is not defin"):
        build_small_training(BOOSTED, Inputs(tables), metric=metric).check_metric()


def test_a_task_metric_of_one_class_is_rejected_before_training(tmp_path: Path) -> None:
    tables = write_actions(tmp_path)
    change_sequences(tables, like_nothing)
    inputs = Inputs(tables)
    with pytest.raises(UserError, match="like/normalised_entropy, which is not"):
        build_small_training(
            MVP, inputs, metric="like/normalised_entropy"
        ).check_metric()
    build_small_training(MVP, inputs, metric="mean/rig").check_metric()


def test_the_check_of_the_metric_does_not_change_the_model(repeats: str) -> None:
    run = build_small_training(SASREC, Inputs(repeats), metric="ndcg@10")
    before = {name: value.clone() for name, value in run.model.state_dict().items()}

    run.check_metric()

    for name, value in run.model.state_dict().items():
        assert (value == before[name]).all()
    assert "recommend" not in vars(run.model)


def test_an_undefined_metric_is_null_in_the_evaluation_and_absent_in_mlflow(
    repeats: str,
    new_store: Callable[[Path], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = build_small_training(SASREC, Inputs(repeats))
    tracked_run = tracking.open_run(
        new_store(tmp_path),
        "retrieval/x",
        "sasrec",
        str(tmp_path),
        config={"model": run.model.config_to_dict(run.config), "tables": repeats},
        hashes=run.catalogue.hashes,
    )
    folder = tmp_path / "sasrec"
    metadata = run.checkpoint(epoch=1, tracking=tracked_run.to_dict())
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
    printed = capsys.readouterr().out
    assert "0 requests whose target is not in the history" in printed
    assert "recall@10 -, ndcg@10 -" in printed


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (math.nan, "-"), (0.0, "0.0000")]
)
def test_an_undefined_value_is_shown_as_a_dash(value: float | None, text: str) -> None:
    assert format_metric(value) == text


def test_undefined_metrics_of_new_items_are_shown_as_dashes() -> None:
    lines = describe_first_time_items(
        {"first/examples": 0.0, "first/ndcg@10": math.nan}
    )
    assert lines == [
        "  first  0 requests whose target is not in the history, ndcg@10 -"
    ]
