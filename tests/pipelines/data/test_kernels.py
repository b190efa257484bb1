"""The partition kernels against the plain reference, on small random logs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import plain_reference as plain
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.tables import UserError, join, read_parquet, write_part
from pipelines.data.catalogue import core_items
from pipelines.data.engine import Engine
from pipelines.data.events import order_events, restore_unset
from pipelines.data.retrieval.sequences import Rules, build_sequences
from pipelines.data.schemas import events_schema
from pipelines.data.splits import SplitConfig, assign, cut_times, nth_times
from pipelines.data.survey import Union, Vocabulary, read_coded, survey, user_keys

SCHEMA = events_schema({"click": "bool", "dwell": "float32"}, ["price"], ["tab"])
USERS = ["u", "user 2", "Ü", "z" * 40, ""]
ITEMS = ["a", "b", "B", "é", "item-10", "item-9"]
FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

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


def in_transit(rows: list[dict[str, Any]], log_order: bool = False) -> pa.Table:
    """Rows as they arrive in a partition."""
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    return table.append_column("log_place", pa.array(np.arange(len(rows)))) if log_order else table


def written(rows: list[dict[str, Any]], folder: str, partitions: int, log_order: bool = False) -> list[str]:
    """Events parts of the rows, one per partition that has any."""
    table = in_transit(rows, log_order)
    partition = user_keys(table["user_id"]) % partitions
    of_part = [table.filter(pa.array(partition == number)) for number in np.unique(partition)]
    events = [order_events(part, SCHEMA)[0] for part in of_part]
    return [join(folder, write_part(folder, table).path) for table in events]


@FEW
@given(rows=rows_strategy, log_order=st.booleans(), data=st.data())
def test_order_events_sorts_totally_and_drops_duplicates(
    rows: list[dict], log_order: bool, data: st.DataObject
) -> None:
    rows = rows + data.draw(st.lists(st.sampled_from(rows), max_size=10))
    table, duplicates = order_events(in_transit(rows, log_order), SCHEMA)
    expected = plain.events(rows, log_order)
    assert duplicates == len(rows) - len(expected)
    if not log_order:
        assert table.to_pylist() == expected
        shuffled = data.draw(st.permutations(rows))
        assert order_events(in_transit(shuffled), SCHEMA)[0].equals(table)
    else:
        key = ("user_id", "timestamp_ms", "position")
        assert table.to_pylist() == sorted(expected, key=lambda row: tuple(row[name] for name in key))


@FEW
@given(rows=rows_strategy, log_order=st.booleans(), data=st.data())
def test_kept_duplicates_stand_beside_each_other(rows: list[dict], log_order: bool, data: st.DataObject) -> None:
    def content(row: dict) -> str:
        return str(sorted(row.items()))  # whatever the order of its keys

    rows = rows + data.draw(st.lists(st.sampled_from(rows), max_size=10))
    table, duplicates = order_events(in_transit(rows, log_order), SCHEMA, keep_duplicates=True)
    assert duplicates == len(rows) - len(plain.events(rows, log_order))
    events, key = table.to_pylist(), ("user_id", "timestamp_ms", "request_id", "position", "item_id")
    if not log_order:
        assert sorted(events, key=content) == sorted(rows, key=content)
        assert [[e[name] for name in key] for e in events] == sorted([e[name] for name in key] for e in events)
        shuffled = data.draw(st.permutations(rows))
        assert order_events(in_transit(shuffled), SCHEMA, keep_duplicates=True)[0].equals(table)
    else:
        places = {name: iter(range(len(rows))) for name in {tuple(row[n] for n in key[:2]) for row in rows}}
        expected = [{**row, "position": next(places[tuple(row[n] for n in key[:2])])} for row in rows]
        assert sorted(events, key=content) == sorted(expected, key=content)


@FEW
@given(rows=rows_strategy)
def test_columns_that_do_not_travel_come_back(rows: list[dict]) -> None:
    whole = in_transit([{**row, "request_id": "", "position": 0, "query": None, "cat_tab": None} for row in rows])
    sent = whole.drop_columns(["request_id", "position", "query", "cat_tab"])
    assert restore_unset(sent, whole.schema).equals(whole)
    assert order_events(sent, SCHEMA)[0].equals(order_events(whole, SCHEMA)[0])


def test_a_part_of_events_is_read_with_their_schema(tmp_path: Any) -> None:
    rows = [
        {"user_id": "u", "request_id": "", "timestamp_ms": time, "item_id": "a", "position": 0} for time in (2**62, 0)
    ]
    [part] = written(rows, str(tmp_path), 1)
    assert read_parquet(part).schema.equals(SCHEMA)
    assert read_parquet(part).equals(order_events(in_transit(rows), SCHEMA)[0].cast(SCHEMA))


def test_order_events_without_integer_room_for_the_times() -> None:
    rows = [
        {"user_id": user, "request_id": "", "timestamp_ms": time, "item_id": "a", "position": 0}
        for user in ("b", "a", "c")
        for time in (2**63 - 1, 5, 0)
    ]
    table, _ = order_events(in_transit(rows), SCHEMA)
    assert list(zip(table["user_id"].to_pylist(), table["timestamp_ms"].to_pylist(), strict=True)) == [
        (user, time) for user in "abc" for time in (0, 5, 2**63 - 1)
    ]


@pytest.mark.usefixtures("ray_local")
@FEW
@given(
    rows=rows_strategy,
    k=st.integers(0, 3),
    temporal=st.booleans(),
    train_core=st.booleans(),
    max_events=st.sampled_from([1, 2, 3, 100]),
    log_order=st.booleans(),
    behaviour=st.sampled_from([None, "click"]),
)
def test_core_and_sequences_equal_the_reference(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict],
    k: int,
    temporal: bool,
    train_core: bool,
    max_events: int,
    log_order: bool,
    behaviour: str | None,
) -> None:
    label = f"label_{behaviour}" if behaviour else None
    folder = str(tmp_path_factory.mktemp("events"))
    split = (2, 5) if temporal else None
    train_core = train_core and temporal
    catalogue, expected = plain.sequences(rows, k, split, train_core, max_events, log_order, label)
    parts = written(rows, folder, 3, log_order)
    if not any(behaviour is None or row[label] for row in rows):
        with pytest.raises(UserError, match="no behaviours"):
            survey(parts, behaviour, Engine())
        return
    found = survey(parts, behaviour, Engine())
    assert found.users == len({row["user_id"] for row in rows})
    before = 2 if train_core else None
    if not catalogue:
        with pytest.raises(UserError, match="lower --core"):
            core_items(found, k, before, Engine())
        return
    items, _ = core_items(found, k, before, Engine())
    assert items.to_pylist() == catalogue

    rules = Rules(
        schema=SCHEMA,
        split={"kind": "temporal", "val_start_ms": 2, "test_start_ms": 5} if temporal else {"kind": "leave_last_out"},
        core=k,
        before_ms=before,
        max_events=max_events,
        log_order=log_order,
        behaviour=behaviour,
    )
    users: dict[str, dict] = {}
    counted: dict[str, int] = {}
    for part in parts:
        table, count = build_sequences(read_coded(part), Vocabulary.of(items), rules)
        table.validate(full=True)
        for row in table.to_pylist():
            assert row["user_id"] not in users
            users[row["user_id"]] = row
        for name, number in count.items():
            counted[name] = counted.get(name, 0) + number
    assert sorted(users) == sorted(expected)
    for user, lists in expected.items():
        requests = users[user]["requests"]
        assert [r["history_end"] for r in requests] == lists["history_end"]
        assert [r["split"] for r in requests] == lists["split"]
        assert [r["timestamp_ms"] for r in requests] == lists["timestamp_ms"]
        assert [r["candidates"] for r in requests] == [[item] for item in lists["item_index"]]
        assert [r["query"] for r in requests] == lists["query"]
        for name in ("item_index", "timestamp_ms", "query", "label_click", "label_dwell", "num_price", "cat_tab"):
            assert users[user][name] == lists[name], name
    assert counted.get("users", 0) == len(expected)
    for name in ("train", "val", "test"):
        flags = [s == name for lists in expected.values() for s in lists["split"]]
        ends = [end for lists in expected.values() for end in lists["history_end"]]
        assert counted.get(f"requests_{name}", 0) == sum(flags)
        assert counted.get(f"without_history_{name}", 0) == sum(
            f and end == 0 for f, end in zip(flags, ends, strict=True)
        )


@pytest.mark.usefixtures("ray_local")
@FEW
@given(
    times=st.lists(st.integers(0, 2**45) | st.integers(0, 9_000_000), min_size=3, max_size=40),
    val=st.sampled_from([0.1, 0.3]),
    test=st.sampled_from([0.1, 0.25]),
)
def test_cut_times_are_the_quantiles(
    tmp_path_factory: pytest.TempPathFactory, times: list[int], val: float, test: float
) -> None:
    rows = [
        {"user_id": f"u{i % 7}", "request_id": "", "timestamp_ms": time, "item_id": "a", "position": i}
        for i, time in enumerate(times)
    ]
    found = survey(written(rows, str(tmp_path_factory.mktemp("events")), 2), None, Engine())
    ranks = [0, len(times) // 2, len(times) - 1]
    assert nth_times(found, ranks, Engine()) == [sorted(times)[rank] for rank in ranks]
    first, second = plain.cuts(rows, val, test)
    config = SplitConfig("temporal", val, test)
    if min(times) < first < second:
        assert cut_times(found, config, Engine()) == {
            "kind": "temporal",
            "val_start_ms": first,
            "test_start_ms": second,
        }
    else:
        with pytest.raises(UserError, match="no two cut times"):
            cut_times(found, config, Engine())


@FEW
@given(ids=st.lists(st.text(max_size=3), max_size=40), known=st.lists(st.text(max_size=3), max_size=40, unique=True))
def test_a_vocabulary_finds_the_places_of_its_ids(ids: list[str], known: list[str]) -> None:
    known = sorted(known, key=str.encode)
    found = Vocabulary.of(pa.array(known, pa.large_string())).positions(pa.array([*ids, None], pa.string()))
    assert found.tolist() == [*(known.index(one) if one in known else -1 for one in ids), -1]


@FEW
@given(st.lists(st.lists(st.sampled_from(ITEMS), unique=True), max_size=6))
def test_the_union_of_parts_adds_up_their_counts(parts: list[list[str]]) -> None:
    found = Union()
    for part in parts:
        found.add(pa.array(part, pa.large_string()), np.arange(1, len(part) + 1))
    ids, counts = found.sorted()
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
    codes = assign({"kind": "leave_last_out"}, np.arange(7), np.array([0, 2, 3]))
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


@pytest.mark.parametrize("temporal", [True, False])
@pytest.mark.parametrize("max_events", [2, 100])
def test_a_behaviour_is_in_histories_from_when_its_label_is_known(
    tmp_path: Any, temporal: bool, max_events: int
) -> None:
    """Behaviours in the order in which they are known; requests in the order of their own times."""
    schema, rng = events_schema({"click": "bool"}, known=["click"]), random.Random(max_events + temporal)
    split = {"kind": "temporal", "val_start_ms": 4, "test_start_ms": 7} if temporal else {"kind": "leave_last_out"}
    rules = Rules(schema, split, 0, None, max_events, log_order=False, behaviour="click")
    for _ in range(25):
        rows = []
        for place in range(rng.randint(1, 30)):
            time, click = rng.randint(0, 9), rng.random() < 0.7
            row = {"user_id": rng.choice("uv"), "request_id": "", "timestamp_ms": time, "item_id": rng.choice("abc")}
            rows.append(row | {"position": place, "label_click": click, "known_click": time + rng.randint(0, 5)})
            rows[-1]["known_click"] = rows[-1]["known_click"] if click else None
        rows.sort(key=lambda row: tuple(row[name] for name in plain.KEY))
        part = join(str(tmp_path), write_part(str(tmp_path), pa.Table.from_pylist(rows, schema=schema)).path)
        items = Vocabulary.of(pa.array(["a", "b", "c"], pa.large_string()))
        found = {row["user_id"]: row for row in build_sequences(read_coded(part), items, rules)[0].to_pylist()}
        clicked = [row for row in rows if row["label_click"]]
        assert list(found) == sorted({row["user_id"] for row in clicked})
        for user, lists in found.items():
            mine = sorted((row for row in clicked if row["user_id"] == user), key=lambda row: row["known_click"])
            mine = mine[-max_events:]
            for name in ("timestamp_ms", "known_click", "label_click"):
                assert lists[name] == [row[name] for row in mine], name
            asked = [row for row in rows if row in mine]
            assert [r["timestamp_ms"] for r in lists["requests"]] == [row["timestamp_ms"] for row in asked]
            assert [r["candidates"] for r in lists["requests"]] == [["abc".index(row["item_id"])] for row in asked]
            for place, (request, row) in enumerate(zip(lists["requests"], asked, strict=True)):
                time, left = row["timestamp_ms"], len(asked) - 1 - place
                assert request["history_end"] == sum(other["known_click"] < time for other in mine)
                last = "train" if len(asked) < 3 or left > 1 else ("test", "val")[left]
                assert request["split"] == (
                    ("train" if time < 4 else "val" if time < 7 else "test") if temporal else last
                )


@pytest.mark.usefixtures("ray_local")
def test_the_core_of_the_training_window_counts_what_is_known_in_it(tmp_path: Any) -> None:
    schema = events_schema({"click": "bool"}, known=["click"])
    row = {"user_id": "u", "request_id": "", "position": 0, "label_click": True}
    rows = [
        row | {"timestamp_ms": time, "item_id": item, "known_click": known}
        for time, item, known in ((0, "a", 1), (1, "b", 9), (2, "a", 3), (3, "b", 4))
    ]
    part = join(str(tmp_path), write_part(str(tmp_path), pa.Table.from_pylist(rows, schema=schema)).path)
    found = survey([part], "click", Engine(), late=True)
    assert core_items(found, 2, 5, Engine())[0].to_pylist() == ["a"]
    assert core_items(found, 2, 10, Engine())[0].to_pylist() == ["a", "b"]
    assert (found.first_ms, found.last_ms) == (0, 3)  # the split is of the times of requests
