"""The audit passes correct tables, and reports the one rule that a planted violation
breaks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from core.errors import UserError
from core.schemas import SequencesInfo
from core.tables import commit, open_table, read_manifest, write_part
from jobs import audit as job
from pipelines.prepare.audit.rules import RULES, audit
from tests.fixtures.audited_tables import Change, Row, copy_with_change, find_violations
from tests.fixtures.commands import (
    LOG,
    prepare_log,
    read_column,
    read_rows,
    read_table,
    write_rows,
)

BEGIN = 1_600_000_000_000
SOURCE = LOG | {
    "query": "query",
    "labels": {"click": {"column": "click"}},
    "prepare": {"core": 0, "split": {"by": "leave_last_out"}},
}


def prepare_rows(folder: Path, rows: list[Row], **options: Any) -> str:
    """Write a log and return the path of its tables."""
    folder.mkdir(exist_ok=True)
    rows = [{"query": None, "click": True, **row} for row in rows]
    write_rows(folder / "log.jsonl", rows)
    prepare_log(SOURCE, folder, folder / "tables", **options)
    return str(folder / "tables")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> str:
    """Tables of a log with many events at the same time; 5 events are repeated and the
    duplicates kept.
    """
    generator = random.Random(3)
    rows = [
        {
            "user": f"u{generator.randrange(12):02}",
            "item": f"i{generator.randrange(9)}",
            "ms": BEGIN + generator.randrange(40) * 1000,
            "query": generator.choice([None, "red", "blue"]),
        }
        for _ in range(90)
    ]
    folder = tmp_path_factory.mktemp("log")
    return prepare_rows(folder, rows + rows[:5], duplicates="keep")


def test_correct_tables_pass_every_rule_of_their_kind(prepared):
    rules = {rule.name: rule for rule in audit(prepared)}

    violated = {name: rule.examples for name, rule in rules.items() if rule.violations}
    assert violated == {}
    others = {"known", "texts", "tasks", "queries", "features", "windows"}
    assert list(rules) == [name for name in RULES if name not in others]
    assert rules["events"].rows == read_manifest(f"{prepared}/events").rows
    interactions = read_manifest(f"{prepared}/sequences").info["interactions"]
    assert interactions > 0
    for name in ("behaviours", "history", "splits"):
        assert rules[name].rows == interactions


# Functions that change rows of a table, and the info of its manifest.


def find_long_row(rows: list[Row]) -> Row:
    """Return the first row of sequences with behaviours at 4 different times."""
    return next(row for row in rows if len(set(row["timestamp_ms"])) >= 4)


def update_counts(rows: list[Row], info: Row) -> None:
    """Set the counts in the info of sequences to those of the rows."""
    splits = [request["split"] for row in rows for request in row["requests"]]
    info["users"] = len(rows)
    info["interactions"] = sum(len(row["item_index"]) for row in rows)
    info["requests"] = {name: splits.count(name) for name in ("train", "val", "test")}


def add_tie_to_history(rows: list[Row], info: Row) -> None:
    """Add behaviours at the time of a request to its history."""
    for row in rows:
        for index, request in enumerate(row["requests"]):
            if request["history_end"] < index:
                request["history_end"] = index
                return


def look_ahead(rows: list[Row], info: Row) -> None:
    """Add the future to a history."""
    find_long_row(rows)["requests"][1]["history_end"] = 3


def drop_last_behaviour(rows: list[Row], info: Row) -> None:
    """Drop a user's last behaviour and its request. The last two requests left become
    val and test, as the split needs.
    """
    row = next(row for row in rows if len(row["item_index"]) > 5)
    for values in row.values():
        if isinstance(values, list):
            values.pop()
    row["requests"][-2]["split"] = "val"
    row["requests"][-1]["split"] = "test"
    update_counts(rows, info)


def replace_target(rows: list[Row], info: Row) -> None:
    """Replace the item of a request by another."""
    row = find_long_row(rows)
    row["requests"][0]["candidates"] = [(row["item_index"][0] + 1) % info["items"]]


def move_test_request_to_train(rows: list[Row], info: Row) -> None:
    """Move a user's test request to the training split."""
    last_requests = [row["requests"][-1] for row in rows]
    request = next(r for r in last_requests if r["split"] == "test")
    request["split"] = "train"
    update_counts(rows, info)


def change_nothing(rows: list[Row], info: Row) -> None:
    """Leave the rows and the info as they are."""


# The table, its change, and the rules that it breaks.
VIOLATIONS: dict[str, tuple[str, Change, set[str]]] = {
    "a tie in a history": ("sequences", add_tie_to_history, {"history"}),
    "the future in a history": ("sequences", look_ahead, {"history"}),
    "another label": (
        "sequences",
        lambda rows, info: find_long_row(rows)["label_click"].__setitem__(1, False),
        {"behaviours"},
    ),
    "a behaviour dropped": ("sequences", drop_last_behaviour, {"behaviours"}),
    "another target": ("sequences", replace_target, {"targets"}),
    "a test request in train": ("sequences", move_test_request_to_train, {"splits"}),
    "a wrong count": (
        "sequences",
        lambda rows, info: info["requests"].update(val=999),
        {"counts"},
    ),
    "a user lost": ("sequences", lambda rows, info: rows.pop(), {"users", "counts"}),
    "events out of order": (
        "events",
        lambda rows, info: rows.insert(0, rows.pop(1)),
        {"events"},
    ),
    "a duplicate": (
        "events",
        lambda rows, info: info.pop("duplicates_kept"),
        {"duplicates"},
    ),
    "items in another order": (
        "items",
        lambda rows, info: rows.reverse(),
        {"catalogue"},
    ),
    "an invented item": (
        "items",
        lambda rows, info: rows.append({"item_index": 9, "item_id": "z"}),
        {"catalogue", "counts"},
    ),
    "another core": (
        "items",
        lambda rows, info: info.update(core=8),
        {"users", "catalogue"},
    ),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_violation_breaks_its_rules(prepared, tmp_path, violation):
    table, change, rules = VIOLATIONS[violation]

    tables = copy_with_change(prepared, tmp_path, change, table)

    assert find_violations(tables).keys() == rules


def test_a_user_in_two_parts_breaks_the_rule_of_users(prepared, tmp_path):
    users = read_column(prepared, "events", "user_id")
    within_user = next(n for n in range(1, len(users)) if users[n] == users[n - 1])

    tables = copy_with_change(prepared, tmp_path, change_nothing, "events", within_user)

    assert list(find_violations(tables)) == ["users"]


def test_sequences_of_another_catalogue_break_the_rule_of_inputs(prepared, tmp_path):
    tables = copy_with_change(prepared, tmp_path, change_nothing)
    uri = f"{tables}/sequences"
    manifest = open_table(uri, SequencesInfo)
    commit(
        uri,
        "sequences",
        read_table(uri).schema,
        manifest.files,
        config={},
        inputs=manifest.inputs | {"items": "0" * 64},
        info=manifest.info,
    )

    assert list(find_violations(tables)) == ["inputs"]


def test_an_item_that_only_the_whole_k_core_drops_is_found(tmp_path):
    """One step of the k-core would keep item i9: it has 3 events, two of them of a user
    that the core drops.
    """
    rows = [
        {"user": user, "item": f"i{t % 2}", "ms": BEGIN + t}
        for user in "ab"
        for t in range(4)
    ]
    rows += [{"user": "c", "item": "i9", "ms": BEGIN + t} for t in range(2)]
    rows.append({"user": "a", "item": "i9", "ms": BEGIN + 9})
    correct = prepare_rows(tmp_path / "log", rows, core=3)
    assert find_violations(correct) == {}

    with_item = copy_with_change(
        correct,
        tmp_path,
        lambda rows, info: rows.append({"item_index": 2, "item_id": "i9"}),
        "items",
    )

    assert find_violations(with_item)["catalogue"] == [
        "item i9: in the catalogue, but not in the 3-core of events"
    ]


def test_a_wrong_temporal_split_breaks_the_rule_of_splits(tmp_path):
    rows = [
        {"user": f"u{n % 3}", "item": f"i{n % 5}", "ms": BEGIN + n * 1000}
        for n in range(60)
    ]
    tables = prepare_rows(tmp_path / "log", rows, core=2, **{"split.by": "temporal"})
    [note] = [rule.note for rule in audit(tables) if rule.name == "catalogue"]
    assert "core_window: all" in note

    changed = copy_with_change(tables, tmp_path, move_test_request_to_train)

    assert list(find_violations(changed)) == ["splits"]


def test_the_job_prints_violations_and_fails(prepared, tmp_path, capsys):
    job.run(job.Config(tables=prepared))
    assert "No violations" in capsys.readouterr().out

    tables = copy_with_change(prepared, tmp_path, look_ahead)
    with pytest.raises(UserError, match="1 violation of history"):
        job.run(job.Config(tables=tables))

    row = find_long_row(read_rows(prepared, "sequences"))
    assert f"history: user {row['user_id']}, request 1" in capsys.readouterr().out


def replace_by_other_schema(folder: Path) -> None:
    """Replace the sequences by a table with the user ids alone."""
    schema = pa.schema([("user_id", pa.string())])
    part = write_part(str(folder), pa.table({"user_id": ["a"]}, schema=schema))
    info = open_table(str(folder), SequencesInfo).info
    commit(str(folder), "sequences", schema, [part], config={}, inputs={}, info=info)


def change_behaviour(folder: Path) -> None:
    """Record another label of behaviours in the info of a manifest."""
    content = json.loads((folder / "manifest.json").read_text())
    content["info"]["behaviour"] = "purchase"
    (folder / "manifest.json").write_text(json.dumps(content))


def truncate_part(folder: Path) -> None:
    """Cut off the last bytes of a part."""
    part = next(folder.glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-20])


def change_row_count(folder: Path) -> None:
    """Record another number of rows of a part in a manifest."""
    content = json.loads((folder / "manifest.json").read_text())
    content["files"][0]["rows"] += 1
    (folder / "manifest.json").write_text(json.dumps(content))


# The damage, by words of the message about it.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "lacks a column": replace_by_other_schema,
    "label_purchase": change_behaviour,
    "bytes, its manifest says": truncate_part,
    "rows, the manifest says": change_row_count,
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_damaged_table_is_named(prepared, tmp_path, words, capsys):
    tables = copy_with_change(prepared, tmp_path, change_nothing)
    DAMAGE[words](tmp_path / "tables/sequences")

    with pytest.raises(UserError) as caught:
        job.run(job.Config(tables=tables))

    assert words in capsys.readouterr().out + str(caught.value)
