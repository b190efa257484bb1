"""A wrong line, what it names wrongly, and --help are answered before what takes seconds to import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from search_tables import write_search

from jobs import prepare
from models import checkpoint
from models.fit import FitConfig
from models.setup import set_up
from models.tables import UserError

ROOT = Path(__file__).parents[2]

CODE = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module("jobs." + sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print("imported:", *sys.modules)
"""


ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}


def answered(job: str, *words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """The command's end, and the modules that it imported."""
    line = [sys.executable, "-c", CODE, job, *words]
    done = subprocess.run(line, cwd=ROOT, env=ENVIRONMENT | environment, capture_output=True, text=True)
    imported = done.stdout.split("imported:")[1].split()
    assert "jobs.cli" in imported
    return done, set(imported)


@pytest.fixture(scope="module")
def made(small: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tables of retrieval with their semantic IDs, tables of search, and a storage with a TIGER's run."""
    home = tmp_path_factory.mktemp("wrong")
    tiger = {"name": "tiger", "d_model": 8, "d_ff": 8, "num_heads": 1, "d_kv": 4}
    setup = set_up(tiger, FitConfig(batch_size=8), *small)
    checkpoint.save(home / "runs/teacher/best", setup.model, setup.checkpoint(epoch=1))
    (home / "runs/teacher/run.json").write_text("{}")
    return {"tables": small[0], "sids": small[1], "search": write_search(home)[0], "runs": str(home / "runs")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sasrec.yaml --tables {tables} --fit.metric ndcg10", "'ndcg10', which .* the nearest is 'ndcg@10'; known are"),
        ("sasrec.yaml --tables {tables} --ray.num_workers 4096 --fit.batch_size 4096",
         "4,096 workers need 4096 CPUs, 1 CPU for each; this machine has .*; lower --ray.num_workers or "),
        ("sasrec.yaml --tables {tables} --name a/b", "the run's name is 'a/b'"),
        ("tiger_small.yaml --tables {tables}", "the model 'tiger' needs semantic IDs; give --sids"),
        ("qgs.yaml --tables {tables}", "'qgs' is of search, and {tables} holds tables of retrieval; models of "
         "retrieval are .*sasrec, .*: give a config of one .*, or tables that jobs.prepare made with --kind search"),
        ("tiger_small.yaml --tables {search}", "'tiger' is of retrieval, .* models of search are base, hstu, hllm, "
         "qgs: "),
        ("sid_mlp.yaml --tables {tables} --sids {sids}", "model.teacher is not set; .* which is STORAGE/NAME of"),
        ("sid_mlp.yaml --tables {tables} --sids {sids} --model.teacher teacher",
         "model.teacher is teacher, the name of a run; give the run's folder, which is {runs}/teacher"),
    ],
)  # fmt: skip
def test_a_training_that_cannot_be_is_refused_before_ray_is_imported(
    made: dict[str, str], words: str, message: str
) -> None:
    before = sorted(Path(made["runs"]).rglob("*"))
    line = f"--storage {made['runs']} --name new --config jobs/configs/{words}".format(**made).split()
    done, imported = answered("train", *line)
    assert done.returncode == 1
    assert re.fullmatch(f"error: .*{message.format(**made)}.*\n", done.stderr), done.stderr
    assert "ray" not in imported
    assert sorted(Path(made["runs"]).rglob("*")) == before


SWEEP = "--storage {runs} --name new --grid tuning/grids"
TIGERS = f"{SWEEP}/tiger.yaml --tables {{tables}} --sids {{sids}}"
CHECKPOINT = "--checkpoint {runs}/teacher/best"


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "words", "message"),
    [
        ("sweep", f"{SWEEP}/sid_mlp_alpha.yaml --tables {{tables}} --model.teacher t",
         "needs semantic IDs; give --sids"),
        ("sweep", f"{SWEEP}/sid_mlp_alpha.yaml --tables {{tables}} --sids {{sids}} --model.teacher gone",
         "the teacher .*/gone is neither a checkpoint nor a finished run"),
        ("sweep", f"{TIGERS} --fit.metric ndcg10", "the grid tiger ranks by val/ndcg@10; leave it out"),
        ("sweep", f"{TIGERS} --ray.num_workers 4096 --fit.batch_size 4096",
         "4,096 workers need 4096 CPUs"),
        ("evaluate", f"{CHECKPOINT} --tables {{tables}}", "the model 'tiger' needs semantic IDs; give --sids"),
        ("evaluate", "--checkpoint {runs}/gone --tables {tables}", "--checkpoint is {runs}/gone, where nothing is"),
        ("evaluate", f"{CHECKPOINT} --tables {{tables}} --sids {{sids}} --draft_beam 5",
         "the model 'tiger' has no option --draft_beam when recommending; it takes unseen, precision, compile, beam"),
        ("evaluate", f"{CHECKPOINT} --tables {{tables}} --sids {{sids}} --beam 0", "beam is 0"),
        ("evaluate", f"{CHECKPOINT} --tables {{search}} --sids {{sids}}", "'tiger' is of retrieval"),
    ],
)  # fmt: skip
def test_a_sweep_or_an_evaluation_that_cannot_be_is_refused_before_ray_starts(
    made: dict[str, str], job: str, words: str, message: str, tmp_path: Path
) -> None:
    before = sorted(Path(made["runs"]).rglob("*"))
    done, imported = answered(job, *words.format(**made).split(), RAY_TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert re.fullmatch(f"error: .*{message.format(**made)}.*\n", done.stderr), done.stderr
    assert job == "sweep" or "ray" not in imported
    assert not list(tmp_path.iterdir())  # where Ray would have its session
    assert sorted(Path(made["runs"]).rglob("*")) == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "words", "message"),
    [
        ("tokenize", "--tokenizer rqkmeans", "the encoder tfdf is neither a folder nor .*; the nearest is 'tfidf'"),
        ("encode", "", "the encoder tfdf is neither a folder nor .*; the nearest is 'tfidf'"),
    ],
)
def test_no_hub_is_asked_for_what_looks_like_a_built_in_encoder(
    small: tuple[str, str], tmp_path: Path, job: str, words: str, message: str
) -> None:
    line = f"--tables {small[0]} --output {tmp_path}/out --encoder tfdf {words}"
    done, imported = answered(job, *line.split())
    assert done.returncode == 1
    assert re.fullmatch(f"error: {message}\n", done.stderr), done.stderr
    assert not {"transformers", "huggingface_hub"} & imported
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", [["--sugest", "raw"], ["--sugest=raw"], ["--suggests", "raw", "--output", "x.yaml"]])
def test_a_misspelt_suggest_is_named(line: list[str]) -> None:
    with pytest.raises(UserError, match=r"unknown key 'sug.*'; the nearest key is 'suggest'"):
        prepare.parse("prepare", line)
