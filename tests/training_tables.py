"""Small tables for tests of training: a log in which the next item mostly follows from
the last one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from models.storage.tables import Manifest, commit, join, write_part
from pipelines.data.schemas import (
    SIDS,
    TRIE,
    events_schema,
    items_schema,
    sequences_schema,
)

KINDS = ("Steel bolt", "Rubber hose, long", "Hose clamp", "Bolt")
COLOURS = ("red", "green", "blue", "black", "white", "grey")


def lists(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", kind))


def write(
    uri: str,
    table: str,
    content: pa.Table,
    info: dict,
    inputs: dict[str, str],
    parts: int = 1,
) -> Manifest:
    size = max(1, -(-len(content) // parts))
    made = [
        write_part(uri, content[at : at + size]) for at in range(0, len(content), size)
    ]  # none of no row
    return commit(uri, table, content.schema, made, config={}, inputs=inputs, info=info)


def write_tables(
    folder: Path,
    users: int = 60,
    items: int = 24,
    length: int = 9,
    seed: int = 0,
    parts: int = 1,
    titles: bool = False,
) -> tuple[str, str]:
    """TABLES, with `parts` files of users, and SIDS of `users` who go from item i to 5
    i + 3 most of the time; the last two are val and test. With `titles` most items have
    one."""
    rng = np.random.default_rng(seed)
    tables, sids = str(folder / "tables"), str(folder / "sids")
    names = [f"item-{i:03d}" for i in range(items)]
    columns: dict = {"item_index": np.arange(items, dtype=np.int32), "item_id": names}
    if titles:
        columns["text_title"] = [
            f"{KINDS[i % 4]} {COLOURS[i // 4 % 6]}" if i % 9 else None
            for i in range(items)
        ]
    texts = ["title"] * titles
    made_of = pa.table(columns, items_schema(texts))
    catalogue = write(
        join(tables, "items"), "items", made_of, {"core": 1, "texts": texts}, {}
    )
    rows = []
    for user in range(users):
        sequence = [int(rng.integers(items))]
        while len(sequence) < length + user % 4:
            sequence.append(
                (5 * sequence[-1] + 3) % items
                if rng.random() < 0.9
                else int(rng.integers(items))
            )
        count = len(sequence)
        splits = ["train"] * (count - 2) + ["val", "test"]
        requests = [
            {
                "timestamp_ms": i,
                "query": None,
                "history_end": i,
                "split": splits[i],
                "candidates": [sequence[i]],
            }
            for i in range(count)
        ]
        rows.append(
            {
                "user_id": f"user-{user:04d}",
                "item_index": sequence,
                "timestamp_ms": list(range(count)),
                "query": [None] * count,
                "requests": requests,
            }
        )
    write(
        join(tables, "sequences"),
        "sequences",
        pa.Table.from_pylist(rows, sequences_schema(events_schema())),
        {"kind": "retrieval", "users": users, "items": items},
        {"items": catalogue.hash, "events": "none"},
        parts,
    )
    codes = [[i % 4, i // 4, 0] for i in range(items)]
    sizes = [4, -(-items // 4), 2]
    table = pa.table(
        {"item_index": np.arange(items, dtype=np.int32), "codes": codes}, SIDS
    )
    made = write(
        join(sids, "sids"),
        "sids",
        table,
        {"codebook_sizes": sizes},
        {"items": catalogue.hash},
    )
    edges, nodes = [], [[]]
    for level in range(3):
        below = sorted({tuple(code[: level + 1]) for code in codes})
        for child, prefix in enumerate(below):
            leaf = codes.index(list(prefix)) if level == 2 else None
            edges.append(
                (level, nodes.index(list(prefix[:level])), prefix[-1], child, leaf)
            )
        nodes = [list(prefix) for prefix in below]
    columns = dict(zip(TRIE.names, zip(*edges, strict=True), strict=True))
    trie = pa.table({name: list(values) for name, values in columns.items()}, TRIE)
    info = {"codebook_sizes": sizes, "levels": 3, "items": items, "branching": []}
    write(join(sids, "trie"), "trie", trie, info, {"sids": made.hash})
    return tables, sids
