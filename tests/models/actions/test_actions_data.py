"""Actions batches: what a slow reading of the table says; nothing known too early; little padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import registry
from models.actions.base import ActionsConfig
from models.actions.batch import ActionsCatalogue, check_batch
from models.actions.data import ActionsExamples
from models.shares import equal_parts
from models.tables import UserError, join, read_table
from tests.actions_tables import SEEN, TASKS, user, write_actions, write_rows
from tests.training_tables import write_tables

SMALL = {"width": 16, "num_layers": 1, "num_heads": 2, "ffn": 24, "expert_width": 8, "tower_width": 6, "dropout": 0.0}
ACTIONS = [name for name, entry in registry.MODELS.items() if entry.family is registry.ACTIONS]


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> str:
    return write_actions(tmp_path_factory.mktemp("actions"), viewers=True)


def load(tables: str, split: str, overlap: float = 0.5, **options) -> ActionsExamples:
    kind = ActionsExamples.of_model(ActionsConfig(window_overlap=overlap))
    return kind.load(join(tables, "sequences"), split, **{"max_history": 10, **options})


def batches(examples: ActionsExamples, batch_size: int = 7, **options) -> list[dict[str, torch.Tensor]]:
    return [examples.collate(rows) for rows in examples.batches(batch_size, **options)]


def events_of(batch: dict[str, torch.Tensor], row: int, prefix: str = "") -> list[tuple]:
    """(item, time, tasks, features, device) of each valid position."""
    valid = batch[f"{prefix}valid"][row]
    columns = [batch[f"{prefix}{name}"][row][valid].tolist() for name in ("item", "time", "label", "feature", "viewer")]
    return [(i, t, tuple(k), tuple(f), v) for i, t, k, f, [v] in zip(*columns, strict=True)]


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
def test_evaluation_reads_the_latest_before_the_cut_and_asks_for_all_after_it(tables, split, limit):
    users = read_table(join(tables, "sequences")).to_pylist()
    seen = {}
    for batch in batches(load(tables, split, max_history=limit)):
        check_batch(batch, ActionsCatalogue.load(tables))
        for row, number in enumerate(batch["user_row"].tolist()):
            assert number not in seen
            seen[number] = events_of(batch, row), events_of(batch, row, "candidate_")
            actions = batch["action"][row][batch["valid"][row]].tolist()
            end = users[number]["train_end" if split == "val" else "val_end"]
            expected = users[number]["actions"][max(0, end - limit) : end]
            assert actions == [[float(np.float32(value)) for value in event] for event in expected]
    for number, row in enumerate(users):
        begin, end = (row["train_end"], row["val_end"]) if split == "val" else (row["val_end"], len(row["item_index"]))
        if begin == end:
            assert number not in seen
        else:
            assert seen[number] == (wanted(row, max(0, begin - limit), begin), wanted(row, begin, end))
    assert seen[0][0] == [] or split == "test"  # who comes after the cut is asked about without a context


@pytest.mark.parametrize("limit", [4, 100])
def test_training_learns_from_each_event_once_and_in_the_order_of_the_log(tables, limit):
    """Whatever the overlap of windows, of which each but a user's first has so much of history at least."""
    learned: dict[int, list] = {}
    for batch in batches(load(tables, "train", max_history=limit), shuffle=True, epoch=3):
        check_batch(batch, ActionsCatalogue.load(tables))
        for row, number in enumerate(batch["user_row"].tolist()):
            new = batch["learn"][row][batch["valid"][row]].tolist()
            events = events_of(batch, row)
            learned.setdefault(number, []).extend(event for event, own in zip(events, new, strict=True) if own)
            assert len(events) <= limit
            assert new == sorted(new)
            assert new[0] or new.count(False) == limit // 2
        assert batch["candidate_item"].shape[1] == 0  # no event is there twice
    for number, row in enumerate(read_table(join(tables, "sequences")).to_pylist()):
        assert sorted(learned.get(number, [])) == sorted(wanted(row, 0, row["train_end"]))


def test_sequences_are_cut_for_models_that_learn_from_candidates_only(tables):
    examples = load(tables, "train", unit="cut")
    found = [batches(examples, shuffle=True, epoch=epoch) for epoch in (0, 0, 1)]
    cuts = []
    for epoch in found:
        cuts.append({})
        for batch in epoch:
            check_batch(batch, ActionsCatalogue.load(tables))
            assert batch["candidate_valid"].any(1).all()
            for row, number in enumerate(batch["user_row"].tolist()):
                context, candidates = events_of(batch, row), events_of(batch, row, "candidate_")
                cuts[-1].setdefault(number, []).append((len(context), len(candidates)))
    assert cuts[0] == cuts[1] != cuts[2]
    windows = load(tables, "train", unit="cut")
    new = np.bincount(windows.user, windows.lengths - windows.shared, minlength=60)
    for number, row in enumerate(read_table(join(tables, "sequences")).to_pylist()):
        assert new[number] == row["train_end"]
        read = sum(context + candidates for context, candidates in cuts[0].get(number, []))
        assert read == windows.lengths[windows.user == number].sum()


def test_each_row_has_a_cut_of_its_own_and_a_batch_learns_from_half(tmp_path):
    rng = np.random.default_rng(0)
    rows = [sequence_of(100, rng, (100, 100)) for _ in range(64)]
    examples = load(write_rows(tmp_path, rows, 9), "train", unit="cut", max_history=50, overlap=0.0)
    assert len(examples) == 128
    of_row, means = {}, []
    for epoch in range(40):
        for batch in examples.batches(16, seed=1, epoch=epoch, shuffle=True):
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
    return user("u", rng.integers(9, size=count).tolist(), list(range(count)), [True] * count, cuts, rng)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [(0.0, [(0, 5, 5), (5, 15, 10), (15, 25, 10)]), (0.3, [(0, 4, 4), (1, 11, 7), (8, 18, 7), (15, 25, 7)])],
)
def test_training_windows_are_cut_from_the_end_and_overlap(overlap, expected, tmp_path):
    """(first event, end, how many of the last ones are learned from)."""
    tables = write_rows(tmp_path, [sequence_of(25, np.random.default_rng(0), (25, 25))], 9)
    examples = load(tables, "train", overlap, max_history=10)
    found = []
    for row in range(len(examples)):
        batch = examples.collate(np.array([row]))
        times = batch["time"][0].tolist()
        found.append((times[0], times[-1] + 1, int(batch["learn"].sum())))
        assert batch["learn"][0, -found[-1][2] :].all()
    assert found == expected
    cut = load(tables, "train", overlap, max_history=10, unit="cut")
    for rows in cut.batches(2, shuffle=True):
        assert (rows[:, 1] >= cut.shared[rows[:, 0]]).all()  # a candidate is one that no other row learns from


def test_a_log_stamped_by_page_has_one_token_to_an_event(tmp_path):
    rng = np.random.default_rng(0)
    pages = [user(f"u{n}", rng.integers(9, size=20).tolist(), [i // 10 for i in range(20)], [True] * 20, (9, 9), rng)
             for n in range(8)]  # fmt: skip
    examples = load(write_rows(tmp_path, pages, 9), "train", max_history=100)
    batch = examples.collate(np.arange(8))
    assert batch["item"].numel() + batch["candidate_item"].numel() == 8 * 20 == int(batch["learn"].sum())


def test_steps_are_of_equally_many_events_and_little_is_padding(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for number in range(600):  # lengths as skewed as those of a real feed
        count = 1 + int(rng.geometric(0.12))
        times = np.sort(rng.integers(0, 10**6, count)).tolist()
        liked = (rng.random(count) < 0.5).tolist()
        rows.append(user(f"u{number}", rng.integers(9, size=count).tolist(), times, liked, (10**6, 10**6), rng))
    examples = load(write_rows(tmp_path, rows, 9), "train", max_history=1024)
    for epoch in (0, 1):
        order = list(examples.batches(32, shuffle=True, epoch=epoch))
        assert len(order) == examples.steps(32) == 19
        assert sorted(np.concatenate(order).tolist()) == list(range(600))
        events, positions = zip(*map(examples.positions, order), strict=True)
        assert 1 - sum(events) / sum(positions) < 0.1
        assert max(events) < 1.5 * np.mean(events)
        batch = examples.collate(order[0])
        there = batch["valid"].sum() + batch["candidate_valid"].sum()
        assert (int(there), batch["valid"].numel() + batch["candidate_valid"].numel()) == (events[0], positions[0])
    again = list(examples.batches(32, shuffle=True, epoch=1))
    assert all(np.array_equal(a, b) for a, b in zip(order, again, strict=True))
    assert not np.array_equal(order[0], next(examples.batches(32, shuffle=True, epoch=0)))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.data())
def test_equal_parts_hold_every_row_and_none_is_empty(lengths, data):
    parts = data.draw(st.integers(1, len(lengths)))
    edges = equal_parts(np.array(lengths), parts)
    assert (edges[0], edges[-1], len(edges)) == (0, len(lengths), parts + 1)
    assert (np.diff(edges) > 0).all()


def test_workers_share_out_the_users(tables):
    whole = load(tables, "val")
    parts = [load(tables, "val", rank=rank, world=3) for rank in range(3)]
    assert sorted(user for part in parts for user in part.user[part.chosen()]) == sorted(whole.user.tolist())
    trains = [load(tables, "train", rank=rank, world=3) for rank in range(3)]
    assert {len(list(part.batches(5, shuffle=True))) for part in trains} == {trains[0].steps(5)}


def test_a_large_batch_of_long_users_is_split(tables, monkeypatch):
    monkeypatch.setattr("models.actions.data.MOST_PAIRS", 200)
    order = list(load(tables, "val", max_history=100).batches(1000))
    assert len(order) > 3
    assert sorted(np.concatenate(order).tolist()) == list(range(len(load(tables, "val"))))


def test_candidates_of_users_without_a_context_are_split_too(tmp_path, monkeypatch):
    """A candidate may read itself beside its context."""
    rng = np.random.default_rng(0)
    rows = [sequence_of(1, rng, (2, 2)), *(sequence_of(20, rng, (0, 0)) for _ in range(10))]
    examples = load(write_rows(tmp_path, rows, 9), "test")
    monkeypatch.setattr("models.actions.data.MOST_PAIRS", 3 * 20 * (1 + 1) - 1)  # a context is padded to one event
    assert [len(order) for order in examples.batches(1000)] == [2] * 5


@pytest.mark.parametrize("name", ACTIONS)
def test_what_a_candidate_was_answered_changes_no_prediction(name, tmp_path):
    """Through the tables: the actions and tasks of all candidates are reversed."""
    rng = np.random.default_rng(0)
    rows = [
        user(f"u{n}", rng.integers(9, size=12).tolist(), list(range(12)), (rng.random(12) < 0.5).tolist(), (5, 9), rng)
        for n in range(4)
    ]
    other = [
        {**row, **{key: [*row[key][:9], *(reverse(row[key][9:]))] for key in ("actions", "tasks")}} for row in rows
    ]
    tables = [write_rows(tmp_path / f"{i}", content, 9) for i, content in enumerate((rows, other))]
    catalogue = ActionsCatalogue.load(tables[0])
    torch.manual_seed(0)
    model = registry.build(registry.config_from_dict({"name": name, **SMALL}), catalogue).eval()
    scores = []
    for made in tables:
        examples = load(made, "test", max_history=100)
        with torch.no_grad():
            scores.append(torch.cat([model.score(batch) for batch in batches(examples)]))
    assert torch.equal(*scores)


def reverse(events: list[list]) -> list[list]:
    return [[type(value)(1 - value) for value in event] for event in events]


@pytest.mark.parametrize("name", ACTIONS)
def test_one_pass_scores_all_candidates_as_one_at_a_time(name, tables):
    catalogue = ActionsCatalogue.load(tables)
    torch.manual_seed(0)
    model = registry.build(registry.config_from_dict({"name": name, **SMALL}), catalogue).eval()
    examples = load(tables, "val")
    batch = examples.collate(np.arange(12))
    with torch.no_grad():
        together = model.score(batch)
        alone = []
        for row, column in batch["candidate_valid"].nonzero().tolist():
            one = {key: value[row : row + 1] for key, value in batch.items()}
            one |= {key: value[:, column : column + 1] for key, value in one.items() if key.startswith("candidate_")}
            alone.append(model.score(one))
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-4)
    assert torch.isfinite(together).all()
    assert (~batch["valid"].any(1)).any()  # one of them has no context


def test_what_does_not_belong_is_refused(tables, tmp_path):
    with pytest.raises(UserError, match="actions have no split 'next'; choose train, val or test"):
        load(tables, "next")
    with pytest.raises(ValueError, match="unit 'cut' is unknown for the split 'val'"):
        load(tables, "val", unit="cut")
    with pytest.raises(ValueError, match="max_history 0 is below 1"):
        load(tables, "val", max_history=0)
    rows = [sequence_of(9, np.random.default_rng(0), cuts) for cuts in ((9, 9), (0, 9))]
    late = write_rows(tmp_path / "late", rows, 9, parts=2)
    with pytest.raises(UserError, match="worker 1 of 2 has no rows to train on"):
        next(load(late, "train", rank=1, world=2, shards=2).batches(4, shuffle=True))
    retrieval, _ = write_tables(tmp_path)
    with pytest.raises(UserError, match="holds sequences of kind 'retrieval'; models of actions need 'actions'"):
        ActionsCatalogue.load(retrieval)


def test_the_catalogue_has_attributes_and_rates(tables):
    catalogue = ActionsCatalogue.load(tables)
    rows = read_table(join(tables, "sequences")).to_pylist()
    train = [event for row in rows for event in row["tasks"][: row["train_end"]]]
    assert catalogue.labels == TASKS
    assert catalogue.train_rates == pytest.approx(np.mean(train, 0).tolist())
    kind, author = catalogue.categories[:, 0].tolist(), catalogue.categories[:, 1].tolist()
    assert [value == kind[0] for value in kind] == [i % 2 == 0 for i in range(12)]
    assert author[0] == 0  # has none
    assert all((author[i] == author[j]) == (i % 5 == j % 5) for i in range(1, 12) for j in range(1, 12))
    moved = write_actions(Path(tables).parent / "other", items=13)
    (Path(moved) / "items").rename(Path(moved) / "others")
    (Path(tables) / "items").rename(Path(moved) / "items")
    try:
        with pytest.raises(UserError, match="sequences was made from other items"):
            ActionsCatalogue.load(moved)
    finally:
        (Path(moved) / "items").rename(Path(tables) / "items")
