"""SID-MLP and its teacher: checkpoints without it, and rejected teachers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from core.errors import UserError
from core.schemas import Inputs
from models.loaded_model import load_model
from models.training import checkpoint
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import SASREC, build_training
from tests.models.retrieval.conftest import FIT, HEADS


def test_recommending_needs_no_teacher_and_training_does(distillation, tmp_path):
    teacher = tmp_path / "tiger"
    shutil.copytree(distillation.teacher, teacher)
    setup = distillation.build(teacher=str(teacher))
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
        distillation.build(**about.model)


def test_a_teacher_that_does_not_fit_is_rejected(distillation, tmp_path):
    inputs, teacher = distillation.inputs, distillation.teacher
    sasrec = build_training(SASREC, FIT, Inputs(inputs.tables))
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
        model = {"name": "sid_mlp", **HEADS, "teacher": str(path)}
        with pytest.raises(UserError, match=message):
            build_training(model | options, FIT, tables)
