"""Small tables for the tests of retrieval models, and a TIGER that is trained once for
all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from models.retrieval.data import Catalogue
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import Manifest, commit, read_manifest, write_part
from models.training.fit import EpochEvent, FitConfig, fit
from pipelines.data.schemas import (
    SIDS,
    TRIE,
    events_schema,
    items_schema,
    sequences_schema,
)
from tests.fixtures import training_tables
from tests.fixtures.trainings import build_training

Log = dict[str, list[tuple[int, int]]]
"""User -> (timestamp, item_index), in order of time."""

WriteTables = Callable[..., Path]


def leave_last_out(count: int) -> list[str]:
    return ["train"] * count if count < 3 else ["train"] * (count - 2) + ["val", "test"]


def _write(
    folder: Path, schema: pa.Schema, parts: list[pa.Table], inputs: dict, info: dict
) -> Manifest:
    uri = str(folder)
    written = [write_part(uri, part) for part in parts]
    return commit(
        uri, folder.name, schema, written, config={}, inputs=inputs, info=info
    )


@pytest.fixture
def write_tables(tmp_path: Path) -> WriteTables:
    """Writes `items` and `sequences` of a log, with strict histories, in parts of a few
    users.
    """

    def write(
        log: Log, num_items: int, name: str = "tables", users_per_part: int = 3
    ) -> Path:
        root = tmp_path / name
        schema = items_schema()
        items = pa.table(
            {
                "item_index": np.arange(num_items, dtype=np.int32),
                "item_id": [f"i{i:05d}" for i in range(num_items)],
            },
            schema=schema,
        )
        made = _write(root / "items", schema, [items], {}, {})
        schema = sequences_schema(events_schema())
        rows = []
        for user, behaviours in log.items():
            times = [t for t, _ in behaviours]
            requests = [
                {
                    "timestamp_ms": t,
                    "query": None,
                    "history_end": sum(x < t for x in times),
                    "split": s,
                    "candidates": [i],
                }
                for (t, i), s in zip(
                    behaviours, leave_last_out(len(behaviours)), strict=True
                )
            ]
            rows.append(
                {
                    "user_id": user,
                    "item_index": [i for _, i in behaviours],
                    "timestamp_ms": times,
                    "query": [None] * len(times),
                    "requests": requests,
                }
            )
        parts = [
            pa.Table.from_pylist(rows[at : at + users_per_part], schema=schema)
            for at in range(0, len(rows), users_per_part)
        ]
        _write(
            root / "sequences",
            schema,
            parts,
            {"items": made.hash},
            {"kind": "retrieval"},
        )
        return root

    return write


@pytest.fixture
def write_sids(tmp_path: Path) -> Callable[..., Path]:
    """Writes `sids` and `trie` of codes, as made from the items of `tables`."""

    def write(
        codes: list[tuple[int, ...]],
        sizes: list[int],
        tables: Path,
        name: str = "sids",
        **inputs: str,
    ) -> Path:
        root = tmp_path / name
        table = pa.table({"item_index": range(len(codes)), "codes": codes}, schema=SIDS)
        items = read_manifest(str(tables / "items")).hash
        sizes_info = {"codebook_sizes": sizes}
        sids = _write(
            root / "sids",
            SIDS,
            [table],
            {"items": inputs.get("items", items)},
            sizes_info,
        )
        trie = TRIE.empty_table()  # nobody reads what is in it
        _write(
            root / "trie",
            TRIE,
            [trie],
            {"sids": inputs.get("sids", sids.hash)},
            sizes_info,
        )
        return root

    return write


@dataclass
class World:
    """Tables with semantic IDs, a TIGER that was trained on them, and how well it
    ranks.
    """

    root: Path
    tables: str
    sids: str
    tiger: Path
    ndcg: float

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue.load(self.tables, self.sids)

    def train(
        self, model: dict[str, Any], folder: Path, epochs: int, metric: str = "ndcg@10"
    ) -> tuple[Any, list[EpochEvent]]:
        """Trains as `jobs.train` does, without Ray, to `best` in the folder; (set-up,
        epochs).
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
        setup, events = (
            build_training(model, config, Inputs(self.tables, self.sids)),
            [],
        )
        for event in fit(
            setup.model, setup.train, setup.validate, setup.fit, means=setup.means
        ):
            if isinstance(event, EpochEvent):
                events.append(event)
                if event.is_best:
                    about = setup.checkpoint(epoch=event.epoch, metrics=event.metrics)
                    checkpoint.save(folder / "best", setup.model, about)
        return setup, events


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("retrieval")
    made = World(
        root, *training_tables.write_tables(root, users=120), root / "tiger", 0.0
    )
    tiger = {
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
    made.ndcg = max(
        event.metrics["ndcg@10"] for event in made.train(tiger, made.tiger, 12)[1]
    )
    return made
