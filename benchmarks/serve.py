"""Served requests end to end: from the frame of a request to its ranked candidates, with users' states and without.

`python -m benchmarks serve` prints what `serve` yields. A call is one `predict` of one request with CANDIDATES
candidates, all with features, of a user with `history` behaviours. `whole` brings all of these along; `state` goes on
from what the model keeps of the user and brings the latest behaviour alone. QGS is of the published size, AttnMVP of
that of its configuration; weights, texts, items and features are random, none of which changes the time. `median_s` and
`p99_s` are over all calls.
"""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from benchmarks.harness import Call, Row, paired
from models import checkpoint, registry
from models.checkpoint import Checkpoint
from models.inputs import Inputs
from models.tables import commit, join, write_part
from pipelines.serving.package import write_bundle
from pipelines.serving.served_ranker import RequestRanker, size_of

MODELS: dict[str, dict[str, Any]] = {
    "qgs": {
        "name": "qgs",
        "encoder": "linear_hstu",
        "width": 512,
        "num_layers": 12,
        "group_attention": True,
    },
    "attn_mvp": {"name": "attn_mvp"},
}
VARIANTS = [f"{name}_{way}" for name in MODELS for way in ("whole", "state")]
LENGTHS = (100, 1000)
CANDIDATES, ITEMS, QUERIES, TEXT = 300, 5000, 8, 64
FEATURES = {"qgs": 38, "attn_mvp": 54}
ACTIONS, TASKS = 10, 11
REQUESTS_PER_RUN = 20
SLACK = 500
"""Behaviours that a model reads beyond `history`, so that no state slides while it is timed."""


def write(
    uri: str,
    name: str,
    columns: dict[str, Any],
    info: dict[str, Any],
    inputs: dict[str, str],
) -> str:
    """A table of one part; its hash."""
    table = pa.table(columns)
    return commit(
        uri,
        name,
        table.schema,
        [write_part(uri, table)],
        config={},
        inputs=inputs,
        info=info,
    ).hash


def write_tables(folder: str, name: str) -> tuple[str, str | None]:
    """Random (TABLES, TEXT) of a model, without users: what is served needs none."""
    tables, text = join(folder, "tables"), join(folder, "text")
    rng, index = np.random.default_rng(0), np.arange(ITEMS, dtype=np.int32)
    names = [f"feature_{i}" for i in range(FEATURES[name])]
    items = {
        "item_index": index,
        "item_id": [f"i{i}" for i in index],
        "cat_author": [f"a{i % 500}" for i in index],
    }
    hashes = {"items": write(join(tables, "items"), "items", items, {}, {})}
    info: dict[str, Any] = {
        "kind": "search",
        "labels": ["click", "purchase"],
        "features": names,
        "groups": [{"name": "features", "features": names}],
        "unknown_when_ranking": [],
    }
    if name == "attn_mvp":
        tasks = [f"task_{i}" for i in range(TASKS)]
        info = {
            "kind": "actions",
            "tasks": tasks,
            "actions": [f"action_{i}" for i in range(ACTIONS)],
            "features": names,
            "feature_mean": [0.0] * len(names),
            "feature_std": [1.0] * len(names),
            "base_rates": dict.fromkeys(tasks, 0.1),
        }
        write(join(tables, "sequences"), "sequences", {"user_id": ["u"]}, info, hashes)
        return tables, None
    queries = np.arange(QUERIES, dtype=np.int32)
    texts = {"query_index": queries, "query": [f"q{i}" for i in queries]}
    hashes["queries"] = write(join(tables, "queries"), "queries", texts, {}, {})
    hashes["sequences"] = write(
        join(tables, "sequences"), "sequences", {"user_id": ["u"]}, info, {}
    )
    keys: dict[str, dict[str, Any]] = {
        "items": {"item_index": index},
        "queries": {"query_index": queries},
    }
    keys["pairs"] = {
        "item_index": np.repeat(index, QUERIES),
        "query_index": np.tile(queries, ITEMS),
    }
    for table, columns in keys.items():
        vectors = rng.standard_normal(len(next(iter(columns.values()))) * TEXT).astype(
            np.float32
        )
        embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors), TEXT)
        write(
            join(text, table),
            "embeddings",
            {**columns, "embedding": embedding},
            {},
            hashes,
        )
    return tables, text


def save(folder: str, name: str, length: int, **about: Any) -> Inputs:
    """A model of random weights as the checkpoint `checkpoint` of a folder; the tables that it is of."""
    from models.actions.batch import ActionsCatalogue
    from models.search.data import SearchCatalogue

    torch.manual_seed(0)
    tables, text = write_tables(folder, name)
    catalogue: Any = (
        SearchCatalogue.load(tables, text, scale=False)
        if text
        else ActionsCatalogue.load(tables)
    )
    config = registry.config_from_dict({**MODELS[name], "max_history": length + SLACK})
    told = Checkpoint(
        model=registry.config_to_dict(config), hashes=catalogue.hashes, epoch=1, **about
    )
    checkpoint.save(Path(folder, "checkpoint"), registry.build(config, catalogue), told)
    return Inputs(tables, text=text)


def served(name: str, length: int) -> RequestRanker:
    """A model of random weights, as MLflow loads it."""
    with tempfile.TemporaryDirectory(prefix="trieline-benchmark-") as folder:
        inputs = save(folder, name, length)
        with warnings.catch_warnings(action="ignore"):  # random text has no encoder
            write_bundle(Path(folder, "bundle"), join(folder, "checkpoint"), inputs)
        model = RequestRanker()
        model.load_context(
            SimpleNamespace(
                artifacts={"data": join(folder, "bundle")}, model_config=None
            )
        )
        return model


def request(name: str, length: int, way: str, number: int) -> dict[str, Any]:
    """The `number`th request of a user, whose history is one longer each time."""
    rng = np.random.default_rng(number)
    size = 1 if way == "state" else length

    def vectors(rows: int, width: int) -> list[list[float]]:
        return rng.random((rows, width)).tolist()

    def names(rows: int) -> list[str]:
        return [f"i{i}" for i in rng.choice(ITEMS, rows, replace=False)]

    row: dict[str, Any] = {
        "candidates": names(CANDIDATES),
        "features": vectors(CANDIDATES, FEATURES[name]),
    }
    row |= {"history": names(size), "user_id": "u"}
    if name == "qgs":
        row |= {
            "query": f"q{number % QUERIES}",
            "history_query": [f"q{i}" for i in rng.integers(QUERIES, size=size)],
        }
        row["history_features"] = vectors(size, FEATURES[name])
    else:
        row["history_actions"] = vectors(size, ACTIONS)
    return row | ({"history_from": length + number} if way == "state" else {})


def calls_of(
    name: str, length: int, ways: Iterable[str], params: Row
) -> dict[str, Call]:
    """By variant the calls, on one model, whose user has `length` behaviours to begin with."""
    torch.set_num_threads(params["threads"])
    model = served(name, length)
    begin = request(name, length, "whole", 0)
    model.predict(None, pd.DataFrame([{**begin, "history_from": 0}]))
    frames = {
        way: [
            pd.DataFrame([request(name, length, way, i)]) for i in range(params["runs"])
        ]
        for way in ways
    }

    def call(way: str) -> Call:
        return lambda run: model.predict(None, frames[way][run])

    calls = {f"{name}_{way}": call(way) for way in ways}
    if "whole" in frames:
        calls[f"{name}_whole"](0)
    kept = model.users.get("u")
    assert kept is not None
    params["state_mb"] = round(size_of(kept.state) / 2**20, 2)
    return calls


def serve(
    runs: int = 5,
    threads: int = 2,
    lengths: Iterable[int] = LENGTHS,
    variants: Iterable[str] = VARIANTS,
) -> Iterator[Row]:
    """Requests per second, one at a time, model by model and length by length; `runs` of REQUESTS_PER_RUN each."""
    variants = list(variants)
    for name, length in itertools.product(MODELS, lengths):
        of_model = [
            variant for variant in variants if variant.rsplit("_", 1)[0] == name
        ]
        if not of_model:
            continue
        params: Row = {
            "model": name,
            "history": length,
            "candidates": CANDIDATES,
            "threads": threads,
            "device": "cpu",
        }
        params["runs"] = min(runs * REQUESTS_PER_RUN, SLACK)
        calls = calls_of(
            name, length, [variant.rsplit("_", 1)[1] for variant in of_model], params
        )
        yield from paired("serve", calls, params, 1, percentiles=(99,))
