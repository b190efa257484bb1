"""`prepare` warns of logs that it can read but that are not what their user expects,
such as ids that do not match or labels of one class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from core.errors import UserError
from core.tables import read_manifest
from pipelines.prepare.prepare import prepare
from pipelines.prepare.reading.log import load_source
from tests.fixtures.audited_tables import find_violations
from tests.fixtures.commands import read_config, read_rows

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


def make_rows(users: int = 80, events_per_user: int = 8) -> list[Row]:
    """Return a log without faults: each user has an event every three days."""
    return [
        {
            "user": f"u{user:02}",
            "item": f"{1000 + (user * n + n) % 15}",
            "ms": START + n * 3 * DAY + user * 977_777,
        }
        for user in range(users)
        for n in range(events_per_user)
    ]


def describe_items(rows: list[Row]) -> list[Row]:
    """Return a row of the item file for each item of a log."""
    return [
        {"item": item, "title": f"the {item}"}
        for item in sorted({row["item"] for row in rows})
    ]


class Shop:
    """A log in a folder and its tables, which can be prepared with several settings."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tables = folder, folder / "tables"
        self.lines: list[str] = []

    def write(
        self, rows: list[Row], items: list[Row] | None = None, **source: Any
    ) -> None:
        """Write the log, its item file and its mapping, with keys of `source`."""
        raw = self.folder / "raw"
        raw.mkdir(exist_ok=True)
        pl.DataFrame(rows).write_csv(raw / "log.csv")
        items = describe_items(rows) if items is None else items
        pl.DataFrame(items).write_csv(raw / "items.csv")
        (self.folder / "source.yaml").write_text(yaml.safe_dump(SOURCE | source))

    def prepare(self, **settings: Any) -> list[str]:
        """Prepare the tables anew, audit them, and return the warnings."""
        source, _ = load_source(str(self.folder / "source.yaml"))
        self.lines = []
        prepare(
            source,
            str(self.folder / "raw"),
            str(self.tables),
            read_config({"core": 0}, settings),
            "overwrite",
            self.lines.append,
        )
        assert find_violations(str(self.tables)) == {}
        return [line for line in self.lines if line.startswith("warning")]

    def read_history_ends(self, user: str) -> list[int]:
        """Return the history end of each request of a user."""
        sequences = read_rows(self.tables, "sequences")
        [row] = [row for row in sequences if row["user_id"] == user]
        return [request["history_end"] for request in row["requests"]]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_a_log_without_faults_has_no_warning(shop: Shop) -> None:
    shop.write(make_rows())

    assert shop.prepare() == []


def write_users(folder: Path, users: list[str]) -> None:
    """Write a user file with an age per user."""
    table = pl.DataFrame({"id": users, "age": ["7"] * len(users)})
    table.write_csv(folder / "raw" / "users.csv")


def test_user_files_that_match_no_event_are_refused(shop: Shop) -> None:
    users = {"files": "users.csv", "user": "id", "attributes": ["age"]}
    shop.write(make_rows(), users=users)

    write_users(shop.folder, [f"U{user:02}" for user in range(80)])
    error = r"0 of 80 users .* have 'u00', 'u01', the user files 'U00', 'U01'"
    with pytest.raises(UserError, match=error):
        shop.prepare()
    assert not list(shop.tables.rglob("*.parquet"))

    write_users(shop.folder, [f"u{user:02}" for user in range(80)])
    assert shop.prepare() == []


def make_repeated_purchases() -> list[Row]:
    """Return a log with times in whole seconds, whose first 40 rows are repeated."""
    rows = [{**row, "ms": row["ms"] // 1000 * 1000} for row in make_rows()]
    return [*rows, *rows[:40]]


def test_repeated_purchases_can_be_kept(shop: Shop) -> None:
    rows = make_repeated_purchases()
    shop.write(rows)

    assert shop.prepare(duplicates="keep") == []
    assert any("(40 duplicates kept, 0 rejects)" in line for line in shop.lines)
    assert read_manifest(str(shop.tables / "events")).rows == len(rows)
    sequences = read_rows(shop.tables, "sequences")
    assert sum(len(row["item_index"]) for row in sequences) == len(rows)
    # Both of two equal events have the same time, so neither is in the other's history.
    assert shop.read_history_ends("u00")[:4] == [0, 0, 2, 2]

    shop.prepare(duplicates="keep", ties="log_order")
    assert shop.read_history_ends("u00")[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("rows", "settings", "fragment"),
    [
        ({"events_per_user": 12}, {"max_events": 9}, "oldest 240"),
        ({"users": 10}, {"split": {"by": "leave_last_out"}}, "only 10 test requests"),
    ],
)
def test_what_makes_metrics_worse_is_warned_of(
    shop: Shop, rows: dict[str, int], settings: dict[str, Any], fragment: str
) -> None:
    shop.write(make_rows(**rows))

    assert any(fragment in line for line in shop.prepare(**settings))
