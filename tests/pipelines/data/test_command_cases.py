"""Logs of public bug reports that only whole commands show, each answered as its
truth.md says.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from models.loaded_model import LoadedModel
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, read_manifest, read_table
from models.training.fit import FitConfig
from pipelines.data.audit.rules import audit
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import load_source
from pipelines.data.settings import read_config
from pipelines.data.sids.precomputed import read_precomputed
from pipelines.evaluation.inference import infer_all
from tests.fixtures.trainings import build_training

pytestmark = pytest.mark.shared_data

CASES = Path(__file__).parents[3] / "../shared/cases"


def prepare_case(name: str, output: Path, **settings: Any) -> tuple[str, list[str]]:
    """Prepare the log of a case; return where the tables are and the printed lines."""
    source, prepared = load_source(str(CASES / name / "src.yaml"))
    lines: list[str] = []
    config = read_config(prepared, settings)
    log = str(CASES / name / "log")
    prepare(source, log, str(output), config, report=lines.append)
    return str(output), lines


SMALL = {"width": 16, "num_layers": 1, "num_heads": 2, "ffn": 16, "max_history": 12}
MODEL = {"name": "attn_mvp", **SMALL, "experts": 2, "tower_width": 8}


def grow(name: str, folder: Path, first: int, last: int) -> Any:
    """Train on the first days of a case, append days until `last`, and return the
    training that goes on.
    """
    raw, log = folder / "raw", CASES / name / "log"
    raw.mkdir()
    shutil.copy(log / "items.csv", raw)
    source, prepared = load_source(str(CASES / name / "src.yaml"))
    inputs, setup = Inputs(str(folder / "tables")), None
    for days in (range(first), range(first, last)):
        for day in days:
            shutil.copy(log / f"day-{day:02}.csv", raw)
        config, fit = read_config(prepared), FitConfig(batch_size=8)
        prepare(source, str(raw), inputs.tables, config, report=list, existing="append")
        before = str(folder / "first") if setup else None
        if before:
            LoadedModel.load(before, inputs)  # as an evaluation does
        setup = build_training(MODEL, fit, inputs, init=before)
        where = "second" if before else "first"
        checkpoint.save(str(folder / where), setup.model, setup.checkpoint(epoch=1))
    return setup


def test_a_number_that_was_empty_takes_the_scale_of_later_days(tmp_path: Path) -> None:
    setup = grow("d4_init_scale_of_empty_number", tmp_path, 5, 14)

    info = read_manifest(str(tmp_path / "tables/sequences")).info
    (price,) = info["own"]["numbers"]
    assert price["mean"] > 10_000
    assert setup.model.items.own.std.tolist() == pytest.approx([price["std"]])
    assert any("num_price had no values" in note for note in setup.messages)


def test_a_task_that_appears_later_stays_a_task(tmp_path: Path) -> None:
    setup = grow("d4_task_appears_later", tmp_path, 5, 8)

    assert setup.model.labels == ("looked_it", "like")
    assert any(
        "task like was 0 for all candidates before" in note for note in setup.messages
    )


def test_a_day_with_an_event_in_the_future_does_not_join_the_tables(
    tmp_path: Path,
) -> None:
    log, raw = CASES / "d4_clock_ahead/log", tmp_path / "raw"
    shutil.copytree(log, raw, ignore=shutil.ignore_patterns("log-07*", "log-08*"))
    source, prepared = load_source(str(CASES / "d4_clock_ahead/src.yaml"))
    config = read_config(prepared, {"split": {"val_days": 1, "test_days": 1}})
    tables = str(tmp_path / "tables")
    prepare(source, str(raw), tables, config, report=list, existing="append")
    before = read_manifest(f"{tables}/events").hash

    shutil.copy(log / "log-07-bad.csv", raw / "log-07.csv")
    with pytest.raises(UserError, match=r"1 of 91 rows .*in the future"):
        prepare(source, str(raw), tables, config, report=list, existing="append")
    assert read_manifest(f"{tables}/events").hash == before
    shutil.copy(log / "log-07.csv", raw / "log-07.csv")
    prepare(source, str(raw), tables, config, report=list, existing="append")

    info = read_manifest(f"{tables}/sequences").info
    assert min(info["requests"].values()) > 30


def test_an_embedding_of_flt_max_is_refused() -> None:
    case = CASES / "d4_embedding_sentinel"
    assert len(read_precomputed(str(case / "ok.parquet"), "i").row_of_id) == 40
    with pytest.raises(UserError, match="not finite or over"):
        read_precomputed(str(case / "sentinel.parquet"), "i")


def test_scores_of_a_log_without_queries_are_written(tmp_path: Path) -> None:
    tables, _ = prepare_case("d4_search_without_query", tmp_path / "tables")
    fit = FitConfig(batch_size=8, metric="gauc")
    setup = build_training({"name": "boosted"}, fit, Inputs(tables))
    setup.fit_counts()
    place = str(tmp_path / "b")
    checkpoint.save(place, setup.model, setup.checkpoint(epoch=1))

    infer_all(place, Inputs(tables), str(tmp_path / "scores"))

    queries = read_table(str(tmp_path / "scores"), "scores")["query"]
    assert queries.null_count == len(queries) > 0


def test_targets_among_ties_are_not_the_highest_ids(tmp_path: Path) -> None:
    tables, lines = prepare_case("d4_last_out_ties", tmp_path / "tables")

    log = pl.read_csv(CASES / "d4_last_out_ties/log/log.csv")
    items = read_table(f"{tables}/items", "items")["item_id"].to_pylist()
    places: Counter[int] = Counter()
    for row in read_table(f"{tables}/sequences", "sequences").to_pylist():
        (test,) = [each for each in row["requests"] if each["split"] == "test"]
        basket = log.filter(u=row["user_id"], t=test["timestamp_ms"] // 1000)["i"]
        places[sorted(basket).index(items[test["candidates"][0]])] += 1
    assert sum(places.values()) == 30
    assert min(places[place] for place in range(3)) >= 3
    assert any("30 of 30 test requests have the same time" in line for line in lines)
    assert not any(rule.violations for rule in audit(tables))
