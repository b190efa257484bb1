"""A served search model takes custom features by name, and ranks as the module does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from core.files import join
from models.dataset.dataset import Dataset
from models.search.requests import SearchBatch
from tests.fixtures.commands import read_column, read_rows
from tests.fixtures.custom_features_log import prepare_tables, write_random_text
from tests.fixtures.served_models import load_registered, register_ranker

Row = dict[str, Any]


def serve(model: Any, request: Row) -> dict[str, float]:
    """Return the score of each candidate of a request."""
    ranked = model.predict(pd.DataFrame([request]))
    return dict(zip(ranked["item_id"][0], ranked["score"][0], strict=True))


def make_request(tables: str, batch: SearchBatch) -> Row:
    """Return the one request of a batch by names, with custom features as in the log."""
    row = read_rows(tables, "sequences")[int(batch.user_row[0])]
    items = read_column(tables, "items", "item_id")
    queries = read_column(tables, "queries", "query")
    time = int(batch.request_time[0])
    request = next(r for r in row["requests"] if r["timestamp_ms"] == time)
    end = request["history_end"]
    past = range(end - int(batch.request_end[0]), end)
    num_built_in = batch.features.shape[1] - 2
    return {
        "candidates": [items[item] for item in request["candidates"]],
        "query": queries[request["query_index"]],
        "features": batch.features[:, :num_built_in].tolist(),
        "numbers": {"bm25": request["num_bm25"]},
        "categories": {"city": request["cat_city"]},
        "history": [items[row["item_index"][n]] for n in past],
        "history_query": [queries[row["query_index"][n]] for n in past],
        "history_features": [row["features"][n] for n in past],
        "history_numbers": {"bm25": [row["num_bm25"][n] for n in past]},
        "history_categories": {"city": [row["cat_city"][n] for n in past]},
    }


def test_features_of_items_are_taken_from_the_catalogue_unless_given(
    raw, tmp_path, new_store
):
    settings = {"search": {"item_features": ["brand", "weight"]}}
    tables = prepare_tables(tmp_path, raw, settings=settings)
    text, uri = write_random_text(tmp_path, tables), new_store(tmp_path)
    register_ranker(tmp_path, "qgs", tables, text)
    model = load_registered(uri, "qgs")
    items = read_column(tables, "items", "item_id")
    rows = read_rows(tables, "sequences")
    requests = [request for row in rows for request in row["requests"]]
    without_history = next(r for r in requests if r["history_end"] == 0)
    candidates = [*(items[item] for item in without_history["candidates"]), "unknown"]
    bm25 = [*without_history["num_bm25"], None]
    request = {
        "candidates": candidates,
        "query": None,
        "history": [],
        "numbers": {"bm25": bm25},
        "categories": {"city": [*without_history["cat_city"], None]},
    }

    scores = serve(model, request)

    weights = [*without_history["num_weight"], None]
    same = {"numbers": {"bm25": bm25, "weight": weights}}
    assert serve(model, request | same) == pytest.approx(scores, nan_ok=True)
    other = {"numbers": {"bm25": bm25, "weight": [9.0] * len(candidates)}}
    other_scores = serve(model, request | other)
    assert other_scores != pytest.approx(scores, nan_ok=True, abs=1e-6)


def test_served_counts_as_of_a_request_give_the_scores_of_the_module(
    raw, tmp_path, new_store
):
    tables = prepare_tables(tmp_path, raw)
    text, uri = write_random_text(tmp_path, tables), new_store(tmp_path)
    run = register_ranker(tmp_path, "qgs", tables, text)
    without_counts = load_registered(uri, "qgs")
    examples = Dataset.load(run.model, run.catalogue, "test", max_history=8)
    batches = [examples.collate(np.array([n])) for n in range(len(examples))]
    with_history = [
        batch
        for batch in batches
        if len(batch.request_end) == 1 and int(batch.history_length[0]) > 2
    ]

    for batch in with_history[:: len(with_history) // 3]:
        time = int(batch.request_time[0])
        request = make_request(tables, batch) | {"timestamp_ms": time}
        del request["features"]
        with torch.no_grad():
            scores = run.model.score(batch)[:, 0].sigmoid().tolist()
        expected = dict(zip(request["candidates"], scores, strict=True))
        prepare_tables(tmp_path, raw, settings={"counts_as_of": str(time)})
        model = load_registered(uri, "qgs", counts=join(tables, "counts"))
        later = {"timestamp_ms": time + 5 * 3_600_000}

        assert serve(model, request) == pytest.approx(expected, abs=1e-5)
        assert serve(without_counts, request) != pytest.approx(expected, abs=1e-5)
        assert serve(model, request | later) != pytest.approx(expected, abs=1e-5)

        # Features of the request go before counts; what they lack is counted.
        features = batch.features[:, : len(run.catalogue.feature_mean)].tolist()
        given = {"features": features}
        assert serve(without_counts, request | given) == pytest.approx(
            expected, abs=1e-5
        )
        features[0] = [float("nan")] * len(features[0])
        assert serve(model, request | given) == pytest.approx(expected, abs=1e-5)
