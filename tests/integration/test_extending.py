"""What a new decoder, search model or kind of request takes: one file, one line, and
every command knows it.

Each is put into a copy of the project and prepared or trained, evaluated and compared
there by the commands.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from models.build import build_model
from models.retrieval.data import Catalogue
from models.retrieval.parts import History
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import read_table
from models.training.fit import FitConfig
from tests.fixtures import search_tables, training_tables
from tests.fixtures.trainings import build_training

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    """Code of `docs/add_a_decoder.md`."""
    return re.findall(
        rf"```{language}\n(.*?)```",
        (ROOT / "docs/add_a_decoder.md").read_text(),
        flags=re.DOTALL,
    )


DECODER, LINE, CHECK = blocks("python")
(DECODER_YAML,) = blocks("yaml")

RANKER = '''
"""The smallest search model: how near the document is to the query, scaled and moved per label."""


from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.search.catalogue import SearchCatalogue
from models.search.data import SearchBatch
from models.search.inputs import TextProjection
from models.search.model import SearchModel
from models.search.ranker import RankerConfig


@dataclass
class NearestConfig(RankerConfig):
    """It reads no history, so `max_history` only shapes the batches."""

    text_width: int = 8
    """Width that text embeddings are reduced to."""


class Nearest(SearchModel):
    name = "nearest"
    config_class = NearestConfig
    example_unit = "user"

    def __init__(self, config: NearestConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(config, catalogue)
        self.labels, self.masks = catalogue.labels, [None] * len(catalogue.labels)
        self.text = TextProjection(catalogue, config.text_width)
        self.scale, self.shift = (nn.Parameter(torch.ones(len(self.labels))) for _ in range(2))

    def score(self, batch: SearchBatch) -> Tensor:
        query_row = batch.request_query_text[batch.candidate_request]
        query = self.text.project_query(batch.query_text, query_row)
        document = self.text.project_pair(batch.candidate, batch.pair_text, batch.candidate_pair_text)
        return (query * document).sum(1, keepdim=True) * self.scale + self.shift

    def forward(self, batch: SearchBatch) -> dict[str, Tensor]:
        return {"loss": functional.binary_cross_entropy_with_logits(self.score(batch), batch.labels.float())}
'''

KIND = '''
"""The smallest kind: a behaviour asks for itself where its item is not the last of its history."""


import numpy as np
import polars as pl

from pipelines.data.audit.base import REQUEST
from pipelines.data.audit.sequences import behaviour_rows, check_history, check_lengths, check_splits, request_rows
from pipelines.data.retrieval.kind import Retrieval
from pipelines.data.retrieval.sequences import RetrievalBuilder, RetrievalStep
from pipelines.data.sequences.builder import make_sequences


class ChangesBuilder(RetrievalBuilder):
    def form_requests(self, part, behaviours, count):
        requests = super().form_requests(part, behaviours, count)
        user, item = part.user[requests.row], part.item[requests.row]
        is_change = np.ones(len(user), dtype=bool)
        is_change[1:] = (user[1:] != user[:-1]) | (item[1:] != item[:-1])
        return requests.select(is_change)


class ChangesStep(RetrievalStep):
    builder_class = ChangesBuilder

    def describe(self, builder, built):
        return super().describe(builder, built) | {"family": "retrieval"}


def check_changes(tables, rules, core_users):
    requests = request_rows(tables.sequences)
    check_splits(tables, requests, rules["splits"])
    behaviours = behaviour_rows(check_lengths(tables.sequences, rules["behaviours"]))
    check_history(tables, behaviours, requests, rules["history"])
    before = behaviours.select("row", "item_index", history_end=pl.col("index") + 1)
    rules["targets"].rows += requests.height
    asked = requests.with_columns(item_index=pl.col("candidates").list.first())
    again = asked.join(before, on=["row", "history_end", "item_index"], how="semi")
    rules["targets"].add_rows(again, REQUEST + ": asks for the item before it")
    return core_users


class Changes(Retrieval):
    name = "changes"
    simulated_name = "changes"
    skipped_rules = ()

    def make_sequences(self, run, events, items, split):
        return make_sequences(ChangesStep(run, events, items, split, as_of={}))

    def audit_sequences(self, tables, rules, core_users):
        return check_changes(tables, rules, core_users)
'''


def add_model(copy: Path, file: str, content: str, line: str) -> None:
    """Write one file, and one line of the registry."""
    (copy / file).write_text(content.lstrip())
    registry = copy / "models/registry.py"
    text = registry.read_text()
    table = "MODELS = {\n"
    assert table in text
    registry.write_text(text.replace(table, f"{table}    {line}\n"))


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
"""Commands one after the other, in one process: each takes seconds to start. A training
is by a worker of Ray or by that process."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project without its tests, and with a decoder, a search model and a kind of
    request more.
    """
    copy = tmp_path_factory.mktemp("extended") / "project"
    for name in ("models", "pipelines", "tuning", "jobs"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    add_model(copy, "models/retrieval/students/newest.py", DECODER, LINE.strip())
    (copy / "jobs/configs/newest.yaml").write_text(DECODER_YAML)
    line = '"nearest": "models.search.nearest:Nearest",'
    add_model(copy, "models/search/nearest.py", RANKER, line)
    (copy / "pipelines/data/changes.py").write_text(KIND.lstrip())
    table = copy / "pipelines/data/kinds.py"
    text, row = table.read_text(), "for kind in (Retrieval(), Search(), Actions())"
    assert row in text
    text = text.replace(
        row, "for kind in (Retrieval(), Search(), Actions(), Changes())"
    )
    imported = "from pipelines.data.kind import Kind\n"
    table.write_text(
        text.replace(
            imported, f"{imported}from pipelines.data.changes import Changes\n"
        )
    )
    return copy


@pytest.fixture(scope="module")
def said(copy: Path, in_ray: dict[str, str], new_store: Callable[[Path], str]) -> str:
    """What the commands of the copy print, on the shared Ray, whose workers import what
    the driver does.
    """
    home, store = copy.parent, ["--tracking_uri", new_store(copy.parent / "runs")]
    tables, sids = training_tables.write_tables(home / "small")
    tiger = {
        "name": "tiger",
        "d_model": 16,
        "d_ff": 16,
        "num_heads": 1,
        "d_kv": 8,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
    }
    teacher = build_training(tiger, FitConfig(batch_size=8), Inputs(tables, sids))
    checkpoint.save(home / "tiger", teacher.model, teacher.checkpoint(epoch=1))
    small, runs = (
        ["--tables", tables, "--sids", sids],
        ["--storage", str(home / "runs")],
    )
    decoder = [
        "--config",
        str(copy / "jobs/configs/newest.yaml"),
        "--model.teacher",
        str(home / "tiger"),
    ]
    searched, text = search_tables.write_search(home / "searches", users=20, requests=6)
    search = ["--tables", searched, "--text", text]
    fit = ["--fit.batch_size", "8", "--fit.max_epochs", "1", "--fit.metric", "gauc"]
    raw, shop = str(home / "raw"), str(home / "shop")
    simulate = [
        "--kind",
        "changes",
        "--output",
        raw,
        "--users",
        "60",
        "--items",
        "30",
        "--events",
        "900",
    ]
    source = [
        "--source",
        str(ROOT / "jobs/configs/sources/simulated.yaml"),
        "--kind",
        "changes",
    ]
    sasrec = [
        "--model.name",
        "sasrec",
        "--model.dim",
        "16",
        "--model.num_layers",
        "1",
        "--fit.max_epochs",
        "1",
    ]
    commands = [
        ["train by Ray", *decoder, *small, *runs, "--name", "newest"],
        [
            "evaluate",
            "--checkpoint",
            f"{home}/runs/newest",
            *small,
            "--scores",
            "codebook",
        ],
        ["compare", "--experiment", "retrieval/small", *store],
        ["train", "--model.name", "nearest", *search, *fit, *runs, "--name", "nearest"],
        ["evaluate", "--checkpoint", f"{home}/runs/nearest", *search],
        ["compare", "--experiment", "search/search-test", *store],
        ["simulate", *simulate],
        ["prepare", *source, "--input", raw, "--output", shop],
        ["audit", "--tables", shop],
        ["train", *sasrec, "--tables", shop, *runs, "--name", "sasrec"],
        ["evaluate", "--checkpoint", f"{home}/runs/sasrec", "--tables", shop],
        ["compare", "--experiment", "retrieval/shop", *store],
    ]
    made = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
        env={**in_ray, "PYTHONPATH": str(copy)},
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


@pytest.mark.parametrize(
    "order",
    [
        (
            "Trained newest",
            "newest on test",
            "$ --experiment retrieval/small",
            "val/ndcg@10",
        ),
        (
            "Trained nearest",
            "nearest on test",
            "$ --experiment search/search-test",
            "val/gauc",
        ),
        (
            "No violations",
            "Trained sasrec",
            "sasrec on test",
            "$ --experiment retrieval/shop",
            "val/ndcg@10",
        ),
    ],
    ids=["a decoder", "a search model", "a kind of request"],
)
def test_it_is_one_file_and_a_line(said: str, order: tuple[str, ...]) -> None:
    at = 0
    for text in order:
        at = said.index(text, at)
    model = order[-4].split()[-1]
    assert model in said[at:].partition("\n$ ")[0]


def test_a_kind_of_request_asks_what_its_file_says(said: str, copy: Path) -> None:
    asked, repeats = 0, 0
    for user in read_table(f"{copy.parent}/shop/sequences", "sequences").to_pylist():
        asked += len(user["requests"])
        repeats += sum(a == b for a, b in pairwise(user["item_index"]))
        last = [
            user["item_index"][r["history_end"] - 1]
            for r in user["requests"]
            if r["history_end"]
        ]
        assert all(
            r["candidates"] != [item]
            for r, item in zip(user["requests"][-len(last) :], last, strict=True)
        )
    assert repeats
    assert asked < 900


def test_its_two_ways_agree(tmp_path: Path) -> None:
    """The check that the page proposes."""
    tables, sids = training_tables.write_tables(tmp_path / "small")
    catalogue = Catalogue.load(tables, sids)
    tiger = {
        "name": "tiger",
        "d_model": 16,
        "d_ff": 16,
        "num_heads": 1,
        "d_kv": 8,
        "num_encoder_layers": 1,
    }
    backbone: Any = build_model(tiger, catalogue).eval().backbone
    made: dict[str, Any] = {"__name__": "newest"}
    sys.modules["newest"] = types.ModuleType("newest")  # where dataclasses look
    try:
        exec(DECODER, made)
        decoder = made["NewestDecoder"](backbone).eval()
    finally:
        del sys.modules["newest"]
    codes = backbone.tokens.codes(torch.arange(catalogue.num_items))
    history = History(torch.randn(len(codes), 3, 16), torch.full((len(codes),), 3))
    with torch.no_grad():
        exec(
            CHECK,
            {"torch": torch, "decoder": decoder, "history": history, "codes": codes},
        )
