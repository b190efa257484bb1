"""Batches are the same for any number of workers, hold every example once, and can be
continued at any step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.actions.data import ActionsDataset
from models.dataset.dataset import NewExamples, RequestDataset
from models.dataset.order import WINDOW_STEPS, count_steps, order_epoch
from models.retrieval.data import RetrievalDataset
from models.search.data import SearchDataset
from models.storage.tables import join
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.search_tables import write_search
from tests.fixtures.training_tables import write_tables

UNITS: dict[str, tuple[type[RequestDataset], dict[str, str], int]] = {
    "retrieval": (RetrievalDataset, {"train": "request", "val": "request"}, 6),
    "retrieval_users": (RetrievalDataset, {"train": "user", "val": "request"}, 6),
    "search": (SearchDataset, {"train": "user", "val": "request"}, 4),
    "actions": (ActionsDataset, {"train": "user", "val": "user"}, 10),
    "actions_cut": (ActionsDataset, {"train": "split_sequence", "val": "user"}, 10),
}
"""By name: class, unit of each split, and length of a history."""


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """URIs of `sequences` of five parts, by family."""
    folder = tmp_path_factory.mktemp("sequences")
    retrieval, _ = write_tables(folder / "retrieval", users=48, parts=5)
    search, _ = write_search(folder / "search", users=48, parts=5)
    actions = write_actions(folder / "actions", users=48, parts=5)
    tables = {"retrieval": retrieval, "search": search, "actions": actions}
    return {name: join(uri, "sequences") for name, uri in tables.items()}


def load(
    sequences: dict[str, str], name: str, split: str, world: int = 1
) -> list[RequestDataset]:
    """Return the dataset of each of `world` workers."""
    dataset, units, max_history = UNITS[name]
    return [
        dataset.load(
            sequences[name.partition("_")[0]],
            split,
            unit=units[split],
            max_history=max_history,
            rank=rank,
            world=world,
        )
        for rank in range(world)
    ]


def contents(dataset: Any, rows: np.ndarray) -> Counter[Any]:
    """Return what the batch says of each example, without padding: an example alone, as
    the model would read it.
    """
    found: Counter[Any] = Counter()
    for row in range(len(rows)):
        batch = dataset.collate(rows[row : row + 1])
        key = tuple(
            (name, tuple(value.flatten().tolist()))
            for name, value in sorted(batch.tensors().items())
        )
        found[key] += 1
    return found


def global_batches(
    ranks: list[RequestDataset], epoch: int, batch_size: int
) -> list[Counter[Any]]:
    """Return what all workers together have of each step."""
    orders = [list(rank.epoch_rows(batch_size, seed=5, epoch=epoch)) for rank in ranks]
    assert {len(order) for order in orders} == {ranks[0].num_steps(batch_size)}
    return [
        sum(
            (contents(rank, rows) for rank, rows in zip(ranks, step, strict=True)),
            Counter(),
        )
        for step in zip(*orders, strict=True)
    ]


@pytest.mark.parametrize("name", UNITS)
def test_each_batch_is_the_same_for_any_number_of_workers(sequences, name):
    (alone,) = load(sequences, name, "train")
    steps = global_batches([alone], 1, 16)
    assert steps != global_batches([alone], 2, 16)
    for world in (3, 4):
        ranks = load(sequences, name, "train", world)
        assert global_batches(ranks, 1, 16) == steps


@pytest.mark.parametrize("name", UNITS)
def test_an_epoch_has_every_example_once(sequences, name):
    (dataset,) = load(sequences, name, "train")
    rows = np.concatenate(list(dataset.epoch_rows(7, seed=5, epoch=1)))
    examples = rows[:, 0] if rows.ndim == 2 else rows
    assert sorted(examples.tolist()) == list(range(len(dataset)))


@pytest.mark.parametrize("name", UNITS)
def test_a_continued_epoch_has_the_rest_of_the_batches(sequences, name):
    (dataset,) = load(sequences, name, "train")
    whole = list(dataset.epoch(4, seed=5, epoch=1))
    for skip in (1, len(whole) // 2, len(whole) - 1):
        rest = list(dataset.epoch(4, seed=5, epoch=1, skip=skip))
        for batch, expected in zip(rest, whole[skip:], strict=True):
            found, wanted = batch.tensors(), expected.tensors()
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["retrieval", "search", "actions_cut"])
def test_training_on_some_examples_keeps_the_same_ones(sequences, name):
    def keep(world: int) -> list[RequestDataset]:
        ranks = load(sequences, name, "train", world)
        for rank in ranks:
            rank.keep_random(17)
        return ranks

    (alone,) = keep(1)
    steps = global_batches([alone], 1, 4)
    assert sum(steps, Counter()).total() == len(alone) == 17
    assert global_batches(keep(2), 1, 4) == steps
    assert alone.num_steps(4) < load(sequences, name, "train")[0].num_steps(4)


@pytest.mark.parametrize("limit", [0, 17])
@pytest.mark.parametrize("name", ["retrieval", "search", "actions"])
def test_workers_evaluate_each_example_once(sequences, name, limit):
    (alone,) = load(sequences, name, "val")
    expected = contents(alone, alone.evaluation_rows(limit))
    assert expected.total() == (limit or len(alone))
    for world in (3, 4):
        ranks = load(sequences, name, "val", world)
        found = (contents(rank, rank.evaluation_rows(limit)) for rank in ranks)
        assert sum(found, Counter()) == expected
        assert sum(rank.count_users() for rank in ranks) == alone.count_users()


def test_a_worker_without_examples_of_a_batch_stands_in(sequences):
    ranks = load(sequences, "retrieval", "train", 4)
    batches = [list(rank.epoch(2, seed=0, epoch=0)) for rank in ranks]
    real = [
        batch.num_rows for rank in batches for batch in rank if not batch.is_stand_in
    ]
    assert sum(real) == len(ranks[0])
    assert len(real) < sum(map(len, batches))
    assert all(len(batch.history) for rank in batches for batch in rank)


@pytest.mark.parametrize("name", ["retrieval", "search", "actions"])
def test_only_new_examples_and_a_share_of_the_old_are_trained_on(sequences, name):
    dataset, units, max_history = UNITS[name]
    uri = sequences[name]
    (whole,) = load(sequences, name, "train")
    time_column = "time" if name == "actions" else "request_time"
    since = int(np.median(whole.columns[time_column]))

    def learned(replay: float) -> int:
        """Count the requests, of actions the events, that training learns from."""
        new = NewExamples(since, replay, seed=3)
        found = dataset.load(
            uri, "train", unit=units["train"], max_history=max_history, new=new
        )
        if name == "actions":
            return int((found.context - found.shared).sum())
        return found.num_requests

    everything, nothing_old, some_old = learned(1.0), learned(0.0), learned(0.5)
    assert everything > some_old > nothing_old > 0


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=300),
    st.integers(1, 60),
    st.integers(0, 5),
)
def test_batches_have_about_equal_weights_and_none_is_empty(weights, batch_size, epoch):
    weights = np.array(weights)
    lengths = weights[::-1].copy()
    steps = count_steps(weights, batch_size)
    batches = list(
        order_epoch(lengths, weights, batch_size, steps, seed=1, epoch=epoch)
    )
    assert len(batches) == steps
    assert all(len(batch) for batch in batches)
    rows = np.concatenate(batches)
    assert sorted(rows.tolist()) == list(range(len(weights)))


def test_batches_of_one_window_have_similar_lengths():
    lengths = np.random.default_rng(0).integers(1, 1000, 40 * WINDOW_STEPS)
    weights = np.ones(len(lengths), np.int64)
    batches = list(order_epoch(lengths, weights, 20, 128, seed=1, epoch=0))
    spread = [np.ptp(lengths[batch]) for batch in batches]
    assert {len(batch) for batch in batches} == {20}
    assert np.mean(spread) < 50
