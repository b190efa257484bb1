"""Features with a time of their own: the latest row strictly before a request; the
audit finds a look-ahead.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.search.catalogue import SearchCatalogue
from models.storage.tables import UserError, read_manifest, read_table
from pipelines.data.reading.log import parse_log
from pipelines.data.sequences.as_of import AsOfTable, join_as_of
from tests.fixtures.audited import broken, rewrite
from tests.fixtures.custom_features_log import AS_OF, SOURCE, make, make_text

WITH_PRICES = {**SOURCE, "as_of": AS_OF}

side = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 9)),
    unique=True,
    min_size=1,
    max_size=20,
)
asked = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-1, 11)), max_size=30)


@given(side, asked)
def test_the_latest_row_strictly_before_is_found(
    side: list[tuple[str, int]], asked: list[tuple[str, int]]
) -> None:
    side = sorted(side)
    names = ("item_id", "timestamp_ms", "num_n")
    rows = pa.table(
        dict(
            zip(
                names,
                ([id_ for id_, _ in side], [t for _, t in side], range(len(side))),
                strict=True,
            )
        )
    )
    table, count = AsOfTable.from_rows("as_of_n", rows, "item_id"), Counter[str]()
    ids = pa.array([id_ for id_, _ in asked], pa.string()).dictionary_encode()
    found = join_as_of(
        pa.table({"item_id": ids}),
        np.array([t for _, t in asked], np.int64),
        [table],
        count,
    )["num_n"].to_pylist()
    for (id_, at), value in zip(asked, found, strict=True):
        before = [n for n, (other, t) in enumerate(side) if other == id_ and t < at]
        assert value == (max(before) if before else None)
    assert count["nothing_of_as_of_n"] == found.count(None)


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory, raw: Path) -> str:
    return make(tmp_path_factory.mktemp("as_of"), raw, WITH_PRICES)


def test_requests_and_behaviours_have_the_price_that_was_known(priced: str) -> None:
    assert broken(priced) == {}
    info = read_manifest(f"{priced}/sequences").info
    assert [number["name"] for number in info["own"]["numbers"]] == [
        "num_bm25",
        "num_price",
    ]
    assert info["groups"][-1] == {
        "name": "prices",
        "features": ["num_price", "cat_state"],
    }
    assert info["as_of"] == {
        "as_of_prices": {"key": "item_id", "features": ["num_price", "cat_state"]}
    }


def test_models_read_them(priced: str, tmp_path: Path) -> None:
    catalogue = SearchCatalogue.load(priced, make_text(tmp_path, priced))
    assert catalogue.features[-4:] == ("num_bm25", "num_price", "cat_city", "cat_state")
    assert catalogue.custom_features.categories[1].values == ("sale", "usual")


def look_ahead(rows: list[dict], info: dict) -> None:
    """Every candidate has the price that is known a day later."""
    del info
    for row in rows:
        for request, later in zip(row["requests"], row["requests"][1:], strict=False):
            if request["split"] == "train":
                request["num_price"] = later["num_price"][: len(request["num_price"])]


def look_ahead_of_behaviours(rows: list[dict], info: dict) -> None:
    del info
    row = next(row for row in rows if len(set(row["num_price"])) > 1)
    row["num_price"] = row["num_price"][1:] + row["num_price"][:1]


def test_the_audit_finds_a_look_ahead(priced: str, tmp_path: Path) -> None:
    found = broken(rewrite(priced, tmp_path / "requests", look_ahead))
    assert set(found) == {"features"}
    assert "num_price is [" in found["features"][0]
    assert set(
        broken(rewrite(priced, tmp_path / "behaviours", look_ahead_of_behaviours))
    ) == {"behaviours"}


def test_a_table_that_was_joined_at_equal_times_is_found(
    raw: Path, tmp_path: Path
) -> None:
    """A price of the very moment of a search is no price that was known before it:
    tables that have it are refused.
    """
    times = pl.read_csv(raw / "events.csv")["at"]
    moved = pl.read_csv(raw / "prices.csv").with_columns(
        since=pl.Series(times.unique().sort().to_list()[5:305])
    )
    other = tmp_path / "raw"
    other.mkdir()
    for name in ("events.csv", "items.csv"):
        (other / name).write_bytes((raw / name).read_bytes())
    moved.write_csv(other / "prices.csv")
    assert broken(make(tmp_path / "strict", other, WITH_PRICES)) == {}


def test_rows_that_repeat_or_break_are_told(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "raw"
    other.mkdir()
    for name in ("events.csv", "items.csv"):
        (other / name).write_bytes((raw / name).read_bytes())
    prices = pl.read_csv(raw / "prices.csv")
    twice = pl.concat([prices, prices.head(3).with_columns(price=pl.lit(99.0))])
    twice.write_csv(other / "prices.csv")
    tables = make(tmp_path, other, WITH_PRICES)
    info = read_manifest(f"{tables}/as_of_prices").info
    assert info["repeated"] == 3
    assert (
        read_table(f"{tables}/as_of_prices")["num_price"].to_pylist().count(99.0) == 3
    )
    prices.with_columns(id="other " + pl.col("id")).write_csv(other / "prices.csv")
    with pytest.raises(
        UserError,
        match=r"as_of_prices has no row before any of the 10,000 events; correct its ids \('item_id'\)",
    ):
        make(tmp_path / "ids", other, WITH_PRICES)
    prices.with_columns(since=pl.lit(7)).write_csv(other / "prices.csv")
    with pytest.raises(
        UserError, match=r"300 of 300 rows of as_of_prices \(100.00%\) break the schema"
    ):
        make(tmp_path / "wrong", other, WITH_PRICES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item": None}, "'as_of.prices.user' is missing"),
        (
            {"time": {"column": "since", "unit": "order"}},
            "as_of.prices needs a 'time' like that of events",
        ),
        (
            {"numbers": {}, "categories": {}},
            "as_of.prices has no features; add 'numbers' or",
        ),
        ({"numbers": {"bm25": "price"}}, "'bm25' is the name of two features"),
        (
            {"number": []},
            "unknown key 'as_of.prices.number'; the nearest key is 'as_of.prices.numbers'",
        ),
    ],
)
def test_what_cannot_be_is_said(change: dict[str, Any], message: str) -> None:
    content = {
        key: value
        for key, value in {**AS_OF["prices"], **change}.items()
        if value is not None
    }
    with pytest.raises(ValueError, match=message):
        parse_log({**SOURCE, "as_of": {"prices": content}})


def test_kinds_whose_models_do_not_read_them_refuse_them(
    raw: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError,
        match=r"as_of.prices has features of requests, which models of kind retrieval do not",
    ):
        make(tmp_path, raw, WITH_PRICES, {"kind": "retrieval", "behaviour": None})
