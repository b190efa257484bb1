"""Logs become the events, items and rejects of their case, or an error of one line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from core.errors import UserError
from tests.fixtures.commands import merge, prepare_log, read_rows, write_rows

CASES = Path(__file__).parent / "cases"
SOURCES = Path(__file__).parents[3] / "jobs/configs/sources"
SHARED = Path(__file__).parents[3] / "../shared/cases"
MAPPING = {
    "files": "log.*",
    "user": "u",
    "item": "i",
    "time": {"column": "t", "unit": "order"},
    "prepare": {
        "core": 0,
        "max_rejects": 1,
        "min_matched": 0,
        "split": {"by": "leave_last_out"},
    },
}
LOGS = yaml.safe_load((CASES / "logs.yaml").read_text())


def write_files(folder: Path, log: dict[str, Any], suffix: str | None) -> None:
    """Write the files of a log, or its rows in a format."""
    folder.mkdir()
    if suffix:
        write_rows(folder / f"log.{suffix}", log["rows"])
    for name, content in log.get("files", {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            content = content.encode(log.get("encoding", "utf-8"))
        (folder / name).write_bytes(content)


def prepare_events(mapping: dict[str, Any], raw: Path, tables: Path) -> str:
    """Prepare a log, and return the message if it stops.

    A log too small to be split still has its events and items.
    """
    try:
        prepare_log(mapping, raw, tables)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("log", "suffix"),
    [
        pytest.param(log, suffix, id=f"{log['name']} {suffix or ''}")
        for log in LOGS
        for suffix in log.get("formats", [None])
    ],
)
def test_a_log_becomes_its_events(tmp_path, log, suffix):
    write_files(tmp_path / "raw", log, suffix)
    tables = tmp_path / "tables"

    mapping = merge(MAPPING, log.get("mapping", {}))
    if "source" in log:
        mapping = yaml.safe_load((SOURCES / f"{log['source']}.yaml").read_text())
        changes = mapping["prepare"] | {"core_window": "all"} | MAPPING["prepare"]
        mapping["prepare"] = changes

    error = prepare_events(mapping, tmp_path / "raw", tables)

    if "error" in log:
        assert log["error"] in error
        assert "\n" not in error
        return
    names = ["user_id", "item_id", "timestamp_ms", *log.get("columns", [])]
    if log.get("without_times"):
        names.remove("timestamp_ms")
    rows = read_rows(tables, "events")
    if "events" in log:
        assert [[row[name] for name in names] for row in rows] == log["events"]
    rejects = {row["row"]: row["reason"] for row in read_rows(tables, "rejects")}
    expected = log.get("rejects", {})
    assert rejects.keys() == expected.keys()
    for row, reason in expected.items():
        assert reason in rejects[row]
    if "requests" in log:
        assert len({row["request_id"] for row in rows}) == log["requests"]
    if "items" in log:
        names = ["item_id", *log["item_columns"]]
        items = read_rows(tables, "items")
        assert [[row[name] for name in names] for row in items] == log["items"]


SHARED_LOGS = yaml.safe_load((CASES / "shared.yaml").read_text())
SHARED_SETTINGS = MAPPING["prepare"] | {"duplicates": "keep"}
NAMES = [path.name for path in sorted(SHARED.glob("[A-Z]*")) if path.is_dir()]


@pytest.mark.shared_data
@pytest.mark.parametrize("name", NAMES or [""])
def test_a_reported_log_becomes_its_true_events(tmp_path, name):
    case = SHARED_LOGS.get(name, {})
    path, changes = SHARED / name / "src.yaml", case.get("mapping", {})
    mapping = yaml.safe_load(path.read_text("utf-8-sig")) if path.exists() else {}
    changes = {"layout": None, "prepare": SHARED_SETTINGS} | changes
    mapping = {
        key: value for key, value in (mapping | changes).items() if value is not None
    }

    error = prepare_events(mapping, SHARED / name / "log", tmp_path / "tables")

    if "error" in case:
        assert case["error"] in error
        return
    counts = Counter[str]()
    for reject in read_rows(tmp_path / "tables", "rejects"):
        starts = [s for s in case["rejects"] if reject["reason"].startswith(s)]
        counts.update(starts or [reject["reason"]])
    assert counts == case.get("rejects", {})
    rows = read_rows(tmp_path / "tables", "events")
    events = Counter((r["user_id"], r["item_id"], r["timestamp_ms"]) for r in rows)
    truth_path = SHARED / name / "truth.parquet"
    if truth_path.exists():
        truth = Counter(pl.read_parquet(truth_path).select("u", "i", "t").rows())
        assert (truth - events).total() == case.get("lost", 0)
        assert not events - truth
