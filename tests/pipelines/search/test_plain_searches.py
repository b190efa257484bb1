"""Search logs without queries, and search logs whose positions begin at 1."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from core.errors import UserError
from core.schemas import Inputs
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines.evaluation.config import EvaluateConfig
from pipelines.evaluation.inference import infer_all
from pipelines.evaluation.ranking import evaluate
from pipelines.prepare.prepare import prepare
from pipelines.prepare.reading.log import parse_log
from tests.fixtures.commands import read_config, read_table
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


def write_pages(folder: Path, first_position: int = 0) -> None:
    """Write 90 pages of three results, of 10 users."""
    rows = [
        {
            "u": f"u{page % 10}",
            "s": f"s{page}",
            "i": f"p{(page * 7 + position * 3) % 16}",
            "p": position + first_position,
            "t": 1_700_000_000 + page * 3600,
            "c": int(position == page % 3),
        }
        for page, position in product(range(90), range(3))
    ]
    pl.DataFrame(rows).write_csv(folder / "log.csv")


def prepare_pages(folder: Path, **keys: Any) -> str:
    """Prepare the pages with some keys of the source changed; return the tables."""
    source, tables = parse_log({**SOURCE, **keys}), str(folder / "tables")
    prepare(source, str(folder), tables, read_config(SETTINGS), report=str)
    return tables


def test_scores_of_a_log_without_queries_have_query_null(tmp_path: Path) -> None:
    write_pages(tmp_path)
    tables, output = prepare_pages(tmp_path), str(tmp_path / "scores")
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


def test_positions_that_begin_at_1_are_rejected_with_the_expression_to_use(
    tmp_path: Path,
) -> None:
    write_pages(tmp_path, first_position=1)
    with pytest.raises(UserError, match=r"begins at 1.* cast\(p as bigint\) - 1$"):
        prepare_pages(tmp_path)

    tables = prepare_pages(tmp_path, position="cast(p as bigint) - 1")

    assert read_table(f"{tables}/events")["position"].unique().to_pylist() == [0, 1, 2]
