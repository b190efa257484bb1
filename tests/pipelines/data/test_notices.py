"""What prepare says of logs that are read without an error and are not what their user
thinks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from models.storage.tables import UserError, read_manifest, read_table
from pipelines.data.audit.rules import audit
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import load_source
from pipelines.data.settings import read_config

DAY = 86_400_000
START = 1_600_000_000_000 // DAY * DAY
SOURCE = {
    "files": "log.csv",
    "user": "user",
    "item": "item",
    "time": {"column": "ms", "unit": "ms"},
    "items": {"files": "items.csv", "item": "item", "texts": ["title"]},
}

Row = dict[str, Any]


def healthy(users: int = 80, each: int = 8) -> list[Row]:
    """Each user buys something every few days."""
    return [
        {
            "user": f"u{u:02}",
            "item": f"{1000 + (u * n + n) % 15}",
            "ms": START + n * 3 * DAY + u * 977_777,
        }
        for u in range(users)
        for n in range(each)
    ]


def described(rows: list[Row]) -> list[Row]:
    return [
        {"item": item, "title": f"the {item}"}
        for item in sorted({row["item"] for row in rows})
    ]


class Shop:
    """A log in a folder, prepared with other settings."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tables = folder, folder / "tables"
        self.lines: list[str] = []

    def write(
        self, rows: list[Row], items: list[Row] | None = None, **source: Any
    ) -> None:
        raw = self.folder / "raw"
        raw.mkdir(exist_ok=True)
        pl.DataFrame(rows).write_csv(raw / "log.csv")
        pl.DataFrame(described(rows) if items is None else items).write_csv(
            raw / "items.csv"
        )
        (self.folder / "source.yaml").write_text(yaml.safe_dump(SOURCE | source))

    def prepare(self, **settings: Any) -> list[str]:
        """The warnings."""
        source, _ = load_source(str(self.folder / "source.yaml"))
        self.lines = []
        config = read_config({"core": 0}, settings)
        prepare(
            source,
            str(self.folder / "raw"),
            str(self.tables),
            config,
            "overwrite",
            self.lines.append,
        )
        rules = audit(str(self.tables))
        assert {rule.name: rule.examples for rule in rules if rule.violations} == {}
        return [line for line in self.lines if line.startswith("warning")]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_a_healthy_log_has_no_warning(shop: Shop) -> None:
    shop.write(healthy())
    assert shop.prepare() == []
    assert (
        read_manifest(str(shop.tables / "items")).info["matched"]["ids_matched"] == 15
    )


def test_items_that_match_no_event_are_an_error(shop: Shop) -> None:
    items = [{**row, "item": f"0{row['item']}"} for row in described(healthy())]
    shop.write(healthy(), items)
    with pytest.raises(
        UserError, match=r"0 of 15 items \(0.0%\), with 0.0% of the events, have a row"
    ) as caught:
        shop.prepare()
    assert (
        "events have '1000', '1001', the item files '01000', '01001'; convert them"
        in str(caught.value)
    )
    assert not list((shop.tables / "items").glob("*"))
    assert [
        line
        for line in shop.prepare(min_matched=0)
        if "convert them to one format" in line
    ]
    shop.write(healthy(), [*described(healthy())[:12], *items[12:]])  # 80%
    [line] = shop.prepare()
    assert line.startswith("warning: 12 of 15 items (80.0%)")


def test_users_that_match_no_event_are_an_error(shop: Shop) -> None:
    users = {"files": "users.csv", "user": "id", "attributes": ["age"]}
    shop.write(healthy(), users=users)
    path = shop.folder / "raw" / "users.csv"
    pl.DataFrame({"id": [f"U{u:02}" for u in range(80)], "age": ["7"] * 80}).write_csv(
        path
    )
    with pytest.raises(
        UserError,
        match=r"0 of 80 users .* have 'u00', 'u01', the user files 'U00', 'U01'; convert",
    ):
        shop.prepare()
    assert not list(shop.tables.rglob("*.parquet"))
    pl.DataFrame({"id": [f"u{u:02}" for u in range(80)], "age": ["7"] * 80}).write_csv(
        path
    )
    assert shop.prepare() == []


def test_days_as_times_leave_requests_without_a_history(shop: Shop) -> None:
    rows = [{**row, "ms": row["ms"] // (12 * DAY) * 12 * DAY} for row in healthy()]
    shop.write(rows)
    [line] = [
        line
        for line in shop.prepare(split={"kind": "leave_last_out"})
        if "training requests" in line
    ]
    assert (
        "all times are days, and --ties strict excludes behaviours of the same time"
        in line
    )
    assert not [
        line
        for line in shop.prepare(split={"kind": "leave_last_out"}, ties="log_order")
        if "history" in line
    ]


def test_a_user_cut_by_max_events_is_named_or_refused(shop: Shop) -> None:
    shop.write(healthy(each=12))
    with pytest.raises(
        UserError, match=r"no training request with a history .* raise --max_events"
    ):
        shop.prepare(max_events=2)
    assert not list((shop.tables / "sequences").glob("*"))
    [line] = shop.prepare(max_events=9)
    assert line.startswith(
        "warning: 80 users have more than max_events 9 behaviours: the oldest 240 and their"
    )


def test_repeated_purchases_are_dropped_or_kept(shop: Shop) -> None:
    rows = healthy()
    shop.write([*rows, *rows[:40]])
    assert shop.prepare() == []  # at the same millisecond: one event, logged twice
    rows = [{**row, "ms": row["ms"] // 1000 * 1000} for row in rows]
    shop.write([*rows, *rows[:40]])
    [line] = shop.prepare()
    assert line.startswith(
        "warning: 40 events (5.9%) repeat another in every column that is read (user_id, timestamp_ms, item_id) and "
        "were dropped; if they are real"
    )
    assert line.endswith("--duplicates keep")
    dropped = read_manifest(str(shop.tables / "events"))
    assert shop.prepare(duplicates="keep") == []
    kept = read_manifest(str(shop.tables / "events"))
    assert (dropped.rows, kept.rows) == (len(rows), len(rows) + 40)
    assert any("(40 duplicates kept, 0 rejects)" in line for line in shop.lines)
    sequences = read_table(str(shop.tables / "sequences")).to_pylist()
    assert sum(len(row["item_index"]) for row in sequences) == len(rows) + 40
    [twice] = [row for row in sequences if row["user_id"] == "u00"]
    assert [r["history_end"] for r in twice["requests"]][:4] == [
        0,
        0,
        2,
        2,
    ]  # tied with itself: out of the history
    shop.prepare(duplicates="keep", ties="log_order")
    [twice] = [
        row
        for row in read_table(str(shop.tables / "sequences")).to_pylist()
        if row["user_id"] == "u00"
    ]
    assert [r["history_end"] for r in twice["requests"]][:4] == [0, 1, 2, 3]


def test_a_core_that_leaves_little_and_items_told_twice(shop: Shop) -> None:
    rows = healthy()
    rare = [
        {"user": f"v{n}", "item": f"{n}", "ms": rows[n % 600]["ms"] + n}
        for n in range(700)
    ]
    items = described(rows + rare)
    shop.write(
        rows + rare,
        [*items, *described(rows)[:1], {"item": "1001", "title": "another"}],
    )
    lines = shop.prepare(core=3)
    assert [
        next(word for word in ("differ", "3-core") if word in line) for line in lines
    ] == [
        "differ",
        "3-core",
    ]
    assert (
        "1 rows of the item files differ from the first row of their item" in lines[0]
    )
    assert "keeps only 640 of 1,340 behaviours and 80 of 780 users" in lines[1]


def test_a_search_log_without_what_was_not_clicked(shop: Shop) -> None:
    rows = [{**row, "click": 1} for row in healthy()]
    shop.write(rows, labels={"click": {"column": "click"}}, request="ms")
    lines = shop.prepare(kind="search", behaviour="click")
    assert len(lines) == 3
    for line, split in zip(lines, ("train", "val", "test"), strict=True):
        assert f"{split} requests have one class only" in line


def test_few_requests_of_a_split_are_said(shop: Shop) -> None:
    shop.write(healthy(users=10))
    lines = shop.prepare(split={"kind": "leave_last_out"})[1:]
    assert [line.split(":")[1] for line in lines] == [
        " there are only 10 val requests",
        " there are only 10 test requests",
    ]
    shop.write([*healthy(users=10, each=2), *healthy(users=1, each=2)])
    lines = shop.prepare(split={"kind": "leave_last_out"})
    assert (
        "there are no val requests, so jobs.train cannot choose its best epoch"
        in " ".join(lines)
    )
