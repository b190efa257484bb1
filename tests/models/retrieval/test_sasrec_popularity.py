"""SASRec is causal and learns; popularity counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.retrieval.baselines.popularity import Popularity, PopularityConfig
from models.retrieval.data import Catalogue, RequestBatch
from models.retrieval.requests import RETRIEVAL
from models.retrieval.sasrec import SASRec, SASRecConfig
from tests.fixtures.batches import fill_batch
from tests.fixtures.commands import load_split
from tests.fixtures.small_retrieval import make_windows
from tests.fixtures.training_tables import write_log

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


def test_the_loss_of_a_window_is_the_mean_over_its_requests_one_by_one(
    sasrec, tmp_path
):
    log = {f"u{i}": [(t, (3 * i + t) % ITEMS) for t in range(4 + i)] for i in range(4)}
    write_log(str(tmp_path), log, ITEMS)
    uri = f"{tmp_path}/sequences"
    users = load_split(RETRIEVAL, uri, "train", unit="user", max_history=8)
    requests = load_split(RETRIEVAL, uri, "train", unit="request", max_history=8)
    (rows,) = users.evaluation_batches(100)
    losses = []
    for row in range(len(requests)):
        batch = requests.collate(np.array([row]))
        losses.append(sasrec(make_windows(batch))["loss"])

    loss = sasrec(users.collate(rows))["loss"]

    torch.testing.assert_close(loss, torch.stack(losses).mean())


def test_popularity_ranks_by_all_train_behaviours_with_ties_to_the_lower_index(
    tmp_path,
):
    """First behaviours of a user are counted, too, alone or with equal timestamps."""
    log = {
        "a": [(t, i) for t, i in enumerate([9, 5, 5, 3, 1, 1])],
        "b": [(1, 3), (1, 7)],
        "c": [(4, 5)],
    }
    write_log(str(tmp_path), log, 10)
    uri = f"{tmp_path}/sequences"
    train = load_split(
        RETRIEVAL,
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
