"""Test distillation: the record of the teacher, and continued runs of students."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.errors import UserError
from core.schemas import Inputs
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training.loop import fit
from pipelines import tracking
from pipelines.training.config import RayOptions
from pipelines.training.run import TrainingResult
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training, train

TIGER = {
    "name": "tiger",
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 1,
    "num_decoder_layers": 2,
    "max_history": 6,
}
STUDENT = {
    "name": "sid_mlp",
    "attention_heads": 2,
    "attention_width": 16,
    "ffn_width": 32,
    "head_width": 16,
}
FIT = FitConfig(
    batch_size=32,
    max_epochs=4,
    lr=0.01,
    warmup_share=0.0,
    patience=0,
    log_every_steps=2,
    seed=3,
    metric="recall@20",
)


@dataclass
class Distillation:
    """A teacher, and the finished run of a student."""

    folder: Path
    tables: str
    sids: str
    lines: list[str]
    """Output of the trainings."""
    result: TrainingResult | None = None

    @property
    def teacher(self) -> Path:
        """Folder of the teacher's run."""
        return self.folder / "runs/tiger"

    def train_student(
        self, name: str, alpha: float = 0.7, **options: Any
    ) -> TrainingResult:
        """Train a student of the teacher as the run `name`."""
        return train(
            model={**STUDENT, "teacher": str(self.teacher), "alpha": alpha},
            fit=FIT,
            ray=RayOptions(threads=1),
            inputs=Inputs(self.tables, self.sids),
            storage=str(self.folder / "runs"),
            name=name,
            log_model=False,
            say=self.lines.append,
            **options,
        )


@pytest.fixture(scope="module")
def distillation(
    ray_local: None,
    new_store: Callable[[Path], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Distillation:
    """Train a teacher and a student.

    With 20 items recall@20 is 1 after every epoch. So the best epoch is the first one,
    and the last one is kept too.
    """
    folder = tmp_path_factory.mktemp("distillation")
    new_store(folder / "runs")
    tables, sids = write_tables(folder, items=20)
    distillation = Distillation(folder, tables, sids, lines=[])
    teacher = build_training(
        TIGER,
        FitConfig(batch_size=32, max_epochs=3, lr=0.01, warmup_share=0.0),
        Inputs(tables, sids),
    )
    for _ in fit(
        teacher.model, teacher.train, teacher.validate, teacher.fit, means=teacher.means
    ):
        pass
    saved = teacher.checkpoint(epoch=3)
    checkpoint.save(distillation.teacher / "best", teacher.model, saved)
    # The callback makes the training run in this process, which saves a process start.
    distillation.result = distillation.train_student(
        "student", on_checkpoint=lambda saved: None
    )
    return distillation


def test_a_students_run_records_its_teacher(distillation: Distillation) -> None:
    result = distillation.result
    assert result is not None
    best = result.best
    assert best.model["teacher"] == str(distillation.teacher / "best")
    assert best.model["teacher_model"]["d_model"] == 16
    assert best.metrics["recall@20"] == 1.0
    run = tracking.connect(result.run.uri).get_run(result.run.run_id)
    assert run.data.params["model.teacher_hash"] == best.model["teacher_hash"]


def test_a_student_is_not_trained_again_nor_with_other_options(
    distillation: Distillation,
) -> None:
    assert distillation.train_student("student").was_finished
    with pytest.raises(UserError, match=r"started with model\.alpha 0\.7, not 0\.5"):
        distillation.train_student("student", alpha=0.5)


def test_a_finished_student_does_not_need_its_teacher(
    distillation: Distillation,
) -> None:
    runs = distillation.folder / "runs"
    moved = distillation.teacher.rename(runs / "elsewhere")
    try:
        repeated = distillation.train_student("student")
        assert repeated.was_finished
        assert repeated.best.model["teacher"] == str(distillation.teacher / "best")

        no_teacher = r"tiger is neither a checkpoint nor a finished run"
        with pytest.raises(UserError, match=no_teacher):
            distillation.train_student("student", overwrite=True)
        with pytest.raises(UserError, match=no_teacher):
            distillation.train_student("student", alpha=0.5)
        with pytest.raises(UserError, match=no_teacher):
            distillation.train_student("another")
        assert (runs / "student/best").is_dir()
        assert not (runs / "another").exists()
    finally:
        moved.rename(distillation.teacher)


def test_an_interrupted_student_continues_to_the_undisturbed_weights(
    distillation: Distillation,
) -> None:
    """The backbone, which comes from the teacher, stays frozen."""
    whole = distillation.folder / "runs/student"
    first, last = sorted(whole.glob("step-*"))
    interrupted = distillation.folder / "runs/interrupted"
    shutil.copytree(first, interrupted / first.name)
    record = json.loads((whole / "run.json").read_text())
    (interrupted / "run.json").write_text(json.dumps({**record, "status": "running"}))
    distillation.lines.clear()

    distillation.train_student("interrupted", on_checkpoint=lambda saved: None)

    lines = distillation.lines
    assert any("continuing after epoch 1" in line for line in lines)
    epochs = [line for line in lines if line.startswith("epoch")]
    assert len(epochs) == FIT.max_epochs - 1
    tensors = load_file(interrupted / last.name / "model.safetensors")
    expected = load_file(last / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=1e-6)

    start = load_file(first / "model.safetensors")
    unchanged = {name for name in start if torch.equal(start[name], expected[name])}
    backbone = {name for name in start if name.startswith("backbone.")}
    assert backbone
    assert backbone <= unchanged
    assert not (start.keys() - backbone) <= unchanged
