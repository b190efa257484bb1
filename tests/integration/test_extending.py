"""Test that a decoder, a tokenizer and a metric are each one file of the user's own.

A kind of request is added to a copy of the project, with a line for its model. The
copy's commands prepare or train, evaluate and compare all of them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import UserError
from core.schemas import Inputs
from models import own_code, registry
from models.loaded_model import LoadedModel, build_model
from models.retrieval.data import Catalogue
from models.retrieval.retriever import History
from models.training import checkpoint
from models.training.fit_config import FitConfig
from tests.fixtures import training_tables
from tests.fixtures.commands import read_table
from tests.fixtures.trainings import build_training

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def read_code_blocks(language: str) -> list[str]:
    """Return the code blocks in a language of `docs/extending.md`."""
    page = (ROOT / "docs/extending.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


_, DECODER, CHECK = read_code_blocks("python")
(DECODER_YAML,) = read_code_blocks("yaml")

METRIC = """
from models.metrics.metric import RequestMetric


class HitRate(RequestMetric):
    name = "hit_rate"

    def values(self, ranking, k):
        return (ranking.rank < k).double()
"""

TOKENIZER = """
from models.retrieval.tokenizers.rqkmeans import Rqkmeans


class Mine(Rqkmeans):
    pass
"""

KIND = '''
"""The smallest kind: a behaviour asks for itself where its item is not the last of its history."""


import polars as pl

from pipelines.prepare.kinds.retrieval.sequences import RetrievalBuilder


class Changes(RetrievalBuilder):
    name = "changes"

    def form_requests(self, events, behaviours, count):
        requests = super().form_requests(events, behaviours, count)
        item = pl.col("candidates").list.first()
        is_change = (item != item.shift(1).over("user")).fill_null(True)
        return requests.filter(is_change)
'''

KIND_AUDIT = '''
"""Audit rules of the smallest kind."""

import polars as pl

from pipelines.prepare.audit.base import REQUEST
from pipelines.prepare.audit.sequences import behaviour_rows, check_history, check_lengths, check_splits, request_rows


def check_changes(tables, rules):
    requests = request_rows(tables.sequences)
    check_splits(tables, requests, rules["splits"])
    behaviours = behaviour_rows(check_lengths(tables.sequences, rules["behaviours"]))
    check_history(tables, behaviours, requests, rules["history"])
    before = behaviours.select("row", "item_index", history_end=pl.col("index") + 1)
    rules["targets"].rows += requests.height
    asked = requests.with_columns(item_index=pl.col("candidates").list.first())
    again = asked.join(before, on=["row", "history_end", "item_index"], how="semi")
    rules["targets"].add_rows(again, REQUEST + ": asks for the item before it")
    return tables.core_events.select("user_id").unique()
'''

KIND_MODEL = '''
"""SASRec on the requests of the smallest kind."""

from dataclasses import replace

from models.retrieval.requests import RETRIEVAL
from models.retrieval.sasrec import SASRec


class ChangesSASRec(SASRec):
    name = "changes_sasrec"
    kind = replace(RETRIEVAL, name="changes")
'''


def insert_after(file: Path, line: str, addition: str) -> None:
    """Insert text after a line of a file."""
    text = file.read_text()
    assert line in text
    file.write_text(text.replace(line, f"{line}{addition}"))


def add_kind(copy: Path) -> None:
    """Add a kind of request and a model of the kind to a copy of the project."""
    (copy / "pipelines/prepare/changes.py").write_text(KIND.lstrip())
    kinds = copy / "pipelines/prepare/kinds/registry.py"
    insert_after(kinds, "(RetrievalBuilder, SearchBuilder, ActionsBuilder", ", Changes")
    insert_after(
        kinds,
        "from __future__ import annotations\n\n",
        "from pipelines.prepare.changes import Changes\n",
    )
    (copy / "pipelines/prepare/audit/changes.py").write_text(KIND_AUDIT.lstrip())
    rules = copy / "pipelines/prepare/audit/rules.py"
    insert_after(rules, "\nKINDS = {\n", '    "changes": check_changes,\n')
    insert_after(
        rules,
        "from pipelines.prepare.audit.base import Rule, Tables\n",
        "from pipelines.prepare.audit.changes import check_changes\n",
    )
    (copy / "models/changes.py").write_text(KIND_MODEL.lstrip())
    registry_line = '    "changes_sasrec": "models.changes:ChangesSASRec",\n'
    insert_after(copy / "models/registry.py", "MODELS = {\n", registry_line)


COMMANDS = """
import importlib, json, sys
from functools import partial
from jobs import cli
from pipelines.training import run as training

by_ray = training.run_training
in_process = training.TrialContext(on_checkpoint=lambda about: None)
here = partial(training.run_training, trial=in_process)
for job, *words in json.loads(sys.argv[1]):
    print("$", *words, flush=True)
    training.run_training = by_ray if job == "train by Ray" else here
    module = importlib.import_module(f"jobs.{job.split()[0]}")
    module.run(cli.config_from_words(module, words))
"""
"""A program that runs commands one after the other in one process, as starting each
would take seconds. `train by Ray` trains in a Ray worker, `train` in the process."""


TINY_TIGER = {
    "name": "tiger",
    "d_model": 16,
    "d_ff": 16,
    "num_heads": 1,
    "d_kv": 8,
    "num_encoder_layers": 1,
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Copy the project, and add a decoder and a kind of request."""
    copy = tmp_path_factory.mktemp("extended") / "project"
    for name in ("core", "models", "pipelines", "tuning", "jobs"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    files = {
        "newest.py": DECODER,
        "newest.yaml": DECODER_YAML,
        "hit_rate.py": METRIC,
        "mine.py": TOKENIZER,
    }
    for name, content in files.items():
        (copy / name).write_text(content.lstrip())
    add_kind(copy)
    return copy


def build_decoder_commands(copy: Path) -> list[list[str]]:
    """Return commands that train, evaluate and compare the new decoder."""
    home = copy.parent
    tables, sids = training_tables.write_tables(home / "small", titles=True)
    teacher = build_training(
        {**TINY_TIGER, "num_decoder_layers": 1},
        FitConfig(batch_size=8),
        Inputs(tables, sids),
    )
    checkpoint.save(home / "tiger", teacher.model, teacher.checkpoint(epoch=1))
    teacher_option = ["--model.teacher", str(home / "tiger")]
    config = ["--config", "newest.yaml", "--fit.metric", "hit_rate.py:HitRate"]
    metric = ["--metric", "hit_rate.py:HitRate"]
    inputs = ["--tables", tables, "--sids", sids]
    storage = ["--storage", f"{home}/runs", "--name", "newest"]
    storage += ["--ray.num_workers", "2"]
    trained = ["--checkpoint", f"{home}/runs/newest"]
    codes = ["--tokenizer", "mine.py:Mine", "--tokenizer.codebook_size", "8"]
    codes += ["--encoder", "tfidf", "--pca", "0", "--output", f"{home}/mine"]
    return [
        ["tokenize", "--tables", tables, *codes],
        ["train by Ray", *config, *teacher_option, *inputs, *storage],
        ["evaluate", *trained, *inputs, "--scores", "codebook", *metric],
        ["compare", "--experiment", "retrieval/small"],
    ]


def build_kind_commands(copy: Path) -> list[list[str]]:
    """Return commands that prepare a log of the new kind and train its model."""
    home = copy.parent
    raw, tables = f"{home}/raw", f"{home}/shop"
    sizes = ["--users", "60", "--items", "30", "--events", "900"]
    source = ["--source", str(ROOT / "jobs/configs/sources/simulated.yaml")]
    model = ["--model.name", "changes_sasrec", "--model.dim", "16"]
    fit = ["--fit.max_epochs", "1"]
    inputs = ["--tables", tables]
    storage = ["--storage", f"{home}/runs", "--name", "changes_sasrec"]
    return [
        ["simulate", "--kind", "changes", "--output", raw, *sizes],
        ["prepare", *source, "--kind", "changes", "--input", raw, "--output", tables],
        ["audit", *inputs],
        ["train", *model, *fit, *inputs, *storage],
        ["evaluate", "--checkpoint", f"{home}/runs/changes_sasrec", *inputs],
        ["compare", "--experiment", "changes/shop"],
    ]


@pytest.fixture(scope="module")
def output(copy, in_ray, new_store) -> str:
    """Run the commands of the copy on the shared Ray; return their output.

    Ray's workers import the modules that the driver imports.
    """
    store = ["--tracking_uri", new_store(copy.parent / "runs")]
    commands = [
        *build_decoder_commands(copy),
        *build_kind_commands(copy),
    ]
    for command in commands:
        if command[0] == "compare":
            command += store
    process = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
        env={**in_ray, "PYTHONPATH": str(copy)},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.parametrize(
    "expected",
    [
        (
            "Trained newest.py@",
            "Newest on test",
            "hit_rate",
            "$ --experiment retrieval/small",
            "newest.py@",
        ),
        (
            "No violations",
            "Trained changes_sasrec",
            "changes_sasrec on test",
            "$ --experiment changes/shop",
            "val/ndcg@10",
        ),
    ],
    ids=["a decoder", "a kind of request"],
)
def test_every_command_knows_an_extension(output, expected):
    """The texts appear in their order."""
    start = 0
    for text in expected:
        assert text in output[start:], output
        start = output.index(text, start)


def test_the_new_kind_forms_the_requests_that_its_file_defines(output, copy):
    """An item is no target directly after itself."""
    num_requests = num_repeats = 0
    for user in read_table(f"{copy.parent}/shop/sequences").to_pylist():
        items, requests = user["item_index"], user["requests"]
        num_requests += len(requests)
        num_repeats += sum(a == b for a, b in pairwise(items))
        for request in requests:
            history_end = request["history_end"]
            if history_end:
                assert request["candidates"] != [items[history_end - 1]]
    assert num_repeats
    assert num_requests < 900


def test_the_pages_check_of_a_decoder_passes(tmp_path):
    tables, sids = training_tables.write_tables(tmp_path / "small")
    catalogue = Catalogue.load(Inputs(tables, sids))
    backbone: Any = build_model(TINY_TIGER, catalogue).eval().backbone
    (tmp_path / "own.py").write_text(f"{DECODER}\n")
    name = own_code.run_file(f"{tmp_path}/own.py:NewestDecoder")
    decoder = own_code.find_class(name)(backbone)
    codes = backbone.tokens.codes(torch.arange(catalogue.num_items))
    history = History(torch.randn(len(codes), 3, 16), torch.full((len(codes),), 3))
    variables = {"decoder": decoder, "history": history, "codes": codes}

    with torch.no_grad():
        exec(CHECK, {"torch": torch, **variables})


def test_code_of_a_checkpoint_runs_if_it_is_named_or_trusted(output, copy):
    home = copy.parent
    uri = str(home / "runs/newest/best")
    inputs = Inputs(f"{home}/small/tables", f"{home}/small/sids")
    saved = checkpoint.read(uri)
    assert len(saved.code) == 1
    with pytest.raises(UserError, match="code of its own: "):
        own_code.accept_code(saved.code, uri, trust=False)
    with pytest.raises(UserError, match="in no file that may run"):
        registry.find(saved.name)
    with pytest.raises(UserError, match="code of its own"):
        LoadedModel.load(uri, inputs)
    assert LoadedModel.load(uri, inputs, trust_code=True).model


def test_a_checkpoint_names_no_file_to_run(tmp_path):
    file = tmp_path / "evil.py"
    file.write_text("raise SystemExit")
    with pytest.raises(UserError, match="in no file that may run"):
        build_model({"name": f"{file}:Evil"}, None)
