"""Features that change over time: an event has the value of the latest row strictly
before it, and the audit finds values of later rows.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.tables import read_manifest
from pipelines.prepare.sequences.as_of import join_as_of
from tests.fixtures.audited_tables import Row, copy_with_change, find_violations
from tests.fixtures.commands import read_column
from tests.fixtures.custom_features_log import (
    AS_OF,
    SOURCE,
    prepare_tables,
)

WITH_PRICES = {**SOURCE, "as_of": AS_OF}

ROWS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 9)),
    unique=True,
    min_size=1,
    max_size=20,
)
EVENTS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-1, 11)), max_size=30)


@given(ROWS, EVENTS)
def test_an_event_has_the_value_of_the_latest_row_strictly_before_it(rows, events):
    rows = sorted(rows)
    columns = {
        "item_id": [item for item, _ in rows],
        "timestamp_ms": [time for _, time in rows],
        "num_n": range(len(rows)),
    }
    table = ("item_id", pl.DataFrame(columns))
    searches = pl.DataFrame(events, ["item_id", "as_of"], orient="row").cast(
        {"item_id": pl.String, "as_of": pl.Int64}
    )
    counts = Counter[str]()

    joined = join_as_of(searches, {"as_of_n": table}, counts)

    values = joined["num_n"].to_list()
    for (item, time), value in zip(events, values, strict=True):
        earlier = [n for n, (other, t) in enumerate(rows) if other == item and t < time]
        assert value == max(earlier, default=None)
    assert counts["nothing_of_as_of_n"] == values.count(None)


@pytest.fixture(scope="module")
def priced(tmp_path_factory, raw) -> str:
    """Path of the tables of the log with prices."""
    return prepare_tables(tmp_path_factory.mktemp("as_of"), raw, WITH_PRICES)


def test_requests_and_behaviours_have_the_price_known_at_their_time(priced):
    assert find_violations(priced) == {}
    info = read_manifest(f"{priced}/sequences").info
    numbers = [number["name"] for number in info["custom"]["numbers"]]
    assert numbers == ["num_bm25", "num_price"]
    assert info["groups"][-1] == {
        "name": "prices",
        "features": ["num_price", "cat_state"],
    }
    assert info["as_of"] == {
        "as_of_prices": {"key": "item_id", "features": ["num_price", "cat_state"]}
    }


def use_prices_of_the_next_request(rows: list[Row], info: Row) -> None:
    """Give the candidates of training requests prices of the user's next request."""
    for row in rows:
        for request, later in zip(row["requests"], row["requests"][1:], strict=False):
            if request["split"] == "train":
                request["num_price"] = later["num_price"][: len(request["num_price"])]


def test_the_audit_finds_candidates_with_later_prices(priced, tmp_path):
    tables = copy_with_change(priced, tmp_path, use_prices_of_the_next_request)

    violations = find_violations(tables)

    assert set(violations) == {"features"}
    assert "num_price is [" in violations["features"][0]


def test_of_rows_with_equal_item_and_time_the_last_is_kept_and_counted(raw, tmp_path):
    prices = pl.read_csv(raw / "prices.csv")
    repeated = prices.head(3).with_columns(price=pl.lit(99.0))
    log = Path(shutil.copytree(raw, tmp_path / "raw"))
    pl.concat([prices, repeated]).write_csv(log / "prices.csv")

    tables = prepare_tables(tmp_path, log, WITH_PRICES)

    kept = read_column(tables, "as_of_prices", "num_price")
    assert kept.count(99.0) == 3
