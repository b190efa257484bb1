"""The audit of searches and feeds: correct tables pass, and a planted violation breaks
the rules that cover it, and no other.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from core.tables import read_manifest
from pipelines.prepare.audit.rules import audit
from tests.fixtures.audited_tables import Row, copy_with_change, find_violations
from tests.fixtures.commands import LOG, prepare_log, run_job, write_rows

SOURCES = Path(__file__).parents[3] / "jobs/configs/sources"
LOGS: dict[str, tuple[str, int, Row]] = {
    "search": (
        "simulated_search",
        400,
        {"max_events": 12, "search.windows_days": "[1, 30]"},
    ),
    "actions": (
        "simulated_feed",
        900,
        {
            "max_events": 25,
            "actions.counts.keys": "[item, author, user]",
            "actions.counts.counted_labels": "[long_dwell, like]",
            "actions.counts.windows_days": "[1, 7]",
        },
    ),
}
"""Mapping file, number of events and options of jobs.prepare, by kind."""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> dict[str, str]:
    """Tables of a small simulated log, by kind."""
    tables = {}
    for kind, (source, events, options) in LOGS.items():
        folder = tmp_path_factory.mktemp(kind)
        sizes = {"users": 60, "items": 50, "events": events, "seed": 3}
        run_job("simulate", kind=kind, output=folder / "raw", **sizes)
        mapping = (SOURCES / f"{source}.yaml").read_text()
        prepare_log(mapping, folder / "raw", folder / "tables", **options)
        tables[kind] = str(folder / "tables")
    return tables


@pytest.mark.parametrize("kind", LOGS)
def test_correct_tables_pass(prepared, kind):
    rules = {rule.name: rule.rows for rule in audit(prepared[kind])}
    info = read_manifest(f"{prepared[kind]}/sequences").info

    assert find_violations(prepared[kind]) == {}
    assert info["truncated_users"] > 0
    num_requests = sum(info["requests"].values())
    if kind == "search":
        assert rules["targets"] == num_requests
        num_candidates = sum(info["candidates"].values())
        assert rules["windows"] == num_candidates + info["interactions"]
        assert rules["queries"] == info["queries"] > 0
    else:
        assert rules["windows"] == rules["tasks"] == num_requests
        assert rules["splits"] == info["users"] == 60


# Functions that change rows of `sequences`, and the info of its manifest.


def find_search(rows: list[Row]) -> tuple[Row, Row]:
    """Return a user with three behaviours, and the first request of the user."""
    for row in rows:
        if row["requests"][-1]["history_end"] >= 3:
            return row, row["requests"][0]
    raise AssertionError("no user with three behaviours")


def find_feed(rows: list[Row]) -> tuple[Row, int]:
    """Return a user with events in all splits, and the index of the first of test."""
    for row in rows:
        if 2 < row["train_end"] < row["val_end"] < len(row["item_index"]) - 1:
            return row, row["val_end"]
    raise AssertionError("no user with events in all splits")


def flip_labels(rows: list[Row], info: Row) -> None:
    _, request = find_search(rows)
    request["label_purchase"] = [not label for label in request["label_purchase"]]


def change_behaviour(rows: list[Row], info: Row) -> None:
    find_search(rows)[0]["label_click"][0] = False


def move_test_request_to_train(rows: list[Row], info: Row) -> None:
    requests = [request for row in rows for request in row["requests"]]
    next(r for r in requests if r["split"] == "test")["split"] = "train"


def count_a_later_event(rows: list[Row], info: Row) -> None:
    column = info["features"].index("item_clicks_30d")
    find_search(rows)[1]["features"][column] += 0.5


def remove_last_row(rows: list[Row], info: Row) -> None:
    rows.pop()


def change_item(rows: list[Row], info: Row) -> None:
    row, index = find_feed(rows)
    row["item_index"][index] = (row["item_index"][index] + 1) % info["items"]


def flip_task(rows: list[Row], info: Row) -> None:
    row, index = find_feed(rows)
    task = info["tasks"].index("contribution")
    row["tasks"][index][task] = 1 - row["tasks"][index][task]


def move_candidate_to_context(rows: list[Row], info: Row) -> None:
    find_feed(rows)[0]["val_end"] += 1


def count_a_later_like(rows: list[Row], info: Row) -> None:
    row, index = find_feed(rows)
    row["features"][index][info["features"].index("item_like_7d")] += 0.5


@pytest.mark.parametrize(
    ("kind", "change", "rules"),
    [
        (
            "search",
            lambda rows, info: find_search(rows)[1].update(history_end=1),
            {"history"},
        ),
        ("search", flip_labels, {"targets"}),
        ("search", change_behaviour, {"behaviours"}),
        ("search", move_test_request_to_train, {"splits", "counts"}),
        ("search", count_a_later_event, {"windows"}),
        ("search", remove_last_row, {"users", "counts"}),
        ("actions", change_item, {"behaviours", "windows"}),
        ("actions", flip_task, {"tasks"}),
        ("actions", move_candidate_to_context, {"splits", "counts"}),
        ("actions", count_a_later_like, {"windows"}),
        (
            "actions",
            lambda rows, info: info["base_rates"].update(like=0.5),
            {"counts"},
        ),
        ("actions", remove_last_row, {"users", "counts"}),
    ],
)
def test_a_planted_violation_is_reported_under_its_rules(
    prepared, tmp_path, kind, change, rules
):
    copied = copy_with_change(prepared[kind], tmp_path, change)
    assert find_violations(copied).keys() == rules


def test_a_missing_query_is_reported(prepared, tmp_path):
    copied = copy_with_change(prepared["search"], tmp_path, remove_last_row, "queries")
    assert {"queries", "counts"} <= find_violations(copied).keys()


@pytest.fixture(
    scope="session",
    params=[{"time": {"column": "clicked_at", "unit": "s"}}, {"delay_minutes": 150}],
    ids=["time", "delay"],
)
def delayed(request, tmp_path_factory) -> str:
    """Tables of overlapping searches of four users, whose results are seconds apart and
    whose clicks are visible later, some after the next search.
    """
    begin, folder = 1_555_200_000, tmp_path_factory.mktemp("late")
    rows = [
        {
            "user": f"u{user}",
            "search": f"s{user}-{number}",
            "ms": begin * 1000 + number * 7_200_000 + user + 4000 * position,
            "query": f"q{number % 3}",
            "item": f"i{(number + position) % 6}",
            "place": position,
            "click": (number + position) % 2,
            "clicked_at": begin + number * 7_200 + position * 5_000 + 1,
        }
        for user, number, position in product(range(4), range(12), range(4))
    ]
    write_rows(folder / "log.jsonl", rows)
    mapping = LOG | {
        "request": "search",
        "query": "query",
        "position": "place",
        "labels": {"click": {"column": "click", **request.param}},
        "prepare": {"kind": "search", "core": 0, "behaviour": "click"},
    }
    options = {"search.windows_days": "[1]", "search.delay_minutes": 0}
    prepare_log(mapping, folder, folder / "tables", **options)
    return str(folder / "tables")


def test_tables_with_delayed_labels_pass(delayed):
    rules = {rule.name: rule for rule in audit(delayed)}
    assert find_violations(delayed) == {}
    assert rules["known"].rows == 4 * 12 * 4


def ignore_label_times(rows: list[Row], info: Row) -> None:
    """Count all behaviours whose impression is before the request."""
    for row in rows:
        for request in row["requests"]:
            shown = [t for t in row["timestamp_ms"] if t < request["timestamp_ms"]]
            request["history_end"] = len(shown)


def change_label_time(events: list[Row], info: Row) -> None:
    next(row for row in events if row["label_click"])["known_click"] -= 86_400_000


def test_a_click_that_is_used_before_its_label_time_is_reported(delayed, tmp_path):
    copied = copy_with_change(delayed, tmp_path / "a", ignore_label_times)
    assert list(find_violations(copied)) == ["history"]
    copied = copy_with_change(delayed, tmp_path / "b", change_label_time, "events")
    assert "known" in find_violations(copied)
