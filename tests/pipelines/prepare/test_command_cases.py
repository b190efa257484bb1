"""Logs from public bug reports whose faults only whole commands show. The file truth.md
of each log has the right behaviour.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from core.errors import UserError
from core.schemas import Inputs
from core.tables import read_manifest
from models.loaded_model import LoadedModel
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines.prepare.prepare import prepare
from pipelines.prepare.reading.log import Log, load_source
from tests.fixtures.audited_tables import find_violations
from tests.fixtures.commands import read_column, read_config, read_rows
from tests.fixtures.trainings import build_training

pytestmark = pytest.mark.shared_data

CASES = Path(__file__).parents[3] / "../shared/cases"


def load_case(name: str) -> tuple[Log, dict[str, Any]]:
    """Return the mapping of a reported log, which was written before `split.by`."""
    source, settings = load_source(str(CASES / name / "src.yaml"))
    settings["split"]["by"] = settings["split"].pop("kind")
    return source, settings


def prepare_case(name: str, output: Path, **settings: Any) -> tuple[str, list[str]]:
    """Prepare a reported log; return the path of its tables and the printed lines."""
    source, defaults = load_case(name)
    lines: list[str] = []
    config = read_config(defaults, settings)
    log = str(CASES / name / "log")
    prepare(source, log, str(output), config, report=lines.append)
    return str(output), lines


SMALL = {"width": 16, "num_layers": 1, "num_heads": 2, "ffn": 16, "max_history": 12}
MODEL = {"name": "attn_mvp", **SMALL, "experts": 2, "tower_width": 8}


def train_on_growing_log(
    name: str, folder: Path, num_days: int, total_days: int
) -> Any:
    """Train on the first days of a reported log, append the days until `total_days`,
    and return the training that starts from the first one's checkpoint.
    """
    raw, log = folder / "raw", CASES / name / "log"
    raw.mkdir()
    shutil.copy(log / "items.csv", raw)
    source, defaults = load_case(name)
    config, fit = read_config(defaults), FitConfig(batch_size=8)
    inputs = Inputs(str(folder / "tables"))

    def build_on(days: range, init: str | None, output: str) -> Any:
        """Append days to the tables, and build and save the training on them."""
        for day in days:
            shutil.copy(log / f"day-{day:02}.csv", raw)
        prepare(source, str(raw), inputs.tables, config, report=list, append=True)
        if init:
            LoadedModel.load(init, inputs)  # as an evaluation does
        training = build_training(MODEL, fit, inputs, init=init)
        checkpoint.save(output, training.model, training.checkpoint(epoch=1))
        return training

    first, second = str(folder / "first"), str(folder / "second")
    build_on(range(num_days), None, first)
    return build_on(range(num_days, total_days), first, second)


def test_a_number_that_was_empty_takes_the_scale_of_later_days(tmp_path):
    training = train_on_growing_log("d4_init_scale_of_empty_number", tmp_path, 5, 14)

    info = read_manifest(str(tmp_path / "tables/sequences")).info
    (price,) = info["custom"]["numbers"]
    assert price["mean"] > 10_000
    assert training.model.items.own.std.tolist() == pytest.approx([price["std"]])
    assert any("num_price had no values" in note for note in training.messages)


def test_a_task_that_appears_later_stays_a_task(tmp_path):
    training = train_on_growing_log("d4_task_appears_later", tmp_path, 5, 8)

    assert training.model.labels == ("looked_it", "like")


def test_a_file_with_an_event_in_the_future_is_not_appended(tmp_path):
    log, raw = CASES / "d4_clock_ahead/log", tmp_path / "raw"
    shutil.copytree(log, raw, ignore=shutil.ignore_patterns("log-07*", "log-08*"))
    source, defaults = load_case("d4_clock_ahead")
    config = read_config(defaults, {"split": {"val_days": 1, "test_days": 1}})
    tables = str(tmp_path / "tables")
    prepare(source, str(raw), tables, config, report=list, append=True)
    before = read_manifest(f"{tables}/events").hash

    shutil.copy(log / "log-07-bad.csv", raw / "log-07.csv")
    with pytest.raises(UserError, match=r"1 of 91 rows .*in the future"):
        prepare(source, str(raw), tables, config, report=list, append=True)
    assert read_manifest(f"{tables}/events").hash == before

    shutil.copy(log / "log-07.csv", raw / "log-07.csv")
    prepare(source, str(raw), tables, config, report=list, append=True)
    info = read_manifest(f"{tables}/sequences").info
    assert min(info["requests"].values()) > 30


def test_targets_among_requests_of_equal_time_are_not_the_highest_ids(tmp_path):
    tables, _ = prepare_case("d4_last_out_ties", tmp_path / "tables")

    log = pl.read_csv(CASES / "d4_last_out_ties/log/log.csv")
    ids = read_column(tables, "items", "item_id")
    rank_counts: Counter[int] = Counter()  # of the target among the ids of its time
    for row in read_rows(tables, "sequences"):
        (request,) = [r for r in row["requests"] if r["split"] == "test"]
        basket = log.filter(u=row["user_id"], t=request["timestamp_ms"] // 1000)["i"]
        target = ids[request["candidates"][0]]
        rank_counts[sorted(basket).index(target)] += 1
    assert sum(rank_counts.values()) == 30
    assert min(rank_counts[rank] for rank in range(3)) >= 3
    assert find_violations(tables) == {}
