"""Random logs of every kind become tables that the audit proves: the slow and obvious
program beside the pipeline.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.storage.tables import read_table
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import parse_log
from pipelines.data.settings import read_config
from tests.fixtures.audited import broken

pytestmark = pytest.mark.exhaustive

HOUR, BEGIN = 3_600_000, 1_600_000_000_000
Row = dict[str, Any]

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "user": st.sampled_from(["u", "user 2", "Ü", "z" * 40]),
            "item": st.sampled_from([*"abcd", "item-10"]),
            "ms": st.integers(0, 16).map(lambda hour: BEGIN + hour * HOUR),
            "request": st.sampled_from(["r1", "r2"]),
            "query": st.sampled_from([None, "p", "q", "r"]),
            "position": st.integers(0, 12),
            "click": st.sampled_from([None, True, False, True]),
            "like": st.sampled_from([None, True, False]),
            "dwell": st.sampled_from([None, 0.5, 3.0, 3.3, 4.0, 50.0]),
            "price": st.sampled_from([None, 2.0]),
            "city": st.sampled_from([None, "t", "v"]),
            "late": st.integers(0, 20),
        }
    ),
    min_size=5,
    max_size=50,
)
STEADY = [
    {
        "user": user,
        "item": "ab"[n % 2],
        "ms": BEGIN + n * HOUR,
        "request": f"{user}-{n}",
        "query": "p",
        "click": True,
        "position": n % 5,
        "like": n % 3 == 0,
        "dwell": float(n),
        "price": 1.0,
        "city": "t",
        "late": 0,
    }
    for user, hours in {"steady": 17, "early": 7}.items()
    for n in range(hours)
]
"""A user with behaviours before and after both cuts, and one of training, so that no
random log is too small."""

SOURCE: Row = {
    "files": "log.jsonl",
    "user": "user",
    "item": "item",
    "time": {"column": "ms", "unit": "ms"},
    "numbers": ["price"],
    "categories": ["city"],
    "position": "position",
    "query": "query",
    "items": {"files": "items.csv", "item": "item", "attributes": {"author": "author"}},
    "labels": {
        "click": {"column": "click"},
        "like": {"column": "like"},
        "dwell": {"column": "dwell", "type": "float32"},
    },
}
CUTS = {
    "kind": "temporal",
    "val_start": BEGIN + 8 * HOUR,
    "test_start": BEGIN + 12 * HOUR,
}
WINDOWS = {"windows_days": [0.25, 1.0], "delay_minutes": 90}
SEARCH = {**WINDOWS, "page_size": 5, "max_request_minutes": 1800}
ACTIONS = {
    "tasks": {
        "long": {"label": "dwell", "above": 3},
        "middling": {"label": "dwell", "at_least": 3.3},
        "some": {"any": ["click", "like"]},
    },
    "inputs": {"dwell": {"label": "dwell", "range": [0, 8], "log_unit": 2}},
    "counts": {
        **WINDOWS,
        "keys": ["item", "author", "user"],
        "prior": 0.2,
        "strength": 4,
    },
}

most = st.sampled_from([1, 2, 5, 100])
splits = st.sampled_from([CUTS, {"kind": "leave_last_out"}])
RETRIEVAL_SETTINGS = st.fixed_dictionaries(
    {
        "kind": st.just("retrieval"),
        "core": st.integers(0, 3),
        "ties": st.sampled_from(["strict", "log_order"]),
        "behaviour": st.sampled_from([None, "click"]),
        "max_events": st.sampled_from([12, 100]),
        "split": splits,
        "duplicates": st.sampled_from(["drop", "keep"]),
        "core_window": st.sampled_from(["all", "train"]),
    }
).filter(lambda given: given["core_window"] == "all" or given["split"] == CUTS)
SEARCH_SETTINGS = st.fixed_dictionaries(
    {
        "kind": st.just("search"),
        "core": st.just(0),
        "behaviour": st.just("click"),
        "max_events": most,
        "split": splits,
        "search": st.just(SEARCH),
    }
)
ACTIONS_SETTINGS = st.fixed_dictionaries(
    {
        "kind": st.just("actions"),
        "core": st.just(0),
        "max_events": st.sampled_from([12, 100]),
        "split": st.just(CUTS),
        "actions": st.just(ACTIONS),
    }
)
few = settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def made(folder: Path, rows: list[Row], given: Row, requests: bool, late: bool) -> str:
    """TABLES of the log, whose rows may name their requests, and whose clicks may be
    known later.
    """
    labels = SOURCE["labels"] | (
        {
            "click": {
                "column": "click",
                "time": {"column": f"ms + late * {HOUR // 2}", "unit": "ms"},
            }
        }
        if late
        else {}
    )
    source = SOURCE | {"labels": labels} | ({"request": "request"} if requests else {})
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "items.csv").write_text("item,author\na,x\nb,x\nc,y\nd,\n")
    config = read_config({"min_matched": 0, **given})
    prepare(
        parse_log(source),
        str(folder),
        str(folder / "tables"),
        config,
        report=lambda line: None,
    )
    return str(folder / "tables")


@pytest.mark.long
@few
@given(ROWS, st.integers(0, 9), RETRIEVAL_SETTINGS, st.booleans(), st.booleans())
def test_retrieval(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Row],
    twice: int,
    given: Row,
    requests: bool,
    late: bool,
) -> None:
    late = late and given["behaviour"] is not None and given["ties"] == "strict"
    tables = made(
        tmp_path_factory.mktemp("log"),
        [*STEADY, *rows, *rows[:twice]],
        given,
        requests,
        late,
    )
    assert broken(tables) == {}


@pytest.mark.long
@few
@given(ROWS, SEARCH_SETTINGS, st.booleans(), st.booleans())
def test_search(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Row],
    given: Row,
    requests: bool,
    late: bool,
) -> None:
    tables = made(
        tmp_path_factory.mktemp("log"), [*STEADY, *rows], given, requests, late
    )
    assert broken(tables) == {}


@pytest.mark.long
@few
@given(ROWS, ACTIONS_SETTINGS)
def test_actions(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], given: Row
) -> None:
    tables = made(tmp_path_factory.mktemp("log"), [*STEADY, *rows], given, False, False)
    assert broken(tables) == {}
    users = {row["user_id"] for row in read_table(f"{tables}/sequences").to_pylist()}
    assert users == {row["user"] for row in [*STEADY, *rows]}
