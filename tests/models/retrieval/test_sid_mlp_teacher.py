"""SID-MLP and its teacher: training, frozen weights, checkpoints, rejected teachers."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.errors import UserError
from core.schemas import Inputs
from models.loaded_model import load_model
from models.retrieval.data import Catalogue
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training.loop import Report
from models.training_run import TrainingRun
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training
from tests.models.retrieval.conftest import TrainedTiger

SMALL = {"attention_heads": 2, "attention_width": 24, "ffn_width": 32, "head_width": 20}


@dataclass
class Taught:
    """A student distilled from the trained teacher."""

    inputs: Inputs
    teacher: str
    teacher_ndcg: float
    setup: TrainingRun
    initial_weights: dict[str, Tensor]
    events: list[Report]

    @property
    def catalogue(self) -> Catalogue:
        """The catalogue of the teacher and the student."""
        return self.setup.catalogue


@pytest.fixture(scope="module")
def taught(trained_tiger: TrainedTiger) -> Taught:
    """A SID-MLP that was distilled for 8 epochs."""
    teacher = str(trained_tiger.folder)
    inputs = Inputs(trained_tiger.tables, trained_tiger.sids)
    options = {"name": "sid_mlp", "teacher": teacher, "dropout": 0.0, **SMALL}
    untrained = build_training(options, FitConfig(seed=2, batch_size=32), inputs)
    setup, events = trained_tiger.train(options, trained_tiger.root / "taught", 8)
    return Taught(
        inputs,
        teacher,
        trained_tiger.ndcg,
        setup,
        untrained.model.state_dict(),
        events,
    )


def build_student_training(
    teacher: str | Path, inputs: Inputs, **options: Any
) -> TrainingRun:
    """Build a training of a SID-MLP from a teacher."""
    options = {"name": "sid_mlp", "teacher": str(teacher), **SMALL, **options}
    return build_training(options, FitConfig(batch_size=32), inputs)


def test_a_student_ranks_nearly_as_well_as_its_teacher(taught: Taught) -> None:
    losses = [event.loss for event in taught.events]
    metrics = taught.events[-1].metrics
    chance = sum(1 / math.log2(rank + 1) for rank in range(1, 11)) / 24
    assert losses[-1] < 0.5 * losses[0]
    assert taught.teacher_ndcg > 2 * chance
    assert metrics["ndcg@10"] > 0.9 * taught.teacher_ndcg
    assert metrics["recall@10"] > 2 * 10 / 24 * 0.9


def test_recommending_needs_no_teacher_and_training_does(
    taught: Taught, tmp_path: Path
) -> None:
    teacher = tmp_path / "tiger"
    shutil.copytree(taught.teacher, teacher)
    setup = build_student_training(teacher, taught.inputs)
    assert setup.model.config.teacher == str(teacher / "best")
    checkpoint.save(tmp_path / "student", setup.model, setup.checkpoint(epoch=1))
    batch = setup.val.collate(next(setup.val.evaluation_batches(40)))
    expected_items, expected_scores = setup.model.eval().recommend(batch, 20)

    shutil.rmtree(teacher)
    loaded, about = load_model(tmp_path / "student", setup.catalogue)
    items, scores = loaded.recommend(batch, 20)

    assert torch.equal(items, expected_items)
    assert torch.equal(scores, expected_scores)
    assert loaded.config.teacher_hash
    with pytest.raises(UserError, match="has no teacher to learn from"):
        loaded(batch)
    with pytest.raises(UserError, match="is neither a checkpoint nor a finished run"):
        build_training(about.model, FitConfig(batch_size=32), taught.inputs)


def test_a_teacher_that_does_not_fit_is_rejected(
    taught: Taught, tmp_path: Path
) -> None:
    inputs, teacher = taught.inputs, taught.teacher
    sasrec = build_training(
        {"name": "sasrec", "dim": 8, "num_layers": 1},
        FitConfig(batch_size=32),
        Inputs(inputs.tables),
    )
    checkpoint.save(tmp_path / "sasrec", sasrec.model, sasrec.checkpoint(epoch=1))
    truncated = Path(shutil.copytree(checkpoint.locate(teacher), tmp_path / "cut"))
    weights = truncated / checkpoint.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-9])
    other_items = Inputs(*write_tables(tmp_path / "items", users=8, items=40))
    other_users = Inputs(*write_tables(tmp_path / "sequences", users=8, seed=5))
    for message, path, tables, options in (
        ("model.teacher is not set", "", inputs, {}),
        ("neither a checkpoint nor", tmp_path / "nowhere", inputs, {}),
        ("has no decoder", tmp_path / "sasrec", inputs, {}),
        ("teacher_hash", teacher, inputs, {"teacher_hash": "0123"}),
        ("m 3", teacher, inputs, {"m": 3}),
        ("another table 'items'", teacher, other_items, {}),
        ("another table 'sequences'", teacher, other_users, {}),
        ("SHA-256", truncated, inputs, {}),
    ):
        with pytest.raises(UserError, match=message):
            build_student_training(path, tables, **options)
