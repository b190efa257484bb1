"""The kernels of partitions on small random logs: order, duplicates, cut times,
vocabularies.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.storage.tables import UserError, join, read_parquet, write_part
from pipelines.data.engine import Engine
from pipelines.data.events.columns import Vocabulary, user_keys
from pipelines.data.events.event_stats import IdCounts, event_stats
from pipelines.data.events.k_core import core_items
from pipelines.data.events.order_events import add_missing_columns, order_events
from pipelines.data.schemas import events_schema
from pipelines.data.sequences.splits import (
    SPLITS,
    SplitConfig,
    assign_splits,
    count_tied,
    cut_times,
    nth_times,
)

SCHEMA = events_schema({"click": "bool", "dwell": "float32"}, ["price"], ["tab"])
KEY = ("user_id", "timestamp_ms", "request_id", "position", "item_id")
REST = (
    "query",
    "label_click",
    "label_dwell",
    "num_price",
    "cat_tab",
)  # in the order of the schema
USERS = ["u", "user 2", "Ü", "z" * 40, ""]
ITEMS = ["a", "b", "B", "é", "item-10", "item-9"]
FEW = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

rows_strategy = st.lists(
    st.fixed_dictionaries(
        {
            "user_id": st.sampled_from(USERS),
            "request_id": st.sampled_from(["", "r1", "r2"]),
            "timestamp_ms": st.one_of(st.integers(0, 6), st.sampled_from([0, 2**62])),
            "item_id": st.sampled_from(ITEMS),
            "query": st.sampled_from([None, "", "q"]),
            "position": st.integers(0, 2),
            "label_click": st.sampled_from([None, True, False]),
            "label_dwell": st.sampled_from([None, 0.5, -1.0]),
            "num_price": st.sampled_from([None, 2.0]),
            "cat_tab": st.sampled_from([None, "t"]),
        }
    ),
    min_size=1,
    max_size=60,
)


def in_order(
    rows: list[dict[str, Any]], log_order: bool = False
) -> list[dict[str, Any]]:
    """By dicts and loops: duplicates dropped, sorted by the key and then by everything
    else, nulls first.
    """
    seen: set[tuple] = set()
    kept = []
    for row in rows:
        content = tuple(sorted(row.items(), key=lambda pair: pair[0]))
        if content not in seen:
            seen.add(content)
            kept.append(dict(row))
    if not log_order:
        return sorted(
            kept,
            key=lambda row: (
                *(row[name] for name in KEY),
                *(
                    (row[name] is not None, 0 if row[name] is None else row[name])
                    for name in REST
                ),
            ),
        )
    ranks: Counter = Counter()
    for row in kept:  # still in the log's order
        group = (row["user_id"], row["timestamp_ms"])
        row["position"] = ranks[group]
        ranks[group] += 1
    return sorted(
        kept, key=lambda row: (row["user_id"], row["timestamp_ms"], row["position"])
    )


def in_transit(rows: list[dict[str, Any]], log_order: bool = False) -> pa.Table:
    """Rows as they arrive in a partition."""
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    return (
        table.append_column("log_place", pa.array(np.arange(len(rows))))
        if log_order
        else table
    )


def written(
    rows: list[dict[str, Any]], folder: str, partitions: int, log_order: bool = False
) -> list[str]:
    """Events parts of the rows, one per partition that has any."""
    table = in_transit(rows, log_order)
    partition = user_keys(table["user_id"]) % partitions
    of_part = [
        table.filter(pa.array(partition == number)) for number in np.unique(partition)
    ]
    events = [order_events(part, SCHEMA)[0] for part in of_part]
    return [join(folder, write_part(folder, table).path) for table in events]


@FEW
@given(rows=rows_strategy, log_order=st.booleans(), data=st.data())
def test_order_events_sorts_totally_and_drops_duplicates(
    rows: list[dict], log_order: bool, data: st.DataObject
) -> None:
    rows = rows + data.draw(st.lists(st.sampled_from(rows), max_size=10))
    table, duplicates = order_events(in_transit(rows, log_order), SCHEMA)
    expected = in_order(rows, log_order)
    assert duplicates == len(rows) - len(expected)
    if not log_order:
        assert table.to_pylist() == expected
        shuffled = data.draw(st.permutations(rows))
        assert order_events(in_transit(shuffled), SCHEMA)[0].equals(table)
    else:
        key = ("user_id", "timestamp_ms", "position")
        assert table.to_pylist() == sorted(
            expected, key=lambda row: tuple(row[name] for name in key)
        )


@FEW
@given(rows=rows_strategy, log_order=st.booleans(), data=st.data())
def test_kept_duplicates_stand_beside_each_other(
    rows: list[dict], log_order: bool, data: st.DataObject
) -> None:
    def content(row: dict) -> str:
        return str(sorted(row.items()))  # whatever the order of its keys

    rows = rows + data.draw(st.lists(st.sampled_from(rows), max_size=10))
    table, duplicates = order_events(
        in_transit(rows, log_order), SCHEMA, keep_duplicates=True
    )
    assert duplicates == len(rows) - len(in_order(rows, log_order))
    events, key = table.to_pylist(), KEY
    if not log_order:
        assert sorted(events, key=content) == sorted(rows, key=content)
        assert [[e[name] for name in key] for e in events] == sorted(
            [e[name] for name in key] for e in events
        )
        shuffled = data.draw(st.permutations(rows))
        assert order_events(in_transit(shuffled), SCHEMA, keep_duplicates=True)[
            0
        ].equals(table)
    else:
        places = {
            name: iter(range(len(rows)))
            for name in {tuple(row[n] for n in key[:2]) for row in rows}
        }
        expected = [
            {**row, "position": next(places[tuple(row[n] for n in key[:2])])}
            for row in rows
        ]
        assert sorted(events, key=content) == sorted(expected, key=content)


@FEW
@given(rows=rows_strategy)
def test_columns_that_do_not_travel_come_back(rows: list[dict]) -> None:
    whole = in_transit(
        [
            {**row, "request_id": "", "position": 0, "query": None, "cat_tab": None}
            for row in rows
        ]
    )
    sent = whole.drop_columns(["request_id", "position", "query", "cat_tab"])
    assert add_missing_columns(sent, whole.schema).equals(whole)
    assert order_events(sent, SCHEMA)[0].equals(order_events(whole, SCHEMA)[0])


def test_a_part_of_events_is_read_with_their_schema(tmp_path: Any) -> None:
    rows = [
        {
            "user_id": "u",
            "request_id": "",
            "timestamp_ms": time,
            "item_id": "a",
            "position": 0,
        }
        for time in (2**62, 0)
    ]
    [part] = written(rows, str(tmp_path), 1)
    assert read_parquet(part).schema.equals(SCHEMA)
    assert read_parquet(part).equals(
        order_events(in_transit(rows), SCHEMA)[0].cast(SCHEMA)
    )


def test_order_events_without_integer_room_for_the_times() -> None:
    rows = [
        {
            "user_id": user,
            "request_id": "",
            "timestamp_ms": time,
            "item_id": "a",
            "position": 0,
        }
        for user in ("b", "a", "c")
        for time in (2**63 - 1, 5, 0)
    ]
    table, _ = order_events(in_transit(rows), SCHEMA)
    assert list(
        zip(
            table["user_id"].to_pylist(), table["timestamp_ms"].to_pylist(), strict=True
        )
    ) == [(user, time) for user in "abc" for time in (0, 5, 2**63 - 1)]


@FEW
@given(
    times=st.lists(
        st.integers(0, 2**45) | st.integers(0, 9_000_000), min_size=3, max_size=40
    ),
    val=st.sampled_from([0.1, 0.3]),
    test=st.sampled_from([0.1, 0.25]),
)
def test_cut_times_are_the_quantiles(
    tmp_path_factory: pytest.TempPathFactory, times: list[int], val: float, test: float
) -> None:
    rows = [
        {
            "user_id": f"u{i % 7}",
            "request_id": "",
            "timestamp_ms": time,
            "item_id": "a",
            "position": i,
        }
        for i, time in enumerate(times)
    ]
    found = event_stats(
        written(rows, str(tmp_path_factory.mktemp("events")), 2),
        None,
        Engine(in_process=True),
    )
    ranks = [0, len(times) // 2, len(times) - 1]
    assert nth_times(found, ranks, Engine(in_process=True)) == [
        sorted(times)[rank] for rank in ranks
    ]
    first, second = (
        sorted(times)[int(len(times) * share)] for share in (1 - val - test, 1 - test)
    )
    config = SplitConfig("temporal", val, test)
    if min(times) < first < second:
        assert cut_times(found, config, Engine(in_process=True)) == {
            "kind": "temporal",
            "val_start_ms": first,
            "test_start_ms": second,
        }
    else:
        with pytest.raises(UserError, match="split by fractions is not possible"):
            cut_times(found, config, Engine(in_process=True))


@FEW
@given(
    ids=st.lists(st.text(max_size=3), max_size=40),
    known=st.lists(st.text(max_size=3), max_size=40, unique=True),
)
def test_a_vocabulary_finds_the_places_of_its_ids(
    ids: list[str], known: list[str]
) -> None:
    known = sorted(known, key=str.encode)
    found = Vocabulary.from_ids(pa.array(known, pa.large_string())).lookup(
        pa.array([*ids, None], pa.string())
    )
    assert found.tolist() == [
        *(known.index(one) if one in known else -1 for one in ids),
        -1,
    ]


@FEW
@given(st.lists(st.lists(st.sampled_from(ITEMS), unique=True), max_size=6))
def test_the_union_of_parts_adds_up_their_counts(parts: list[list[str]]) -> None:
    found = IdCounts()
    for part in parts:
        found.add(pa.array(part, pa.large_string()), np.arange(1, len(part) + 1))
    ids, counts = found.sort()
    wanted: dict[str, int] = {}
    for part in parts:
        for count, one in enumerate(part, start=1):
            wanted[one] = wanted.get(one, 0) + count
    assert dict(zip(ids.to_pylist(), counts.tolist(), strict=True)) == wanted
    assert ids.to_pylist() == sorted(wanted, key=str.encode)


def test_user_keys_are_stable_and_not_negative() -> None:
    keys = user_keys(pa.array(["a", "b", "a", ""]))
    assert keys[0] == keys[2] != keys[1]
    assert (keys >= 0).all()
    assert (user_keys(pa.chunked_array([["a"], ["b", "a", ""]])) == keys).all()


def test_leave_last_out_leaves_short_histories_to_training() -> None:
    codes = assign_splits({"kind": "leave_last_out"}, np.arange(7), np.array([0, 2, 3]))
    assert codes.tolist() == [0, 0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "random"}, "one of auto"),
        ({"val_fraction": 0.0}, "between 0 and 1"),
        ({"val_fraction": 0.6, "test_fraction": 0.5}, "nothing to train on"),
    ],
)
def test_split_config_refuses(values: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SplitConfig(**values)


def test_temporal_split_needs_a_clock() -> None:
    assert SplitConfig().resolve(clock=True) == "temporal"
    assert SplitConfig().resolve(clock=False) == "leave_last_out"
    with pytest.raises(UserError, match="no clock times"):
        SplitConfig("temporal").resolve(clock=False)


def test_parts_do_not_depend_on_the_order_of_rows(tmp_path: Any) -> None:
    generator = random.Random(0)
    rows = [
        {
            "user_id": f"u{generator.randrange(20)}",
            "request_id": "",
            "timestamp_ms": generator.randrange(30),
            "item_id": f"i{generator.randrange(9)}",
            "position": 0,
            "label_click": generator.random() < 0.5,
        }
        for _ in range(500)
    ]
    first = written(rows, str(tmp_path), 4)
    generator.shuffle(rows)
    assert written(rows, str(tmp_path), 4) == first
    assert pl.concat([pl.from_arrow(read_parquet(part)) for part in first]).height < 500


def test_the_core_of_the_training_window_counts_what_is_known_in_it(
    tmp_path: Any,
) -> None:
    schema = events_schema({"click": "bool"}, known=["click"])
    row = {"user_id": "u", "request_id": "", "position": 0, "label_click": True}
    rows = [
        row | {"timestamp_ms": time, "item_id": item, "known_click": known}
        for time, item, known in ((0, "a", 1), (1, "b", 9), (2, "a", 3), (3, "b", 4))
    ]
    part = join(
        str(tmp_path),
        write_part(str(tmp_path), pa.Table.from_pylist(rows, schema=schema)).path,
    )
    found = event_stats([part], "click", Engine(in_process=True), late=True)
    assert core_items(found, 2, 5, Engine(in_process=True))[0].to_pylist() == ["a"]
    assert core_items(found, 2, 10, Engine(in_process=True))[0].to_pylist() == [
        "a",
        "b",
    ]
    assert (found.first_ms, found.last_ms) == (
        0,
        3,
    )  # the split is of the times of requests


def test_leave_last_out_draws_among_requests_of_one_time() -> None:
    baskets = 300
    users = np.repeat([f"u{n}" for n in range(baskets)], 5)
    items = np.tile(["a", "b", "c", "d", "e"], baskets)
    time = np.tile([1, 2, 9, 9, 9], baskets)
    start = np.arange(0, len(time), 5)
    ids = (pa.array(users), pa.array(items))

    codes = assign_splits({"kind": "leave_last_out"}, time, start, ids)

    assert np.bincount(codes).tolist() == [3 * baskets, baskets, baskets]
    for name in ("val", "test"):
        held_out = Counter(items[codes == SPLITS.index(name)])
        assert set(held_out) == {"c", "d", "e"}
        assert all(abs(count - 100) < 30 for count in held_out.values())  # 3.7 sigma
    again = assign_splits({"kind": "leave_last_out"}, time, start, ids)
    assert (codes == again).all()
    tied = count_tied(codes, time, start)
    assert tied == {"val": baskets, "test": baskets}


def test_leave_last_out_without_ties_takes_the_last_two() -> None:
    time, start = np.array([1, 2, 3, 1, 1, 2, 3, 4]), np.array([0, 3])
    ids = (pa.array(["u"] * 3 + ["v"] * 5), pa.array(list("abcdefgh")))
    codes = assign_splits({"kind": "leave_last_out"}, time, start, ids)
    assert codes.tolist() == [0, 1, 2, 0, 0, 0, 1, 2]
    assert count_tied(codes, time, start) == {"val": 0, "test": 0}
