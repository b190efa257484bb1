"""Streaming: every row once an epoch, the same batches whatever the number of workers, and two buffers held at most."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoint
from models.examples import Sharded, plan
from models.fit import FitConfig, fit
from models.inputs import Inputs
from models.retrieval.data import Examples
from models.setup import set_up
from models.shares import Share
from models.tables import UserError
from models.whole_batch import IDLE
from tests.models.test_shares import FAMILIES, PARTS, contents, sequences  # noqa: F401  (a fixture)
from tests.training_tables import write_tables

Tables = dict[str, str]


def streams(
    sequences: Tables, name: str, world: int, shards: int, buffers: int
) -> list[Sharded]:
    """Of each of `world` workers, agreed about each other's shards."""
    family, units, limit = FAMILIES[name]
    uri = sequences[name.partition("_")[0]]
    manifest, _ = family._open(uri)
    made = []
    for rank in range(world):
        share = Share.of(np.ones(len(manifest.files), np.int64), shards, rank, world)
        made.append(family.load_share(uri, units, limit, share, buffers)["train"])
    counts = [
        [*stream.rows_per_buffer.flat, *stream.examples_per_buffer.flat]
        for stream in made
    ]
    largest = np.max(counts, 0).tolist()
    for stream in made:
        stream.agree(lambda mine: largest)
    return made


def rows_of(batch: dict[str, Any]) -> Counter[Any]:
    """The batch's rows without padding, whatever their order; none of a stand-in."""
    if IDLE in batch:
        return Counter()
    found: Counter[Any] = Counter()
    for row in range(len(batch["history"])):
        length = int(batch["history_length"][row])
        one = (
            tuple(batch["history"][row, :length].tolist()),
            *(int(batch[k][row]) for k in ("user", "target")),
        )
        found[one] += 1
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_an_epoch_has_every_row_once(sequences: Tables, name: str) -> None:
    family, units, limit = FAMILIES[name]
    whole = family.load(
        sequences[name.partition("_")[0]],
        "train",
        unit=units["train"],
        max_history=limit,
    )
    (stream,) = streams(sequences, name, world=1, shards=2, buffers=3)
    assert stream.requests == whole.requests
    assert stream.rows_per_buffer.sum() == len(whole)
    batches = list(stream.epoch(7, seed=5, epoch=1))
    assert len(batches) == stream.steps(7)
    users = Counter(int(user) for batch in batches for user in batch["user_row"])
    rows = np.arange(len(whole))
    assert users == Counter(whole.user_rows(rows).tolist())
    if name == "retrieval":
        found = sum((rows_of(batch) for batch in batches), Counter())
        assert found == rows_of(whole.collate(rows))


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_workers_share_the_same_batches(sequences: Tables, shards: int) -> None:
    epochs = []
    for world in (1, 2, 4):
        ranks = [
            list(s.epoch(8, seed=5, epoch=2))
            for s in streams(sequences, "retrieval", world, shards, 3)
        ]
        assert len({len(steps) for steps in ranks}) == 1
        epochs.append(
            [sum(map(rows_of, step), Counter()) for step in zip(*ranks, strict=True)]
        )
    assert epochs[0] == epochs[1] == epochs[2]


def test_a_continued_epoch_reads_no_buffer_before_its_own(
    sequences: Tables,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (stream,) = streams(sequences, "retrieval", 1, 2, 3)
    whole = list(stream.epoch(8, seed=5, epoch=0))
    other = list(stream.epoch(8, seed=5, epoch=1))
    assert [rows_of(b) for b in whole] != [rows_of(b) for b in other]
    read: list[int] = []
    load = Sharded._buffer
    monkeypatch.setattr(
        Sharded,
        "_buffer",
        lambda self, number: (read.append(number), load(self, number))[1],
    )
    order = np.random.default_rng([5, 0, 2, 3]).permutation(3)
    ends = np.cumsum(-(-stream.rows_per_buffer.sum(0) // 8)[order])
    for skip in range(len(whole)):
        read.clear()
        rest = list(stream.epoch(8, seed=5, epoch=0, skip=skip))
        for mine, expected in zip(rest, whole[skip:], strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)
        assert read == order[int(np.searchsorted(ends, skip, side="right")) :].tolist()


def test_two_buffers_are_held_at_most(
    sequences: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stream,) = streams(sequences, "retrieval", 1, 1, 6)
    alive: weakref.WeakSet[Sharded] = weakref.WeakSet()
    most, lock, load = [0], threading.Lock(), Sharded._buffer

    def watched(self: Sharded, number: int) -> Sharded:
        examples = load(self, number)
        with lock:
            alive.add(examples)
        return examples

    monkeypatch.setattr(Sharded, "_buffer", watched)
    sizes = []
    for _ in stream.epoch(4, seed=0, epoch=0):
        with lock:
            if (
                len(alive) > 2
            ):  # examples refer to themselves: what is let go of waits for the collector
                gc.collect()
            most[0] = max(most[0], len(alive))
            sizes += [examples.nbytes for examples in alive]
    assert 1 <= most[0] <= 2  # the next one may not be read yet
    assert 0 < max(sizes) <= stream.nbytes <= max(sizes) + 100  # an end mark per part


def test_a_budget_decides(sequences: Tables) -> None:
    uri = sequences["retrieval"]
    held = Examples.load(uri, "train", max_history=6).nbytes

    def choose(budget: float, world: int = 1) -> tuple[int, int]:
        return plan(Examples, uri, "request", 6, shards=9, budget=budget, world=world)

    assert choose(0) == choose(100 * held) == choose(0.9 * held, 2) == (9, 1)
    assert choose(0.9 * held)[0] == 1
    assert 3 <= choose(0.9 * held)[1] <= 4
    assert choose(0.4 * held, 2)[0] == 2
    assert choose(0.4 * held, 2)[1] < choose(0.4 * held)[1] <= PARTS
    with pytest.raises(
        UserError, match=r"memory_budget_gb .* is below .* raise it, or prepare"
    ):
        choose(held / 20)


def test_a_run_goes_on_as_if_undisturbed(tmp_path: Path) -> None:
    tables, _sids = write_tables(tmp_path, users=60, parts=8)
    uri = f"{tables}/sequences"
    held = Examples.load(uri, "train", max_history=20).nbytes
    config = FitConfig(
        max_epochs=2,
        batch_size=16,
        metric="ndcg@10",
        memory_budget_gb=0.6 * held / 2**30,
        checkpoint_every_steps=3,
        log_every_steps=3,
        seed=3,
    )
    model = {"name": "sasrec", "dim": 8, "num_layers": 1, "num_heads": 1}

    def run(
        config: FitConfig, last: Any = (None, None, None), upto: int = 10**6
    ) -> tuple[Any, Any, Any]:
        """(state, weights, shards) of the last checkpoint of the first `upto` events."""
        state, weights, shards = last
        setup = set_up(
            model,
            config,
            Inputs(tables),
            goes_on=Checkpoint(model, shards=shards) if shards else None,
        )
        assert setup.train.examples.buffers > 1
        assert f"streaming: {setup.checkpoint().shards[1]} buffers" in setup.notes[-1]
        if weights:
            setup.model.load_state_dict(weights)
        events = fit(
            setup.model,
            setup.train,
            setup.validate,
            setup.fit,
            means=setup.means,
            state=state,
        )
        for event in itertools.islice(events, upto):
            if event.state:
                last = (
                    *copy.deepcopy((event.state, setup.model.state_dict())),
                    setup.checkpoint().shards,
                )
        return last

    _, undisturbed, _ = run(config)
    for upto in (1, 3, 5):
        _, resumed, _ = run(
            dataclasses.replace(config, memory_budget_gb=8), run(config, upto=upto)
        )
        assert all(
            torch.equal(undisturbed[name], resumed[name]) for name in undisturbed
        )
