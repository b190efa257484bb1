"""What the query condition is worth, on simulated logs whose causes are known and users
that training has not seen.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.search.catalogue import SearchCatalogue
from models.search.data import SearchBatch, SearchDataset
from models.search.qgs import QGS, QGSConfig
from models.storage.tables import join
from pipelines.data.search.simulator import SearchSettings, draw_searches
from pipelines.data.simulation import Settings, make_world
from tests.fixtures.search_tables import FEATURES, request, write_tables

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


def simulated(
    folder: Path, query_driven: float, seed: int = 0
) -> tuple[SearchDataset, SearchCatalogue]:
    """The clicks of a simulated log as tables; text tells the cluster, features tell
    nothing.
    """
    world = make_world(Settings(USERS, ITEMS, SEARCHES, seed))
    log = draw_searches(
        SearchSettings(USERS, ITEMS, SEARCHES, seed, query_driven),
        world,
        np.zeros(ITEMS, np.int64),
    )
    rows = []
    for user in range(USERS):
        mine = np.flatnonzero(log.user == user)
        searches, past = [], []
        for s in mine[np.argsort(log.time[mine], kind="stable")]:
            time, asked = int(log.time[s]), int(log.query_cluster[s])
            shown, clicks = log.item[s].tolist(), log.click[s].tolist()
            none = np.zeros((len(shown), len(FEATURES)), np.float32)
            searches.append(
                request(time, asked, len(past), "train", shown, clicks, none)
            )
            past += [
                (item, time, asked)
                for item, click in zip(shown, clicks, strict=True)
                if click
            ]
        item, times, queries = (
            (list(column) for column in zip(*past, strict=True))
            if past
            else ([], [], [])
        )
        columns = {
            "item_index": item,
            "timestamp_ms": times,
            "query_index": queries,
            "position": [0] * len(past),
        }
        features = [np.zeros(len(FEATURES), np.float32)] * len(past)
        rows.append(
            {
                "user_id": f"u{user:03d}",
                **columns,
                "features": features,
                "requests": searches,
            }
        )
    clusters = len(world.following_cluster)
    tables, text = write_tables(folder, rows, ITEMS, clusters, topic=world.cluster)
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
    """The objective alone."""
    tokens = model.history_tokens(batch)
    return model.next_item_loss(model.encode_history(batch, tokens), tokens, batch)


def held_out_loss(
    examples: SearchDataset,
    catalogue: SearchCatalogue,
    condition: str,
    token: str,
    seed: int = 0,
) -> float:
    """InfoNCE of the next item over users that the model was not trained on."""
    torch.manual_seed(seed)
    model = QGS(
        QGSConfig(query_condition=condition, token=token, negatives="batch", **SIZES),
        catalogue,
    )
    optimizer = torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=0.01
    )
    train = len(examples) - HELD_OUT
    for step in range(60):
        rows = np.random.default_rng(step).choice(train, 16, replace=False)
        loss = next_item_loss(model, examples.collate(rows))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(
            next_item_loss(
                model.eval(), examples.collate(np.arange(train, len(examples)))
            )
        )


def test_the_condition_helps_where_queries_drive_clicks(tmp_path: Path) -> None:
    examples, catalogue = simulated(tmp_path, query_driven=1.0)
    with_query, item_only = (
        held_out_loss(examples, catalogue, condition, "item")
        for condition in ("query", "none")
    )
    assert with_query < item_only - 0.5


def test_the_condition_does_not_help_where_queries_are_noise(tmp_path: Path) -> None:
    """Of items alone. The pair tokens of the paper hold the query too, so that the loss
    falls all the same.
    """
    examples, catalogue = simulated(tmp_path, query_driven=0.0)
    with_query, item_only = (
        held_out_loss(examples, catalogue, condition, "item")
        for condition in ("query", "none")
    )
    assert with_query > item_only - 0.1
    pairs = [
        held_out_loss(examples, catalogue, condition, "pair")
        for condition in ("query", "none")
    ]
    assert pairs[0] < pairs[1] - 0.5
