"""Search logs without queries or clock times."""

from __future__ import annotations

from itertools import product
from typing import Any

from core.schemas import Inputs
from core.tables import read_manifest
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines.evaluation.config import EvaluateConfig
from pipelines.evaluation.inference import infer_all
from pipelines.evaluation.ranking import evaluate
from tests.fixtures.commands import prepare_log, read_table, write_rows
from tests.fixtures.search_log import draw_searches, prepare_searches
from tests.fixtures.trainings import build_training

SOURCE: dict[str, Any] = {
    "files": "log.csv",
    "user": "u",
    "request": "s",
    "item": "i",
    "position": "p",
    "time": {"column": "t", "unit": "s"},
    "labels": {"click": "c = '1'"},
}
SETTINGS: dict[str, Any] = {
    "kind": "search",
    "core": 0,
    "behaviour": "click",
    "split": {"by": "temporal", "val_fraction": 0.2, "test_fraction": 0.2},
}


PAGES = [
    {
        "u": f"u{page % 10}",
        "s": f"s{page}",
        "i": f"p{(page * 7 + position * 3) % 16}",
        "p": position,
        "t": 1_700_000_000 + page * 3600,
        "c": int(position == page % 3),
    }
    for page, position in product(range(90), range(3))
]
"""90 pages of three results, of 10 users."""


def test_scores_of_a_log_without_queries_have_query_null(tmp_path):
    write_rows(tmp_path / "log.csv", PAGES)
    tables, output = str(tmp_path / "tables"), str(tmp_path / "scores")
    mapping = {**SOURCE, "prepare": SETTINGS}
    prepare_log(mapping, tmp_path, tmp_path / "tables")
    fit = FitConfig(batch_size=8, metric="gauc")
    run = build_training({"name": "boosted"}, fit, Inputs(tables))
    run.fit_in_one_pass()
    model = str(tmp_path / "model")
    checkpoint.save(model, run.model, run.checkpoint(epoch=1))

    config = EvaluateConfig(checkpoint=model, tables=tables, batch_inference=output)
    manifest, _ = infer_all(config)

    scores = read_table(output)
    assert scores["query"].to_pylist() == [None] * scores.num_rows
    result, _ = evaluate(config)
    assert manifest.info.candidates == result.metrics["candidates"] > 0


def test_a_log_without_clock_times_has_no_count_windows(tmp_path):
    rows = [row | {"ms": number} for number, row in enumerate(draw_searches(60))]
    changes = {"time": {"unit": "order"}, "prepare": {"split": None}}
    options = {"split.by": "leave_last_out"}

    tables = prepare_searches(tmp_path, rows, changes, **options)

    info = read_manifest(f"{tables}/sequences").info
    assert info["features"] == ["position", "page"]
    assert info["windows"] == []
