"""Examples hold exactly the histories and targets of the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.dataset.dataset import Dataset
from models.retrieval.data import RequestBatch, WindowBatch
from models.retrieval.requests import RETRIEVAL
from tests.fixtures.commands import load_split
from tests.fixtures.training_tables import Log, assign_splits, write_log

Example = tuple[Any, ...]
"""User row, history and target; in val and test also whether the target is a repeat."""

BEHAVIOURS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=12
)
LOG = st.dictionaries(
    st.text("abcé", min_size=1, max_size=5),
    BEHAVIOURS.map(lambda rows: sorted(rows, key=lambda row: row[0])),
    min_size=1,
    max_size=9,
)
"""Behaviours (timestamp, item) of each user, in order of time."""
FEW_EXAMPLES = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def write_sequences(folder: Path, log: Log) -> str:
    """Write the tables of a log, a few users per part; return the URI of `sequences`."""
    write_log(str(folder), log, 10, parts=-(-len(log) // 3))
    return f"{folder}/sequences"


def list_expected(log, split: str, max_history: int) -> list[Example]:
    """Return the examples of a split that have a history, sorted."""
    examples: list[Example] = []
    for row, behaviours in enumerate(log.values()):
        splits = assign_splits(len(behaviours))
        for (time, item), request_split in zip(behaviours, splits, strict=True):
            history = [i for t, i in behaviours if t < time]
            if request_split != split or not history:
                continue
            example: Example = (row, tuple(history[-max_history:]), item)
            if split != "train":
                example += (item in history,)
            examples.append(example)
    return sorted(examples)


def read_requests(batch: RequestBatch, has_repeats: bool) -> list[Example]:
    """Return the examples of a batch of requests."""
    examples: list[Example] = []
    histories, targets = batch.history.tolist(), batch.target.tolist()
    for row, length in enumerate(batch.history_length.tolist()):
        history = histories[row]
        assert set(history[length:]) <= {-1}
        user = int(batch.user_row[row])
        example: Example = (user, tuple(history[:length]), targets[row])
        if has_repeats:
            example += (bool(batch.repeats[row]),)
        examples.append(example)
    return examples


def read_windows(batch: WindowBatch) -> list[Example]:
    """Return the examples that the windows of a batch serve."""
    examples: list[Example] = []
    histories, targets = batch.history.tolist(), batch.target.tolist()
    for index, row in enumerate(batch.target_row.tolist()):
        end = int(batch.target_position[index]) + 1
        history = tuple(histories[row][:end])
        examples.append((int(batch.user_row[row]), history, targets[index]))
    return examples


def list_examples(dataset: Dataset) -> list[Example]:
    """Return the examples of a dataset's batches, sorted."""
    has_repeats = dataset.selection.split not in ("train", "next")
    examples: list[Example] = []
    for batch in map(dataset.collate, dataset.evaluation_batches(4)):
        if dataset.selection.unit == "request":
            examples += read_requests(batch, has_repeats)
        else:
            examples += read_windows(batch)
    return sorted(examples)


def count_users(examples: list[Example]) -> int:
    """Return the number of users with an example."""
    return len({user for user, *_ in examples})


@FEW_EXAMPLES
@given(log=LOG, max_history=st.integers(1, 6))
def test_requests_are_those_of_the_tables(tmp_path, log, max_history):
    uri = write_sequences(tmp_path, log)
    for split in ("train", "val", "test"):
        dataset = load_split(RETRIEVAL, uri, split, max_history=max_history)
        expected = list_expected(log, split, max_history)
        assert list_examples(dataset) == expected
        assert dataset.count_users() == count_users(expected)


@FEW_EXAMPLES
@given(log=LOG, max_history=st.integers(1, 14))
def test_windows_serve_each_train_request_once(tmp_path, log, max_history):
    """Histories are slices of the behaviours, and whole if one window is enough."""
    uri = write_sequences(tmp_path, log)
    dataset = load_split(RETRIEVAL, uri, "train", unit="user", max_history=max_history)
    expected = list_expected(log, "train", 99)

    examples = list_examples(dataset)

    targets = sorted((user, target) for user, _, target in examples)
    assert targets == sorted((user, target) for user, _, target in expected)
    behaviours = [[item for _, item in rows] for rows in log.values()]
    for user, history, _ in examples:
        items = behaviours[user]
        starts = range(len(items) - len(history) + 1)
        parts = [tuple(items[start : start + len(history)]) for start in starts]
        assert history in parts
    if all(len(history) <= max_history for _, history, _ in expected):
        assert examples == expected
        assert len(dataset.evaluation_rows()) == count_users(expected)


def test_next_requests_follow_all_behaviours(tmp_path):
    log = {"a": [(1, 4)], "b": [(1, 2), (1, 3), (2, 5)]}
    uri = write_sequences(tmp_path, log)
    examples = list_examples(load_split(RETRIEVAL, uri, "next"))
    assert examples == [(0, (4,), -1), (1, (2, 3, 5), -1)]
