"""The audit passes the tables of a log of actions and finds each kind of planted
violation, and only that one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.storage.tables import read_manifest
from pipelines.data.actions.simulator import FeedSettings, simulate_feed
from pipelines.data.audit.rules import audit
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import load_source
from pipelines.data.settings import read_config
from tests.fixtures.audited import Change, Row, broken, rewrite

SOURCE = (
    Path(__file__).parents[3] / "jobs" / "configs" / "sources" / "simulated_feed.yaml"
)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> str:
    """Tables of a small simulated feed, in two parts, with counts of items, authors and
    users.
    """
    folder = tmp_path_factory.mktemp("feed")
    simulate_feed(str(folder / "raw"), FeedSettings(60, 40, 900, 3))
    source, defaults = load_source(str(SOURCE))
    actions = defaults["actions"] | {
        "counts": {
            "keys": ["item", "author", "user"],
            "counted_labels": ["long_dwell", "like"],
        }
    }
    config = read_config(
        defaults, {"partitions": 2, "max_events": 25, "actions": actions}
    )
    prepare(
        source,
        str(folder / "raw"),
        str(folder / "tables"),
        config,
        report=lambda line: None,
    )
    return str(folder / "tables")


def test_correct_tables_pass(prepared: str) -> None:
    rules = {rule.name: rule for rule in audit(prepared)}
    assert broken(prepared) == {}
    info = read_manifest(prepared + "/sequences").info
    assert info["truncated_users"] > 0
    assert rules["windows"].rows == rules["tasks"].rows == sum(info["events"].values())
    assert rules["splits"].rows == info["users"] == 60


def candidate(rows: list[Row]) -> tuple[Row, int]:
    """A user and the place of one of his candidates of the test window."""
    row = next(
        row
        for row in rows
        if 2 < row["train_end"] < row["val_end"] < len(row["item_index"]) - 1
    )
    return row, row["val_end"]


def swapped(rows: list[Row], info: Row) -> None:
    """Two events of a user's context have changed places, with all that belongs to
    them.
    """
    for values in candidate(rows)[0].values():
        if isinstance(values, list):
            values[:2] = values[1::-1]


def other(column: str, value: Callable[[Any, Row], Any]) -> Change:
    """That candidate has another value in a column."""

    def change(rows: list[Row], info: Row) -> None:
        row, place = candidate(rows)
        row[column][place] = value(row[column][place], info)

    return change


def more(column: str, name: str) -> Change:
    """That candidate has more of one task, action or feature."""

    def change(rows: list[Row], info: Row) -> None:
        row, place = candidate(rows)
        row[column][place][info[column].index(name)] += 0.5

    return change


def task_taken(values: list[bool], info: Row) -> list[bool]:
    return [
        value ^ (name == "contribution")
        for name, value in zip(info["tasks"], values, strict=True)
    ]


def candidate_in_context(rows: list[Row], info: Row) -> None:
    """The first test candidate counts as context."""
    candidate(rows)[0]["val_end"] += 1
    info["events"]["val"] += 1
    info["events"]["test"] -= 1


def user_twice(rows: list[Row], info: Row) -> None:
    row = rows[0]
    rows.append(copy.deepcopy(row))
    train, val, length = row["train_end"], row["val_end"], len(row["item_index"])
    info["users"] += 1
    info["interactions"] += length
    for split, low, high in (
        ("train", 0, train),
        ("val", train, val),
        ("test", val, length),
    ):
        info["events"][split] += high - low
        info["users_with_candidates"][split] += high > low
        info["users_without_context"][split] += high > low == 0


def later_cut(rows: list[Row], info: Row) -> None:
    """The manifest says that validation began an hour later than it did."""
    info["val_start_ms"] += 3_600_000


def base_rate(rows: list[Row], info: Row) -> None:
    info["base_rates"]["like"] += 0.01


def not_counted(rows: list[Row], info: Row) -> None:
    info["users_without_context"]["test"] += 1


PLANTED: dict[str, tuple[Change, set[str]]] = {
    "events out of order": (swapped, {"behaviours"}),
    "another item": (
        other("item_index", lambda item, info: (item + 1) % info["items"]),
        {"behaviours", "windows"},
    ),
    "another label": (
        other("label_share", lambda label, info: not label),
        {"behaviours", "tasks"},
    ),
    "another task": (other("tasks", task_taken), {"tasks"}),
    "another action": (more("actions", "dwell"), {"tasks"}),
    "another threshold": (
        lambda rows, info: info["definitions"]["tasks"]["long_dwell"].update(
            above=12_000
        ),
        {"tasks", "windows"},
    ),
    "a candidate in the context": (candidate_in_context, {"splits"}),
    "a later cut": (later_cut, {"splits", "windows"}),
    "a count of the future": (more("features", "item_like_7d"), {"windows"}),
    "a count of another author": (more("features", "author_exposures_1d"), {"windows"}),
    "no delay": (
        lambda rows, info: info["definitions"]["counts"].update(delay_minutes=0),
        {"windows"},
    ),
    "an unknown feature": (
        lambda rows, info: info["features"].__setitem__(0, "item_magic_1d"),
        {"windows"},
    ),
    "a base rate": (base_rate, {"counts"}),
    "the scale of another log": (
        lambda rows, info: info["feature_mean"].__setitem__(0, 9.0),
        {"counts"},
    ),
    "a user not counted": (not_counted, {"counts"}),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_found(prepared: str, tmp_path: Path, what: str) -> None:
    change, rules = PLANTED[what]
    assert set(broken(rewrite(prepared, tmp_path, change))) == rules


def test_users_who_come_twice_and_unequal_lists_are_found(
    prepared: str, tmp_path: Path
) -> None:
    found = broken(rewrite(prepared, tmp_path / "twice", user_twice))
    assert "users" in found
    assert "splits" not in found
    shorter = rewrite(
        prepared, tmp_path / "shorter", lambda rows, info: rows[-1]["label_like"].pop()
    )
    assert "behaviours" in broken(shorter)
