"""Tables prepared from random logs of each kind pass the audit, which recomputes them
with slow and obvious code.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.storage.tables import read_table
from pipelines.data.prepare import prepare
from pipelines.data.settings import read_config
from tests.fixtures.audited_tables import find_violations
from tests.fixtures.random_logs import (
    ACTIONS,
    BEGIN,
    HOUR,
    ITEMS_CSV,
    ROWS,
    SEARCH,
    STEADY,
    Row,
    make_source,
)

pytestmark = pytest.mark.exhaustive

CUTS = {
    "kind": "temporal",
    "val_start": BEGIN + 8 * HOUR,
    "test_start": BEGIN + 12 * HOUR,
}
SPLITS = st.sampled_from([CUTS, {"kind": "leave_last_out"}])


def has_valid_core_window(config: Row) -> bool:
    """Return whether the core window fits the split: `train` needs a temporal split."""
    return config["core_window"] == "all" or config["split"] == CUTS


RETRIEVAL_SETTINGS = st.fixed_dictionaries(
    {
        "kind": st.just("retrieval"),
        "core": st.integers(0, 3),
        "ties": st.sampled_from(["strict", "log_order"]),
        "behaviour": st.sampled_from([None, "click"]),
        "max_events": st.sampled_from([12, 100]),
        "split": SPLITS,
        "duplicates": st.sampled_from(["drop", "keep"]),
        "core_window": st.sampled_from(["all", "train"]),
    }
).filter(has_valid_core_window)
SEARCH_SETTINGS = st.fixed_dictionaries(
    {
        "kind": st.just("search"),
        "core": st.just(0),
        "behaviour": st.just("click"),
        "max_events": st.sampled_from([1, 2, 5, 100]),
        "split": SPLITS,
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
few_examples = settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def prepare_tables(
    folder: Path,
    rows: list[Row],
    config: Row,
    named_requests: bool = False,
    late_clicks: bool = False,
) -> str:
    """Write a log with its items and return the path of its tables."""
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "items.csv").write_text(ITEMS_CSV)
    prepare(
        make_source(named_requests, late_clicks),
        str(folder),
        str(folder / "tables"),
        read_config({"min_matched": 0, **config}),
        report=lambda line: None,
    )
    return str(folder / "tables")


@pytest.mark.long
@few_examples
@given(ROWS, st.integers(0, 9), RETRIEVAL_SETTINGS, st.booleans(), st.booleans())
def test_the_audit_proves_retrieval_tables_of_any_log(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Row],
    repeated: int,
    config: Row,
    named_requests: bool,
    late_clicks: bool,
) -> None:
    if config["behaviour"] is None or config["ties"] != "strict":
        late_clicks = False
    log = [*STEADY, *rows, *rows[:repeated]]
    folder = tmp_path_factory.mktemp("log")

    tables = prepare_tables(folder, log, config, named_requests, late_clicks)

    assert find_violations(tables) == {}


@pytest.mark.long
@few_examples
@given(ROWS, SEARCH_SETTINGS, st.booleans(), st.booleans())
def test_the_audit_proves_search_tables_of_any_log(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Row],
    config: Row,
    named_requests: bool,
    late_clicks: bool,
) -> None:
    log = [*STEADY, *rows]
    folder = tmp_path_factory.mktemp("log")

    tables = prepare_tables(folder, log, config, named_requests, late_clicks)

    assert find_violations(tables) == {}


@pytest.mark.long
@few_examples
@given(ROWS, ACTIONS_SETTINGS)
def test_the_audit_proves_actions_tables_of_any_log(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], config: Row
) -> None:
    log = [*STEADY, *rows]

    tables = prepare_tables(tmp_path_factory.mktemp("log"), log, config)

    assert find_violations(tables) == {}
    users = {row["user_id"] for row in read_table(f"{tables}/sequences").to_pylist()}
    assert users == {row["user"] for row in log}
