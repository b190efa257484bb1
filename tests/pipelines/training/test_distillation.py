"""Test distillation: the record of the teacher, and continued runs of students."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from core.errors import UserError
from core.schemas import Inputs
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines import tracking
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import CASES, build_training, train

FIT = FitConfig(
    batch_size=32,
    max_epochs=4,
    lr=0.01,
    patience=0,
    metric="recall@20",
)


@pytest.mark.long
def test_a_student_records_its_teacher_continues_and_then_does_not_need_it(
    new_store, tmp_path, capsys
):
    """With 20 items recall@20 is 1 after every epoch. So the best epoch of a student is
    the first one, and the last one is kept too.
    """
    new_store(tmp_path)
    inputs = Inputs(*write_tables(tmp_path / "made", items=20))
    teacher = build_training(CASES["tiger"], FIT, inputs)
    checkpoint.save(tmp_path / "tiger/best", teacher.model, teacher.checkpoint())
    student = dict(CASES["sid_mlp"])
    del student["teacher_model"]
    train_student = partial(
        train,
        model={**student, "teacher": str(tmp_path / "tiger")},
        fit=FIT,
        inputs=inputs,
        storage=str(tmp_path),
        log_model=False,
    )

    result = train_student(name="whole")

    model = result.best.model
    assert model["teacher"] == str(tmp_path / "tiger/best")
    logged = tracking.connect(result.run.uri).get_run(result.run.run_id)
    assert logged.data.params["model.teacher_hash"] == model["teacher_hash"]
    assert logged.data.metrics["sids/codebook_sizes/0"] == 4

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    first, last = sorted(folder.name for folder in whole.glob("step-*"))
    shutil.copytree(whole / first, cut / first)
    record = json.loads((whole / "run.json").read_text())
    (cut / "run.json").write_text(json.dumps({**record, "status": "running"}))
    train_student(name="cut")
    assert "continuing after epoch 1" in capsys.readouterr().out
    start, tensors, expected = (
        load_file(folder / "model.safetensors")
        for folder in (whole / first, cut / last, whole / last)
    )
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=1e-6)
    changed = {name for name in start if not torch.equal(start[name], expected[name])}
    assert changed
    assert not [name for name in changed if name.startswith("backbone.")]  # frozen

    (tmp_path / "tiger").rename(tmp_path / "elsewhere")
    repeated = train_student(name="whole")
    assert repeated.was_finished
    assert repeated.best == result.best
    for options in ({"name": "whole", "overwrite": True}, {"name": "another"}):
        with pytest.raises(UserError, match="tiger is neither a checkpoint"):
            train_student(**options)
    assert not (tmp_path / "another").exists()
