"""The teacher's cache: equal training, computed once, unpadded, checked on reading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from core.schemas import Inputs
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training.loop import Report, fit
from models.training_run import TrainingRun
from tests.fixtures.trainings import build_training
from tests.models.retrieval.conftest import ENCODER, FIT, Distillation


@pytest.fixture(scope="module")
def cache(distillation: Distillation) -> Path:
    """The teacher's cache of a SID-MLP."""
    folder = distillation.folder / "teacher_cache"
    distillation.build(folder)
    return folder


def train(setup: TrainingRun) -> list[Report]:
    """Train and return the event of each epoch."""
    events = fit(setup.model, setup.train, setup.validate, setup.fit)
    return [event for event in events if event.ends_epoch]


def table_kinds(cache: Path) -> list[str]:
    """Return the names of a cache's outputs: `encoder` or `decoder`, sorted."""
    return sorted(path.name.split("-")[0] for path in cache.iterdir() if path.is_dir())


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [
        {"alpha": 0.3, "tau": 2.0, "logits": "vocabulary", "readout": "per_digit"},
        ENCODER,
        {"name": "sid_mlp_pp", "encoder": "encoder"},
    ],
)
def test_training_with_the_cache_equals_training_without_up_to_half_precision(
    distillation: Distillation, cache: Path, model: dict[str, Any]
) -> None:
    metric = "neg_mse" if model is ENCODER else "ndcg@10"
    if "encoder" in model:
        model = {**model, "encoder": distillation.stage_1, "teacher": ""}
    config = FitConfig(**{**vars(FIT), "metric": metric})
    uncached = distillation.build(None, config, **model)
    cached = distillation.build(cache, config, **model)
    initial = {
        name: value.clone() for name, value in uncached.model.state_dict().items()
    }

    expected_events, events = train(uncached), train(cached)

    for event, expected in zip(events, expected_events, strict=True):
        assert event.loss == pytest.approx(expected.loss, rel=2e-3)
        assert event.metrics[metric] == pytest.approx(
            expected.metrics[metric], rel=0.1, abs=0.02
        )
    weights, expected_weights = cached.model.state_dict(), uncached.model.state_dict()
    changed = [
        name
        for name, value in expected_weights.items()
        if not torch.equal(value, initial[name])
    ]
    assert changed
    for name in changed:
        change = (expected_weights[name] - initial[name]).norm()
        difference = (weights[name] - expected_weights[name]).norm()
        assert difference < 0.1 * change


def test_epochs_and_validation_run_neither_encoder_nor_teacher(
    distillation: Distillation, cache: Path
) -> None:
    setup = distillation.build(cache)
    teacher = setup.model.teacher
    for module in (
        setup.model.backbone.encoder,
        teacher.decoder.stack,
        teacher.backbone.encoder,
    ):
        for parameter in module.parameters():
            parameter.fill_(math.nan)

    for event in train(setup):
        assert math.isfinite(event.loss)
        assert event.metrics["recall@20"] > 0


@pytest.mark.parametrize("split", ["test", "next"])
def test_requests_of_other_splits_are_not_in_the_cache(
    split: str, distillation: Distillation, cache: Path
) -> None:
    """Request numbers of `next` are those of other requests in the cache."""
    model: Any = distillation.build(cache).model
    examples = distillation.load_requests(split)
    batch = examples.collate(next(examples.evaluation_batches(8)))
    assert model.read_cache("encoder", batch) is None


def test_trainings_with_equal_teacher_outputs_share_tables(
    distillation: Distillation, tmp_path: Path
) -> None:
    distillation.build(tmp_path, alpha=0.0)
    # without a weight of the teacher, its logits are not needed
    assert table_kinds(tmp_path) == ["encoder"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("states")}

    distillation.build(tmp_path, **ENCODER)
    distillation.build(tmp_path, logits="vocabulary")
    distillation.build(tmp_path, m=2)
    assert table_kinds(tmp_path) == ["decoder", "encoder"]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())

    distillation.build(tmp_path, name="sid_mlp_pp", end_to_end=True)
    assert table_kinds(tmp_path) == ["decoder", "encoder"]
    distillation.build(tmp_path, name="sid_mlp_pp", encoder=distillation.stage_1)
    assert table_kinds(tmp_path) == ["decoder", "encoder", "encoder"]


def test_each_layer_of_a_language_model_has_a_table_of_its_own(
    distillation: Distillation, tmp_path: Path
) -> None:
    teacher = {"name": "lc_rec", "width": 16, "num_layers": 2, "num_heads": 2}
    setup = build_training(teacher, FIT, Inputs(distillation.tables, distillation.sids))
    checkpoint.save(tmp_path / "lc_rec", setup.model, setup.checkpoint(epoch=1))
    student = {"name": "lc_rec_sid_mlp", "width": 12, "attention_heads": 2}
    student["teacher"] = str(tmp_path / "lc_rec")

    for layer in (1, 2):
        distillation.build(tmp_path / "cache", **student, layer=layer)

    assert table_kinds(tmp_path / "cache") == ["decoder", "encoder", "encoder"]
