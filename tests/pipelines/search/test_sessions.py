"""Sessions in the histories of searches equal a loop over the raw rows, leak nothing, and
are read by models and served requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from core.tables import read_manifest
from tests.fixtures.audited_tables import Row, copy_with_change, find_violations
from tests.fixtures.commands import read_column, read_rows
from tests.fixtures.search_log import (
    HOUR_MS,
    draw_searches,
    prepare_searches,
)
from tests.fixtures.served_models import build_search_requests, serve_ranker

SECTION = {
    "files": "session_*.csv",
    "user": "user",
    "item": "item",
    "time": {"column": "ms", "unit": "ms"},
}
TYPES = ("cart", "view")
SEARCHES = draw_searches()


def draw_sessions() -> pd.DataFrame:
    """Draw behaviours, many at the time of a search of the user, some of an unknown user
    or item, and some twice.
    """
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(300):
        search = SEARCHES[rng.integers(len(SEARCHES))]
        user = search["user"] if rng.random() < 0.9 else "stranger"
        time = search["ms"] + int(rng.integers(-2, 3)) * HOUR_MS // 2
        item = f"i{rng.integers(18)}"
        rows.append((user, item, time, TYPES[int(rng.random() < 0.3)]))
    return pd.DataFrame([*rows, *rows[:20]], columns=["user", "item", "ms", "kind"])


SESSIONS = draw_sessions()


def prepare_sessions(folder: Path, **options: Any) -> str:
    """Prepare the log with sessions; return the folder of the tables."""
    (folder / "raw").mkdir()
    SESSIONS.to_csv(folder / "raw/session_1.csv", index=False)
    sections = {name: SECTION | {"where": f"kind = '{name}'"} for name in TYPES}
    return prepare_searches(folder, SEARCHES, {"sessions": sections}, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> str:
    """Tables of the log without sessions."""
    return prepare_searches(tmp_path_factory.mktemp("plain"), SEARCHES)


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> str:
    """Tables of the log with sessions."""
    return prepare_sessions(tmp_path_factory.mktemp("sessions"))


def test_histories_are_clicks_and_sessions_strictly_before_the_search(plain, tables):
    ids = read_column(tables, "items", "item_id")
    assert ids == read_column(plain, "items", "item_id")
    distinct = SESSIONS.drop_duplicates()
    of_searches = distinct[distinct["user"] != "stranger"]
    users = {row["user_id"]: row for row in read_rows(plain, "sequences")}

    rows = read_rows(tables, "sequences")

    num_sessions = 0
    assert users.keys() == {row["user_id"] for row in rows}
    for row in rows:
        old = users[row["user_id"]]
        expected = [
            (time, 0, number, item, query, None)
            for number, (time, item, query) in enumerate(
                zip(
                    old["timestamp_ms"],
                    old["item_index"],
                    old["query_index"],
                    strict=True,
                )
            )
        ]
        for user, item, time, kind in of_searches.itertuples(index=False):
            if user == row["user_id"] and item in ids:
                key = (time, 1 + TYPES.index(kind), item, ids.index(item), -1, kind)
                expected.append(key)
        expected.sort(key=lambda behaviour: behaviour[:3])
        times, _, _, items, queries, kinds = map(list, zip(*expected, strict=True))
        assert row["timestamp_ms"] == times
        assert row["item_index"] == items
        assert row["query_index"] == queries
        assert row["session_type"] == kinds
        num_sessions += len(times) - len(old["timestamp_ms"])
        for request, other in zip(row["requests"], old["requests"], strict=True):
            end = sum(time < request["timestamp_ms"] for time in times)
            assert request == other | {"history_end": end}
    info = read_manifest(f"{tables}/sequences").info
    inside = of_searches["item"].isin(ids)
    assert info["sessions"] == list(TYPES)
    assert info["session_rows"] == num_sessions == inside.sum()
    assert info["sessions_unknown_items"] == (~inside).sum() > 0
    assert info["sessions_unknown_users"] == len(distinct) - len(of_searches) > 0


def look_ahead(rows: list[Row], info: Row) -> None:
    """Count a behaviour at the time of the search itself."""
    for row in rows:
        for request in row["requests"]:
            if request["timestamp_ms"] in row["timestamp_ms"]:
                request["history_end"] += 1
                return


def change_type(rows: list[Row], info: Row) -> None:
    types = next(r["session_type"] for r in rows if "view" in r["session_type"])
    types[types.index("view")] = None


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (look_ahead, {"history"}),
        (change_type, {"behaviours", "windows"}),
        (lambda rows, info: info.update(sessions_unknown_users=0), {"counts"}),
    ],
)
def test_a_planted_violation_of_sessions_is_reported(change, rule, tables, tmp_path):
    copied = copy_with_change(tables, tmp_path, change)

    assert find_violations(tables) == {}
    assert find_violations(copied).keys() == rule


def test_truncated_histories_with_sessions_pass_the_audit(tmp_path):
    tables = prepare_sessions(tmp_path, max_events=9)

    assert read_manifest(f"{tables}/sequences").info["truncated_users"] > 0
    assert find_violations(tables) == {}


def test_served_requests_with_sessions_have_the_scores_of_the_tables(tables, tmp_path):
    setup, served = serve_ranker({"name": "qgs"}, tmp_path, tables, None, max_history=8)
    requests, expected_scores = build_search_requests(setup, tables, max_history=8)

    answers = served.predict(None, pd.DataFrame(requests))

    for items, scores, expected in zip(
        answers["item_id"], answers["score"], expected_scores, strict=True
    ):
        scores_by_item = dict(zip(items, scores, strict=True))
        assert scores_by_item == pytest.approx(expected, abs=1e-5)
    types = {name for request in requests for name in request["history_type"]}
    assert types == {"", *TYPES}
