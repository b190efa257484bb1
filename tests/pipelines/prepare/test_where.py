"""`where` takes the rows of a log and of its sections at which a condition is true."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from core.tables import read_manifest
from pipelines.prepare.audit.rules import audit
from tests.fixtures.audited_tables import Row, copy_with_change, find_violations
from tests.fixtures.commands import prepare_log, read_rows, write_rows

MAPPING: Row = {
    "files": "log*.csv",
    "user": "customer",
    "item": "sku",
    "time": {"column": "ms", "unit": "ms"},
    "categories": ["kind"],
    "prepare": {"core": 0, "max_rejects": 0.5, "split": {"by": "temporal"}},
}
CONDITION = "kind in ('order', 'view') and customer is not null and cast(n as int) > 0"
ITEMS = {"files": "items.csv", "item": "sku", "texts": ["name"]}


def draw_rows(number: int, seed: int, begin: int = 0) -> list[Row]:
    """Draw rows with cancelled, anonymous and unreadable ones."""
    generator = random.Random(seed)
    return [
        {
            "customer": generator.choice(["ann", "bob", "eve", None]),
            "sku": f"i{generator.randrange(5)}",
            "ms": 1_600_000_000_000 + (begin + index) * 1000,
            "kind": generator.choice(["order", "view", "cancel", None]),
            "n": generator.choice([*"1234", "-1", ""] * 5 + ["many"]),
        }
        for index in range(number)
    ]


def is_taken(row: Row) -> bool:
    """Return whether the condition holds, in plain Python."""
    has_number = row["n"] not in ("", "many") and int(row["n"]) > 0
    return bool(row["customer"]) and row["kind"] in ("order", "view") and has_number


@pytest.fixture(scope="module")
def taken(tmp_path_factory) -> tuple[Path, list[Row]]:
    """Tables of a log with a condition, in two appended pieces, and its rows."""
    folder = tmp_path_factory.mktemp("where")
    rows: list[Row] = []
    items = [{"sku": f"i{n}", "name": f"name {n}", "old": str(n % 2)} for n in range(5)]
    write_rows(folder / "items.csv", items)
    mapping = MAPPING | {"where": CONDITION, "items": ITEMS | {"where": "old = '0'"}}
    for piece in range(2):
        rows += draw_rows(300, piece, 300 * piece)
        write_rows(folder / f"log{piece}.csv", rows[-300:])
        prepare_log(mapping, folder, folder / "tables", append=True, min_matched=0)
    return folder, rows


def test_taken_rows_are_those_of_a_log_that_was_filtered_before(taken, tmp_path):
    folder, rows = taken
    write_rows(tmp_path / "log.csv", [row for row in rows if is_taken(row)])
    prepare_log(MAPPING, tmp_path, tmp_path / "tables")

    def sort(tables: Path) -> list[Any]:
        return sorted(map(str, read_rows(tables, "events")))

    assert sort(folder / "tables") == sort(tmp_path / "tables")
    info = read_manifest(f"{folder}/tables/events").info
    # an unreadable condition is a reject unless the rest of the condition is false
    unreadable = sum(row["n"] == "many" for row in rows)
    assert 0 < info["rejects"] <= unreadable
    taken_rows = sum(map(is_taken, rows))
    assert info["rows_read"] == taken_rows + info["rejects"]
    assert info["rows_left_out"] == len(rows) - info["rows_read"]
    assert read_manifest(f"{folder}/tables/items").info["rows_left_out"] == 2


def test_a_day_whose_rows_are_all_left_out_adds_no_event(tmp_path, capsys):
    mapping = MAPPING | {
        "files": "log*.jsonl",
        "item": "one",
        "explode": {"one": "skus"},
        "where": "kind = 'view'",
    }
    contents = []
    for day, kind in enumerate(("view", "cancel")):
        rows = draw_rows(300, day, 300 * day)
        rows = [row | {"skus": [row["sku"]] * 2, "kind": kind} for row in rows]
        write_rows(tmp_path / f"log{day}.jsonl", [{**rows[0], "kind": "cancel"}, *rows])
        prepare_log(mapping, tmp_path, tmp_path / "tables", append=True)
        contents.append(read_rows(tmp_path / "tables", "sequences"))
    assert contents[0] == contents[1]
    assert read_manifest(f"{tmp_path}/tables/events").info["rows_left_out"] == 302
    printed = capsys.readouterr().out
    assert "where: 1 row left out" in printed
    assert "where: 301 rows left out, and no others" in printed


def test_the_audit_names_a_column_that_it_cannot_check(taken):
    [note] = [rule.note for rule in audit(f"{taken[0]}/tables") if rule.name == "rows"]
    assert "events have no n" in note


def test_the_audit_finds_a_row_that_the_condition_leaves_out(tmp_path):
    rows = [row for row in draw_rows(300, 3) if row["customer"]]
    write_rows(tmp_path / "log.csv", rows)
    prepare_log(MAPPING | {"where": "kind = 'view'"}, tmp_path, tmp_path / "raw")
    tables = str(tmp_path / "raw")
    assert "rows" in {rule.name for rule in audit(tables) if rule.rows}
    assert find_violations(tables) == {}

    copied = copy_with_change(
        tables,
        tmp_path / "copy",
        lambda events, info: events[-1].update(cat_kind="cancel"),
        "events",
    )
    assert "left out by where" in find_violations(copied)["rows"][0]

    copied = copy_with_change(
        tables,
        tmp_path / "second",
        lambda events, info: info.update(rows_read=info["rows_read"] + 7),
        "events",
    )
    assert list(find_violations(copied)) == ["rows"]
