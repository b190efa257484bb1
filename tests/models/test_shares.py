"""What a worker reads and holds of a table, and batches that are the same whatever the number of workers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import shares
from models.actions.data import ActionsExamples
from models.examples import Sharded
from models.fit import IDLE
from models.retrieval.data import Examples
from models.search.data import SearchExamples
from models.setup import Batches
from models.shares import Share, quotas, shards_of
from models.tables import join, read_manifest, read_parquet
from tests.actions_tables import write_actions
from tests.search_tables import write_search
from tests.training_tables import write_tables

PARTS, WORLDS = 12, (1, 3, 4)
FAMILIES: dict[str, tuple[type[Sharded], dict[str, str], int]] = {
    "retrieval": (Examples, {"train": "request", "val": "request"}, 6),
    "retrieval_users": (Examples, {"train": "user", "val": "request"}, 6),
    "search": (SearchExamples, {"train": "user", "val": "request"}, 4),
    "actions": (ActionsExamples, {"train": "user", "val": "user"}, 10),
    "actions_cut": (ActionsExamples, {"train": "cut", "val": "user"}, 10),
}
"""By name: class, unit of each split, and length of a history."""


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """URIs of `sequences` of twelve parts, by family."""
    folder = tmp_path_factory.mktemp("shares")
    return {
        "retrieval": join(
            write_tables(folder / "retrieval", users=48, parts=PARTS)[0], "sequences"
        ),
        "search": join(
            write_search(folder / "search", users=48, parts=PARTS)[0], "sequences"
        ),
        "actions": join(
            write_actions(folder / "actions", users=48, parts=PARTS), "sequences"
        ),
    }


def load(
    sequences: dict[str, str], name: str, world: int, shards: int
) -> list[dict[str, Any]]:
    """Of each of `world` workers, the examples by split, agreed about each other's shards."""
    family, units, limit = FAMILIES[name]
    uri = sequences[name.partition("_")[0]]
    sizes = np.array([part.bytes for part in read_manifest(uri).files])
    ranks = [
        family.load_share(uri, units, limit, Share.of(sizes, shards, rank, world))
        for rank in range(world)
    ]
    for split in units:
        counts = [
            [*rank[split].rows_per_buffer.flat, *rank[split].examples_per_buffer.flat]
            for rank in ranks
        ]
        largest = np.max(counts, 0).tolist()
        for rank in ranks:
            rank[split].agree(lambda mine, largest=largest: largest)
    return ranks


def contents(examples: Any, rows: np.ndarray) -> Counter[Any]:
    """What the batch says of each row, without padding: a row alone, as the model would read it."""
    found: Counter[Any] = Counter()
    for row in range(len(rows)):
        batch = examples.collate(rows[row : row + 1])
        found[
            tuple(
                (name, tuple(value.flatten().tolist()))
                for name, value in sorted(batch.items())
            )
        ] += 1
    return found


def epoch_of(ranks: list[Any], epoch: int, batch_size: int) -> list[Counter[Any]]:
    """What all workers together have of each step."""
    orders = [
        list(rank.batches(batch_size, seed=5, epoch=epoch, shuffle=True))
        for rank in ranks
    ]
    assert {len(order) for order in orders} == {ranks[0].steps(batch_size)}
    return [
        sum(
            (contents(rank, rows) for rank, rows in zip(ranks, step, strict=True)),
            Counter(),
        )
        for step in zip(*orders, strict=True)
    ]


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_batch_is_the_same_whatever_the_number_of_workers(
    sequences: dict[str, str], name: str, shards: int
) -> None:
    alone = load(sequences, name, 1, shards)[0]["train"]
    steps = epoch_of([alone], 1, 16)
    rows = alone._shard_rows()
    if name != "actions_cut":  # which cuts a row anew
        assert sum(steps, Counter()) == sum(
            (contents(alone, own) for _, own in rows), Counter()
        )  # each once
    assert steps != epoch_of([alone], 2, 16)
    for world in WORLDS[1:]:
        assert (
            epoch_of(
                [rank["train"] for rank in load(sequences, name, world, shards)], 1, 16
            )
            == steps
        )


@pytest.mark.parametrize(
    ("name", "shards"), [("retrieval", 1), ("search", 4), ("actions_cut", 4)]
)
def test_training_on_some_rows_is_on_the_same_ones_whatever_the_epoch_and_the_number_of_workers(
    sequences: dict[str, str], name: str, shards: int
) -> None:
    def limited(world: int) -> list[Any]:
        ranks = [rank["train"] for rank in load(sequences, name, world, shards)]
        for rank in ranks:
            rank.limit_to(17)
        return ranks

    alone = limited(1)
    steps = epoch_of(alone, 1, 4)
    assert sum(steps, Counter()).total() == len(alone[0]) == 17
    assert epoch_of(limited(2), 1, 4) == steps
    if name != "actions_cut":  # which cuts a row anew
        every = contents(
            alone[0], np.concatenate([rows for _, rows in alone[0]._shard_rows()])
        )
        assert sum(steps, Counter()) == sum(epoch_of(alone, 2, 4), Counter()) == every


@pytest.mark.parametrize(("limit", "shards"), [(0, 4), (17, 1), (17, 4)])
@pytest.mark.parametrize("name", ["retrieval", "search", "actions"])
def test_a_validation_is_of_the_same_rows_whatever_the_number_of_workers(
    sequences: dict[str, str], name: str, shards: int, limit: int
) -> None:
    alone = load(sequences, name, 1, shards)[0]["val"]
    expected = contents(alone, alone.chosen(limit))
    assert expected.total() == (limit or len(alone))
    for world in WORLDS[1:]:
        ranks = [rank["val"] for rank in load(sequences, name, world, shards)]
        assert (
            sum((contents(rank, rank.chosen(limit)) for rank in ranks), Counter())
            == expected
        )


@pytest.mark.parametrize("name", ["retrieval", "search"])
def test_shares_are_even(sequences: dict[str, str], name: str) -> None:
    """Of batches of 32 examples each of four workers has about eight."""
    ranks = [rank["train"] for rank in load(sequences, name, 4, PARTS)]
    sizes = np.array(
        [
            [rank.sizes(rows).sum() for rows in rank.batches(32, shuffle=True)]
            for rank in ranks
        ]
    )
    full = sizes[:, sizes.sum(0) > 24]
    assert abs(full.mean(1) - 8).max() < 1
    assert full.max() <= 9 + max(
        rank.sizes(np.arange(len(rank))).max() for rank in ranks
    )


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the bytes of each file that is read from now on."""
    read: Counter[str] = Counter()

    def reading(uri: str, columns: list[str] | None = None, *more: Any) -> Any:
        read[uri] += Path(uri).stat().st_size
        return read_parquet(uri, columns, *more)

    monkeypatch.setattr(shares, "read_parquet", reading)
    return read


@pytest.mark.parametrize("name", ["retrieval", "search", "actions"])
def test_four_workers_read_no_more_than_one(
    sequences: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both splits together, each file once. Those of a table in one shard are read by every worker."""
    files = {part.path: part.bytes for part in read_manifest(sequences[name]).files}
    expected = {join(sequences[name], path): size for path, size in files.items()}
    for world in WORLDS:
        read = counted(monkeypatch)
        load(sequences, name, world, PARTS)
        assert read == expected
    read = counted(monkeypatch)
    load(sequences, name, 4, 1)
    assert read == {path: 4 * size for path, size in expected.items()}


def held(examples: Any) -> int:
    """Bytes of the arrays that it holds."""
    values = [*vars(examples).values()]
    values += [
        array for value in values if isinstance(value, dict) for array in value.values()
    ]
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_worker_holds_no_more_than_its_share(
    sequences: dict[str, str], name: str
) -> None:
    whole = load(sequences, name, 1, PARTS)[0]
    for rank in load(sequences, name, 4, PARTS):
        for split in ("train", "val"):
            rows = sum(len(own) for _, own in rank[split]._shard_rows()) / len(
                whole[split]
            )
            assert held(rank[split]) <= 1.3 * max(rows, 0.25) * held(whole[split])


def test_a_validation_holds_only_what_it_needs(tmp_path: Path) -> None:
    """Of 60 users with 40 behaviours each, the latest six before each validation request; and no user without one."""
    uri = join(write_tables(tmp_path, length=40)[0], "sequences")
    share = Share.of(np.ones(1, np.int64), 1, 0, 1)
    examples = Examples.load_share(
        uri, {"train": "request", "val": "request"}, 6, share
    )
    assert len(examples["val"].behaviours) == 60 * 6
    assert len(examples["train"].behaviours) > 60 * 36
    assert examples["val"].behaviours.dtype == np.int32
    actions = join(write_actions(tmp_path / "actions"), "sequences")
    found = ActionsExamples.load(actions, "val", max_history=3)
    events = int((found.context + found.candidates).sum())
    assert len(found.events["item"]) == events + 1  # and one of zeros
    assert found.context.max() == 3


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(1, 40))
def test_quotas_give_each_row_once_in_batches_of_the_size(
    rows: list[int], batch_size: int
) -> None:
    total = sum(rows)
    steps = -(-total // batch_size)
    edges = np.array(
        [quotas(n, total, batch_size, steps, v, len(rows)) for v, n in enumerate(rows)]
    )
    assert (np.diff(edges) >= 0).all()
    assert edges[:, 0].sum() == 0
    if not steps:
        return
    assert edges[:, -1].tolist() == rows
    sizes = np.diff(edges).sum(0)
    assert abs(sizes[:-1] - batch_size).max(initial=0) <= len(rows)
    if len(set(rows)) == 1:
        assert (sizes[:-1] == batch_size).all()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=20),
    st.integers(1, 30),
    st.integers(1, 40),
)
def test_every_part_is_held_and_by_one_worker_if_there_are_shards_enough(
    sizes: list[int], shards: int, world: int
) -> None:
    ranks = [Share.of(np.array(sizes), shards, rank, world) for rank in range(world)]
    parts = Counter(
        part for share in ranks for shard in share.held for part in shard.parts
    )
    assert set(parts) == set(range(len(sizes)))
    assert all(share.held for share in ranks)
    if world <= ranks[0].shards:
        assert set(parts.values()) == {1}
    places: dict[int, list[tuple[int, int]]] = {}
    for share in ranks:
        for shard in share.held:
            places.setdefault(shard.number, []).append((shard.place, shard.holders))
    for found in places.values():
        assert sorted(found) == [(place, len(found)) for place in range(len(found))]


def test_shards_are_a_matter_of_the_table_and_the_batch(
    sequences: dict[str, str],
) -> None:
    manifest = read_manifest(sequences["retrieval"])
    size = sum(part.bytes for part in manifest.files) / 2**20
    assert shards_of(manifest, 32.0, 256) == 1
    assert shards_of(manifest, size / 2, 256) == 2
    assert shards_of(manifest, size / 100, 256) == PARTS  # no more than parts
    assert shards_of(manifest, size / 100, 20) == 5  # four rows of each in a batch


def test_a_worker_without_rows_of_a_batch_stands_in(sequences: dict[str, str]) -> None:
    ranks = load(sequences, "retrieval", 4, PARTS)
    batches = [[*Batches(rank["train"], 2, 0)(0, 0)] for rank in ranks]
    assert all(len(batch["history"]) for rank in batches for batch in rank)
    real = [
        len(batch["history"]) for rank in batches for batch in rank if IDLE not in batch
    ]
    assert sum(real) == sum(len(rank["train"]) for rank in ranks)
    assert len(real) < sum(map(len, batches))
    assert torch.equal(
        next(Batches(ranks[0]["train"], 2, 0)(0, 3))["history"],
        batches[0][3]["history"],
    )


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 1, 255], np.uint8),
        ([0, 256], np.float16),
        ([-1.0, 0.5], np.float16),
        ([np.nan, 1.0], np.float16),
        ([0.1], np.float32),
        ([70000.0], np.float32),
        ([2049.0], np.float32),
        ([], np.uint8),
        ([np.inf], np.float16),
    ],
)
def test_compact_numbers_are_the_same(values: list[float], kind: type) -> None:
    found = shares.compact(np.array(values, np.float32))
    assert found.dtype == kind
    np.testing.assert_array_equal(
        found.astype(np.float32), np.array(values, np.float32)
    )
