"""Small search tables for tests: clicks follow the query's topic and the user's taste;
with text that tells both.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from models.search.catalogue import SearchCatalogue
from models.search.data import SearchBatch
from models.storage.tables import join
from pipelines.data.search.config import SearchConfig
from pipelines.data.search.features import feature_groups
from tests.training_tables import lists, write

WIDTH = 8
FEATURES = (
    "pair_ctr_7d",
    "item_ctr_7d",
    "query_searches_7d",
    "pair_gap",
    "position",
    "hour_sin",
)
LABELS = ("click", "purchase")


SCHEMA = pa.schema(
    [
        ("user_id", pa.string()),
        ("item_index", lists(pa.int32())),
        ("timestamp_ms", lists(pa.int64())),
        ("query_index", lists(pa.int32())),
        ("position", lists(pa.int32())),
        ("features", lists(pa.list_(pa.float32(), len(FEATURES)))),
        ("label_click", lists(pa.bool_())),
        ("label_purchase", lists(pa.bool_())),
        ("label_dwell", lists(pa.float32())),
        (
            "requests",
            lists(
                pa.struct(
                    [
                        ("timestamp_ms", pa.int64()),
                        ("query_index", pa.int32()),
                        ("history_end", pa.int32()),
                        ("split", pa.string()),
                        ("candidates", lists(pa.int32())),
                        ("positions", lists(pa.int32())),
                        *((f"label_{name}", lists(pa.bool_())) for name in LABELS),
                        ("features", lists(pa.float32())),
                    ]
                )
            ),
        ),
    ]
)


def request(
    time: int,
    query: int,
    end: int,
    split: str,
    shown: list[int],
    clicks: list[bool],
    features: Any,
) -> dict:
    """One request as the table holds it; every second click is a purchase."""
    bought = [
        click and item % 2 == 0 for click, item in zip(clicks, shown, strict=True)
    ]
    return {
        "timestamp_ms": time,
        "query_index": query,
        "history_end": end,
        "split": split,
        "candidates": shown,
        "positions": list(range(len(shown))),
        "label_click": clicks,
        "label_purchase": bought,
        "features": np.asarray(features, np.float32).ravel().tolist(),
    }


def dwell_of(item: int, time: int) -> float | None:
    """Seconds that a behaviour took, where they are known."""
    return None if item % 5 == 0 else float((7 * item + time) % 60)


ITEM_MODEL = {
    "model_type": "bert",
    "vocab_size": 20,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 9,
    "initializer_range": 0.5,
}
"""An encoder that the documents' tokens may be of."""


def write_text(
    folder: str,
    inputs: dict[str, str],
    items: np.ndarray,
    queries: np.ndarray,
    joint: bool = False,
) -> None:
    """TEXT of these vectors; a pair is the mean of its two, its joint form leans to the
    document; documents have 3 to 9 random tokens."""
    rng = np.random.default_rng(1)
    tokens = pa.array(
        [rng.integers(20, size=3 + i % 7).tolist() for i in range(len(items))],
        lists(pa.int32()),
    )
    table = pa.table(
        {
            "item_index": pa.array(np.arange(len(items), dtype=np.int32)),
            "tokens": tokens,
        }
    )
    write(
        join(folder, "tokens"),
        "tokens",
        table,
        {"pooling": "cls", "normalize": False},
        inputs,
    )
    count = len(items) * (len(queries) + 1)
    item, query = np.divmod(np.arange(count), len(queries) + 1)
    query = query - 1
    mixed = (items[item] + np.vstack([queries, np.zeros(WIDTH)])[query]) / 2
    keys = {
        "items": {"item_index": np.arange(len(items))},
        "queries": {"query_index": np.arange(len(queries))},
    }
    keys["pairs"] = {"item_index": item, "query_index": query}
    for name, vectors in {"items": items, "queries": queries, "pairs": mixed}.items():
        columns: dict[str, Any] = {
            key: pa.array(values.astype(np.int32)) for key, values in keys[name].items()
        }
        columns["embedding"] = pa.FixedSizeListArray.from_arrays(
            pa.array(vectors.astype(np.float32).ravel()), WIDTH
        )
        if joint and name == "pairs":
            seen = (2 * items[item] + vectors).astype(np.float32)
            columns["joint"] = pa.FixedSizeListArray.from_arrays(
                pa.array(seen.ravel()), WIDTH
            )
        write(
            join(folder, name),
            "embeddings",
            pa.table(columns),
            {"encoder": "test"},
            inputs,
        )


def change(
    batch: SearchBatch, catalogue: SearchCatalogue, **changes: Any
) -> SearchBatch:
    """A copy of the batch with other tensors, and with the text of its items and
    queries as they are then.
    """
    copy = replace(batch.map(Tensor.clone), **changes)
    text = catalogue.text.collate(
        copy.history.numpy(),
        copy.history_query.numpy(),
        copy.request_query.numpy(),
        copy.candidate.numpy(),
        np.bincount(copy.candidate_request, minlength=len(copy.request)),
    )
    return replace(copy, **text)


def write_tables(
    folder: Path,
    rows: list[dict],
    items: int,
    queries: int,
    joint: bool = False,
    topic: Any = None,
    parts: int = 1,
) -> tuple[str, str]:
    """TABLES and TEXT with these rows of `sequences`; text is of the topics `topic`
    (items,) and q, or of i % 4 and q % 4."""
    tables, text = str(folder / "tables"), str(folder / "text")
    rng = np.random.default_rng(0)
    names = {
        "items": ("item_index", "item_id", items),
        "queries": ("query_index", "query", queries),
    }
    hashes = {}
    for name, (index, word, count) in names.items():
        values = {
            index: np.arange(count, dtype=np.int32),
            word: [f"{word}-{i:03d}" for i in range(count)],
        }
        hashes[name] = write(join(tables, name), name, pa.table(values), {}, {}).hash
    info: dict[str, Any] = {
        "kind": "search",
        "labels": list(LABELS),
        "features": list(FEATURES),
    }
    groups = feature_groups(SearchConfig(), list(FEATURES), {})
    info |= {
        "dataset": "search-test",
        "groups": groups,
        "unknown_when_ranking": ["position", "page"],
    }
    usual = {"label_click": True, "label_purchase": False, "label_dwell": None}
    rows = [
        {
            **{name: [value] * len(row["item_index"]) for name, value in usual.items()},
            **row,
        }
        for row in rows
    ]
    made = write(
        join(tables, "sequences"),
        "sequences",
        pa.Table.from_pylist(rows, SCHEMA),
        info,
        {},
        parts,
    )
    of_items, of_queries = (
        (topic, np.arange(queries))
        if topic is not None
        else (np.arange(n) % 4 for n in (items, queries))
    )
    topics = rng.standard_normal((4 if topic is None else queries, WIDTH))
    vectors = [
        topics[of] + 0.1 * rng.standard_normal((len(of), WIDTH))
        for of in (of_items, of_queries)
    ]
    write_text(text, hashes | {"sequences": made.hash}, vectors[0], vectors[1], joint)
    return tables, text


def write_search(
    folder: Path,
    users: int = 40,
    requests: int = 10,
    shown: int = 6,
    items: int = 24,
    queries: int = 8,
    seed: int = 0,
    joint: bool = False,
    parts: int = 1,
) -> tuple[str, str]:
    """A log in which a user clicks what has the query's topic, mostly; the last two
    requests are val and test.

    User 0 never clicks, so that one history is empty; requests without and with clicks
    only occur.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for user in range(users):
        past: list[tuple[Any, ...]] = []
        searches = []
        for number in range(requests):
            time, query = 1000 * (number + 1) + user, int(rng.integers(-1, queries))
            candidates = rng.choice(items, shown, replace=False).tolist()
            features = rng.random((shown, len(FEATURES))).astype(np.float32)
            fits = [query >= 0 and item % 4 == query % 4 for item in candidates]
            clicks = [
                bool(user and rng.random() < (0.9 if fit else 0.05)) for fit in fits
            ]
            split = {requests - 2: "val", requests - 1: "test"}.get(number, "train")
            searches.append(
                request(time, query, len(past), split, candidates, clicks, features)
            )
            past += [
                (
                    item,
                    time,
                    query,
                    place,
                    features[place],
                    True,
                    item % 2 == 0,
                    dwell_of(item, time),
                )
                for place, (item, click) in enumerate(
                    zip(candidates, clicks, strict=True)
                )
                if click
            ]
        names = ("item_index", "timestamp_ms", "query_index", "position", "features")
        names += tuple(f"label_{name}" for name in (*LABELS, "dwell"))
        columns = list(zip(*past, strict=True)) if past else [()] * len(names)
        row = {name: list(column) for name, column in zip(names, columns, strict=True)}
        rows.append({"user_id": f"user-{user:03d}", **row, "requests": searches})
    return write_tables(folder, rows, items, queries, joint, parts=parts)
