"""The functions that work on one partition of the events, on small random logs: order,
duplicates, cut times, vocabularies and splits.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
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

Row = dict[str, Any]

SCHEMA = events_schema({"click": "bool", "dwell": "float32"}, ["price"], ["tab"])
SORT_KEY = ("user_id", "timestamp_ms", "request_id", "position", "item_id")
OTHER_COLUMNS = ("query", "label_click", "label_dwell", "num_price", "cat_tab")
USERS = ["u", "user 2", "Ü", "z" * 40, ""]
ITEMS = ["a", "b", "B", "é", "item-10", "item-9"]
few_examples = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

ROWS = st.lists(
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


def sort_value(row: Row) -> tuple:
    """Return what rows are sorted by: the key, then all other columns, nulls first."""
    key = [row[name] for name in SORT_KEY]
    others = [row[name] for name in OTHER_COLUMNS]
    nulls_first = [
        (value is not None, 0 if value is None else value) for value in others
    ]
    return (*key, *nulls_first)


def order_slowly(rows: list[Row], log_order: bool = False) -> list[Row]:
    """Return rows without duplicates in their order, by dicts and loops.

    In log order, rows of a user and time keep the order of the log, and their position
    is their index among them.
    """
    unique: list[Row] = []
    for row in rows:
        if row not in unique:
            unique.append(row)
    if not log_order:
        return sorted(unique, key=sort_value)
    numbered = number_positions(unique)
    return sorted(numbered, key=lambda row: tuple(row[name] for name in LOG_ORDER_KEY))


LOG_ORDER_KEY = ("user_id", "timestamp_ms", "position")


def number_positions(rows: list[Row]) -> list[Row]:
    """Return rows with their index among the rows of the same user and time."""
    counts: Counter = Counter()
    numbered: list[Row] = []
    for row in rows:
        group = (row["user_id"], row["timestamp_ms"])
        numbered.append({**row, "position": counts[group]})
        counts[group] += 1
    return numbered


def to_table(rows: list[Row], log_order: bool = False) -> pa.Table:
    """Return rows as a partition receives them, with log rows if the log's order
    counts.
    """
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    if log_order:
        table = table.append_column("log_place", pa.array(np.arange(len(rows))))
    return table


def write_events(rows: list[Row], folder: str, partitions: int) -> list[str]:
    """Write the events of each partition that has any, and return the paths."""
    table = to_table(rows)
    partition = user_keys(table["user_id"]) % partitions
    paths: list[str] = []
    for number in np.unique(partition):
        rows_of_partition = table.filter(pa.array(partition == number))
        events, _ = order_events(rows_of_partition, SCHEMA)
        paths.append(join(folder, write_part(folder, events).path))
    return paths


def make_event(user: str, time: int, **columns: Any) -> Row:
    """Return an event of item `a`."""
    event = {
        "user_id": user,
        "request_id": "",
        "timestamp_ms": time,
        "item_id": "a",
        "position": 0,
    }
    return event | columns


@few_examples
@given(rows=ROWS, log_order=st.booleans(), data=st.data())
def test_order_events_sorts_totally_and_drops_duplicates(
    rows: list[Row], log_order: bool, data: st.DataObject
) -> None:
    rows = rows + data.draw(st.lists(st.sampled_from(rows), max_size=10))

    table, duplicates = order_events(to_table(rows, log_order), SCHEMA)

    expected = order_slowly(rows, log_order)
    assert duplicates == len(rows) - len(expected)
    assert table.to_pylist() == expected
    if not log_order:
        shuffled = data.draw(st.permutations(rows))
        table_of_shuffled, _ = order_events(to_table(shuffled), SCHEMA)
        assert table_of_shuffled.equals(table)


def sort_by_content(rows: list[Row]) -> list[Row]:
    """Return rows sorted by their content, whatever the order of their keys."""
    return sorted(rows, key=lambda row: str(sorted(row.items())))


@few_examples
@given(rows=ROWS, log_order=st.booleans(), data=st.data())
def test_kept_duplicates_are_sorted_with_the_other_events(
    rows: list[Row], log_order: bool, data: st.DataObject
) -> None:
    rows = rows + data.draw(st.lists(st.sampled_from(rows), max_size=10))

    table, duplicates = order_events(
        to_table(rows, log_order), SCHEMA, keep_duplicates=True
    )

    events = table.to_pylist()
    assert duplicates == len(rows) - len(order_slowly(rows, log_order))
    if log_order:
        assert sort_by_content(events) == sort_by_content(number_positions(rows))
    else:
        assert sort_by_content(events) == sort_by_content(rows)
        keys = [[event[name] for name in SORT_KEY] for event in events]
        assert keys == sorted(keys)
        shuffled = to_table(data.draw(st.permutations(rows)))
        table_of_shuffled, _ = order_events(shuffled, SCHEMA, keep_duplicates=True)
        assert table_of_shuffled.equals(table)


@few_examples
@given(rows=ROWS)
def test_columns_of_defaults_are_not_sent_and_added_again(rows: list[Row]) -> None:
    defaults = {"request_id": "", "position": 0, "query": None, "cat_tab": None}
    whole = to_table([row | defaults for row in rows])
    sent = whole.drop_columns(list(defaults))

    assert add_missing_columns(sent, whole.schema).equals(whole)
    events_of_sent, _ = order_events(sent, SCHEMA)
    events_of_whole, _ = order_events(whole, SCHEMA)
    assert events_of_sent.equals(events_of_whole)


def test_a_part_of_events_is_read_with_the_schema_of_events(tmp_path: Path) -> None:
    rows = [make_event("u", time) for time in (2**62, 0)]

    [part] = write_events(rows, str(tmp_path), 1)

    events, _ = order_events(to_table(rows), SCHEMA)
    assert read_parquet(part).schema.equals(SCHEMA)
    assert read_parquet(part).equals(events.cast(SCHEMA))


def test_order_events_sorts_users_and_times_that_fit_no_common_integer() -> None:
    times = (2**63 - 1, 5, 0)
    rows = [make_event(user, time) for user in ("b", "a", "c") for time in times]

    table, _ = order_events(to_table(rows), SCHEMA)

    keys = [(event["user_id"], event["timestamp_ms"]) for event in table.to_pylist()]
    assert keys == [(user, time) for user in "abc" for time in (0, 5, 2**63 - 1)]


@few_examples
@given(
    times=st.lists(
        st.integers(0, 2**45) | st.integers(0, 9_000_000), min_size=3, max_size=40
    ),
    val=st.sampled_from([0.1, 0.3]),
    test=st.sampled_from([0.1, 0.25]),
)
def test_cut_times_are_quantiles_of_the_event_times(
    tmp_path_factory: pytest.TempPathFactory, times: list[int], val: float, test: float
) -> None:
    rows = [
        make_event(f"u{number % 7}", time, position=number)
        for number, time in enumerate(times)
    ]
    parts = write_events(rows, str(tmp_path_factory.mktemp("events")), 2)
    engine, ordered = Engine(in_process=True), sorted(times)

    stats = event_stats(parts, None, engine)

    ranks = [0, len(times) // 2, len(times) - 1]
    assert nth_times(stats, ranks, engine) == [ordered[rank] for rank in ranks]
    val_start = ordered[int(len(times) * (1 - val - test))]
    test_start = ordered[int(len(times) * (1 - test))]
    config = SplitConfig("temporal", val, test)
    if ordered[0] < val_start < test_start:
        assert cut_times(stats, config, engine) == {
            "kind": "temporal",
            "val_start_ms": val_start,
            "test_start_ms": test_start,
        }
    else:
        with pytest.raises(UserError, match="split by fractions is not possible"):
            cut_times(stats, config, engine)


@few_examples
@given(
    ids=st.lists(st.text(max_size=3), max_size=40),
    vocabulary_ids=st.lists(st.text(max_size=3), max_size=40, unique=True),
)
def test_a_vocabulary_gives_the_index_of_an_id_or_minus_one(
    ids: list[str], vocabulary_ids: list[str]
) -> None:
    vocabulary_ids = sorted(vocabulary_ids, key=str.encode)
    vocabulary = Vocabulary.from_ids(pa.array(vocabulary_ids, pa.large_string()))

    indices = vocabulary.lookup(pa.array([*ids, None], pa.string()))

    index_by_id = {id_: index for index, id_ in enumerate(vocabulary_ids)}
    assert indices.tolist() == [*(index_by_id.get(id_, -1) for id_ in ids), -1]


@few_examples
@given(st.lists(st.lists(st.sampled_from(ITEMS), unique=True), max_size=6))
def test_the_counts_of_parts_are_added_by_id(parts: list[list[str]]) -> None:
    id_counts = IdCounts()
    expected: Counter[str] = Counter()
    for part in parts:
        counts = np.arange(1, len(part) + 1)
        id_counts.add(pa.array(part, pa.large_string()), counts)
        expected.update(dict(zip(part, counts.tolist(), strict=True)))

    ids, counts = id_counts.sort()

    assert dict(zip(ids.to_pylist(), counts.tolist(), strict=True)) == expected
    assert ids.to_pylist() == sorted(expected, key=str.encode)


def test_user_keys_are_stable_and_not_negative() -> None:
    keys = user_keys(pa.array(["a", "b", "a", ""]))

    assert keys[0] == keys[2] != keys[1]
    assert (keys >= 0).all()
    assert (user_keys(pa.chunked_array([["a"], ["b", "a", ""]])) == keys).all()


def test_leave_last_out_leaves_short_histories_to_training() -> None:
    user_starts = np.array([0, 2, 3])

    codes = assign_splits({"kind": "leave_last_out"}, np.arange(7), user_starts)

    assert codes.tolist() == [0, 0, 0, 0, 0, 1, 2]


def test_a_temporal_split_needs_clock_times() -> None:
    assert SplitConfig().resolve(has_clock_times=True) == "temporal"
    assert SplitConfig().resolve(has_clock_times=False) == "leave_last_out"
    with pytest.raises(UserError, match="no clock times"):
        SplitConfig("temporal").resolve(has_clock_times=False)


def test_parts_do_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    generator = random.Random(0)
    rows = [
        make_event(
            f"u{generator.randrange(20)}",
            generator.randrange(30),
            item_id=f"i{generator.randrange(9)}",
            label_click=generator.random() < 0.5,
        )
        for _ in range(500)
    ]
    parts = write_events(rows, str(tmp_path), 4)
    generator.shuffle(rows)

    assert write_events(rows, str(tmp_path), 4) == parts
    assert sum(len(read_parquet(part)) for part in parts) < 500  # less duplicates


def test_the_core_of_the_training_window_counts_labels_known_within_it(
    tmp_path: Path,
) -> None:
    schema = events_schema({"click": "bool"}, known=["click"])
    clicks = ((0, "a", 1), (1, "b", 9), (2, "a", 3), (3, "b", 4))
    rows = [
        make_event("u", time, item_id=item, label_click=True, known_click=known)
        for time, item, known in clicks
    ]
    table = pa.Table.from_pylist(rows, schema=schema)
    part = join(str(tmp_path), write_part(str(tmp_path), table).path)
    engine = Engine(in_process=True)

    stats = event_stats([part], "click", engine, is_late=True)

    assert core_items(stats, 2, 5, engine)[0].to_pylist() == ["a"]
    assert core_items(stats, 2, 10, engine)[0].to_pylist() == ["a", "b"]
    # The split is by the times of requests, not by the times that labels are known.
    assert (stats.first_ms, stats.last_ms) == (0, 3)


def test_leave_last_out_draws_among_requests_of_equal_time() -> None:
    users = 300
    user_ids = np.repeat([f"u{n}" for n in range(users)], 5)
    items = np.tile(["a", "b", "c", "d", "e"], users)
    times = np.tile([1, 2, 9, 9, 9], users)
    user_starts = np.arange(0, len(times), 5)
    ids = (pa.array(user_ids), pa.array(items))

    codes = assign_splits({"kind": "leave_last_out"}, times, user_starts, ids)

    assert np.bincount(codes).tolist() == [3 * users, users, users]
    for name in ("val", "test"):
        held_out = Counter(items[codes == SPLITS.index(name)])
        assert set(held_out) == {"c", "d", "e"}
        assert all(abs(count - 100) < 30 for count in held_out.values())  # 3.7 sigma
    again = assign_splits({"kind": "leave_last_out"}, times, user_starts, ids)
    assert (codes == again).all()
    assert count_tied(codes, times, user_starts) == {"val": users, "test": users}


def test_leave_last_out_without_ties_takes_the_last_two_requests() -> None:
    times, user_starts = np.array([1, 2, 3, 1, 1, 2, 3, 4]), np.array([0, 3])
    ids = (pa.array(["u"] * 3 + ["v"] * 5), pa.array(list("abcdefgh")))

    codes = assign_splits({"kind": "leave_last_out"}, times, user_starts, ids)

    assert codes.tolist() == [0, 1, 2, 0, 0, 0, 1, 2]
    assert count_tied(codes, times, user_starts) == {"val": 0, "test": 0}
