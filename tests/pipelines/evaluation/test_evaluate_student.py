"""Students evaluated: options beside each other, export checked, and found beside their
teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.evaluate import Config, run
from jobs.options import parse
from models.build import load_model
from models.retrieval.data import Catalogue, RetrievalDataset
from models.retrieval.search.export import load_exported
from models.storage import checkpoint
from models.storage.checkpoint import weights_hash
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.training.fit import FitConfig
from papers.tables import paper_tables
from pipelines import tracking
from pipelines.comparison.load import compare
from pipelines.comparison.runs import select
from pipelines.comparison.tables import tables as tables_of
from pipelines.serving.export import differs
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


@pytest.fixture(scope="module")
def world(
    new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A folder with an untrained teacher and two students of it, with their MLflow
    runs; options of its tables.
    """
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
        checkpoint.save(
            folder / name,
            setup.model,
            setup.checkpoint(epoch=1, step=4, tracking=opened.to_dict()),
        )
        tracking.Logger(opened).end()
    return folder, ["--tables", tables, "--sids", sids]


def evaluate(
    world: tuple[Path, list[str]], name: str, *options: str
) -> dict[str, float]:
    result = run(
        parse(Config, ["--checkpoint", str(world[0] / name), *world[1], *options])
    )
    assert result is not None
    return result.metrics


def test_students_find_their_teacher_in_the_comparison(
    world: tuple[Path, list[str]],
) -> None:
    constrained, free = (
        evaluate(world, "tiger"),
        evaluate(world, "tiger", "--constrained", "false"),
    )
    ones = evaluate(world, "student-1")
    assert evaluate(world, "student-1", "--path", "plain") == ones
    two = evaluate(world, "student-2")
    assert evaluate(world, "student-2", "--scores", "codebook") != two
    assert evaluate(world, "student-2", "--scores", "children") == two  # its own
    uri = f"sqlite:///{world[0]}/mlflow.db"
    run_id = checkpoint.read(world[0] / "tiger").tracking["run_id"]
    tags = tracking.connect(uri).get_run(run_id).data.tags
    assert tags[tracking.WEIGHTS_TAG] == weights_hash(str(world[0] / "tiger"))
    comparison = compare(select(uri, ["retrieval/small"]))
    runs, same_users, *_ = tables_of(comparison)
    students = paper_tables(comparison)[0]
    assert {row[1] for row in runs.cells} == {
        "tiger",
        "tiger [constrained False]",
        "student-*",
        "student-1 [path plain]",
        "student-2 [scores codebook]",
    }
    assert ["student-*", "tiger", "2", "60"] in [line[:4] for line in same_users.cells]
    mean = (ones["ndcg@10"] + two["ndcg@10"]) / 2
    for teacher, metrics in (
        ("tiger", constrained),
        ("tiger [constrained False]", free),
    ):
        row = next(row for row in students.cells if row[:2] == ["student-*", teacher])
        assert row[2] == "2"
        assert row[3].startswith(f"{mean:.4f} ± ")
        assert row[4] == f"{metrics['ndcg@10']:.4f}"


@pytest.mark.long
def test_an_exported_student_ranks_as_it_did(
    world: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "new" / "student.pt2"
    options = [
        "--checkpoint",
        str(world[0] / "student-1"),
        *world[1],
        "--export",
        str(file),
        "--k",
        "7",
    ]
    assert run(parse(Config, options)) is None
    assert (
        "same items in the same order as the model for 60 requests"
        in capsys.readouterr().out
    )
    model, _ = load_model(
        world[0] / "student-1", Catalogue.load(world[1][1], world[1][3])
    )
    batch = RetrievalDataset.load(f"{world[1][1]}/sequences", "test").collate(
        np.array([3, 17, 29])
    )
    items, scores = load_exported(file)(batch.history, batch.history_length, batch.user)
    expected = model.recommend(batch, 7)
    assert items.tolist() == expected[0].tolist()
    torch.testing.assert_close(scores, expected[1])
    with pytest.raises(UserError, match="a Tiger of this config cannot be exported"):
        run(
            parse(
                Config,
                [
                    "--checkpoint",
                    str(world[0] / "tiger"),
                    *world[1],
                    "--export",
                    str(file),
                ],
            )
        )
    with pytest.raises(UserError, match="cannot write /proc/student"):
        run(parse(Config, [*options, "--export", "/proc/student.pt2"]))
    with pytest.raises(UserError, match="beam is given with --export"):
        parse(Config, [*options, "--beam", "3"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam", "0"], "--beam is 0, it must be at least 1"),
        (
            ["--constrained", "false", "--scores", "children"],
            "--scores children has no effect with --constrained false",
        ),
        (
            ["--constrained", "false", "--path", "plain"],
            "--path plain has no effect with --constrained false",
        ),
        (["--decoder", "hf"], "the model 'sid_mlp' has no option --decoder"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    world: tuple[Path, list[str]], options: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(world, "student-1", *options)


def test_rankings_differ_but_where_rounding_decides() -> None:
    scores = torch.tensor([[-1.0, -2.0, -2.000001, -4.0, -5.0]])
    items = torch.tensor([[10, 11, 12, 13, 14]])

    def wrong(ranked: list[int], by: float = 0.0) -> bool:
        return bool(differs(torch.tensor([ranked]), scores + by, items, scores))

    assert not wrong([10, 11, 12, 13, 14], by=1e-6)
    assert not wrong([10, 12, 11, 13, 14])  # a tie
    assert not wrong(
        [10, 11, 12, 13, 99]
    )  # the last may tie with the first that was left out
    assert wrong([11, 10, 12, 13, 14])
    assert wrong([10, 11, 12, 99, 14])
    assert wrong([10, 11, 12, 13, 14], by=0.01)
    short = torch.full_like(scores, -torch.inf)
    assert not differs(items, short, items, short).any()  # nobody was found
