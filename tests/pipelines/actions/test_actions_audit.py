"""The audit passes the tables of a log of actions and reports each planted violation, and
only that violation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.tables import read_manifest
from pipelines.prepare.audit.rules import audit
from pipelines.prepare.kinds.simulation import draw_feed, write_log
from pipelines.prepare.prepare import prepare
from pipelines.prepare.reading.log import load_source
from pipelines.prepare.settings.simulation import Settings
from tests.fixtures.audited_tables import Change, Row, copy_with_change, find_violations
from tests.fixtures.commands import read_config

SOURCE = (
    Path(__file__).parents[3] / "jobs" / "configs" / "sources" / "simulated_feed.yaml"
)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> str:
    """Tables of a small simulated feed, in two parts, with counts of items, authors and
    users.
    """
    folder = tmp_path_factory.mktemp("feed")
    write_log(str(folder / "raw"), "actions", Settings(60, 40, 900, 3), draw_feed)
    source, defaults = load_source(str(SOURCE))
    counts = {
        "keys": ["item", "author", "user"],
        "counted_labels": ["long_dwell", "like"],
        "windows_days": [1, 7],
    }
    actions = defaults["actions"] | {"counts": counts}
    config = read_config(
        defaults, {"partitions": 2, "max_events": 25, "actions": actions}
    )
    tables = str(folder / "tables")
    prepare(source, str(folder / "raw"), tables, config, report=str)
    return tables


def test_correct_tables_pass(prepared: str) -> None:
    rules = {rule.name: rule for rule in audit(prepared)}
    info = read_manifest(prepared + "/sequences").info

    assert find_violations(prepared) == {}
    assert info["truncated_users"] > 0
    assert (
        rules["windows"].rows == rules["tasks"].rows == sum(info["requests"].values())
    )
    assert rules["splits"].rows == info["users"] == 60


def find_user(rows: list[Row]) -> Row:
    """Return the first user with events in train, val and test."""
    for row in rows:
        if 2 < row["train_end"] < row["val_end"] < len(row["item_index"]) - 1:
            return row
    raise AssertionError("no user with events in all splits")


def swap_events(rows: list[Row], info: Row) -> None:
    """Swap the first two events of a user in all columns."""
    for values in find_user(rows).values():
        if isinstance(values, list):
            values[:2] = values[1::-1]


def change_candidate(column: str, value: Callable[[Any, Row], Any]) -> Change:
    """Return a change of one column of a test candidate to `value(old value, info)`."""

    def change(rows: list[Row], info: Row) -> None:
        row = find_user(rows)
        index = row["val_end"]
        row[column][index] = value(row[column][index], info)

    return change


def increase_candidate(column: str, name: str) -> Change:
    """Return an increase of one action or feature of a test candidate."""

    def change(rows: list[Row], info: Row) -> None:
        row = find_user(rows)
        row[column][row["val_end"]][info[column].index(name)] += 0.5

    return change


def next_item(item: int, info: Row) -> int:
    return (item + 1) % info["items"]


def flip_contribution(tasks: list[int], info: Row) -> list[int]:
    flipped = list(tasks)
    index = info["tasks"].index("contribution")
    flipped[index] = 1 - flipped[index]
    return flipped


def change_threshold(rows: list[Row], info: Row) -> None:
    info["definitions"]["tasks"]["long_dwell"]["above"] = 12_000


def move_candidate_to_context(rows: list[Row], info: Row) -> None:
    find_user(rows)["val_end"] += 1
    info["requests"]["val"] += 1
    info["requests"]["test"] -= 1


def repeat_user(rows: list[Row], info: Row) -> None:
    """Append a user's row again, and count it in the manifest."""
    row = rows[0]
    rows.append(copy.deepcopy(row))
    train, val, length = row["train_end"], row["val_end"], len(row["item_index"])
    info["users"] += 1
    info["interactions"] += length
    for split, begin, end in (
        ("train", 0, train),
        ("val", train, val),
        ("test", val, length),
    ):
        info["requests"][split] += end - begin
        if end > begin:
            info["users_with_candidates"][split] += 1
            info["users_without_context"][split] += begin == 0


def move_val_start(rows: list[Row], info: Row) -> None:
    """Record a validation start an hour later than it was."""
    info["split"]["val_start_ms"] += 3_600_000


def remove_delay(rows: list[Row], info: Row) -> None:
    info["definitions"]["counts"]["delay_minutes"] = 0


def rename_feature(rows: list[Row], info: Row) -> None:
    info["features"][0] = "item_magic_1d"


def change_base_rate(rows: list[Row], info: Row) -> None:
    info["base_rates"]["like"] += 0.01


def change_feature_mean(rows: list[Row], info: Row) -> None:
    info["feature_mean"][0] = 9.0


def change_user_count(rows: list[Row], info: Row) -> None:
    info["users_without_context"]["test"] += 1


PLANTED: dict[str, tuple[Change, set[str]]] = {
    "events out of order": (swap_events, {"behaviours"}),
    "another item": (
        change_candidate("item_index", next_item),
        {"behaviours", "windows"},
    ),
    "another label": (
        change_candidate("label_share", lambda label, info: not label),
        {"behaviours", "tasks"},
    ),
    "another task": (change_candidate("tasks", flip_contribution), {"tasks"}),
    "another action": (increase_candidate("actions", "dwell"), {"tasks"}),
    "another threshold": (change_threshold, {"tasks", "windows"}),
    "a candidate in the context": (move_candidate_to_context, {"splits"}),
    "a later start of val": (move_val_start, {"splits", "windows"}),
    "a later event in a count": (
        increase_candidate("features", "item_like_7d"),
        {"windows"},
    ),
    "another author's event in a count": (
        increase_candidate("features", "author_exposures_1d"),
        {"windows"},
    ),
    "no delay": (remove_delay, {"windows"}),
    "an unknown feature": (rename_feature, {"windows"}),
    "another base rate": (change_base_rate, {"counts"}),
    "the scale of another log": (change_feature_mean, {"counts"}),
    "a wrong count of users": (change_user_count, {"counts"}),
}
"""Changes of the rows and the info of `sequences`, and the rules that they violate."""


@pytest.mark.parametrize("violation", PLANTED)
def test_a_planted_violation_is_reported_under_its_rules(
    prepared: str, tmp_path: Path, violation: str
) -> None:
    change, rules = PLANTED[violation]
    assert set(find_violations(copy_with_change(prepared, tmp_path, change))) == rules


def test_a_repeated_user_is_reported(prepared: str, tmp_path: Path) -> None:
    violated = find_violations(copy_with_change(prepared, tmp_path, repeat_user))
    assert "users" in violated
    assert "splits" not in violated


def test_columns_of_unequal_length_are_reported(prepared: str, tmp_path: Path) -> None:
    def shorten_column(rows: list[Row], info: Row) -> None:
        rows[-1]["label_like"].pop()

    assert "behaviours" in find_violations(
        copy_with_change(prepared, tmp_path, shorten_column)
    )
