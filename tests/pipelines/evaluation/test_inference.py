"""Test batch inference.

Its tables agree with the log and with the metrics of an evaluation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from core.schemas import Inputs
from jobs.evaluate import Config, run
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines.evaluation import inference
from pipelines.evaluation.ranking import evaluate
from tests.fixtures.actions_tables import TASKS, write_actions
from tests.fixtures.commands import read_column, read_rows
from tests.fixtures.search_tables import write_search
from tests.fixtures.served_models import serve_ranker
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import SASREC, build_training

SEARCH_LABELS = ("click", "purchase")


def test_search_scores_match_the_log_and_the_metrics(tmp_path):
    tables, text = write_search(tmp_path / "log", parts=2)
    serve_ranker({"name": "qgs"}, tmp_path, tables, text, max_history=12)
    options: dict[str, Any] = {
        "checkpoint": str(tmp_path / "qgs"),
        "tables": tables,
        "text": text,
    }
    out = str(tmp_path / "out")

    run(Config(**options, batch_inference=out, batch_size=7))
    rows = read_rows(tmp_path, "out")
    labels, scores = check_search_rows(rows, tables)

    metrics = evaluate(Config(**options))[0].metrics
    all_labels = np.concatenate(labels)
    all_scores = np.concatenate(scores).astype(float)
    for i, prefix in enumerate(("", "purchase/")):
        aucs = [
            roc_auc_score(request_labels[:, i], request_scores[:, i])
            for request_labels, request_scores in zip(labels, scores, strict=True)
            if 0 < request_labels[:, i].sum() < len(request_labels)
        ]
        assert metrics[f"{prefix}gauc"] == pytest.approx(np.mean(aucs))
        assert metrics[f"{prefix}auc"] == pytest.approx(
            roc_auc_score(all_labels[:, i], all_scores[:, i]), abs=1e-5
        )


def check_search_rows(
    rows: list[dict[str, Any]], tables: str
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Check that rows of scores follow the test requests of the log.

    Returns:
        Labels and scores of each request's candidates, of shape (candidates, labels).
    """
    item_ids = read_column(tables, "items", "item_id")
    queries = read_column(tables, "queries", "query")
    queries.append(None)
    test_requests = [
        (user["user_id"], request)
        for user in read_rows(tables, "sequences")
        for request in user["requests"]
        if request["split"] == "test"
    ]
    labels, scores = [], []
    for row, (user_id, request) in zip(rows, test_requests, strict=True):
        assert row["user_id"] == user_id
        assert row["timestamp_ms"] == request["timestamp_ms"]
        assert row["query"] == queries[request["query_index"]]
        assert row["score_click"] == sorted(row["score_click"], reverse=True)
        item_indices = [item_ids.index(item_id) for item_id in row["item_id"]]
        positions = [request["candidates"].index(item) for item in item_indices]
        assert sorted(positions) == list(range(6))
        logged = {
            name: [request[f"label_{name}"][position] for position in positions]
            for name in SEARCH_LABELS
        }
        for name in SEARCH_LABELS:
            assert row[f"label_{name}"] == logged[name]
        labels.append(np.array([logged[name] for name in SEARCH_LABELS]).T)
        scores.append(np.array([row[f"score_{name}"] for name in SEARCH_LABELS]).T)
    return labels, scores


def collect_by_event(
    rows: list[dict[str, Any]], prefix: str
) -> dict[tuple[str, int, str], list[float]]:
    """Return a value per task by user id, time and item id.

    Args:
        rows: Rows of the table of scores.
        prefix: `score_` or `label_`.
    """
    values_by_event = {}
    for row in rows:
        columns = [row[f"{prefix}{task}"] for task in TASKS]
        for item, *values in zip(row["item_id"], *columns, strict=True):
            values_by_event[row["user_id"], row["timestamp_ms"], item] = values
    return values_by_event


def test_feed_scores_match_the_log(tmp_path):
    tables = write_actions(tmp_path / "log", items=300, viewers=True, parts=2)
    serve_ranker({"name": "attn_mvp"}, tmp_path, tables, None, max_history=12)
    path, out = str(tmp_path / "attn_mvp"), str(tmp_path / "out")

    config = Config(checkpoint=path, tables=tables, batch_inference=out, batch_size=7)
    manifest, _ = inference.infer_all(config)

    rows = read_rows(tmp_path, "out")
    item_ids = read_column(tables, "items", "item_id")
    users = read_rows(tables, "sequences")
    logged = {}
    for user in users:
        for i in range(user["val_end"], len(user["item_index"])):
            item_id = item_ids[user["item_index"][i]]
            event = (user["user_id"], user["timestamp_ms"][i], item_id)
            logged[event] = list(user["tasks"][i])
    scored = collect_by_event(rows, "score_")
    assert set(scored) == set(logged)
    # No user is shown an item twice at one time, so no event is lost in `logged`.
    assert len(logged) == manifest.info.candidates
    assert collect_by_event(rows, "label_") == logged


def test_metrics_of_a_split_can_be_computed_from_its_recommendations(tmp_path):
    tables, _ = write_tables(tmp_path / "log", parts=2)
    model = {**SASREC, "max_history": 2}
    setup = build_training(model, FitConfig(batch_size=8), Inputs(tables))
    path, out = str(tmp_path / "sasrec"), str(tmp_path / "out")
    checkpoint.save(path, setup.model, setup.checkpoint(epoch=1))
    options: dict[str, Any] = {"checkpoint": path, "tables": tables, "split": "val"}

    run(Config(**options, batch_inference=out, k=20, batch_size=7, unseen=True))
    rows = read_rows(tmp_path, "out")
    item_ids = read_column(tables, "items", "item_id")
    requests = [
        (user, number, request)
        for user in read_rows(tables, "sequences")
        for number, request in enumerate(user["requests"])
        if request["split"] == "val"
    ]
    for row, (user, number, request) in zip(rows, requests, strict=True):
        target = request["candidates"][0]
        history = user["item_index"][: request["history_end"]]
        assert (row["user_id"], row["request"]) == (user["user_id"], number)
        assert row["timestamp_ms"] == request["timestamp_ms"]
        assert row["target"] == item_ids[target]
        assert row["target_is_known"] == (target in history)
        assert row["score"] == sorted(row["score"], reverse=True)
        assert not {item_ids[item] for item in history} & set(row["item_id"])

    metrics = evaluate(Config(**options, unseen=True))[0].metrics
    first_rows = [row for row in rows if not row["target_is_known"]]
    for prefix, prefix_rows in (("", rows), ("first/", first_rows)):
        for k in (1, 10, 20):
            hits = [row for row in prefix_rows if row["target"] in row["item_id"][:k]]
            ranks = [row["item_id"].index(row["target"]) for row in hits]
            gains = [1 / np.log2(2 + rank) for rank in ranks]
            assert metrics[f"{prefix}recall@{k}"] == len(hits) / len(prefix_rows)
            assert metrics[f"{prefix}ndcg@{k}"] == pytest.approx(
                sum(gains) / len(prefix_rows)
            )
