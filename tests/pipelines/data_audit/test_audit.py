"""The audit passes correct tables and finds each kind of planted violation, and only
that one.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs import audit as job
from models.storage.tables import (
    UserError,
    add_seal,
    check_seal,
    commit,
    read_manifest,
    read_table,
    write_part,
)
from pipelines.data.audit.rules import RULES, audit
from pipelines.data.kinds import KINDS
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import parse_log
from pipelines.data.settings import read_config
from tests.fixtures.audited import Change, Row, broken, rewrite

BEGIN = 1_600_000_000_000
SOURCE = {
    "files": "log.jsonl",
    "user": "user",
    "item": "item",
    "time": {"column": "ms", "unit": "ms"},
    "query": "query",
    "labels": {"click": {"column": "click"}},
}


def made(folder: Path, rows: list[Row], **given: Any) -> str:
    """TABLES of a log."""
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text(
        "".join(
            json.dumps({"query": None, "click": True, **row}) + "\n" for row in rows
        )
    )
    config = read_config({"core": 0, "split": {"kind": "leave_last_out"}, **given})
    prepare(
        parse_log(SOURCE),
        str(folder),
        str(folder / "tables"),
        config,
        report=lambda line: None,
    )
    return str(folder / "tables")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tables of a log with many events at the same time, some of which come twice and
    are kept.
    """
    draw = random.Random(3)
    rows = [
        {
            "user": f"u{draw.randrange(12):02}",
            "item": f"i{draw.randrange(9)}",
            "ms": BEGIN + draw.randrange(40) * 1000,
            "query": draw.choice([None, "red", "blue"]),
        }
        for _ in range(90)
    ]
    return made(tmp_path_factory.mktemp("log"), rows + rows[:5], duplicates="keep")


def test_correct_tables_pass(prepared: str) -> None:
    rules = {rule.name: rule for rule in audit(prepared)}
    assert {
        name: rule.examples for name, rule in rules.items() if rule.violations
    } == {}
    info = read_manifest(f"{prepared}/sequences").info
    assert rules["events"].rows == read_manifest(f"{prepared}/events").rows
    assert (
        rules["behaviours"].rows
        == rules["history"].rows
        == rules["splits"].rows
        == info["interactions"]
        > 0
    )
    for kind in KINDS.values():
        assert set(kind.skipped_rules) < set(RULES)
    assert list(rules) == [
        name
        for name in RULES
        if name not in {*KINDS["retrieval"].skipped_rules, "known", "folds"}
    ]


def first(rows: list[Row], least: int = 4) -> Row:
    """A user's row with behaviours at so many times."""
    return next(row for row in rows if len(set(row["timestamp_ms"])) >= least)


def recount(rows: list[Row], info: Row) -> None:
    """Counts in the manifest of sequences, from its rows."""
    splits = [request["split"] for row in rows for request in row["requests"]]
    info |= {
        "users": len(rows),
        "interactions": sum(len(row["item_index"]) for row in rows),
    }
    info["requests"] = {name: splits.count(name) for name in ("train", "val", "test")}


def tie_in_history(rows: list[Row], info: Row) -> None:
    place, request = next(
        (i, r)
        for row in rows
        for i, r in enumerate(row["requests"])
        if r["history_end"] < i
    )
    request["history_end"] = place


def behaviours_out_of_order(rows: list[Row], info: Row) -> None:
    row = first(rows)
    items = row["item_index"]
    i = next(i for i in range(len(items) - 1) if items[i] != items[i + 1])
    items[i : i + 2] = items[i + 1], items[i]
    for n in (i, i + 1):
        row["requests"][n]["candidates"] = [items[n]]


def behaviour_dropped(rows: list[Row], info: Row) -> None:
    """The user's last behaviour and its request vanish, a train request becomes test as
    it must.
    """
    row = next(row for row in rows if len(row["item_index"]) > 5)
    for values in row.values():
        if isinstance(values, list):
            values.pop()
    row["requests"][-1]["split"], row["requests"][-2]["split"] = "test", "val"
    recount(rows, info)


def other_target(rows: list[Row], info: Row) -> None:
    row = first(rows)
    row["requests"][0]["candidates"] = [(row["item_index"][0] + 1) % info["items"]]


def moved_to_train(rows: list[Row], info: Row) -> None:
    next(row for row in rows if row["requests"][-1]["split"] == "test")["requests"][-1][
        "split"
    ] = "train"
    recount(rows, info)


def user_twice(rows: list[Row], info: Row) -> None:
    rows.append(copy.deepcopy(rows[0]))
    recount(rows, info)


def user_lost(rows: list[Row], info: Row) -> None:
    rows.pop()
    recount(rows, info)


def unsorted_events(rows: list[Row], info: Row) -> None:
    rows[0], rows[1] = rows[1], rows[0]


SEQUENCES: dict[str, tuple[Change, str]] = {
    "a tie in a history": (tie_in_history, "history"),
    "the future in a history": (
        lambda rows, info: first(rows)["requests"][1].update(history_end=3),
        "history",
    ),
    "a history out of bounds": (
        lambda rows, info: first(rows)["requests"][-1].update(history_end=99),
        "history",
    ),
    "no history": (
        lambda rows, info: first(rows)["requests"][-1].update(history_end=None),
        "history",
    ),
    "a shorter list": (
        lambda rows, info: first(rows)["label_click"].pop(),
        "behaviours",
    ),
    "another label": (
        lambda rows, info: first(rows)["label_click"].__setitem__(1, False),
        "behaviours",
    ),
    "behaviours out of order": (behaviours_out_of_order, "behaviours"),
    "a behaviour dropped": (behaviour_dropped, "behaviours"),
    "a candidate outside": (
        lambda rows, info: first(rows)["requests"][0].update(candidates=[99]),
        "targets",
    ),
    "no candidate": (
        lambda rows, info: first(rows)["requests"][0].update(candidates=[]),
        "targets",
    ),
    "another target": (other_target, "targets"),
    "a test request in train": (moved_to_train, "splits"),
    "a wrong count": (lambda rows, info: info["requests"].update(val=999), "counts"),
    "a wrong number of lost events": (
        lambda rows, info: info.update(truncated_events=7),
        "counts",
    ),
    "a user twice": (user_twice, "users"),
    "a user lost": (user_lost, "users"),
}


@pytest.mark.parametrize("what", SEQUENCES)
def test_a_planted_violation_is_found(prepared: str, tmp_path: Path, what: str) -> None:
    change, rule = SEQUENCES[what]
    assert [*broken(rewrite(prepared, tmp_path, change))] == [rule]


OTHERS: dict[str, tuple[str, Change, set[str]]] = {
    "events out of order": ("events", unsorted_events, {"events"}),
    "a negative time": (
        "events",
        lambda rows, info: rows[0].update(timestamp_ms=-5),
        {"events"},
    ),
    "a duplicate": (
        "events",
        lambda rows, info: info.pop("duplicates_kept"),
        {"duplicates"},
    ),
    "other duplicates": (
        "events",
        lambda rows, info: info.update(duplicates_kept=3),
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
        {"catalogue"},
    ),
    "another core": (
        "items",
        lambda rows, info: info.update(core=8),
        {"users", "catalogue"},
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_violation_in_another_table_is_found(
    prepared: str, tmp_path: Path, what: str
) -> None:
    table, change, rules = OTHERS[what]
    found = set(broken(rewrite(prepared, tmp_path, change, table)))
    assert rules <= found
    assert len(rules) == len(found) or what in (
        "a negative time",
        "an invented item",
        "events out of order",
    )


def test_a_user_in_two_parts_and_other_inputs_are_found(
    prepared: str, tmp_path: Path
) -> None:
    of_user = [row["user_id"] for row in read_table(f"{prepared}/events").to_pylist()]
    cut = next(n for n in range(1, len(of_user)) if of_user[n] == of_user[n - 1])
    assert [
        *broken(rewrite(prepared, tmp_path, lambda rows, info: None, "events", cut))
    ] == ["users"]
    uri, manifest = (
        str(tmp_path / "tables/sequences"),
        read_manifest(str(tmp_path / "tables/sequences")),
    )
    schema, inputs = read_table(uri).schema, manifest.inputs | {"items": "0" * 64}
    commit(
        uri,
        "sequences",
        schema,
        manifest.files,
        config={},
        inputs=inputs,
        info=manifest.info,
    )
    assert [*broken(str(tmp_path / "tables"))] == ["inputs", "users"]


def test_an_item_that_the_core_drops_is_found(tmp_path: Path) -> None:
    """One step of the k-core instead of the loop keeps what the loop drops."""
    rows = [
        {"user": user, "item": f"i{t % 2}", "ms": BEGIN + t}
        for user in "ab"
        for t in range(4)
    ]
    rows += [
        {"user": "c", "item": "i9", "ms": BEGIN + t} for t in range(2)
    ]  # i9: 3 events, two of a lost user
    right = made(
        tmp_path / "log", [*rows, {"user": "a", "item": "i9", "ms": BEGIN + 9}], core=3
    )
    assert broken(right) == {}
    more = rewrite(
        right,
        tmp_path,
        lambda rows, info: rows.append({"item_index": 2, "item_id": "i9"}),
        "items",
    )
    assert broken(more)["catalogue"] == [
        "item i9: in the catalogue, but not in the 3-core of events"
    ]


def test_a_wrong_temporal_split_is_found(tmp_path: Path) -> None:
    rows = [
        {"user": f"u{n % 3}", "item": f"i{n % 5}", "ms": BEGIN + n * 1000}
        for n in range(60)
    ]
    tables = made(tmp_path / "log", rows, split={"kind": "temporal"}, core=2)
    note = next(rule.note for rule in audit(tables) if rule.name == "catalogue")
    assert "core_window: all" in note
    assert [*broken(rewrite(tables, tmp_path, moved_to_train))] == ["splits"]


def test_the_job_prints_and_fails(
    prepared: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.run(job.Config(tables=prepared))
    assert "No violations" in capsys.readouterr().out
    wrong = rewrite(prepared, tmp_path, SEQUENCES["the future in a history"][0])
    with pytest.raises(UserError, match="1 violation of history"):
        job.run(job.Config(tables=wrong))
    user = first(read_table(f"{prepared}/sequences").to_pylist())["user_id"]
    assert f"history: user {user}, request 1" in capsys.readouterr().out


def flipped(part: Path) -> None:
    content = bytearray(part.read_bytes())
    content[50] ^= 255
    part.write_bytes(bytes(content))


def foreign(folder: Path) -> None:
    schema = pa.schema([("user_id", pa.string())])
    part = write_part(str(folder), pa.table({"user_id": ["a"]}, schema=schema))
    info = read_manifest(str(folder)).info
    commit(str(folder), "sequences", schema, [part], config={}, inputs={}, info=info)


def says(**info: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = check_seal((folder / "manifest.json").read_text())
        content["info"] |= info
        (folder / "manifest.json").write_text(add_seal(content))

    return change


DAMAGED: dict[str, Callable[[Path], object]] = {
    "bytes, its manifest says": lambda folder: (part := part_of(folder)).write_bytes(
        part.read_bytes()[:-20]
    ),
    "its SHA-256 is": lambda folder: flipped(part_of(folder)),
    "missing": lambda folder: part_of(folder).unlink(),
    "no known split: {'kind': 'temporal'}": says(split={"kind": "temporal"}),
    "no known split": says(
        split={"kind": "temporal", "val_start_ms": "a", "test_start_ms": "b"}
    ),
    "is not a table": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json is damaged": lambda folder: (folder / "manifest.json").write_text(
        '{"table": "sequ'
    ),
    "was not written by this version of jobs.prepare": foreign,
    "label_purchase": says(behaviour="purchase"),
}


def part_of(folder: Path) -> Path:
    return next(folder.glob("*.parquet"))


@pytest.mark.parametrize("words", DAMAGED)
def test_a_damaged_table_is_named(
    prepared: str, tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = rewrite(prepared, tmp_path, lambda rows, info: None)
    DAMAGED[words](tmp_path / "tables/sequences")
    with pytest.raises(UserError) as caught:
        job.run(job.Config(tables=tables))
    assert words in capsys.readouterr().out + str(caught.value)
