"""The audit passes the tables of a search log and reports each planted violation, and
only that violation.
"""

from __future__ import annotations

import json
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.schemas import QUERIES
from core.tables import read_manifest
from pipelines.prepare.audit.rules import audit
from pipelines.prepare.kinds.simulation import draw_searches, write_log
from pipelines.prepare.prepare import prepare
from pipelines.prepare.reading.log import load_source
from pipelines.prepare.settings.simulation import Settings
from tests.fixtures.audited_tables import Change, Row, copy_with_change, find_violations
from tests.fixtures.commands import read_config, read_rows, read_table

SOURCE = (
    Path(__file__).parents[3] / "jobs" / "configs" / "sources" / "simulated_search.yaml"
)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> str:
    """Tables of a small simulated log, in two parts."""
    folder = tmp_path_factory.mktemp("search")
    write_log(str(folder / "raw"), "search", Settings(60, 60, 400, 3), draw_searches)
    source, defaults = load_source(str(SOURCE))
    config = read_config(
        defaults,
        {"partitions": 2, "max_events": 12, "search": {"windows_days": [1, 30]}},
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
    info = read_manifest(prepared + "/sequences").info

    assert find_violations(prepared) == {}
    assert info["truncated_users"] > 0
    assert rules["targets"].rows == sum(info["requests"].values())
    num_candidates = sum(info["candidates"].values())
    assert rules["windows"].rows == num_candidates + info["interactions"]
    assert rules["queries"].rows == info["queries"] > 0


def find_user(rows: list[Row], min_behaviours: int = 3) -> Row:
    """Return a user whose last request has at least this many behaviours before it."""
    for row in rows:
        has_behaviours = len(row["item_index"]) >= min_behaviours
        if has_behaviours and row["requests"][-1]["history_end"] >= min_behaviours:
            return row
    raise AssertionError(f"no user with {min_behaviours} behaviours")


def find_request(rows: list[Row]) -> Row:
    """Return the first request of a user with behaviours."""
    return find_user(rows)["requests"][0]  # type: ignore[no-any-return]


def extend_history(rows: list[Row], info: Row) -> None:
    find_request(rows)["history_end"] = 1


def swap_candidates(rows: list[Row], info: Row) -> None:
    candidates = find_request(rows)["candidates"]
    candidates[0], candidates[1] = candidates[1], candidates[0]


def change_position(rows: list[Row], info: Row) -> None:
    find_request(rows)["positions"][0] = 7


def flip_labels(rows: list[Row], info: Row) -> None:
    request = find_request(rows)
    request["label_purchase"] = [not label for label in request["label_purchase"]]


def change_query(rows: list[Row], info: Row) -> None:
    request = find_request(rows)
    request["query_index"] = (request["query_index"] + 1) % info["queries"]


def add_to_request_counts(info: Row, request: Row, difference: int) -> None:
    """Add `difference` to the manifest's counts of requests like `request`."""
    split = request["split"]
    info["requests"][split] += difference
    info["candidates"][split] += difference * len(request["candidates"])
    if len(set(request["label_click"])) == 1:
        info["requests_one_class"][split] += difference


def remove_request(rows: list[Row], info: Row) -> None:
    add_to_request_counts(info, find_user(rows)["requests"].pop(), -1)


def change_behaviour(rows: list[Row], info: Row) -> None:
    find_user(rows)["label_click"][0] = False


def move_test_request_to_train(rows: list[Row], info: Row) -> None:
    requests = [request for row in rows for request in row["requests"]]
    request = next(request for request in requests if request["split"] == "test")
    add_to_request_counts(info, request, -1)
    request["split"] = "train"
    add_to_request_counts(info, request, 1)


def change_count(rows: list[Row], info: Row) -> None:
    info["requests_one_class"]["train"] = 999


def increase_feature(values: list[float], info: Row, feature: str) -> None:
    """Increase a feature, as if a later event had been counted."""
    values[info["features"].index(feature)] += 0.5


def increase_feature_of_request(rows: list[Row], info: Row) -> None:
    increase_feature(find_request(rows)["features"], info, "item_clicks_30d")


def increase_feature_of_behaviour(rows: list[Row], info: Row) -> None:
    increase_feature(find_user(rows)["features"][0], info, "pair_seen")


def remove_delay(rows: list[Row], info: Row) -> None:
    info["search"]["delay_minutes"] = 0


def remove_feature(rows: list[Row], info: Row) -> None:
    find_request(rows)["features"].pop()


def remove_user(rows: list[Row], info: Row) -> None:
    row = rows.pop()
    info["users"] -= 1
    info["interactions"] -= len(row["item_index"])
    for request in row["requests"]:
        add_to_request_counts(info, request, -1)


PLANTED: dict[str, tuple[Change, set[str]]] = {
    "a later behaviour in a history": (extend_history, {"history"}),
    "other candidates": (swap_candidates, {"targets", "windows"}),
    "another position": (change_position, {"targets", "windows"}),
    "another label": (flip_labels, {"targets"}),
    "another query": (change_query, {"targets", "windows"}),
    "a missing request": (remove_request, {"targets"}),
    "another behaviour": (change_behaviour, {"behaviours"}),
    "a test request in train": (move_test_request_to_train, {"splits"}),
    "a wrong count of requests of one class": (change_count, {"counts"}),
    "a later event counted in a request": (increase_feature_of_request, {"windows"}),
    "a later event counted in a behaviour": (
        increase_feature_of_behaviour,
        {"windows"},
    ),
    "no delay": (remove_delay, {"windows"}),
    "a missing feature": (remove_feature, {"windows"}),
    "a missing user": (remove_user, {"users"}),
}
"""Changes of the rows and the info of `sequences`, and the rules that they violate."""


@pytest.mark.parametrize("violation", PLANTED)
def test_a_planted_violation_is_reported_under_its_rules(
    prepared: str, tmp_path: Path, violation: str
) -> None:
    change, rules = PLANTED[violation]
    assert set(find_violations(copy_with_change(prepared, tmp_path, change))) == rules


def test_a_missing_query_is_reported(prepared: str, tmp_path: Path) -> None:
    uri = copy_with_change(prepared, tmp_path, lambda rows, info: rows.pop(), "queries")
    assert {"queries", "counts"} <= set(find_violations(uri))
    assert read_table(uri + "/queries").schema.equals(QUERIES)


DAY_S = 86_400
FIRST_DAY_S = 18_000 * DAY_S


def write_spread_log(folder: Path) -> Path:
    """Write a raw log of overlapping searches of four users.

    Every search has a row per result, the results are seconds apart, and every second
    result is clicked.
    """
    rows = [
        {
            "user": f"u{user}",
            "search": f"s{user}-{number}",
            "ms": FIRST_DAY_S * 1000 + number * 7_200_000 + user + 4000 * position,
            "query": f"q{number % 3}",
            "item": f"i{(number + position) % 6}",
            "place": position,
            "click": (number + position) % 2,
            "clicked_at": FIRST_DAY_S + number * 7_200 + position * 5_000 + 1,
        }
        for user, number, position in product(range(4), range(12), range(4))
    ]
    (folder / "raw").mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "raw" / "log.jsonl").write_text(lines)
    return folder / "raw"


SPREAD_SOURCE = {
    "files": "log.jsonl",
    "user": "user",
    "request": "search",
    "query": "query",
    "item": "item",
    "position": "place",
    "time": {"column": "ms", "unit": "ms"},
    "labels": {"click": {"column": "click"}},
    "prepare": {
        "kind": "search",
        "core": 0,
        "behaviour": "click",
        "search": {"windows_days": [1], "delay_minutes": 0},
    },
}


def prepare_spread_log(folder: Path, source: dict[str, Any]) -> str:
    """Write and prepare the log with a source; return its tables."""
    raw = write_spread_log(folder)
    (folder / "source.yaml").write_text(yaml.safe_dump(source))
    log_source, defaults = load_source(str(folder / "source.yaml"))
    tables = str(folder / "tables")
    prepare(log_source, str(raw), tables, read_config(defaults), report=str)
    return tables


@pytest.fixture(scope="session")
def spread(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tables of a log whose results have different times within a request."""
    folder = tmp_path_factory.mktemp("spread")
    return prepare_spread_log(folder, SPREAD_SOURCE)


def split_request(
    request: Row, behaviour_times: list[int], num_features: int
) -> list[Row]:
    """Return one request per result, at the result's time."""
    parts = []
    for n in range(len(request["candidates"])):
        time = request["timestamp_ms"] + 4000 * n
        part = {
            **request,
            "timestamp_ms": time,
            "history_end": sum(earlier < time for earlier in behaviour_times),
            "features": request["features"][n * num_features :][:num_features],
        }
        for name in ("candidates", "positions", "label_click"):
            part[name] = [request[name][n]]
        parts.append(part)
    return parts


def test_a_request_split_into_one_per_result_is_reported(
    spread: str, tmp_path: Path
) -> None:
    """As if the time were part of a request's key: the history of each result has the
    clicks on the results before it.
    """

    def split_requests(rows: list[Row], info: Row) -> None:
        for row in rows:
            parts = [
                split_request(request, row["timestamp_ms"], len(info["features"]))
                for request in row["requests"]
            ]
            row["requests"] = list(chain.from_iterable(parts))

    tables = copy_with_change(spread, tmp_path, split_requests)

    rules = {rule.name: rule for rule in audit(tables)}
    assert rules["history"].violations == 0  # each has the behaviours before it
    assert rules["targets"].violations == 4 * 48


def test_a_history_with_a_click_of_the_same_request_is_reported(
    spread: str, tmp_path: Path
) -> None:
    def extend_last_history(rows: list[Row], info: Row) -> None:
        rows[0]["requests"][-1]["history_end"] += 1

    assert [
        *find_violations(copy_with_change(spread, tmp_path, extend_last_history))
    ] == ["history"]


@pytest.fixture(scope="session", params=["time", "delay"])
def delayed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Tables of a log whose clicks are visible later than their impressions, some after
    the next search.
    """
    if request.param == "time":
        options = {"time": {"column": "clicked_at", "unit": "s"}}
    else:
        options = {"delay_minutes": 150}
    click = SPREAD_SOURCE["labels"]["click"] | options  # type: ignore[index]
    source = SPREAD_SOURCE | {"labels": {"click": click}}
    return prepare_spread_log(tmp_path_factory.mktemp("late"), source)


def count_earlier_behaviours(row: Row, request: Row) -> int:
    """Return the number of a user's behaviours whose impression is before a request."""
    return sum(time < request["timestamp_ms"] for time in row["timestamp_ms"])


def test_tables_with_delayed_labels_pass(delayed: str) -> None:
    rules = {rule.name: rule for rule in audit(delayed)}
    assert find_violations(delayed) == {}
    assert rules["known"].rows == 4 * 12 * 4


def test_delayed_labels_shorten_histories(delayed: str) -> None:
    for row in read_rows(delayed, "sequences"):
        assert row["known_click"] == sorted(row["known_click"])
        visible = sum(request["history_end"] for request in row["requests"])
        shown = sum(
            count_earlier_behaviours(row, request) for request in row["requests"]
        )
        assert visible < shown


def test_a_history_with_a_click_before_its_label_time_is_reported(
    delayed: str, tmp_path: Path
) -> None:
    def ignore_label_times(rows: list[Row], info: Row) -> None:
        for row in rows:
            for request in row["requests"]:
                request["history_end"] = count_earlier_behaviours(row, request)

    assert [
        *find_violations(copy_with_change(delayed, tmp_path, ignore_label_times))
    ] == ["history"]


def test_counts_of_clicks_before_their_label_time_are_reported(
    delayed: str, spread: str, tmp_path: Path
) -> None:
    """The features are those of the same log with clicks at the time of impressions."""
    users = read_rows(spread, "sequences")
    requests_without_delay = {row["user_id"]: row["requests"] for row in users}

    def ignore_label_times(rows: list[Row], info: Row) -> None:
        for row in rows:
            for request, other in zip(
                row["requests"], requests_without_delay[row["user_id"]], strict=True
            ):
                request["features"] = other["features"]

    assert [
        *find_violations(copy_with_change(delayed, tmp_path, ignore_label_times))
    ] == ["windows"]


def test_a_label_time_that_differs_from_the_event_is_reported(
    delayed: str, tmp_path: Path
) -> None:
    def change_label_time(rows: list[Row], info: Row) -> None:
        next(row for row in rows if row["label_click"])["known_click"] -= DAY_S * 1000

    assert "known" in find_violations(
        copy_with_change(delayed, tmp_path, change_label_time, "events")
    )
