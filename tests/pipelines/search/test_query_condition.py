"""The gain of the query condition on simulated logs with planted causes, for users outside
the training set.
"""

from __future__ import annotations

from itertools import compress
from pathlib import Path

import numpy as np
import pytest
import torch

from models.search.catalogue import SearchCatalogue
from models.search.data import SearchBatch, SearchDataset
from models.search.qgs import QGS, QGSConfig
from models.storage.tables import join
from pipelines.data.search.simulator import Searches, SearchSettings, draw_searches
from pipelines.data.simulation import Settings, make_world
from tests.fixtures.search_tables import FEATURES, make_request, write_tables

pytestmark = pytest.mark.long

USERS, ITEMS, SEARCHES, HELD_OUT = 160, 60, 2400, 40
SIZES = {
    "width": 24,
    "num_layers": 2,
    "max_history": 40,
    "dnn_width": 16,
    "tower_width": 8,
    "text_width": 8,
    "context_features": False,
}


def build_user_row(user: int, log: Searches) -> dict:
    """Build a user's row of `sequences`, with features that are all zero."""
    searches = np.flatnonzero(log.user == user)
    searches = searches[np.argsort(log.time[searches], kind="stable")]
    row = {"user_id": f"u{user:03d}"}
    items, times, queries, requests = [], [], [], []
    for search in searches:
        time, query = int(log.time[search]), int(log.query_cluster[search])
        shown, clicks = log.item[search].tolist(), log.click[search].tolist()
        features = np.zeros((len(shown), len(FEATURES)), np.float32)
        requests.append(
            make_request(time, query, len(items), "train", shown, clicks, features)
        )
        clicked = list(compress(shown, clicks))
        items += clicked
        times += [time] * len(clicked)
        queries += [query] * len(clicked)
    return row | {
        "item_index": items,
        "timestamp_ms": times,
        "query_index": queries,
        "position": [0] * len(items),
        "features": [np.zeros(len(FEATURES), np.float32)] * len(items),
        "requests": requests,
    }


def write_simulated_log(
    folder: Path, query_driven: float, seed: int = 0
) -> tuple[SearchDataset, SearchCatalogue]:
    """Write the clicks of a simulated log as tables; return its examples and catalogue.

    The text of an item or query is its cluster; features hold no information.
    """
    world = make_world(Settings(USERS, ITEMS, SEARCHES, seed))
    log = draw_searches(
        SearchSettings(USERS, ITEMS, SEARCHES, seed, query_driven),
        world,
        np.zeros(ITEMS, np.int64),
    )
    rows = [build_user_row(user, log) for user in range(USERS)]
    num_clusters = len(world.following_cluster)
    tables, text = write_tables(folder, rows, ITEMS, num_clusters, topic=world.cluster)
    catalogue = SearchCatalogue.load(tables, text)
    examples = SearchDataset.load(
        join(tables, "sequences"),
        "train",
        unit="user",
        max_history=40,
        text=catalogue.text,
        reads_history_queries=True,
    )
    return examples, catalogue


def next_item_loss(model: QGS, batch: SearchBatch) -> torch.Tensor:
    """Return the next-item loss without the ranking loss."""
    tokens = model.history_tokens(batch)
    return model.next_item_loss(model.encode_history(batch, tokens), tokens, batch)


def train_and_measure_loss(
    examples: SearchDataset,
    catalogue: SearchCatalogue,
    condition: str,
    token: str,
    seed: int = 0,
) -> float:
    """Return the InfoNCE loss of the next item over users outside the training set."""
    torch.manual_seed(seed)
    config = QGSConfig(
        query_condition=condition, token=token, negatives="batch", **SIZES
    )
    model = QGS(config, catalogue)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    num_train = len(examples) - HELD_OUT
    for step in range(60):
        rows = np.random.default_rng(step).choice(num_train, 16, replace=False)
        loss = next_item_loss(model, examples.collate(rows))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    held_out = examples.collate(np.arange(num_train, len(examples)))
    with torch.no_grad():
        return float(next_item_loss(model.eval(), held_out))


def test_the_condition_helps_where_queries_drive_clicks(tmp_path: Path) -> None:
    examples, catalogue = write_simulated_log(tmp_path, query_driven=1.0)
    with_query = train_and_measure_loss(examples, catalogue, "query", "item")
    without_query = train_and_measure_loss(examples, catalogue, "none", "item")
    assert with_query < without_query - 0.5


def test_the_condition_does_not_help_item_tokens_where_queries_are_noise(
    tmp_path: Path,
) -> None:
    """The pair tokens of the paper contain the query, so that their loss falls anyway."""
    examples, catalogue = write_simulated_log(tmp_path, query_driven=0.0)
    with_query = train_and_measure_loss(examples, catalogue, "query", "item")
    without_query = train_and_measure_loss(examples, catalogue, "none", "item")
    assert with_query > without_query - 0.1

    pairs_with_query = train_and_measure_loss(examples, catalogue, "query", "pair")
    pairs_without_query = train_and_measure_loss(examples, catalogue, "none", "pair")
    assert pairs_with_query < pairs_without_query - 0.5
