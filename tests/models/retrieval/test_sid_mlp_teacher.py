"""Teachers that SID-MLP refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from core.errors import UserError
from core.schemas import Inputs
from models.training import checkpoint
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import SASREC, build_training
from tests.models.retrieval.conftest import FIT, HEADS


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
