"""Writers of small retrieval tables, and a TIGER that is trained once per session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from core.schemas import (
    Inputs,
    ItemsInfo,
    RetrievalInfo,
    events_schema,
    items_schema,
    sequences_schema,
)
from core.tables import Table, commit, write_part
from models.retrieval.data import Catalogue
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training.loop import Report, fit
from tests.fixtures import training_tables
from tests.fixtures.infos import make_info
from tests.fixtures.trainings import build_training

Log = dict[str, list[tuple[int, int]]]
"""User -> (timestamp, item_index), in order of time."""

WriteTables = Callable[..., Path]


def assign_splits(count: int) -> list[str]:
    """Return the split of each of a user's `count` behaviours: leave-last-out."""
    if count < 3:
        return ["train"] * count
    return ["train"] * (count - 2) + ["val", "test"]


def build_sequence(user: str, behaviours: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the row of `sequences` of one user, with one request per behaviour.

    A request's history holds the strictly earlier behaviours.
    """
    times = [time for time, _ in behaviours]
    splits = assign_splits(len(behaviours))
    requests = []
    for (time, item), split in zip(behaviours, splits, strict=True):
        request = {
            "timestamp_ms": time,
            "query": None,
            "history_end": sum(earlier < time for earlier in times),
            "split": split,
            "candidates": [item],
        }
        requests.append(request)
    return {
        "user_id": user,
        "item_index": [item for _, item in behaviours],
        "timestamp_ms": times,
        "query": [None] * len(times),
        "requests": requests,
    }


def commit_table(
    folder: Path, schema: pa.Schema, parts: list[pa.Table], inputs: dict, info: Any
) -> Table:
    """Write the parts of a table and its manifest."""
    uri = str(folder)
    files = [write_part(uri, part) for part in parts]
    return commit(uri, folder.name, schema, files, config={}, inputs=inputs, info=info)


@pytest.fixture
def write_tables(tmp_path: Path) -> WriteTables:
    """A function that writes `items` and `sequences` of a log, a few users per part."""

    def write(
        log: Log, num_items: int, name: str = "tables", users_per_part: int = 3
    ) -> Path:
        root = tmp_path / name
        schema = items_schema()
        columns = {
            "item_index": np.arange(num_items, dtype=np.int32),
            "item_id": [f"i{i:05d}" for i in range(num_items)],
        }
        items = pa.table(columns, schema=schema)
        items_manifest = commit_table(
            root / "items", schema, [items], {}, make_info(ItemsInfo)
        )

        schema = sequences_schema(events_schema())
        rows = [build_sequence(user, behaviours) for user, behaviours in log.items()]
        parts = [
            pa.Table.from_pylist(rows[first : first + users_per_part], schema=schema)
            for first in range(0, len(rows), users_per_part)
        ]
        inputs = {"items": items_manifest.hash}
        info = make_info(RetrievalInfo, kind="retrieval")
        commit_table(root / "sequences", schema, parts, inputs, info)
        return root

    return write


@dataclass
class TrainedTiger:
    """Tables with semantic IDs and the run folder of a TIGER trained on them."""

    root: Path
    tables: str
    sids: str
    folder: Path
    """Run folder of the TIGER, with the checkpoint `best`."""
    ndcg: float
    """Best validation ndcg@10 of the TIGER."""

    @property
    def catalogue(self) -> Catalogue:
        """The catalogue of the tables."""
        return Catalogue.load(Inputs(self.tables, self.sids))

    def train(
        self, model: dict[str, Any], folder: Path, epochs: int, metric: str = "ndcg@10"
    ) -> tuple[Any, list[Report]]:
        """Train a model on the tables as `jobs.train` does, without Ray.

        The best checkpoint is saved as `best` in `folder`.

        Returns:
            The training's set-up and the event of each epoch.
        """
        config = FitConfig(
            lr=5e-3,
            warmup_share=0.0,
            batch_size=32,
            max_epochs=epochs,
            patience=0,
            metric=metric,
            seed=2,
        )
        setup = build_training(model, config, Inputs(self.tables, self.sids))
        events = []
        for event in fit(setup.model, setup.train, setup.validate, setup.fit):
            if not event.ends_epoch:
                continue
            events.append(event)
            if event.is_best:
                about = setup.checkpoint(epoch=event.epoch, metrics=event.metrics)
                checkpoint.save(folder / "best", setup.model, about)
        return setup, events


@pytest.fixture(scope="session")
def trained_tiger(tmp_path_factory: pytest.TempPathFactory) -> TrainedTiger:
    """Tables and a small TIGER that ranks better than chance."""
    root = tmp_path_factory.mktemp("retrieval")
    tables, sids = training_tables.write_tables(root, users=120)
    tiger = TrainedTiger(root, tables, sids, root / "tiger", 0.0)
    model = {
        "name": "tiger",
        "d_model": 16,
        "d_ff": 32,
        "num_heads": 2,
        "d_kv": 8,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "n_user_tokens": 2,
        "dropout": 0.0,
        "beam": 24,
    }
    _, events = tiger.train(model, tiger.folder, 12)
    tiger.ndcg = max(event.metrics["ndcg@10"] for event in events)
    return tiger
