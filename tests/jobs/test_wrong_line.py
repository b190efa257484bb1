"""Command lines that cannot be: one line that names what is wrong, before Ray starts, and nothing is written."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from search_tables import write_search

from jobs import cli
from models import checkpoint
from models.fit import FitConfig
from models.inputs import Inputs
from models.setup import set_up
from models.tables import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(small: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tables of retrieval with their semantic IDs, tables of search, and a storage with a TIGER's run."""
    home = tmp_path_factory.mktemp("wrong")
    tiger = {"name": "tiger", "d_model": 8, "d_ff": 8, "num_heads": 1, "d_kv": 4}
    setup = set_up(tiger, FitConfig(batch_size=8), Inputs(*small))
    checkpoint.save(home / "runs/teacher/best", setup.model, setup.checkpoint(epoch=1))
    (home / "runs/teacher/run.json").write_text("{}")
    return {"tables": small[0], "sids": small[1], "search": write_search(home)[0], "runs": str(home / "runs")}


TRAIN = "train --storage {runs} --name new --config jobs/configs"
SWEEP = "sweep --storage {runs} --name new --grid tuning/grids"
TIGERS = f"{SWEEP}/tiger.yaml --tables {{tables}} --sids {{sids}}"
EVALUATE = "evaluate --checkpoint {runs}/teacher/best"
LINES = [
    (f"{TRAIN}/sasrec.yaml --tables {{tables}} --fit.metric ndcg10",
     "'ndcg10', which .* the nearest is 'ndcg@10'; known are"),
    (f"{TRAIN}/sasrec.yaml --tables {{tables}} --ray.num_workers 4096 --fit.batch_size 4096",
     "4,096 workers need 4096 CPUs, 1 CPU for each; this machine has .*; lower --ray.num_workers or "),
    (f"{TRAIN}/sasrec.yaml --tables {{tables}} --name a/b", "the run's name is 'a/b'"),
    (f"{TRAIN}/tiger_small.yaml --tables {{tables}}", "the model 'tiger' needs semantic IDs; give --sids"),
    (f"{TRAIN}/qgs.yaml --tables {{tables}}",
     "'qgs' is of search, and {tables} holds tables of retrieval; models of retrieval are .*sasrec, .*: give a config "
     "of one .*, or tables that jobs.prepare made with --kind search"),
    (f"{TRAIN}/tiger_small.yaml --tables {{search}}",
     "'tiger' is of retrieval, .* models of search are base, hstu, hllm, qgs: "),
    (f"{TRAIN}/sid_mlp.yaml --tables {{tables}} --sids {{sids}}",
     "model.teacher is not set; .* which is STORAGE/NAME of"),
    (f"{TRAIN}/sid_mlp.yaml --tables {{tables}} --sids {{sids}} --model.teacher teacher",
     "model.teacher is teacher, the name of a run; give the run's folder, which is {runs}/teacher"),
    (f"{TRAIN}/sasrec.yaml --tables {{tables}} --model.nam x", "unknown key 'model.nam'; .*'model.name'"),
    ("train --tables {tables} --storage {runs} --name new", "no model is named; give a --config"),
    (f"{TRAIN}/sasrec.yaml --tables {{tables}} --model tiger --model.dim 8",
     "--model is 'tiger', it must be a mapping"),
    (f"{SWEEP}/sid_mlp_alpha.yaml --tables {{tables}} --model.teacher t", "needs semantic IDs; give --sids"),
    (f"{SWEEP}/sid_mlp_alpha.yaml --tables {{tables}} --sids {{sids}} --model.teacher gone",
     "the teacher .*/gone is neither a checkpoint nor a finished run"),
    (f"{TIGERS} --fit.metric ndcg10", "the grid tiger ranks by val/ndcg@10; leave it out"),
    (f"{TIGERS} --ray.num_workers 4096 --fit.batch_size 4096", "4,096 workers need 4096 CPUs"),
    (f"{EVALUATE} --tables {{tables}}", "the model 'tiger' needs semantic IDs; give --sids"),
    ("evaluate --checkpoint {runs}/gone --tables {tables}", "--checkpoint is {runs}/gone, where nothing is"),
    (f"{EVALUATE} --tables {{tables}} --sids {{sids}} --draft_beam 5",
     "the model 'tiger' has no option --draft_beam when recommending; it takes unseen, precision, compile, beam"),
    (f"{EVALUATE} --tables {{tables}} --sids {{sids}} --beam 0", "beam is 0"),
    (f"{EVALUATE} --tables {{search}} --sids {{sids}}", "'tiger' is of retrieval"),
    ("tokenize --tables {tables} --output {runs}/out --encoder tfdf --tokenizer rqkmeans",
     "the encoder tfdf is neither a folder nor .*; the nearest is 'tfidf'"),
    ("encode --tables {tables} --output {runs}/out --encoder tfdf",
     "the encoder tfdf is neither a folder nor .*; the nearest is 'tfidf'"),
]  # fmt: skip


def test_it_is_refused_before_ray_starts(
    made: dict[str, str], monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    def start(*args: Any, **options: Any) -> None:
        raise AssertionError("Ray is started")

    monkeypatch.setattr(cli, "start_ray", start)
    monkeypatch.chdir(ROOT)
    before = sorted(Path(made["runs"]).rglob("*"))
    for line, message in LINES:
        with subtests.test(line=line):
            name, *words = line.format(**made).split()
            job = importlib.import_module(f"jobs.{name}")
            with pytest.raises(UserError) as raised:
                job.run(cli.options_for(job, words))
            assert re.search(message.format(**made), str(raised.value)), raised.value
            assert "\n" not in str(raised.value)
            assert sorted(Path(made["runs"]).rglob("*")) == before
