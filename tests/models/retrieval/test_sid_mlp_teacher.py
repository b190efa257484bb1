"""SID-MLP and its teacher: what is learned, what is frozen, what is refused."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.build import load_model, parse_options
from models.retrieval.data import Catalogue
from models.retrieval.decoders.sid_mlp import SidMlpConfig
from models.retrieval.students.sid_mlp import SidMlp
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import TableVersion, UserError
from models.training.fit import EpochEvent, FitConfig
from models.training_run import TrainingRun
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training
from tests.models.retrieval.conftest import TrainedTiger

SMALL = {"attention_heads": 2, "attention_width": 24, "ffn_width": 32, "head_width": 20}


@dataclass
class Taught:
    """A student distilled from the trained teacher."""

    tables: str
    sids: str
    teacher: str
    accuracy: float
    setup: TrainingRun
    before: dict[str, Tensor]
    events: list[EpochEvent]


@pytest.fixture(scope="module")
def taught(trained_tiger: TrainedTiger) -> Taught:
    config = {
        "name": "sid_mlp",
        "teacher": str(trained_tiger.folder),
        "dropout": 0.0,
        **SMALL,
    }
    before = build_training(
        config,
        FitConfig(seed=2, batch_size=32),
        Inputs(trained_tiger.tables, trained_tiger.sids),
    ).model.state_dict()
    setup, events = trained_tiger.train(config, trained_tiger.root / "taught", 8)
    return Taught(
        trained_tiger.tables,
        trained_tiger.sids,
        str(trained_tiger.folder),
        trained_tiger.ndcg,
        setup,
        before,
        events,
    )


def test_a_student_learns_what_its_teacher_knows(taught: Taught) -> None:
    losses = [event.loss for event in taught.events]
    metrics = taught.events[-1].metrics
    assert losses[-1] < 0.5 * losses[0]
    chance = sum(1 / math.log2(rank + 1) for rank in range(1, 11)) / 24
    assert taught.accuracy > 2 * chance
    assert metrics["ndcg@10"] > 0.9 * taught.accuracy
    assert metrics["recall@10"] > 2 * 10 / 24 * 0.9


def test_what_is_frozen_stays(taught: Taught) -> None:
    model = taught.setup.model
    teacher, _ = load_model(checkpoint.locate(taught.teacher), taught.setup.catalogue)
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, teacher.backbone.state_dict()[name])
        assert torch.equal(value, taught.before[f"backbone.{name}"])
    assert all(
        p.grad is None and not p.requires_grad for p in model.backbone.parameters()
    )
    assert not model.train().backbone.training
    moved = [
        n for n, v in model.state_dict().items() if not torch.equal(v, taught.before[n])
    ]
    assert {name.rsplit(".", 1)[0].split(".")[1] for name in moved} == {
        "readout",
        "heads",
    }
    assert not [
        name for name in model.state_dict() if "stack" in name or "teacher" in name
    ]


def test_recommending_needs_no_teacher(taught: Taught, tmp_path: Path) -> None:
    """The checkpoint alone gives the same recommendations where the teacher's folder is
    gone; training does not.
    """
    gone = tmp_path / "tiger"
    shutil.copytree(taught.teacher, gone)
    config = {"name": "sid_mlp", "teacher": str(gone), **SMALL}
    setup = build_training(
        config, FitConfig(batch_size=32), Inputs(taught.tables, taught.sids)
    )
    assert setup.config.teacher == str(gone / "best")
    checkpoint.save(tmp_path / "student", setup.model, setup.checkpoint(epoch=1))
    batch = setup.val.collate(next(setup.val.evaluation_batches(40)))
    expected = setup.model.eval().recommend(batch, 20)
    shutil.rmtree(gone)
    loaded, about = load_model(tmp_path / "student", setup.catalogue, "sid_mlp")
    items, scores = loaded.recommend(batch, 20)
    assert torch.equal(items, expected[0])
    assert torch.equal(scores, expected[1])
    assert loaded.config.teacher_hash
    with pytest.raises(UserError, match="has no teacher to learn from"):
        loaded(batch)
    with pytest.raises(UserError, match="is neither a checkpoint nor a finished run"):
        build_training(
            about.model, FitConfig(batch_size=32), Inputs(taught.tables, taught.sids)
        )


def test_resolving_twice_changes_nothing(taught: Taught) -> None:
    catalogue = taught.setup.catalogue
    once = SidMlp.resolve_config(SidMlpConfig(teacher=taught.teacher), catalogue)
    assert SidMlp.resolve_config(once, catalogue) == once
    assert once.teacher_model["d_model"] == 16
    assert once.max_history == 20
    assert parse_options(json.loads(json.dumps(SidMlp.config_to_dict(once))))[1] == once


def test_a_teacher_that_does_not_fit_is_refused(taught: Taught, tmp_path: Path) -> None:
    def train(
        teacher: str,
        tables: str = taught.tables,
        sids: str = taught.sids,
        **options: Any,
    ) -> None:
        build_training(
            {"name": "sid_mlp", "teacher": teacher, **SMALL, **options},
            FitConfig(batch_size=32),
            Inputs(tables, sids),
        )

    with pytest.raises(
        UserError,
        match=r"model\.teacher is not set; give the folder of a trained TIGER",
    ):
        train("")
    with pytest.raises(
        UserError,
        match=r"the teacher .*/nowhere is neither a checkpoint nor a finished run",
    ):
        train(str(tmp_path / "nowhere"))
    (tmp_path / "running").mkdir()
    with pytest.raises(
        UserError,
        match=r"neither a checkpoint nor a finished run: it holds no config.json and no best",
    ):
        train(str(tmp_path / "running"))
    other = build_training(
        {"name": "sasrec", "dim": 8, "num_layers": 1},
        FitConfig(batch_size=32),
        Inputs(taught.tables),
    )
    checkpoint.save(tmp_path / "sasrec", other.model, other.checkpoint(epoch=1))
    with pytest.raises(
        UserError,
        match=r"is of the model 'sasrec', which has no decoder; give .* one of tiger, ",
    ):
        train(str(tmp_path / "sasrec"))
    with pytest.raises(
        UserError,
        match=r"teacher_hash is 0123, the teacher .* has .*; leave model\.teacher_hash out",
    ):
        train(taught.teacher, teacher_hash="0123")
    with pytest.raises(UserError, match=r"m 3 leaves no level of 3 to the student"):
        train(taught.teacher, m=3)

    wide, wide_sids = write_tables(tmp_path / "wide", users=8, items=40)
    with pytest.raises(
        UserError, match=r"the teacher .* belongs to another table 'items'"
    ):
        train(taught.teacher, wide, wide_sids)
    other, other_sids = write_tables(tmp_path / "other", users=8, seed=5)
    with pytest.raises(
        UserError,
        match=r"the teacher .* belongs to another table 'sequences': \w+ was trained on",
    ):
        train(taught.teacher, other, other_sids)

    cut = tmp_path / "cut"
    shutil.copytree(checkpoint.locate(taught.teacher), cut)
    (cut / checkpoint.WEIGHTS).write_bytes((cut / checkpoint.WEIGHTS).read_bytes()[:-9])
    with pytest.raises(UserError, match=r"truncated or replaced"):
        train(str(cut))


def test_a_teacher_of_another_depth_is_refused(taught: Taught, tmp_path: Path) -> None:
    """As many tokens, cut into other levels: the hashes of the semantic IDs tell."""
    teacher = checkpoint.locate(taught.teacher)
    catalogue = taught.setup.catalogue
    codes = torch.cat([catalogue.sids[:, :2], torch.zeros(24, 2, dtype=torch.long)], 1)
    deep = Catalogue.from_codes(codes, (4, 6, 1, 1))
    deep = Catalogue(
        24,
        deep.sids,
        (4, 6, 1, 1),
        deep.trie,
        {**catalogue.versions, "sids": TableVersion("d" * 64)},
    )
    with pytest.raises(
        UserError,
        match=r"belongs to another table 'sids': \w+ was trained on, dddddddddddd is given",
    ):
        SidMlp.resolve_config(SidMlpConfig(teacher=teacher), deep)
