"""Batches are equal for any world size, hold every example once and can be resumed."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.files import join
from models.actions.requests import ACTIONS
from models.dataset.dataset import (
    WINDOW_STEPS,
    Dataset,
    Examples,
    Kind,
    order_epoch,
)
from models.retrieval.requests import RETRIEVAL
from models.search.requests import SEARCH
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.commands import load_split
from tests.fixtures.search_tables import write_search
from tests.fixtures.training_tables import write_tables

UNITS: dict[str, tuple[Kind, dict[str, str], int]] = {
    "retrieval": (RETRIEVAL, {"train": "request", "val": "request"}, 6),
    "retrieval_users": (RETRIEVAL, {"train": "user", "val": "request"}, 6),
    "search": (SEARCH, {"train": "user", "val": "request"}, 4),
    "actions": (ACTIONS, {"train": "user", "val": "user"}, 10),
    "actions_cut": (ACTIONS, {"train": "split_sequence", "val": "user"}, 10),
}
"""Class, unit of each split and maximum history of each dataset, by name."""


@pytest.fixture(scope="module")
def sequences(tmp_path_factory) -> dict[str, str]:
    """URIs of `sequences` tables of five parts, by kind."""
    folder = tmp_path_factory.mktemp("sequences")
    retrieval, _ = write_tables(folder / "retrieval", users=48, parts=5)
    search, _ = write_search(folder / "search", users=48, parts=5)
    actions = write_actions(folder / "actions", users=48, parts=5)
    tables = {"retrieval": retrieval, "search": search, "actions": actions}
    return {name: join(uri, "sequences") for name, uri in tables.items()}


def load_ranks(
    sequences: dict[str, str], name: str, split: str, world: int = 1
) -> list[Dataset]:
    """Load the dataset of each of `world` workers."""
    dataset, units, max_history = UNITS[name]
    return [
        load_split(
            dataset,
            sequences[name.partition("_")[0]],
            split,
            unit=units[split],
            max_history=max_history,
            rank=rank,
            world=world,
        )
        for rank in range(world)
    ]


def count_examples(dataset: Dataset, examples: Examples) -> Counter[Any]:
    """Return how often each of the examples occurs.

    An example is identified by the tensors of a batch that contains it alone, which
    have no padding.
    """
    counts: Counter[Any] = Counter()
    for row in range(len(examples)):
        tensors = dataset.kind.collate(examples.take(np.array([row]))).tensors()
        key = tuple(
            (name, tuple(tensors[name].flatten().tolist())) for name in sorted(tensors)
        )
        counts[key] += 1
    return counts


def list_step_examples(
    ranks: list[Dataset], epoch: int, batch_size: int
) -> list[Counter[Any]]:
    """Return the examples of each step of an epoch, of all workers together."""
    num_steps = ranks[0].num_steps(batch_size)
    steps: list[Counter[Any]] = [Counter() for _ in range(num_steps)]
    for rank in ranks:
        batches = rank.epoch_examples(batch_size, seed=5, epoch=epoch)
        for step, examples in zip(steps, batches, strict=True):
            step.update(count_examples(rank, examples))
    return steps


@pytest.mark.parametrize("name", UNITS)
def test_each_batch_is_the_same_for_any_number_of_workers(sequences, name):
    (whole,) = load_ranks(sequences, name, "train")
    steps = list_step_examples([whole], 1, 16)
    assert steps != list_step_examples([whole], 2, 16)
    for world in (3, 4):
        ranks = load_ranks(sequences, name, "train", world)
        assert list_step_examples(ranks, 1, 16) == steps


@pytest.mark.parametrize("name", UNITS)
def test_a_continued_epoch_has_the_rest_of_the_batches(sequences, name):
    (dataset,) = load_ranks(sequences, name, "train")
    whole = list(dataset.epoch(4, seed=5, epoch=1))
    for skip in (1, len(whole) // 2, len(whole) - 1):
        rest = list(dataset.epoch(4, seed=5, epoch=1, skip=skip))
        for batch, expected in zip(rest, whole[skip:], strict=True):
            torch.testing.assert_close(
                batch.tensors(), expected.tensors(), rtol=0, atol=0
            )


@pytest.mark.parametrize("limit", [0, 17])
@pytest.mark.parametrize("name", ["retrieval", "search", "actions"])
def test_workers_evaluate_each_example_once(sequences, name, limit):
    (whole,) = load_ranks(sequences, name, "val")
    expected = count_examples(whole, whole.examples.take(whole.evaluation_rows(limit)))
    assert expected.total() == (limit or len(whole))
    for world in (3, 4):
        ranks = load_ranks(sequences, name, "val", world)
        examples: Counter[Any] = Counter()
        for rank in ranks:
            rows = rank.evaluation_rows(limit)
            examples.update(count_examples(rank, rank.examples.take(rows)))
        assert examples == expected
        assert sum(rank.count_users() for rank in ranks) == whole.count_users()


def test_a_worker_without_examples_of_a_step_gets_a_stand_in_batch(sequences):
    ranks = load_ranks(sequences, "retrieval", "train", 4)
    batches: list[Any] = []
    for rank in ranks:
        batches += rank.epoch(2, seed=0, epoch=0)
    real_sizes = [batch.num_rows for batch in batches if not batch.is_stand_in]
    assert sum(real_sizes) == len(ranks[0])
    assert len(real_sizes) < len(batches)
    assert all(len(batch.history) for batch in batches)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=300),
    st.integers(1, 60),
    st.integers(0, 5),
)
def test_an_epoch_has_the_counted_steps_none_empty_and_every_row_once(
    weights, batch_size, epoch
):
    weights = np.array(weights)
    lengths = weights[::-1].copy()
    steps = min(math.ceil(weights.sum() / batch_size), len(weights))

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
