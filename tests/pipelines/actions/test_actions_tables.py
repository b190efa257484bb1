"""Counts, tasks and inputs of a log of actions: events that counts may include, and
options that are rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from core.options import build
from core.schemas import LogInfo, Split
from pipelines.prepare.kinds.actions.sequences import ActionsBuilder
from pipelines.prepare.reading.log import parse_log
from pipelines.prepare.sequences.counts import Lookups
from pipelines.prepare.settings.actions import ActionsConfig, Input, Task
from tests.fixtures.commands import read_config

LABELS = {"click": "bool", "like": "bool", "dwell": "float32"}
SOURCE = parse_log(
    {
        "files": "log.jsonl",
        "user": "user",
        "item": "item",
        "time": {"column": "ms", "unit": "ms"},
        "labels": {name: {"column": name, "type": LABELS[name]} for name in LABELS},
        "numbers": ["price"],
        "categories": ["city"],
    }
)
SCHEMA = SOURCE.schema
CATALOGUE = ["a", "b", "c", "d"]
HOUR = 3_600_000
VAL_START, TEST_START = 8 * HOUR, 12 * HOUR
SPLIT = Split("temporal", VAL_START, TEST_START)


def compute_features(folder: Path, disliked_hour: int) -> np.ndarray:
    """Return the features (17, F) of a user with an event per hour, all liked but one."""
    content = {
        "tasks": {"long": {"label": "dwell", "above": 3}, "some": {"any": ["like"]}},
        "inputs": {"dwell": {"label": "dwell", "range": [0, 8], "log_unit": 2}},
        "counts": {"keys": ["user"], "windows_days": [1], "delay_minutes": 0},
    }
    config = build(ActionsConfig, content).resolve(
        LogInfo(LABELS, [], [], clock=True), []
    )
    settings = read_config({"kind": "actions"})
    builder = ActionsBuilder(SOURCE, settings, SPLIT, config)
    rows = [
        {
            "user_id": "u",
            "request_id": "",
            "timestamp_ms": hour * HOUR,
            "item_id": "a",
            "position": 0,
            "label_like": hour != disliked_hour,
        }
        for hour in range(17)
    ]
    events = pa.Table.from_pylist(rows, schema=SCHEMA).select(builder.columns)
    items = pl.DataFrame({"item_id": CATALOGUE}).with_row_index("item_index")
    pq.write_table(events, folder / "events.parquet")
    uri = f"{folder}/events.parquet"
    part: Any = builder.build(str(folder), Lookups(items), uri).part
    return np.array(pq.read_table(folder / part.path)["features"].to_pylist()[0])


def test_counts_of_candidates_include_no_event_of_their_split(tmp_path: Path):
    """Counts of candidates are taken at the start of the split: else one like of a user
    would lower the predictions of the user's other candidates.
    """
    train_changed = compute_features(tmp_path, disliked_hour=0)
    val_changed = compute_features(tmp_path, disliked_hour=8)
    test_changed = compute_features(tmp_path, disliked_hour=12)

    assert np.array_equal(val_changed[8:12], np.tile(val_changed[8], (4, 1)))
    assert np.array_equal(test_changed[12:], np.tile(test_changed[12], (5, 1)))
    # events of validation are counted at the start of test
    assert not np.array_equal(val_changed[12:], test_changed[12:])
    assert not np.array_equal(train_changed[8:12], val_changed[8:12])


def test_an_input_is_scaled_by_the_declared_range_of_its_label():
    ranges = {"rating": [1.0, 5.0]}
    info = LogInfo({"rating": "float32"}, [], [], clock=True, ranges=ranges)
    config = ActionsConfig(
        tasks={"t": Task("rating", at_least=4)}, inputs={"r": Input("rating")}
    )
    ratings = pl.Series([1, 5, None, 2], dtype=pl.Float32)
    events = pl.DataFrame({"label_rating": ratings})

    inputs = config.resolve(info, []).inputs["r"].values(events)
    tasks = events.select(config.tasks["t"].holds).to_series()

    assert inputs.tolist() == [0, 1, 0, 0.25]
    assert tasks.to_list() == [False, True, False, False]
