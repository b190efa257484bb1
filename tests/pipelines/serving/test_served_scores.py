"""Test that search models and models of actions serve the scores of their modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from models import registry
from models.actions.data import ActionsDataset
from models.storage.tables import join, read_table
from models.training_run import TrainingRun
from tests.fixtures.actions_tables import TRAIN_DEVICES, write_actions
from tests.fixtures.search_tables import write_search
from tests.fixtures.served_models import build_search_requests, serve_ranker

FAMILIES = {
    family: [
        name
        for name in registry.MODELS
        if registry.find(name).family == family
        and not registry.find(name).reason_not_served()
    ]
    for family in ("search", "actions")
}
MODELS = {name: {"name": name} for names in FAMILIES.values() for name in names}
for name in ("qgs", "hllm"):
    MODELS[f"{name}, match"] = {"name": name, "next_item": "document", "match": True}


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[str, str | None]]:
    """Write the folders of tables and of text vectors, by family."""
    folder = tmp_path_factory.mktemp("served")
    return {
        "search": write_search(folder / "search"),
        "actions": (write_actions(folder / "feed", viewers=True), None),
    }


def build_feed_requests(
    setup: TrainingRun, tables: str, max_history: int
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Build served requests of users with distinct candidates in the test table.

    Returns:
        The requests, and the module's probabilities of the first task by candidate.
    """
    items = read_table(join(tables, "items"))["item_id"].to_pylist()
    devices = ["watch", *TRAIN_DEVICES]  # by code
    examples = ActionsDataset.load(
        join(tables, "sequences"), "test", max_history=max_history
    )
    requests, scores = [], []
    for number in range(12):
        batch = examples.collate(np.array([number]))
        candidates = batch.candidate_item[0].tolist()
        if len(set(candidates)) < len(candidates):
            continue
        batch.candidate_time[:] = 99  # one request shows all candidates
        batch.candidate_viewer[:] = 1
        past = int(batch.valid.sum())  # number of events before the request
        names = [items[i] for i in candidates]
        with torch.no_grad():
            chances = torch.sigmoid(setup.model.score(batch)[:, 0]).tolist()  # type: ignore[operator]
        viewer_codes = batch.viewer[0, :past, 0].tolist()
        request = {
            "candidates": names,
            "timestamp_ms": 99,
            "viewer_device": devices[1],
            "features": batch.candidate_feature[0].tolist(),
            "history": [items[i] for i in batch.item[0, :past].tolist()],
            "history_actions": batch.action[0, :past].tolist(),
            "history_time_ms": batch.time[0, :past].tolist(),
            "history_viewer_device": [devices[code] for code in viewer_codes],
        }
        requests.append(request)
        scores.append(dict(zip(names, chances, strict=True)))
    return requests, scores


REQUEST_BUILDERS: dict[str, Any] = {
    "search": build_search_requests,
    "actions": build_feed_requests,
}


@pytest.mark.parametrize("name", MODELS)
def test_served_scores_equal_the_modules_scores(
    name: str, inputs: dict[str, tuple[str, str | None]], tmp_path: Path
) -> None:
    family = registry.find(MODELS[name]["name"]).family
    tables, text = inputs[family]
    setup, served = serve_ranker(MODELS[name], tmp_path, tables, text, max_history=12)
    requests, expected_scores = REQUEST_BUILDERS[family](setup, tables, 12)
    assert sum(len(request["history"]) > 3 for request in requests) >= 3

    answers = served.predict(None, pd.DataFrame(requests))

    for items, scores, expected in zip(
        answers["item_id"], answers["score"], expected_scores, strict=True
    ):
        scores_by_item = dict(zip(items, scores, strict=True))
        assert scores_by_item == pytest.approx(expected, abs=1e-5)
