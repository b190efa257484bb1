"""Test the evaluation of students: its options and comparison with teachers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.options import parse
from core.schemas import Inputs
from jobs.evaluate import Config, run
from models.training import checkpoint
from models.training.checkpoint import weights_hash
from models.training.fit_config import FitConfig
from pipelines import tracking
from pipelines.comparison.compare import compare
from pipelines.comparison.tables import build_tables
from pipelines.comparison.verdicts import measure_differences
from tests.fixtures.training_tables import write_tables
from tests.fixtures.trainings import build_training

TIGER = {
    "name": "tiger",
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "beam": 24,
}
STUDENT = {
    "name": "sid_mlp",
    "attention_heads": 2,
    "attention_width": 8,
    "ffn_width": 16,
    "head_width": 16,
    "beam": 24,
}


@dataclass
class Students:
    """An untrained teacher and two of its students, with their MLflow runs."""

    folder: Path
    tables: str
    sids: str

    def options(self, name: str, *more: str) -> list[str]:
        """Return the words of a command line that evaluates a model."""
        words = ["--checkpoint", str(self.folder / name)]
        return [*words, "--tables", self.tables, "--sids", self.sids, *more]

    def evaluate(self, name: str, *more: str) -> dict[str, float]:
        """Evaluate a model with further options; return its metrics."""
        result = run(parse(Config, self.options(name, *more)))
        assert result is not None
        return result.metrics


@pytest.fixture(scope="module")
def students(
    new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> Students:
    """Save an untrained teacher and two seeds of its student."""
    folder = tmp_path_factory.mktemp("students")
    tables, sids = write_tables(folder / "small")
    uri = new_store(folder)
    for name, model, seed in [
        ("tiger", TIGER, 1),
        ("student-1", STUDENT, 1),
        ("student-2", STUDENT, 2),
    ]:
        teacher = {"teacher": str(folder / "tiger")} if model is STUDENT else {}
        setup = build_training(
            {**model, **teacher},
            FitConfig(batch_size=8, seed=seed),
            Inputs(tables, sids),
        )
        config = {
            "model": setup.model.config_to_dict(setup.config),
            "fit": {"seed": seed},
        }
        opened = tracking.open_run(
            uri, "retrieval/small", name, str(folder), config=config, hashes={}
        )
        saved = setup.checkpoint(epoch=1, step=4, tracking=vars(opened))
        checkpoint.save(folder / name, setup.model, saved)
        tracking.Logger(opened).end()
    return Students(folder, tables, sids)


def test_students_are_compared_with_each_evaluation_of_their_teacher(
    students: Students,
) -> None:
    students.evaluate("tiger")
    students.evaluate("tiger", "--constrained", "false")
    students.evaluate("student-1")
    second = students.evaluate("student-2")
    assert students.evaluate("student-2", "--scores", "codebook") != second
    # `children` is the default of the model.
    assert students.evaluate("student-2", "--scores", "children") == second

    uri = f"sqlite:///{students.folder}/mlflow.db"
    teacher = students.folder / "tiger"
    run_id = checkpoint.read(teacher).tracking["run_id"]
    tags = tracking.connect(uri).get_run(run_id).data.tags
    assert tags[tracking.WEIGHTS_TAG] == weights_hash(str(teacher))

    comparison = compare(uri, ["retrieval/small"])
    tables = build_tables(comparison, measure_differences(comparison))
    (_, runs, _), (_, same_users, _), *_ = tables
    assert set(runs["run"]) == {
        "tiger",
        "tiger [constrained False]",
        "student-*",
        "student-2 [scores codebook]",
    }
    assert ("student-*", "tiger", "2", "60") in [line[:4] for line in same_users.rows()]
