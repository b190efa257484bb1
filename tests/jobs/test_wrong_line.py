"""Test that wrong command lines and damaged inputs are refused before Ray starts.

The error is one line that names the mistake, and nothing is written.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core.errors import UserError
from core.schemas import Inputs
from jobs import cli
from models.training import checkpoint
from models.training.fit_config import FitConfig
from tests.fixtures.search_tables import write_search
from tests.fixtures.trainings import build_training

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def paths(small, tmp_path_factory) -> dict[str, str]:
    """Write tables of both kinds, semantic IDs, text and a TIGER's run.

    Return their folders by the names that the command lines use.
    """
    home = tmp_path_factory.mktemp("wrong")
    tiger = {"name": "tiger", "d_model": 8, "d_ff": 8, "num_heads": 1, "d_kv": 4}
    setup = build_training(tiger, FitConfig(batch_size=8), Inputs(*small))
    checkpoint.save(home / "runs/teacher/best", setup.model, setup.checkpoint(epoch=1))
    (home / "runs/teacher/run.json").write_text("{}")
    (home / "log.csv").write_text("user,item,ms\na,b,1600000000000\n")
    (home / "source.yaml").write_text(
        "{files: log.csv, user: user, item: item, time: {column: ms, unit: ms}}"
    )
    search, text = write_search(home)
    return {
        "home": str(home),
        "tables": small[0],
        "sids": small[1],
        "search": search,
        "text": text,
        "runs": str(home / "runs"),
    }


TRAIN = "train --storage {runs} --name new --config jobs/configs/retrieval"
SWEEP = "sweep --storage {runs} --name new --grid tuning/grids"
TIGERS = f"{SWEEP}/tiger.yaml --tables {{tables}} --sids {{sids}}"
PREPARE = "prepare --source {home}/source.yaml --input {home} --output {runs}/out"
EVALUATE = "evaluate --checkpoint {runs}/teacher/best"
SEARCH = "train --storage {runs} --name new --config jobs/configs/search/base.yaml"
SEARCH += " --tables {search} --text {text}"
SASREC = f"{TRAIN}/sasrec.yaml --tables {{tables}}"
TOKENIZE = "tokenize --tables {tables} --output {runs}/out"
WRONG_LINES = [
    (f"{SASREC} --fit.metric ndcg10", "the nearest is 'ndcg@10'"),
    (f"{SASREC} --fit.metric core/errors.py:UserError", "is not a metric"),
    (f"{SASREC} --fit.lrr 1", "'fit.lr'"),
    (f"{SASREC} --ray.use_gpu true --ray.num_workers 2", "ray.use_gpu is true"),
    (f"{SASREC} --model.name tiger", "'model.dim' of tiger"),
    (f"{SASREC} --model.name core/errors.py:UserError", "is not a model"),
    (f"{TRAIN}/sasrec.yaml --tables=", "tables is ''"),
    (f"{SASREC} --model tiger", "needs sids; give --sids"),
    ("train --tables {tables} --storage {runs} --name new", "missing: model"),
    (f"{TRAIN}/sasrec.yaml --tables {{search}}", "tables are of search"),
    (f"{TRAIN}/sasrec.yaml --tables {{runs}}/gone", "{runs}/gone/items"),
    (f"{TRAIN}/sid_mlp.yaml --tables {{tables}} --sids {{sids}}", "model.teacher"),
    (f"{SASREC} --ray.num_workers 3 --fit.batch_size 16", "does not divide by 3"),
    (f"{TIGERS} --fit.metric ndcg10", "'fit.metric' is set by"),
    (f"{TIGERS} --axes.ray.threads [1]", "'ray.threads' is set by the sweep"),
    (f"{SEARCH} --model.label_weights.likes 2", "'likes' in model.label_weights"),
    ("evaluate --checkpoint {runs}/gone --tables {tables}", "{runs}/gone"),
    (f"{EVALUATE} --tables {{tables}}", "needs sids; give --sids"),
    (f"{EVALUATE} --tables {{tables}} --sids {{sids}} --draft_beam 5", "draft_beam"),
    (f"{EVALUATE} --tables {{tables}} --metric ndcg@0", "FILE.py:CLASS"),
    (f"{EVALUATE} --tables {{tables}} --sids {{sids}} --text nowhere", "nowhere/items"),
    ("encode --tables {search} --output {runs}/out --encoder tfidff", "'tfidf'"),
    ("encode --tables {tables} --output {runs}/out", "read no texts"),
    (f"{TOKENIZE} --tokenizer rqvae --tokenizer.epoch 3", "'tokenizer.epochs'"),
    (f"{TOKENIZE} --tokenizer rqkmeans --embeddings x.npy", "needs id"),
    (f"{TOKENIZE} --tokenizer rqkmeans --tokenizer.codebook_size 999", "is 999"),
    (f"{PREPARE} --input /nowhere", "/nowhere"),
    (f"{PREPARE} --source /nowhere.yaml", "/nowhere.yaml"),
    ("train --tables T --storage S --name N --model.dim 4", "missing: model.name"),
]
"""Command lines that end with exit code 1, and a fragment of their one line."""


def test_a_wrong_line_ends_with_code_1_before_ray_starts(
    paths, monkeypatch, subtests, capsys
):
    monkeypatch.delattr("ray.init")
    monkeypatch.chdir(ROOT)
    files = sorted(Path(paths["runs"]).rglob("*"))
    for line, fragment in WRONG_LINES:
        with subtests.test(line=line):
            name, *words = line.format(**paths).split()
            job = importlib.import_module(f"jobs.{name}")
            with pytest.raises(UserError) as raised:
                job.run(cli.config_from_words(job, words))
            with pytest.raises(SystemExit) as ended:
                cli.exit_with_error(raised.value)
            assert ended.value.code == 1
            (error,) = capsys.readouterr().err.splitlines()
            assert fragment.format(**paths) in error
            assert sorted(Path(paths["runs"]).rglob("*")) == files


def truncate(file: Path) -> None:
    """Remove the last 20 bytes of a file."""
    file.write_bytes(file.read_bytes()[:-20])


def replace_weights(best: Path) -> None:
    """Replace the weights of a checkpoint by a tensor that no model has."""
    save_file({"x": torch.zeros(2)}, best / "model.safetensors")


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda home: (home / "tables/items/manifest.json").unlink(),
        "is not a table",
    ),
    (
        lambda home: truncate(next((home / "tables/sequences").glob("*.parquet"))),
        "its manifest says",
    ),
    (lambda home: truncate(home / "sids/trie/manifest.json"), "is damaged"),
    (
        lambda home: replace_weights(home / "runs/teacher/best"),
        "model.safetensors|weights",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_input_is_named_before_ray_starts(
    paths, tmp_path, monkeypatch, damage, message
):
    monkeypatch.delattr("ray.init")
    monkeypatch.setenv("TRIELINE_CACHE", str(tmp_path / "cache"))
    copies = {name: tmp_path / name for name in ("tables", "sids", "runs")}
    for name, copy in copies.items():
        shutil.copytree(paths[name], copy)
    damage(tmp_path)
    line = f"{EVALUATE} --tables {{tables}} --sids {{sids}}"
    _, *words = line.format(**copies).split()
    evaluate = importlib.import_module("jobs.evaluate")

    with pytest.raises(UserError, match=message):
        evaluate.run(cli.config_from_words(evaluate, words))
