"""Batches of actions: they equal a slow reading of the table, have no event of the future
as context, and little padding.
"""

from __future__ import annotations

from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from core.files import join
from models.actions.catalogue import Attributes
from models.actions.requests import ACTIONS, ActionsBatch
from models.dataset.dataset import Dataset
from tests.fixtures.actions_tables import (
    TRAIN_DEVICES,
    build_user_row,
    write_actions,
    write_rows,
)
from tests.fixtures.commands import load_split, read_rows


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> str:
    return write_actions(tmp_path_factory.mktemp("actions"), viewers=True)


def load_examples(tables: str, split: str, overlap: float = 0.5, **options) -> Dataset:
    """Load the examples of one split, with at most 10 events of history by default."""
    options = {"max_history": 10, "window_overlap": overlap, **options}
    return load_split(ACTIONS, join(tables, "sequences"), split, **options)


def collate_batches(
    examples: Dataset, batch_size: int = 7, epoch: int | None = None
) -> list[ActionsBatch]:
    """Return the batches of an evaluation, or of an epoch of training."""
    if epoch is None:
        rows = examples.evaluation_batches(batch_size)
        return [examples.collate(batch) for batch in rows]
    return list(examples.epoch(batch_size, seed=0, epoch=epoch))


def read_users(tables: str) -> list[dict]:
    return read_rows(tables, "sequences")


def get_batch_events(batch: ActionsBatch, row: int, prefix: str = "") -> list[tuple]:
    """Return (item, time, tasks, features, device) of each valid position."""
    valid = getattr(batch, f"{prefix}valid")[row]
    columns = [
        getattr(batch, f"{prefix}{name}")[row][valid].tolist()
        for name in ("item", "time", "label", "feature", "viewer")
    ]
    return [
        (item, time, tuple(tasks), tuple(features), device)
        for item, time, tasks, features, [device] in zip(*columns, strict=True)
    ]


def get_table_events(row: dict, begin: int, end: int) -> list[tuple]:
    """Return (item, time, tasks, features, device) of the events `begin:end`."""
    events = []
    for i in range(begin, end):
        device = row["cat_device"][i]
        events.append(
            (
                row["item_index"][i],
                row["timestamp_ms"][i],
                tuple(float(task) for task in row["tasks"][i]),
                tuple(float(np.float32(value)) for value in row["features"][i]),
                TRAIN_DEVICES.index(device) + 1 if device in TRAIN_DEVICES else 0,
            )
        )
    return events


def get_candidate_range(row: dict, split: str) -> tuple[int, int]:
    """Return the range of a user's events that a split evaluates on."""
    if split == "val":
        return row["train_end"], row["val_end"]
    return row["val_end"], len(row["item_index"])


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("limit", [1, 10, 100])
def test_evaluation_predicts_all_events_of_the_split_from_the_latest_before_it(
    tables, split, limit
):
    users = read_users(tables)
    evaluated = {}
    for batch in collate_batches(load_examples(tables, split, max_history=limit)):
        for row, user in enumerate(batch.user_row.tolist()):
            assert user not in evaluated
            context = get_batch_events(batch, row)
            candidates = get_batch_events(batch, row, "candidate_")
            evaluated[user] = context, candidates
            end, _ = get_candidate_range(users[user], split)
            actions = users[user]["actions"][max(0, end - limit) : end]
            assert batch.action[row][batch.valid[row]].tolist() == [
                [float(np.float32(value)) for value in event] for event in actions
            ]

    for user, row in enumerate(users):
        begin, end = get_candidate_range(row, split)
        if begin == end:
            assert user not in evaluated
            continue
        context = get_table_events(row, max(0, begin - limit), begin)
        assert evaluated[user] == (context, get_table_events(row, begin, end))
    if split == "val":
        # a user whose first event is in val has candidates without a context
        assert evaluated[0][0] == []


@pytest.mark.parametrize("limit", [4, 100])
def test_training_covers_each_event_once_and_in_the_order_of_the_log(tables, limit):
    """Windows overlap: each but a user's first has half of its events as history only."""
    learned: dict[int, list] = {}
    examples = load_examples(tables, "train", max_history=limit)
    for batch in collate_batches(examples, epoch=3):
        assert batch.candidate_item.shape[1] == 0  # no event is in a batch twice
        for row, user in enumerate(batch.user_row.tolist()):
            is_learned = batch.learn[row][batch.valid[row]].tolist()
            events = get_batch_events(batch, row)
            learned.setdefault(user, []).extend(compress(events, is_learned))
            assert len(events) <= limit
            assert is_learned == sorted(is_learned)
            assert is_learned[0] or is_learned.count(False) == limit // 2

    for user, row in enumerate(read_users(tables)):
        expected = get_table_events(row, 0, row["train_end"])
        assert sorted(learned.get(user, [])) == sorted(expected)


def count_split_events(
    examples: Dataset, epoch: int
) -> dict[int, list[tuple[int, int]]]:
    """Return the numbers of context events and candidates of each user's rows."""
    counts: dict[int, list[tuple[int, int]]] = {}
    for batch in collate_batches(examples, epoch=epoch):
        assert batch.candidate_valid.any(1).all()
        for row, user in enumerate(batch.user_row.tolist()):
            num_context = len(get_batch_events(batch, row))
            num_candidates = len(get_batch_events(batch, row, "candidate_"))
            counts.setdefault(user, []).append((num_context, num_candidates))
    return counts


def test_models_trained_on_candidates_only_get_sequences_split_anew_in_each_epoch(
    tables,
):
    examples = load_examples(tables, "train", unit="split_sequence")
    counts = [count_split_events(examples, epoch) for epoch in (0, 0, 1)]
    assert counts[0] == counts[1] != counts[2]

    planned: Any = examples.examples
    num_new = np.bincount(planned.user, planned.lengths - planned.shared, 60)
    for user, row in enumerate(read_users(tables)):
        assert num_new[user] == row["train_end"]
        num_read = sum(sum(pair) for pair in counts[0].get(user, []))
        assert num_read == planned.lengths[planned.user == user].sum()


def build_user(count: int, rng: np.random.Generator, cuts: tuple[int, int]) -> dict:
    """Build a row of `count` liked events at the times 0, 1, 2, ..."""
    items = rng.integers(9, size=count).tolist()
    return build_user_row("u", items, list(range(count)), [True] * count, cuts, rng)


def test_candidates_of_users_without_a_context_are_split_too(tmp_path, monkeypatch):
    """A candidate reads itself and its context, which is padded to one event."""
    rng = np.random.default_rng(0)
    rows = [build_user(1, rng, (2, 2))]
    rows += [build_user(20, rng, (0, 0)) for _ in range(10)]
    examples = load_examples(write_rows(tmp_path, rows, 9), "test")
    monkeypatch.setattr("models.actions.requests.MAX_PAIRS", 3 * 20 * (1 + 1) - 1)

    sizes = [len(batch) for batch in examples.evaluation_batches(1000)]

    assert sizes == [2] * 5


ITEMS = pa.table(
    {
        "item_id": ["a", "b", "c", "d"],
        "num_price": pa.array([1.0, None, 4.0, 7.0], pa.float32()),
        "num_same": pa.array([2.0] * 4, pa.float32()),
        "num_none": pa.array([None] * 4, pa.float32()),
        "cat_author": ["zoë", None, "abe", "zoë"],
        "cat_kind": ["dog", "cat", "dog", "cat"],
        "cat_blank": ["", "x", "", "y"],
        "cat_none": pa.array([None] * 4, pa.string()),
    }
)


def test_numbers_are_standardised_and_categories_encoded():
    numbers, categories = Attributes.from_items(ITEMS).read(ITEMS)
    price = np.array([1.0, 4.0, 7.0])
    scaled = (price - price.mean()) / price.std()
    assert numbers[:, 0].tolist() == np.insert(scaled, 1, 0).astype(np.float32).tolist()
    assert not numbers[:, 1:].any()
    assert categories.T.tolist() == [
        [2, 0, 1, 2],
        [2, 1, 2, 1],
        [0, 1, 0, 2],
        [0, 0, 0, 0],
    ]
    assert (numbers.dtype, categories.dtype) == (torch.float32, torch.int64)


def test_unknown_categories_of_new_items_are_encoded_as_zero():
    unknown = ITEMS.slice(0, 1).set_column(4, "cat_author", [["nobody"]])
    _, categories = Attributes.from_items(ITEMS).read(unknown)
    assert categories.tolist() == [[0, 2, 0, 0]]
    numbers, _ = Attributes().read(ITEMS)
    assert numbers.shape == (4, 0)
