"""Requests and histories of a search log, and `prepare` from its raw files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from core.files import join
from core.schemas import Split
from core.tables import read_manifest, write_part
from pipelines.prepare.events.parts import read_events
from pipelines.prepare.kinds.search.sequences import SearchBuilder
from pipelines.prepare.reading.log import parse_log
from pipelines.prepare.sequences.counts import Lookups
from tests.fixtures.commands import read_config
from tests.fixtures.search_log import DAY_MS, draw_searches, prepare_searches

MAPPING: dict[str, Any] = {
    "files": "log.jsonl",
    "user": "user",
    "item": "item",
    "request": "search",
    "query": "query",
    "position": "position",
    "time": {"column": "n", "unit": "order"},
    "labels": {
        "click": {"column": "click"},
        "dwell": {"column": "dwell", "type": "float32"},
        "buy": {"column": "buy"},
    },
    "numbers": ["price"],
    "categories": ["city"],
}
SCHEMA = parse_log(MAPPING).schema
CATALOGUE, QUERIES = ["a", "b", "c"], ["p", "q", "r"]
LOOKUPS = Lookups(
    pl.DataFrame({"item_id": CATALOGUE}).with_row_index("item_index"),
    pl.DataFrame({"query": QUERIES}).with_row_index("query_index"),
)
SORT_KEY = ("user_id", "timestamp_ms", "request_id", "position", "item_id")


def make_builder(**mapping: Any) -> SearchBuilder:
    """Make a builder of a log without clock times, with a leave-last-out split."""
    settings = {"kind": "search", "behaviour": "click", "search": {"page_size": 2}}
    source = parse_log(MAPPING | mapping)
    return SearchBuilder(source, read_config(settings), Split("leave_last_out"))


def write_events(
    rows: list[dict], folder: str, schema: pa.Schema = SCHEMA
) -> pl.DataFrame:
    """Write rows as a part of `events` and read it back."""
    rows = sorted(rows, key=lambda row: tuple(row[name] for name in SORT_KEY))
    part = write_part(folder, pa.Table.from_pylist(rows, schema=schema))
    return read_events(join(folder, part.path), schema.names)


def test_a_log_without_clock_times_has_no_count_windows(tmp_path: Path) -> None:
    rows = [row | {"ms": number} for number, row in enumerate(draw_searches(60))]
    changes = {"time": {"unit": "order"}, "prepare": {"split": None}}
    options = {"split.by": "leave_last_out"}

    tables = prepare_searches(tmp_path, rows, changes, **options)

    info = read_manifest(f"{tables}/sequences").info
    assert info["features"] == ["position", "page"]
    assert info["windows"] == []
    assert info["split"]["by"] == "leave_last_out"


def make_results(**changes: Any) -> list[dict]:
    """Make four results of one request, a second apart, with clicks on the first and
    third.
    """
    row = {"user_id": "u", "request_id": "r", "query": "p"} | changes
    return [
        row
        | {
            "timestamp_ms": 1000 * n,
            "item_id": "abca"[n],
            "position": n,
            "label_click": n % 2 == 0,
        }
        for n in range(4)
    ]


def build_requests(rows: list[dict], folder: Path) -> tuple[list[dict], Counter[str]]:
    """Return the requests of the only user, and the builder's counts."""
    part = make_builder().build(write_events(rows, str(folder)), LOOKUPS)
    assert isinstance(part.rows, pa.Table)
    return part.rows["requests"].to_pylist()[0], part.count


def repeat_after_a_day() -> list[dict]:
    """Return the results of one request, and again a day later."""
    results = make_results()
    later = [row | {"timestamp_ms": row["timestamp_ms"] + DAY_MS} for row in results]
    return results + later


def test_without_clock_times_a_request_has_no_maximum_duration(tmp_path: Path) -> None:
    [request], _ = build_requests(repeat_after_a_day(), tmp_path)
    assert len(request["candidates"]) == 8
