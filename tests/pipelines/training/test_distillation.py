"""Distillation on Ray: a run records its teacher, and a run that is broken off ends as
one that is not.
"""

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

from models.build import load_model
from models.retrieval.data import Catalogue, HistoryBatch
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit import FitConfig, fit
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
class World:
    """A teacher, a student's run, and what they were made from."""

    folder: Path
    tables: str
    sids: str
    lines: list[str]
    student: TrainingResult | None = None

    def train(self, model: dict[str, Any], name: str, **options: Any) -> TrainingResult:
        return train(
            model=model,
            fit=FIT,
            ray=RayOptions(threads=1),
            inputs=Inputs(self.tables, self.sids),
            storage=str(self.folder / "runs"),
            name=name,
            log_model=False,
            say=self.lines.append,
            **options,
        )

    def distil(self, name: str, **options: Any) -> TrainingResult:
        return self.train(
            {**STUDENT, "teacher": str(self.folder / "runs/tiger")}, name, **options
        )


@pytest.fixture(scope="module")
def world(
    ray_local: None,
    new_store: Callable[[Path], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    """With 20 items recall@20 is 1 after every epoch, so that the best epoch is the
    first, and the last is kept too.
    """
    folder = tmp_path_factory.mktemp("distillation")
    new_store(folder / "runs")
    made = World(folder, *write_tables(folder, items=20), lines=[])
    setup = build_training(
        TIGER,
        FitConfig(batch_size=32, max_epochs=3, lr=0.01, warmup_share=0.0),
        Inputs(made.tables, made.sids),
    )
    for _ in fit(
        setup.model, setup.train, setup.validate, setup.fit, means=setup.means
    ):
        pass
    checkpoint.save(folder / "runs/tiger/best", setup.model, setup.checkpoint(epoch=3))
    made.student = made.distil(
        "student", on_checkpoint=lambda about: None
    )  # in this process: its workers are not of interest
    return made


def test_the_run_records_its_teacher(world: World) -> None:
    assert world.student is not None
    about = world.student.best
    assert about.model["teacher"] == str(world.folder / "runs/tiger/best")
    assert about.model["teacher_model"]["d_model"] == 16
    assert about.metrics["recall@20"] == 1.0
    run = tracking.connect(world.student.run.uri).get_run(world.student.run.run_id)
    assert run.data.params["model.teacher_hash"] == about.model["teacher_hash"]
    assert world.distil("student").was_finished
    with pytest.raises(UserError, match=r"started with model\.alpha 0\.7, not 0\.5"):
        world.train(
            {**STUDENT, "teacher": str(world.folder / "runs/tiger"), "alpha": 0.5},
            "student",
        )
    with pytest.raises(UserError, match=r"model\.teacher is not set"):
        world.train(STUDENT, "orphan")
    assert not (world.folder / "runs/orphan").exists()


def test_a_finished_run_is_found_so_where_its_teacher_is_gone(world: World) -> None:
    runs = world.folder / "runs"
    teacher = (runs / "tiger").rename(runs / "elsewhere")
    try:
        again = world.distil("student")
        assert again.was_finished
        assert again.best.model["teacher"] == str(runs / "tiger/best")
        gone = r"tiger is neither a checkpoint nor a finished run"
        with pytest.raises(UserError, match=gone):
            world.distil("student", overwrite=True)
        with pytest.raises(UserError, match=gone):
            world.train(
                {**STUDENT, "teacher": str(runs / "tiger"), "alpha": 0.5}, "student"
            )
        with pytest.raises(UserError, match=gone):
            world.distil("another")
        assert (runs / "student/best").is_dir()
        assert not (runs / "another").exists()
    finally:
        teacher.rename(runs / "tiger")


def test_broken_off_and_run_again_it_ends_the_same(world: World) -> None:
    """A run of which the first epoch's checkpoint is left goes on from there to the
    undisturbed run's weights.
    """
    whole = world.folder / "runs/student"
    first, last = sorted(whole.glob("step-*"))
    broken = world.folder / "runs/broken"
    shutil.copytree(first, broken / first.name)
    record = json.loads((whole / "run.json").read_text())
    (broken / "run.json").write_text(json.dumps({**record, "status": "running"}))
    world.lines.clear()
    again = world.distil("broken", on_checkpoint=lambda about: None)
    assert any("continuing after epoch 1" in line for line in world.lines)
    assert sum(line.startswith("epoch") for line in world.lines) == FIT.max_epochs - 1
    ours, expected = (
        load_file(broken / last.name / "model.safetensors"),
        load_file(last / "model.safetensors"),
    )
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)
    start = load_file(first / "model.safetensors")
    backbone = {name for name in start if name.startswith("backbone.")}
    assert backbone
    assert all(
        torch.equal(start[name], expected[name]) for name in backbone
    )  # it is frozen
    assert not all(
        torch.equal(start[name], expected[name]) for name in start.keys() - backbone
    )
    model, _ = load_model(
        again.checkpoint, Catalogue.load(world.tables, world.sids), "sid_mlp"
    )
    batch = HistoryBatch(
        history=torch.tensor([[1, 8]]),
        history_length=torch.tensor([2]),
        user=torch.tensor([0]),
    )
    items, _ = model.recommend(batch, 20)
    assert sorted(items[0].tolist()) == list(range(20))
