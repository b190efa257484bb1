"""Actions batches: what a slow reading of the table says; nothing known too early;
little padding.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.actions.base import ActionsConfig
from models.actions.batch import ActionsBatch
from models.actions.catalogue import ActionsCatalogue, Attributes
from models.actions.data import ActionsDataset
from models.ragged import split_evenly
from models.storage.tables import UserError, join, read_table
from tests.fixtures.actions_tables import SEEN, TASKS, user, write_actions, write_rows
from tests.fixtures.training_tables import write_tables


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> str:
    return write_actions(tmp_path_factory.mktemp("actions"), viewers=True)


def load(tables: str, split: str, overlap: float = 0.5, **options) -> ActionsDataset:
    settings = ActionsDataset.dataset_options(
        ActionsConfig(window_overlap=overlap), None
    )
    chosen = {"max_history": 10, **settings, **options}
    return ActionsDataset.load(join(tables, "sequences"), split, **chosen)


def batches(
    examples: ActionsDataset, batch_size: int = 7, epoch: int | None = None
) -> list[ActionsBatch]:
    """Batches of an evaluation, or of an epoch of training."""
    rows = (
        examples.evaluation_batches(batch_size)
        if epoch is None
        else examples.epoch_rows(batch_size, epoch=epoch)
    )
    return [examples.collate(chosen) for chosen in rows]


def events_of(batch: ActionsBatch, row: int, prefix: str = "") -> list[tuple]:
    """(item, time, tasks, features, device) of each valid position."""
    valid = getattr(batch, f"{prefix}valid")[row]
    columns = [
        getattr(batch, f"{prefix}{name}")[row][valid].tolist()
        for name in ("item", "time", "label", "feature", "viewer")
    ]
    return [
        (i, t, tuple(k), tuple(f), v) for i, t, k, f, [v] in zip(*columns, strict=True)
    ]


def wanted(row: dict, begin: int, end: int) -> list[tuple]:
    return [
        (
            row["item_index"][i],
            row["timestamp_ms"][i],
            tuple(float(task) for task in row["tasks"][i]),
            tuple(float(np.float32(value)) for value in row["features"][i]),
            SEEN.index(row["cat_device"][i]) + 1 if row["cat_device"][i] in SEEN else 0,
        )
        for i in range(begin, end)
    ]


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("limit", [1, 10, 100])
def test_evaluation_reads_the_latest_before_the_cut_and_asks_for_all_after_it(
    tables, split, limit
):
    users = read_table(join(tables, "sequences")).to_pylist()
    seen = {}
    for batch in batches(load(tables, split, max_history=limit)):
        for row, number in enumerate(batch.user_row.tolist()):
            assert number not in seen
            seen[number] = events_of(batch, row), events_of(batch, row, "candidate_")
            actions = batch.action[row][batch.valid[row]].tolist()
            end = users[number]["train_end" if split == "val" else "val_end"]
            expected = users[number]["actions"][max(0, end - limit) : end]
            assert actions == [
                [float(np.float32(value)) for value in event] for event in expected
            ]
    for number, row in enumerate(users):
        begin, end = (
            (row["train_end"], row["val_end"])
            if split == "val"
            else (row["val_end"], len(row["item_index"]))
        )
        if begin == end:
            assert number not in seen
        else:
            assert seen[number] == (
                wanted(row, max(0, begin - limit), begin),
                wanted(row, begin, end),
            )
    assert (
        seen[0][0] == [] or split == "test"
    )  # who comes after the cut is asked about without a context


@pytest.mark.parametrize("limit", [4, 100])
def test_training_learns_from_each_event_once_and_in_the_order_of_the_log(
    tables, limit
):
    """Whatever the overlap of windows, of which each but a user's first has so much of
    history at least.
    """
    learned: dict[int, list] = {}
    for batch in batches(load(tables, "train", max_history=limit), epoch=3):
        for row, number in enumerate(batch.user_row.tolist()):
            new = batch.learn[row][batch.valid[row]].tolist()
            events = events_of(batch, row)
            learned.setdefault(number, []).extend(
                event for event, own in zip(events, new, strict=True) if own
            )
            assert len(events) <= limit
            assert new == sorted(new)
            assert new[0] or new.count(False) == limit // 2
        assert batch.candidate_item.shape[1] == 0  # no event is there twice
    for number, row in enumerate(read_table(join(tables, "sequences")).to_pylist()):
        assert sorted(learned.get(number, [])) == sorted(
            wanted(row, 0, row["train_end"])
        )


def test_sequences_are_cut_for_models_that_learn_from_candidates_only(tables):
    examples = load(tables, "train", unit="split_sequence")
    found = [batches(examples, epoch=epoch) for epoch in (0, 0, 1)]
    cuts = []
    for epoch in found:
        cuts.append({})
        for batch in epoch:
            assert batch.candidate_valid.any(1).all()
            for row, number in enumerate(batch.user_row.tolist()):
                context, candidates = (
                    events_of(batch, row),
                    events_of(batch, row, "candidate_"),
                )
                cuts[-1].setdefault(number, []).append((len(context), len(candidates)))
    assert cuts[0] == cuts[1] != cuts[2]
    windows = load(tables, "train", unit="split_sequence")
    new = np.bincount(windows.user, windows.lengths - windows.shared, minlength=60)
    for number, row in enumerate(read_table(join(tables, "sequences")).to_pylist()):
        assert new[number] == row["train_end"]
        read = sum(
            context + candidates for context, candidates in cuts[0].get(number, [])
        )
        assert read == windows.lengths[windows.user == number].sum()


def test_each_row_has_a_cut_of_its_own_and_a_batch_learns_from_half(tmp_path):
    rng = np.random.default_rng(0)
    rows = [sequence_of(100, rng, (100, 100)) for _ in range(64)]
    examples = load(
        write_rows(tmp_path, rows, 9),
        "train",
        unit="split_sequence",
        max_history=50,
        overlap=0.0,
    )
    assert len(examples) == 128
    of_row, means = {}, []
    for epoch in range(80):
        for batch in examples.epoch_rows(16, seed=1, epoch=epoch):
            cuts = batch[:, 1] / 50
            assert len(set(cuts)) > 8
            means.append(cuts.mean())
            for row, cut in zip(batch[:, 0], cuts, strict=True):
                of_row.setdefault(row, []).append(cut)
    assert np.std(means) < 0.03  # of 16 independent cuts 0.07
    for cuts in of_row.values():  # of every row all cuts are alike
        assert 0.35 < np.mean(cuts) < 0.65
        assert (min(cuts) < 0.15, max(cuts) > 0.85, max(cuts) < 1) == (True, True, True)


def sequence_of(count: int, rng: np.random.Generator, cuts: tuple[int, int]) -> dict:
    return user(
        "u",
        rng.integers(9, size=count).tolist(),
        list(range(count)),
        [True] * count,
        cuts,
        rng,
    )


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (0.0, [(0, 5, 5), (5, 15, 10), (15, 25, 10)]),
        (0.3, [(0, 4, 4), (1, 11, 7), (8, 18, 7), (15, 25, 7)]),
    ],
)
def test_training_windows_are_cut_from_the_end_and_overlap(overlap, expected, tmp_path):
    """(first event, end, how many of the last ones are learned from)."""
    tables = write_rows(
        tmp_path, [sequence_of(25, np.random.default_rng(0), (25, 25))], 9
    )
    examples = load(tables, "train", overlap, max_history=10)
    found = []
    for row in range(len(examples)):
        batch = examples.collate(np.array([row]))
        times = batch.time[0].tolist()
        found.append((times[0], times[-1] + 1, int(batch.learn.sum())))
        assert batch.learn[0, -found[-1][2] :].all()
    assert found == expected
    cut = load(tables, "train", overlap, max_history=10, unit="split_sequence")
    for rows in cut.epoch_rows(2):
        assert (
            rows[:, 1] >= cut.shared[rows[:, 0]]
        ).all()  # a candidate is one that no other row learns from


def test_steps_are_of_equally_many_events_and_little_is_padding(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for number in range(600):  # lengths as skewed as those of a real feed
        count = 1 + int(rng.geometric(0.12))
        times = np.sort(rng.integers(0, 10**6, count)).tolist()
        liked = (rng.random(count) < 0.5).tolist()
        rows.append(
            user(
                f"u{number}",
                rng.integers(9, size=count).tolist(),
                times,
                liked,
                (10**6, 10**6),
                rng,
            )
        )
    examples = load(write_rows(tmp_path, rows, 9), "train", max_history=1024)
    for epoch in (0, 1):
        order = list(examples.epoch_rows(32, epoch=epoch))
        assert len(order) == examples.num_steps(32) == 19
        assert sorted(np.concatenate(order).tolist()) == list(range(600))
        valid = [examples.collate(chosen).valid for chosen in order]
        events = [int(each.sum()) for each in valid]
        assert 1 - sum(events) / sum(each.numel() for each in valid) < 0.1
        assert max(events) < 1.5 * np.mean(events)
    again = list(examples.epoch_rows(32, epoch=1))
    assert all(np.array_equal(a, b) for a, b in zip(order, again, strict=True))
    assert not np.array_equal(order[0], next(examples.epoch_rows(32, epoch=0)))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.data())
def test_split_evenly_hold_every_row_and_none_is_empty(lengths, data):
    parts = data.draw(st.integers(1, len(lengths)))
    edges = split_evenly(np.array(lengths), parts)
    assert (edges[0], edges[-1], len(edges)) == (0, len(lengths), parts + 1)
    assert (np.diff(edges) > 0).all()


def test_a_large_batch_of_long_users_is_split(tables, monkeypatch):
    monkeypatch.setattr("models.actions.data.MAX_PAIRS", 200)
    order = list(load(tables, "val", max_history=100).evaluation_batches(1000))
    assert len(order) > 3
    assert sorted(np.concatenate(order).tolist()) == list(
        range(len(load(tables, "val")))
    )


def test_candidates_of_users_without_a_context_are_split_too(tmp_path, monkeypatch):
    """A candidate may read itself beside its context."""
    rng = np.random.default_rng(0)
    rows = [
        sequence_of(1, rng, (2, 2)),
        *(sequence_of(20, rng, (0, 0)) for _ in range(10)),
    ]
    examples = load(write_rows(tmp_path, rows, 9), "test")
    monkeypatch.setattr(
        "models.actions.data.MAX_PAIRS", 3 * 20 * (1 + 1) - 1
    )  # a context is padded to one event
    assert [len(order) for order in examples.evaluation_batches(1000)] == [2] * 5


def test_what_does_not_belong_is_refused(tables, tmp_path):
    with pytest.raises(
        UserError, match="actions have no split 'next'; choose train, val or test"
    ):
        load(tables, "next")
    retrieval, _ = write_tables(tmp_path)
    with pytest.raises(
        UserError,
        match="holds sequences of kind 'retrieval'; models of actions need 'actions'",
    ):
        ActionsCatalogue.load(retrieval)


def test_the_catalogue_has_attributes_and_rates(tables):
    catalogue = ActionsCatalogue.load(tables)
    rows = read_table(join(tables, "sequences")).to_pylist()
    train = [event for row in rows for event in row["tasks"][: row["train_end"]]]
    assert catalogue.labels == TASKS
    assert catalogue.train_rates == pytest.approx(np.mean(train, 0).tolist())
    kind, author = (
        catalogue.categories[:, 0].tolist(),
        catalogue.categories[:, 1].tolist(),
    )
    assert [value == kind[0] for value in kind] == [i % 2 == 0 for i in range(12)]
    assert author[0] == 0  # has none
    assert all(
        (author[i] == author[j]) == (i % 5 == j % 5)
        for i in range(1, 12)
        for j in range(1, 12)
    )
    moved = write_actions(Path(tables).parent / "other", items=13)
    (Path(moved) / "items").rename(Path(moved) / "others")
    (Path(tables) / "items").rename(Path(moved) / "items")
    try:
        with pytest.raises(UserError, match="sequences was made from other items"):
            ActionsCatalogue.load(moved)
    finally:
        (Path(moved) / "items").rename(Path(tables) / "items")


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


def test_attributes_are_standardised_and_numbered_as_by_hand() -> None:
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


def test_new_items_are_read_by_what_the_catalogue_has() -> None:
    attributes = Attributes.from_items(ITEMS)
    numbers, categories = attributes.read(ITEMS)
    for rows in ([2], [3, 0], []):
        again = attributes.read(ITEMS.take(pa.array(rows, pa.int64())))
        assert torch.equal(again[0], numbers[rows])
        assert torch.equal(again[1], categories[rows])
    unknown = ITEMS.slice(0, 1).set_column(4, "cat_author", [["nobody"]])
    assert attributes.read(unknown)[1].tolist() == [[0, 2, 0, 0]]
    assert Attributes().read(ITEMS)[0].shape == (4, 0)
