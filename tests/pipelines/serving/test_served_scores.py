"""Every search model and model of actions serves the scores of its training forward
pass.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from models import registry
from models.actions.data import ActionsDataset
from models.search.data import SearchDataset
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import join, read_table
from models.training.fit import FitConfig
from models.training_run import TrainingRun
from pipelines.serving.package import write_bundle
from pipelines.serving.served_model import ServedModel
from tests.fixtures.actions_tables import SEEN, write_actions
from tests.fixtures.search_tables import write_search
from tests.fixtures.trainings import build_training

SIZES = {
    "width": 16,
    "num_layers": 2,
    "num_heads": 2,
    "ffn": 16,
    "dnn_width": 16,
    "tower_width": 8,
    "text_width": 8,
    "expert_width": 8,
}
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
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str | None]]:
    """(TABLES, TEXT) by family."""
    folder = tmp_path_factory.mktemp("served")
    return {
        "search": write_search(folder / "search"),
        "actions": (write_actions(folder / "feed", viewers=True), None),
    }


def serve(
    name: str, folder: Path, tables: str, text: str | None, longest: int, seed: int = 0
) -> tuple[TrainingRun, ServedModel]:
    """A model of MODELS, untrained if it is trained by gradient, and as it is served."""
    known = inspect.signature(
        registry.find(MODELS[name]["name"]).config_class
    ).parameters
    sizes = {key: value for key, value in SIZES.items() if key in known}
    setup = build_training(
        {**MODELS[name], **sizes, "max_history": longest},
        FitConfig(batch_size=8, seed=seed),
        Inputs(tables, text=text),
    )
    if not setup.model.trains_by_gradient:
        setup.fit_counts()
    checkpoint.save(folder / name, setup.model, setup.checkpoint(epoch=1))
    reads_text = text and "text" in setup.model.extra_inputs
    with (
        pytest.warns(UserWarning, match="without its text encoder")
        if reads_text
        else nullcontext()
    ):
        write_bundle(folder / "data", str(folder / name), Inputs(tables, text=text))
    setup.model.eval()
    served = ServedModel()
    served.load_context(
        SimpleNamespace(artifacts={"data": str(folder / "data")}, model_config=None)
    )
    return setup, served


def searches(
    setup: TrainingRun, tables: str, text: str, longest: int, label: int = 0
) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Requests of the table by the names of things, and the chances of a label of their
    candidates.
    """
    items, queries = (
        read_table(join(tables, name))[column].to_pylist()
        for name, column in (("items", "item_id"), ("queries", "query"))
    )
    examples = SearchDataset.load(
        join(tables, "sequences"),
        "test",
        unit="request",
        max_history=longest,
        **SearchDataset.dataset_options(setup.config, setup.catalogue),
    )
    for number in range(8):
        batch = examples.collate(np.array([number]))
        past, query = int(batch.request_end[0]), int(batch.request_query[0])
        names = [items[i] for i in batch.candidate.tolist()]
        chances = [math.nan] * len(names)
        if past <= setup.config.max_history:
            with torch.no_grad():
                chances = torch.sigmoid(setup.model.score(batch)[:, label]).tolist()  # type: ignore[operator]
        row = {
            "candidates": names,
            "query": queries[query] if query >= 0 else None,
            "features": batch.features.tolist(),
            "history": [items[i] for i in batch.history[0, :past].tolist()],
            "history_query": [
                queries[q] if q >= 0 else ""
                for q in batch.history_query[0, :past].tolist()
            ],
            "history_time_ms": batch.history_time[0, :past].tolist(),
            "history_features": batch.history_features[0, :past].tolist(),
        }
        yield row, dict(zip(names, chances, strict=True))


def feeds(
    setup: TrainingRun, tables: str, text: None, longest: int
) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """The same of a feed: a user's candidates of one time, each item once."""
    items = read_table(join(tables, "items"))["item_id"].to_pylist()
    devices = ["watch", *SEEN]
    examples = ActionsDataset.load(
        join(tables, "sequences"), "test", max_history=longest
    )
    for number in range(12):
        batch = examples.collate(np.array([number]))
        shown, past = batch.candidate_item[0].tolist(), int(batch.valid.sum())
        if len(set(shown)) < len(shown):
            continue
        batch.candidate_time[:] = 99
        batch.candidate_viewer[:] = 1
        names = [items[i] for i in shown]
        with torch.no_grad():
            chances = torch.sigmoid(setup.model.score(batch)[:, 0]).tolist()  # type: ignore[operator]
        row = {
            "candidates": names,
            "timestamp_ms": 99,
            "viewer_device": devices[1],
            "features": batch.candidate_feature[0].tolist(),
            "history": [items[i] for i in batch.item[0, :past].tolist()],
            "history_actions": batch.action[0, :past].tolist(),
            "history_time_ms": batch.time[0, :past].tolist(),
            "history_viewer_device": [
                devices[v] for v in batch.viewer[0, :past, 0].tolist()
            ],
        }
        yield row, dict(zip(names, chances, strict=True))


REQUESTS: dict[str, Any] = {"search": searches, "actions": feeds}


def ranked(served: ServedModel, rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    found = served.predict(None, pd.DataFrame(rows))
    return [
        dict(zip(items, scores, strict=True))
        for items, scores in zip(*map(found.get, found.columns), strict=True)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_served_scores_are_those_of_training(
    name: str, made: dict[str, tuple[str, str | None]], tmp_path: Path
) -> None:
    family = registry.find(MODELS[name]["name"]).family
    tables, text = made[family]
    setup, served = serve(name, tmp_path, tables, text, longest=12)
    rows, chances = zip(*REQUESTS[family](setup, tables, text, 12), strict=True)
    assert sum(len(row["history"]) > 3 for row in rows) >= 3
    for found, want in zip(ranked(served, list(rows)), chances, strict=True):
        assert found == pytest.approx(want, abs=1e-5)
