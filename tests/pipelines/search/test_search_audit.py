"""The audit passes the tables of a search log and finds each kind of planted violation,
and only that one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.storage.tables import read_manifest, read_table
from pipelines.data.audit.rules import audit
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import load_source
from pipelines.data.schemas import QUERIES
from pipelines.data.search.simulator import SearchSettings, simulate_search
from pipelines.data.settings import read_config
from tests.fixtures.audited import Change, Row, broken, rewrite

SOURCE = (
    Path(__file__).parents[3] / "jobs" / "configs" / "sources" / "simulated_search.yaml"
)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> str:
    """Tables of a small simulated log, in two parts."""
    folder = tmp_path_factory.mktemp("search")
    simulate_search(str(folder / "raw"), SearchSettings(60, 60, 400, 3, 0.5))
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
    assert broken(prepared) == {}
    info = read_manifest(prepared + "/sequences").info
    assert info["truncated_users"] > 0
    assert rules["targets"].rows == sum(info["requests"].values())
    assert (
        rules["windows"].rows == sum(info["candidates"].values()) + info["interactions"]
    )
    assert rules["queries"].rows == info["queries"] > 0


def some(rows: list[Row], least: int = 3) -> Row:
    """A user with so many behaviours and requests after them."""
    return next(
        row
        for row in rows
        if len(row["item_index"]) >= least
        and row["requests"][-1]["history_end"] >= least
    )


def shown(rows: list[Row]) -> Row:
    """What such a user's first request showed."""
    return some(rows)["requests"][0]  # type: ignore[no-any-return]


def candidates_swapped(rows: list[Row], info: Row) -> None:
    candidates = shown(rows)["candidates"]
    candidates[0], candidates[1] = candidates[1], candidates[0]


def counted(info: Row, request: Row, by: int) -> None:
    """The manifest counts one such request more or less."""
    split = request["split"]
    info["requests"][split] += by
    info["candidates"][split] += by * len(request["candidates"])
    info["requests_one_class"][split] += by * (len(set(request["label_click"])) == 1)


def request_lost(rows: list[Row], info: Row) -> None:
    counted(info, some(rows)["requests"].pop(), -1)


def moved_to_train(rows: list[Row], info: Row) -> None:
    request = next(r for row in rows for r in row["requests"] if r["split"] == "test")
    counted(info, request, -1)
    request["split"] = "train"
    counted(info, request, 1)


def user_lost(rows: list[Row], info: Row) -> None:
    row = rows.pop()
    info["users"] -= 1
    info["interactions"] -= len(row["item_index"])
    for request in row["requests"]:
        counted(info, request, -1)


def more(values: list[float], info: Row, feature: str) -> None:
    """A feature is as if something more had been known."""
    values[info["features"].index(feature)] += 0.5


PLANTED: dict[str, tuple[Change, set[str]]] = {
    "the future in a history": (
        lambda rows, info: shown(rows).update(history_end=1),
        {"history"},
    ),
    "other candidates": (candidates_swapped, {"targets", "windows"}),
    "another position": (
        lambda rows, info: shown(rows)["positions"].__setitem__(0, 7),
        {"targets", "windows"},
    ),
    "another label": (
        lambda rows, info: shown(rows).update(
            label_purchase=[not v for v in shown(rows)["label_purchase"]]
        ),
        {"targets"},
    ),
    "another query": (
        lambda rows, info: shown(rows).update(
            query_index=(shown(rows)["query_index"] + 1) % info["queries"]
        ),
        {"targets", "windows"},
    ),
    "a request lost": (request_lost, {"targets"}),
    "another behaviour": (
        lambda rows, info: some(rows)["label_click"].__setitem__(0, False),
        {"behaviours"},
    ),
    "a test request in train": (moved_to_train, {"splits"}),
    "one class not counted": (
        lambda rows, info: info["requests_one_class"].update(train=999),
        {"counts"},
    ),
    "a count of the future": (
        lambda rows, info: more(shown(rows)["features"], info, "item_clicks_30d"),
        {"windows"},
    ),
    "a count in a behaviour": (
        lambda rows, info: more(some(rows)["features"][0], info, "pair_seen"),
        {"windows"},
    ),
    "no delay": (
        lambda rows, info: info["search"].update(delay_minutes=0),
        {"windows"},
    ),
    "a feature missing": (
        lambda rows, info: shown(rows)["features"].pop(),
        {"windows"},
    ),
    "a user lost": (user_lost, {"users"}),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_found(prepared: str, tmp_path: Path, what: str) -> None:
    change, rules = PLANTED[what]
    assert set(broken(rewrite(prepared, tmp_path, change))) == rules


def test_a_query_that_is_missing_is_found(prepared: str, tmp_path: Path) -> None:
    uri = rewrite(prepared, tmp_path, lambda rows, info: rows.pop(), "queries")
    assert {"queries", "counts"} <= set(broken(uri))
    assert read_table(uri + "/queries").schema.equals(QUERIES)


def spread_log(folder: Path) -> Path:
    """A raw log of a row per result, seconds apart, of searches that overlap; every
    second result is clicked.
    """
    rows = [
        {
            "user": f"u{user}",
            "search": f"s{user}-{number}",
            "ms": 18_000 * 86_400_000 + number * 7_200_000 + user + 4000 * place,
            "query": f"q{number % 3}",
            "item": f"i{(number + place) % 6}",
            "place": place,
            "click": (number + place) % 2,
            "clicked_at": 18_000 * 86_400 + number * 7_200 + place * 5_000 + 1,
        }
        for user in range(4)
        for number in range(12)
        for place in range(4)
    ]
    (folder / "raw").mkdir(parents=True)
    (folder / "raw" / "log.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return folder / "raw"


SPREAD = {
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


def tables_of(
    folder: Path, raw: Path, source: dict[str, Any], say: Callable[[str], None]
) -> str:
    (folder / "source.yaml").write_text(yaml.safe_dump(source))
    made, defaults = load_source(str(folder / "source.yaml"))
    prepare(made, str(raw), str(folder / "tables"), read_config(defaults), report=say)
    return str(folder / "tables")


@pytest.fixture(scope="session")
def spread(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tables of a log whose results have times of their own."""
    folder, said = tmp_path_factory.mktemp("spread"), []
    uri = tables_of(folder, spread_log(folder), SPREAD, said.append)
    assert any(
        "results of 48 requests have different times, up to 0.20 minutes apart" in line
        for line in said
    )
    assert read_manifest(uri + "/sequences").info["max_request_spread_ms"] == 12_000
    return uri


def test_requests_with_results_of_several_times_pass(spread: str) -> None:
    rules = {rule.name: rule for rule in audit(spread)}
    assert {
        name: rule.examples for name, rule in rules.items() if rule.violations
    } == {}
    assert rules["targets"].rows == 48


def test_a_request_that_is_cut_into_several_is_found(
    spread: str, tmp_path: Path
) -> None:
    """As if the time were part of a request's key: each result its own request, which
    sees the clicks before it.
    """

    def cut(rows: list[Row], info: Row) -> None:
        width = len(info["features"])
        for row in rows:
            requests = []
            for whole in row["requests"]:
                for n in range(len(whole["candidates"])):
                    lists = {
                        name: [whole[name][n]]
                        for name in ("candidates", "positions", "label_click")
                    }
                    time = whole["timestamp_ms"] + 4000 * n
                    seen = sum(moment < time for moment in row["timestamp_ms"])
                    part = {
                        "timestamp_ms": time,
                        "history_end": seen,
                        "features": whole["features"][n * width :][:width],
                    }
                    requests.append(whole | lists | part)
            row["requests"] = requests

    found = {rule.name: rule for rule in audit(rewrite(spread, tmp_path, cut))}
    assert (
        found["history"].violations == 0
    )  # each is right about what is earlier than it
    assert found["targets"].violations == 4 * 48


def test_a_history_with_the_request_s_own_click_is_found(
    spread: str, tmp_path: Path
) -> None:
    end = read_table(spread + "/sequences").to_pylist()[0]["requests"][-1][
        "history_end"
    ]
    found = rewrite(
        spread,
        tmp_path,
        lambda rows, info: rows[0]["requests"][-1].update(history_end=end + 1),
    )
    assert [*broken(found)] == ["history"]


@pytest.fixture(scope="session", params=["time", "delay"])
def late(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Tables of a log whose clicks are known later than their impressions, some after
    the next search.
    """
    folder = tmp_path_factory.mktemp("late")
    when = (
        {"time": {"column": "clicked_at", "unit": "s"}}
        if request.param == "time"
        else {"delay_minutes": 150}
    )
    source = SPREAD | {"labels": {"click": SPREAD["labels"]["click"] | when}}  # type: ignore[index]
    return tables_of(folder, spread_log(folder), source, lambda line: None)


def test_labels_that_are_known_later_pass(late: str) -> None:
    rules = {rule.name: rule for rule in audit(late)}
    assert {
        name: rule.examples for name, rule in rules.items() if rule.violations
    } == {}
    assert rules["known"].rows == 4 * 12 * 4
    users = read_table(late + "/sequences").to_pylist()
    for user in users:
        assert user["known_click"] == sorted(user["known_click"])
        shown = [
            sum(time < r["timestamp_ms"] for time in user["timestamp_ms"])
            for r in user["requests"]
        ]
        assert sum(r["history_end"] for r in user["requests"]) < sum(shown)


def test_a_click_before_it_is_known_is_found(late: str, tmp_path: Path) -> None:
    def early(rows: list[Row], info: Row) -> None:
        """Histories as if clicks were known when their results were shown."""
        for row in rows:
            for request in row["requests"]:
                request["history_end"] = sum(
                    time < request["timestamp_ms"] for time in row["timestamp_ms"]
                )

    assert [*broken(rewrite(late, tmp_path, early))] == ["history"]


def test_counts_of_clicks_before_they_are_known_are_found(
    late: str, spread: str, tmp_path: Path
) -> None:
    """Features of the same log, whose clicks count from when they were shown."""
    shown = {
        row["user_id"]: row for row in read_table(spread + "/sequences").to_pylist()
    }

    def early(rows: list[Row], info: Row) -> None:
        for row in rows:
            for request, other in zip(
                row["requests"], shown[row["user_id"]]["requests"], strict=True
            ):
                request["features"] = other["features"]

    assert [*broken(rewrite(late, tmp_path, early))] == ["windows"]


def test_a_label_time_that_its_event_does_not_give_is_found(
    late: str, tmp_path: Path
) -> None:
    def early(rows: list[Row], info: Row) -> None:
        next(row for row in rows if row["label_click"])["known_click"] -= 86_400_000

    assert "known" in broken(rewrite(late, tmp_path, early, "events"))
