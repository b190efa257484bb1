"""SASRec is causal and learns; popularity counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.dataset.encoding import PAD
from models.retrieval.data import Catalogue, RequestBatch, RetrievalDataset
from models.retrieval.floors.popularity import Popularity, PopularityConfig
from models.retrieval.sasrec import SASRec, SASRecConfig
from tests.fixtures.batches import fill_batch
from tests.fixtures.small_retrieval import make_windows

ITEMS = 12


@pytest.fixture
def sasrec() -> SASRec:
    """A SASRec with random weights."""
    torch.manual_seed(0)
    config = SASRecConfig(dim=16, feedforward_dim=32, dropout=0.2, max_history=8)
    return SASRec(config, Catalogue(ITEMS)).eval()


def test_a_later_behaviour_changes_no_earlier_state(sasrec):
    history = torch.randint(0, ITEMS, (4, 8))
    states = sasrec.states(history)
    for position in range(8):
        changed = history.clone()
        changed[:, position] = (changed[:, position] + 1) % ITEMS
        new_states = sasrec.states(changed)
        before, new_before = states[:, :position], new_states[:, :position]
        torch.testing.assert_close(new_before, before, rtol=0, atol=0)
        assert (new_states[:, position] != states[:, position]).any(1).all()


def test_padding_other_rows_and_targets_change_no_recommendation(sasrec):
    history = torch.tensor([[1, 2, 3, PAD, PAD], [4, 5, 6, 7, 8]])
    batch = fill_batch(
        RequestBatch,
        {},
        history=history,
        history_length=torch.tensor([3, 5]),
        target=torch.tensor([1, 2]),
    )
    alone = fill_batch(
        RequestBatch,
        {},
        history=history[:1, :3],
        history_length=torch.tensor([3]),
        target=torch.tensor([9]),
    )

    items, scores = sasrec.recommend(batch, 5)
    items_alone, scores_alone = sasrec.recommend(alone, 5)

    assert items_alone.tolist() == items[:1].tolist()
    torch.testing.assert_close(scores_alone, scores[:1])


def test_more_items_than_the_catalogue_has_leave_an_empty_tail(sasrec):
    batch = fill_batch(
        RequestBatch,
        {"B": 2},
        history=torch.tensor([[1, 2, 3, PAD, PAD], [4, 5, 6, 7, 8]]),
        history_length=torch.tensor([3, 5]),
    )
    items, scores = sasrec.recommend(batch, ITEMS + 2)
    assert sorted(items[0].tolist()) == [-1, -1, *range(ITEMS)]
    assert scores[:, -2:].tolist() == [[-torch.inf] * 2] * 2


def test_the_loss_of_a_window_is_the_mean_over_its_requests_one_by_one(
    sasrec, write_tables
):
    log = {f"u{i}": [(t, (3 * i + t) % ITEMS) for t in range(4 + i)] for i in range(4)}
    uri = str(write_tables(log, ITEMS) / "sequences")
    users = RetrievalDataset.load(uri, "train", unit="user", max_history=8)
    requests = RetrievalDataset.load(uri, "train", unit="request", max_history=8)
    (rows,) = users.evaluation_batches(100)
    losses = []
    for row in range(len(requests)):
        batch = requests.collate(np.array([row]))
        window = make_windows(
            batch,
            target=batch.target,
            target_row=torch.tensor([0]),
            target_position=batch.history_length - 1,
        )
        losses.append(sasrec(window)["loss"])

    loss = sasrec(users.collate(rows))["loss"]

    torch.testing.assert_close(loss, torch.stack(losses).mean())


def test_it_learns_a_cycle(sasrec, write_tables):
    log = {f"u{i}": [(t, (i + t) % ITEMS) for t in range(9)] for i in range(ITEMS)}
    uri = str(write_tables(log, ITEMS) / "sequences")
    train = RetrievalDataset.load(uri, "train", unit="user", max_history=8)
    optimizer = torch.optim.AdamW(sasrec.train().parameters(), 1e-2)

    for epoch in range(80):
        for rows in train.epoch_rows(12, epoch=epoch):
            optimizer.zero_grad()
            sasrec(train.collate(rows))["loss"].backward()
            optimizer.step()

    test = RetrievalDataset.load(uri, "test", max_history=8)
    (rows,) = test.evaluation_batches(100)
    batch = test.collate(rows)
    items, _ = sasrec.recommend(batch, 1)
    assert (items[:, 0] == batch.target).float().mean() > 0.9


def test_popularity_ranks_by_all_train_behaviours_with_ties_to_the_lower_index(
    write_tables,
):
    """First behaviours of a user are counted, too, alone or with equal timestamps."""
    log = {
        "a": [(t, i) for t, i in enumerate([9, 5, 5, 3, 1, 1])],
        "b": [(1, 3), (1, 7)],
        "c": [(4, 5)],
    }
    uri = str(write_tables(log, 10) / "sequences")
    train = RetrievalDataset.load(
        uri,
        "train",
        unit=Popularity.example_unit,
        max_history=PopularityConfig().max_history,
    )
    model = Popularity(PopularityConfig(), Catalogue(10))

    model.fit_in_one_pass(train.epoch(2, seed=0, epoch=0))

    assert model.counts.tolist() == [0, 0, 0, 2, 0, 3, 0, 1, 0, 1]
    batch = fill_batch(RequestBatch, {"B": 2, "T": 1}, target=torch.tensor([3, 0]))
    items, scores = model.recommend(batch, 5)
    assert items.tolist() == [[5, 3, 7, 9, 0]] * 2
    assert scores[0].tolist() == [3, 2, 1, 1, 0]
    shares = torch.tensor([3 / 17, 1 / 17])
    torch.testing.assert_close(model(batch)["loss"], -shares.log().mean())
