"""Small tables for the tests of retrieval models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from models.tables import Manifest, commit, read_manifest, write_part
from pipelines.data.schemas import SIDS, TRIE, events_schema, items_schema, sequences_schema

Log = dict[str, list[tuple[int, int]]]
"""User -> (timestamp, item_index), in order of time."""

WriteTables = Callable[..., Path]


def leave_last_out(count: int) -> list[str]:
    return ["train"] * count if count < 3 else ["train"] * (count - 2) + ["val", "test"]


def _write(folder: Path, schema: pa.Schema, parts: list[pa.Table], inputs: dict, info: dict) -> Manifest:
    uri = str(folder)
    written = [write_part(uri, part) for part in parts]
    return commit(uri, folder.name, schema, written, config={}, inputs=inputs, info=info)


@pytest.fixture
def write_tables(tmp_path: Path) -> WriteTables:
    """Writes `items` and `sequences` of a log, with strict histories, in parts of a few users."""

    def write(log: Log, num_items: int, name: str = "tables", users_per_part: int = 3) -> Path:
        root = tmp_path / name
        schema = items_schema()
        items = pa.table(
            {"item_index": np.arange(num_items, dtype=np.int32), "item_id": [f"i{i:05d}" for i in range(num_items)]},
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
                for (t, i), s in zip(behaviours, leave_last_out(len(behaviours)), strict=True)
            ]
            rows.append({
                "user_id": user, "item_index": [i for _, i in behaviours], "timestamp_ms": times,
                "query": [None] * len(times), "requests": requests,
            })  # fmt: skip
        parts = [
            pa.Table.from_pylist(rows[at : at + users_per_part], schema=schema)
            for at in range(0, len(rows), users_per_part)
        ]
        _write(root / "sequences", schema, parts, {"items": made.hash}, {"kind": "retrieval"})
        return root

    return write


@pytest.fixture
def write_sids(tmp_path: Path) -> Callable[..., Path]:
    """Writes `sids` and `trie` of codes, as made from the items of `tables`."""

    def write(codes: list[tuple[int, ...]], sizes: list[int], tables: Path, name: str = "sids", **inputs: str) -> Path:
        root = tmp_path / name
        table = pa.table({"item_index": range(len(codes)), "codes": codes}, schema=SIDS)
        items = read_manifest(str(tables / "items")).hash
        sizes_info = {"codebook_sizes": sizes}
        sids = _write(root / "sids", SIDS, [table], {"items": inputs.get("items", items)}, sizes_info)
        edges, node_of = [], {(): 0}
        for level in range(len(sizes)):
            for child, prefix in enumerate(sorted({c[: level + 1] for c in codes})):
                item = codes.index(prefix) if level == len(sizes) - 1 else None
                edges.append((level, node_of[prefix[:-1]], prefix[-1], child, item))
                node_of[prefix] = child
        columns = dict(zip(TRIE.names, zip(*edges, strict=True), strict=True))
        trie = pa.table({k: list(v) for k, v in columns.items()}, schema=TRIE)
        _write(root / "trie", TRIE, [trie], {"sids": inputs.get("sids", sids.hash)}, sizes_info)
        return root

    return write
