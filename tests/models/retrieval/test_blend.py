"""Blends are weighted sums of scores; checkpoints that differ are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.errors import UserError
from core.schemas import Inputs
from models.loaded_model import LoadedModel, build_model
from models.training import checkpoint
from models.training.fit_config import FitConfig
from tests.fixtures.small_retrieval import ITEMS, build_catalogue, make_requests
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training

SASREC = {"name": "sasrec", "dim": 8, "num_layers": 1, "max_history": 4}
SID_SASREC = {**SASREC, "name": "sid_sasrec"}


def build(**options: Any) -> Any:
    """Return a blend of two models with random weights."""
    torch.manual_seed(2)
    options = {"name": "blend", "models": [SASREC, SID_SASREC], **options}
    return build_model(options, build_catalogue()).eval()


def test_scores_are_weighted_sums_of_scores():
    """A baseline's scores below 0 count as 0."""
    models = [SID_SASREC, {"name": "popularity"}]
    model, batch = build(weight=3, depth=9, models=models), make_requests(5)
    model.models[1].counts[:] = torch.arange(ITEMS) - ITEMS + 7.0
    model.fit_in_one_pass([], [batch])
    mask = torch.arange(ITEMS) % 3 > 0

    items, scores = model.recommend(batch, 12, allowed=mask, unseen=True)

    for row in range(5):
        parts = []
        for part in model.models:
            allowed = part.encode_allowed(mask)
            ranking = part.recommend(batch, 12, allowed=allowed, unseen=True)
            pairs = zip(*(values[row].tolist() for values in ranking), strict=True)
            parts.append({item: score for item, score in pairs if item >= 0})
        first, counts = parts
        lowest = min(first.values())
        total = {
            item: first.get(item, lowest) + 3 * max(counts.get(item, 0), 0)
            for item in first | counts
        }
        expected = sorted(total.values(), reverse=True)[:12]
        found = items[row][items[row] >= 0].tolist()
        assert [total[item] for item in found] == pytest.approx(expected)
        assert scores[row, : len(found)].tolist() == pytest.approx(expected)


def test_two_checkpoints_become_one_and_others_are_refused(tmp_path):
    inputs = Inputs(*write_tables(tmp_path / "tables", users=12))
    saved = {}
    models = {"first": SASREC, "second": SID_SASREC, "sids": SID_SASREC}
    for name, model in {**models, "sequences": SASREC}.items():
        run = build_training(model, FitConfig(), inputs)
        metadata = run.checkpoint()
        if name in metadata.hashes:
            metadata.hashes[name] = "0" * 64
        saved[name] = str(tmp_path / name)
        checkpoint.save(saved[name], run.model, metadata)
    options = {"name": "blend", "first": saved["first"]}
    for name in ("sequences", "sids"):
        with pytest.raises(UserError, match=f"/first and .*/{name} were"):
            build_training({**options, "second": saved[name]}, FitConfig(), inputs)

    run = build_training({**options, "second": saved["second"]}, FitConfig(), inputs)
    run.fit_in_one_pass()
    checkpoint.save(tmp_path / "blend", run.model, run.checkpoint())
    loaded = LoadedModel.load(str(tmp_path / "blend"), inputs)

    (rows,) = run.val.evaluation_batches(100)
    requests = run.val.collate(rows)
    scores = loaded.model.recommend(requests, 10)[1]
    assert torch.equal(scores, run.model.recommend(requests, 10)[1])
    assert tuple(loaded.checkpoint.model["hashes"]) == run.model.config.hashes
