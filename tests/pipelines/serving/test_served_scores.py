"""Test that search models and models of actions serve the scores of their modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from core.files import join
from models import registry
from models.actions.requests import ACTIONS
from models.training_run import TrainingRun
from tests.fixtures.actions_tables import TRAIN_DEVICES, write_actions
from tests.fixtures.commands import load_split, read_column
from tests.fixtures.search_tables import write_search
from tests.fixtures.served_models import build_search_requests, serve_ranker

KINDS = {
    kind: [
        name
        for name in registry.MODELS
        if registry.find(name).kind.name == kind and not registry.find(name).not_served
    ]
    for kind in ("search", "actions")
}
MODELS = {name: {"name": name} for names in KINDS.values() for name in names}
for name in ("qgs", "hllm"):
    MODELS[f"{name}, match"] = {"name": name, "next_item": "document", "match": True}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, tuple[str, str | None]]:
    """Write the folders of tables and of text vectors, by kind."""
    folder = tmp_path_factory.mktemp("served")
    return {
        "search": write_search(folder / "search"),
        "actions": (write_actions(folder / "feed", viewers=True), None),
    }


def build_feed_requests(
    setup: TrainingRun, tables: str, max_history: int, label: int
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Build requests of users with distinct candidates, and their expected scores.

    The requests also have the events that are older than the model's longest history,
    an item that is not in the catalogue, and events after the request. The scores are
    the module's probabilities of the label by candidate.
    """
    items = read_column(tables, "items", "item_id")
    # By code; the watch is in no model's vocabulary.
    devices = ["watch", *TRAIN_DEVICES]
    sequences = join(tables, "sequences")
    truncated = load_split(ACTIONS, sequences, "test", max_history=max_history)
    full = load_split(ACTIONS, sequences, "test", max_history=100)
    rows, scores = [], []
    for number in range(12):
        batch = truncated.collate(np.array([number]))
        every_event = full.collate(np.array([number]))
        candidates = batch.candidate_item[0].tolist()
        past = int(every_event.valid.sum())  # number of events before the request
        if len(set(candidates)) < len(candidates) or not past:
            continue
        batch.candidate_time[:] = 99  # one request shows all candidates
        batch.candidate_viewer[:] = batch.candidate_viewer[:, :1]
        history = [items[i] for i in every_event.item[0, :past].tolist()]
        actions = every_event.action[0, :past].tolist()
        times = every_event.time[0, :past].tolist()
        viewers = [devices[i] for i in every_event.viewer[0, :past, 0].tolist()]
        later = len(items)
        row = {
            "candidates": [items[i] for i in candidates],
            "timestamp_ms": 99,
            "viewer_device": devices[int(batch.candidate_viewer[0, 0, 0])],
            "features": batch.candidate_feature[0].tolist(),
            "history": [*history[:-1], "who", history[-1], *items],
            "history_actions": [
                *actions[:-1],
                [1.0] * 3,
                actions[-1],
                *[[1.0] * 3] * later,
            ],
            "history_time_ms": [*times[:-1], *times[-1:] * 2, *range(99, 99 + later)],
            "history_viewer_device": [
                *viewers[:-1],
                "tablet",
                viewers[-1],
                *["phone"] * later,
            ],
        }
        with torch.no_grad():
            chances = torch.sigmoid(setup.model.score(batch)[:, label]).tolist()  # type: ignore[operator]
        rows.append(row)
        scores.append(dict(zip(row["candidates"], chances, strict=True)))
    return rows, scores


REQUEST_BUILDERS: dict[str, Any] = {
    "search": build_search_requests,
    "actions": build_feed_requests,
}


@pytest.mark.parametrize("name", MODELS)
def test_served_scores_equal_the_modules_scores(name, inputs, tmp_path):
    """Also beside requests with an unknown candidate, and without candidates."""
    kind = registry.find(MODELS[name]["name"]).kind.name
    tables, text = inputs[kind]
    setup, served = serve_ranker(MODELS[name], tmp_path, tables, text, max_history=8)
    label = len(setup.model.labels) - 1
    requests, expected_scores = REQUEST_BUILDERS[kind](setup, tables, 8, label)
    assert sum(len(request["history"]) > 3 for request in requests) >= 3
    known = requests[0]["candidates"]
    bare = {**requests[0], "features": None}
    requests.append({**bare, "candidates": ["who", *known]})
    requests.append({**bare, "candidates": []})

    params = {"label": setup.model.labels[label]}
    answers = served.predict(None, pd.DataFrame(requests), params)

    *answered, with_unknown, without_candidates = zip(
        answers["item_id"], answers["score"], strict=True
    )
    for (items, scores), expected in zip(answered, expected_scores, strict=True):
        assert sorted(scores, reverse=True) == scores
        assert dict(zip(items, scores, strict=True)) == pytest.approx(
            expected, abs=1e-5
        )
    assert sorted(with_unknown[0]) == sorted(["who", *known])
    is_scored = np.isfinite(with_unknown[1]).tolist()
    assert is_scored == [item != "who" for item in with_unknown[0]]
    assert with_unknown[0][-1] == "who"
    assert without_candidates == ([], [])
