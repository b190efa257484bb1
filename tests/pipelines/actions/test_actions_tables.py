"""The sequences of a log of actions against the plain reference."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import plain_actions as plain
import pyarrow as pa
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import build
from models.tables import join, read_parquet, write_part
from pipelines.data.actions.config import ActionsConfig, Input, Task
from pipelines.data.actions.features import IDS
from pipelines.data.actions.sequences import ActionsRules, build_actions, write_actions
from pipelines.data.engine import Engine
from pipelines.data.schemas import events_schema
from pipelines.data.survey import Vocabulary, read_coded

LABELS = {"click": "bool", "like": "bool", "dwell": "float32"}
SCHEMA = events_schema(LABELS, ["price"], ["city"])
CATALOGUE = ["a", "b", "c", "d"]
AUTHORS = {"a": "x", "b": "x", "c": "y", "d": None}
HOUR = plain.DAY // 24
CUTS = (8 * HOUR, 12 * HOUR)
SPLIT = {"kind": "temporal", "val_start_ms": CUTS[0], "test_start_ms": CUTS[1]}

TASKS = {
    "long": lambda row: (row["label_dwell"] or 0.0) > 3,
    "middling": lambda row: (row["label_dwell"] or 0.0) >= 3.3,
    "some": lambda row: bool(row["label_click"] or row["label_like"]),
    "click": lambda row: bool(row["label_click"]),
    "like": lambda row: bool(row["label_like"]),
}
INPUTS = {
    "dwell": lambda row: math.log1p(min(row["label_dwell"] or 0.0, 8.0) / 2) / math.log1p(4),
    "click": lambda row: float(bool(row["label_click"])),
    "like": lambda row: float(bool(row["label_like"])),
}


def config_of(**counts: Any) -> ActionsConfig:
    """The configuration that TASKS and INPUTS write out."""
    content = dict[str, Any](
        tasks={
            "long": {"label": "dwell", "above": 3},
            "middling": {"label": "dwell", "at_least": 3.3},
            "some": {"any": ["click", "like"]},
        },
        inputs={"dwell": {"label": "dwell", "range": [0, 8], "log_unit": 2}},
        counts={"windows_days": [0.25, 1], "delay_minutes": 90, "prior": 0.2, "strength": 4, **counts},
    )
    given: ActionsConfig = build(ActionsConfig, content)
    return given.resolve({"labels": LABELS}, ["author"])


def rules_of(max_events: int = 100, **counts: Any) -> ActionsRules:
    return ActionsRules(SCHEMA, SPLIT, max_events, config_of(**counts))


rows_strategy = st.lists(
    st.fixed_dictionaries(
        {
            "user_id": st.sampled_from(["u", "user 2", "Ü", ""]),
            "request_id": st.sampled_from(["", "r1"]),
            "timestamp_ms": st.integers(0, 16).map(lambda hour: hour * HOUR),
            "item_id": st.sampled_from([*CATALOGUE, "outside"]),
            "query": st.none(),
            "position": st.integers(0, 3),
            "label_click": st.sampled_from([None, True, False]),
            "label_like": st.sampled_from([None, True, False]),
            "label_dwell": st.sampled_from([None, 0.5, 3.0, 3.3, 4.0, 50.0]),
            "num_price": st.sampled_from([None, 2.0]),
            "cat_city": st.sampled_from([None, "t"]),
        }
    ),
    min_size=1,
    max_size=50,
    unique_by=lambda row: tuple(row[name] for name in plain.KEY),
)


def ordered(rows: list[dict]) -> list[dict]:
    return sorted(rows, key=lambda row: tuple(row[name] for name in plain.KEY))


def part_of(rows: list[dict], folder: str) -> str:
    return join(folder, write_part(folder, pa.Table.from_pylist(ordered(rows), schema=SCHEMA)).path)


def check_sequences(found: list[dict], rows: list[dict], keys: dict, marks: dict, max_events: int) -> None:
    """`found` is what the reference makes of `rows`."""
    expected = plain.sequences(rows, CATALOGUE, CUTS, max_events)
    assert sorted(row["user_id"] for row in found) == sorted(expected)
    for row in found:
        wanted = expected[row["user_id"]]
        events = wanted["events"]
        assert row["item_index"] == [CATALOGUE.index(event["item_id"]) for event in events]
        for name in ("timestamp_ms", *(f"label_{label}" for label in LABELS), "num_price", "cat_city"):
            assert row[name] == pa.array([event[name] for event in events], SCHEMA.field(name).type).to_pylist(), name
        assert (row["train_end"], row["val_end"]) == (wanted["train_end"], wanted["val_end"])
        assert row["tasks"] == [[int(task(event)) for task in TASKS.values()] for event in events]
        actions = [[action(event) for action in INPUTS.values()] for event in events]
        np.testing.assert_allclose(row["actions"], actions, rtol=1e-6)
        counts = [
            plain.features(rows, event, moment, keys, marks, [0.25, 1], 90, 0.2, 4)
            for event, moment in zip(events, wanted["moments"], strict=True)
        ]
        np.testing.assert_allclose(row["features"], counts, rtol=1e-6, atol=1e-6)


@settings(max_examples=60)
@given(rows=rows_strategy, max_events=st.sampled_from([1, 2, 5, 100]))
def test_sequences_equal_the_reference(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict], max_events: int
) -> None:
    rules = rules_of(max_events, keys=["user"], counted_labels=["long", "like"])
    events = read_coded(part_of(rows, str(tmp_path_factory.mktemp("events"))), rules.columns, IDS)
    table, count, sums = build_actions(events, Vocabulary.of(pa.array(CATALOGUE, pa.large_string())), [], rules)
    table.validate(full=True)
    found = table.to_pylist()
    marks = {name: TASKS[name] for name in ("long", "like")}
    check_sequences(found, rows, {"user": lambda row: row["user_id"]}, marks, max_events)

    sides = {"train": (0, "train_end"), "val": ("train_end", "val_end"), "test": ("val_end", "length")}
    for row in found:
        row["length"] = len(row["item_index"])
    for split, (begin, end) in sides.items():
        spans = [(row[begin] if begin else 0, row[end]) for row in found]
        assert count[f"events_{split}"] == sum(high - low for low, high in spans)
        assert count[f"users_{split}"] == sum(high > low for low, high in spans)
        assert count[f"with_context_{split}"] == sum(high > low > 0 for low, high in spans)
        assert count[f"events_without_context_{split}"] == sum(high for low, high in spans if low == 0)
    learned = np.array([tasks for row in found for tasks in row["tasks"][: row["train_end"]]]).reshape(-1, len(TASKS))
    assert [count[f"positives_{name}"] for name in TASKS] == learned.sum(axis=0).tolist()
    trained = [values for row in found for values in row["features"][: row["train_end"]]]
    np.testing.assert_allclose(sums[0], np.sum(np.reshape(trained, (-1, len(sums[0]))), axis=0), rtol=1e-5)
    assert count["outside"] == sum(row["item_id"] == "outside" for row in rows)
    assert count["interactions"] + count["outside"] + count["truncated_events"] == len(rows)
    times = [(row["user_id"], row["timestamp_ms"]) for row in found]
    assert count["tied_rows"] == sum(a == b for _, time in times for a, b in pairwise(time))


@pytest.mark.usefixtures("ray_local")
@settings(max_examples=6)
@given(rows=rows_strategy, parts=st.integers(1, 3))
def test_counts_across_partitions_equal_the_reference(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict], parts: int
) -> None:
    folder, made = (str(tmp_path_factory.mktemp(name)) for name in ("events", "sequences"))
    users = sorted({row["user_id"] for row in rows})
    of_part = [[row for row in rows if users.index(row["user_id"]) % parts == number] for number in range(parts)]
    uris = [part_of(part, folder) for part in of_part if part]
    codes = {"author": np.array([{"x": 0, "y": 1, None: -1}[AUTHORS[item]] for item in CATALOGUE], dtype=np.int32)}
    rules = rules_of(keys=["item", "author", "user"])
    catalogue = ray.put(Vocabulary.of(pa.array(CATALOGUE, pa.large_string())))
    written, count, scale, _ = write_actions(uris, len(rows), made, catalogue, codes, rules, Engine())
    found = [row for part in written for row in read_parquet(join(made, part.path)).to_pylist()]
    inside = {item: item for item in CATALOGUE}
    keys = {
        "item": lambda row: inside.get(row["item_id"]),
        "author": lambda row: AUTHORS.get(row["item_id"]),
        "user": lambda row: row["user_id"],
    }
    check_sequences(found, rows, keys, TASKS, 100)
    trained = [values for row in found for values in row["features"][: row["train_end"]]]
    if trained:
        np.testing.assert_allclose(scale[0], np.mean(trained, axis=0), rtol=1e-5, atol=1e-7)
        std = np.std(np.array(trained, dtype=float), axis=0)
        np.testing.assert_allclose(scale[1], np.where(std > 1e-6, std, 1), rtol=1e-4, atol=1e-6)
        assert count["events_train"] == len(trained)


def test_no_count_of_a_candidate_knows_what_was_done_with_another() -> None:
    """Counts of candidates are taken at the cut: else a user's one like would speak against his other candidates."""
    rules = rules_of(keys=["user"], delay_minutes=0, windows_days=[1])
    rows = [
        {
            "user_id": "u",
            "request_id": "",
            "timestamp_ms": hour * HOUR,
            "item_id": "a",
            "position": 0,
            "label_like": True,
        }
        for hour in range(17)
    ]
    found = []
    for changed in (0, CUTS[0] // HOUR, CUTS[1] // HOUR):
        rows[changed]["label_like"] = False
        events = pa.Table.from_pylist(rows, schema=SCHEMA).select(rules.columns)
        for number, name in enumerate(IDS):
            events = events.set_column(number, name, events[name].combine_chunks().dictionary_encode())
        table, _, _ = build_actions(events, Vocabulary.of(pa.array(CATALOGUE, pa.large_string())), [], rules)
        found.append(np.array(table.to_pylist()[0]["features"]))
        rows[changed]["label_like"] = True
    first, of_val, of_test = found
    assert np.array_equal(of_val[8:12], np.tile(of_val[8], (4, 1)))
    assert np.array_equal(of_test[12:], np.tile(of_test[12], (5, 1)))
    assert not np.array_equal(of_val[12:], of_test[12:])  # what was done in validation is known at the cut of test
    assert not np.array_equal(first[8:12], of_val[8:12])


def test_names_of_features_follow_keys_windows_and_marks() -> None:
    names = config_of(keys=["author"], counted_labels=["like"]).features
    assert names == [
        "author_exposures_0.25d", "author_like_0.25d", "author_like_rate_0.25d",
        "author_exposures_1d", "author_like_1d", "author_like_rate_1d",
    ]  # fmt: skip


def test_bool_labels_without_an_entry_are_tasks_and_actions_of_their_own() -> None:
    config = config_of()
    assert list(config.tasks) == list(TASKS)
    assert list(config.inputs) == list(INPUTS)
    assert config.counts.counted_labels == list(TASKS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tasks": {"t": {"label": "nothing"}}}, "no label 'nothing'; those are: click, like, dwell"),
        ({"tasks": {"t": {"any": ["like", "nothing"]}}}, "no label 'nothing'"),
        ({"tasks": {"t": {"label": "dwell"}}}, "give 'above' or 'at_least'"),
        ({"tasks": {"t": {"label": "like", "above": 1}}}, "no threshold"),
        ({"tasks": {"t": {"any": ["dwell"]}}}, "give 'above' or 'at_least'"),
        ({"tasks": {"t": {"label": "like", "any": ["click"]}}}, "exactly one"),
        ({"tasks": {"t": {"label": "dwell", "above": 1, "at_least": 1}}}, "give one of them"),
        ({"tasks": {"t": {"lable": "like"}}}, "lable"),
        ({"tasks": {"t": "like"}}, "actions.tasks.t' is 'like'"),
        ({"tasks": ["like"]}, "actions.tasks' is"),
        ({"tasks": {"long-dwell": {"label": "like"}}}, "'long-dwell' in 'tasks' is no name; use letters, digits and _"),
        ({"tasks": {7: {"label": "like"}}}, "actions.tasks.7' is 7"),
        ({"tasks": {"mean": {"label": "like"}}}, "tasks.mean has the name of the metrics' mean over all tasks"),
        ({"tasks": {"t": {"label": "dwell", "above": "10s"}}}, "actions.tasks.t.above' is '10s'"),
        ({"tasks": {"t": {"label": "dwell", "above": True}}}, "above' is true, it must be a number"),
        ({"tasks": {"t": {"label": "dwell", "at_least": float("nan")}}}, "at_least' is nan, it must be a number"),
        ({"tasks": {"t": {"label": "dwell", "at_least": float("inf")}}}, "threshold is inf; give a finite number"),
        ({"inputs": {"a b": {"label": "like"}}}, "'a b' in 'inputs' is no name"),
        ({"inputs": {"a": {"label": "dwell", "range": [0, 5], "log_unit": "1s"}}}, "log_unit' is '1s'"),
        ({"inputs": {"a": {"label": "dwell"}}}, "give its 'range'"),
        ({"inputs": {"a": {"label": "dwell", "range": [5, 1]}}}, "least and the largest"),
        ({"inputs": {"a": {"label": "dwell", "range": [5, math.inf]}}}, "least and the largest"),
        ({"inputs": {"a": {"label": "dwell", "range": [0, 5], "log_unit": 0}}}, "above 0"),
        ({"inputs": {"a": {"label": "like", "range": [0, 1]}}}, "is bool"),
        ({"counts": {"keys": ["maker"]}}, "those are: user, item, author"),
        ({"counts": {"keys": ["user", "user"]}}, "each once"),
        ({"counts": {"keys": []}}, "at least one"),
        ({"counts": {"windows_days": []}}, "at least one length"),
        ({"counts": {"counted_labels": ["nothing"]}}, "no task"),
        ({"counts": {"windows_days": [7, 1]}}, "ascending"),
        ({"counts": {"delay_minutes": -1}}, "0 or more"),
        ({"counts": {"windows_days": [0.5], "delay_minutes": 800}}, "longer windows"),
        ({"counts": {"prior": 2}}, "between 0 and 1"),
        ({"counts": {"strength": 0}}, "above 0"),
    ],
)
def test_what_the_log_cannot_give_is_refused(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(ActionsConfig, given, "actions.").resolve({"labels": LABELS}, ["author"])


def test_a_bool_label_that_cannot_name_a_task_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tasks\.mean has the name"):
        ActionsConfig().resolve({"labels": LABELS | {"mean": "bool"}}, ["author"])


def test_a_log_without_bool_labels_needs_tasks_and_inputs() -> None:
    with pytest.raises(ValueError, match="define at least one task"):
        ActionsConfig().resolve({"labels": {"dwell": "float32"}}, [])
    with pytest.raises(ValueError, match="say what models read"):
        ActionsConfig(tasks={"t": Task("dwell", above=1)}).resolve({"labels": {"dwell": "float32"}}, [])


def test_an_input_takes_the_range_that_its_label_declares() -> None:
    info = {"labels": {"rating": "float32"}, "ranges": {"rating": [1, 5]}}
    config = ActionsConfig(tasks={"t": Task("rating", at_least=4)}, inputs={"r": Input("rating")})
    events = pa.table({"label_rating": pa.array([1, 5, None, 2], pa.float32())})
    assert config.resolve(info, []).inputs["r"].values(events).tolist() == [0, 1, 0, 0.25]
    assert config.tasks["t"].values(events).tolist() == [False, True, False, False]
