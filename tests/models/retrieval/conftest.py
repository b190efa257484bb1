"""Checkpoints of a teacher and an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from core.schemas import Inputs
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training_run import TrainingRun
from tests.fixtures import training_tables
from tests.fixtures.trainings import TIGER, build_training

HEADS = {
    "attention_heads": 2,
    "attention_width": 24,
    "ffn_width": 32,
    "head_width": 20,
    "dropout": 0.0,
}
ENCODER = {"name": "sid_mlp_pp_encoder", "encoder_layers": 1, "encoder_width": 24}
"""Options of stage 1 of SID-MLP++."""
FIT = FitConfig(
    batch_size=32, max_epochs=1, lr=5e-3, warmup_share=0.0, patience=0, seed=2
)


@dataclass
class Distillation:
    """Tables, and checkpoints of an untrained teacher and an untrained stage 1."""

    folder: Path
    tables: str
    sids: str

    @property
    def inputs(self) -> Inputs:
        """URIs of the tables and the semantic IDs."""
        return Inputs(self.tables, self.sids)

    @property
    def teacher(self) -> str:
        """Folder of the teacher's run."""
        return str(self.folder / "tiger")

    @property
    def stage_1(self) -> str:
        """Folder of the run of stage 1 of SID-MLP++."""
        return str(self.folder / "encoder")

    def build(self, fit: FitConfig = FIT, **model: Any) -> TrainingRun:
        """Build the training of a student, by default a SID-MLP.

        Args:
            fit: Options of the training loop.
            model: Options of the student that differ from the defaults.
        """
        options = {"name": "sid_mlp", "teacher": self.teacher, **model}
        if options["name"] in ("sid_mlp", "sid_mlp_pp"):
            options = {**HEADS, **options}
        return build_training(options, fit, self.inputs)


@pytest.fixture(scope="session")
def distillation(tmp_path_factory) -> Distillation:
    """Tables of 30 users with a teacher and a stage 1 of SID-MLP++."""
    folder = tmp_path_factory.mktemp("distillation")
    tables, sids = training_tables.write_tables(folder, users=30)
    teacher = build_training(TIGER, FIT, Inputs(tables, sids))
    # log-probabilities far from uniform
    torch.nn.init.normal_(teacher.model.backbone.embedding.weight, std=2.0)
    checkpoint.save(folder / "tiger/best", teacher.model, teacher.checkpoint(epoch=1))
    distillation = Distillation(folder, tables, sids)
    stage_1 = distillation.build(**ENCODER)
    checkpoint.save(folder / "encoder/best", stage_1.model, stage_1.checkpoint(epoch=1))
    return distillation
