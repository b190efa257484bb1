"""What a new decoder, search model or kind of request takes: one file, one row, and every command knows it.

Each is put into a copy of the project and prepared or trained, evaluated and compared there by the commands.
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
import search_tables
import torch
import training_tables

from models import checkpoint, registry
from models.fit import FitConfig
from models.inputs import Inputs
from models.retrieval.data import Catalogue
from models.retrieval.parts import History
from models.setup import set_up
from models.tables import read_table

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    """Code of `docs/add_a_decoder.md`."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs/add_a_decoder.md").read_text(), flags=re.DOTALL)


DECODER, ROW, CHECK = blocks("python")
(DECODER_YAML,) = blocks("yaml")

RANKER = '''
"""The smallest search model: how near the document is to the query, scaled and moved per label."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.search.data import SearchCatalogue
from models.search.inputs import Text
from models.search.ranker import RankerConfig


@dataclass
class NearestConfig(RankerConfig):
    """It reads no history, so `max_history` only shapes the batches."""

    text_width: int = 8
    """Width that text embeddings are reduced to."""


class Nearest(nn.Module):
    def __init__(self, config: NearestConfig, catalogue: SearchCatalogue) -> None:
        super().__init__()
        self.config, self.labels = config, catalogue.labels
        self.text = Text(catalogue, config.text_width)
        self.scale, self.shift = (nn.Parameter(torch.ones(len(self.labels))) for _ in range(2))

    def score(self, batch: dict[str, Tensor]) -> Tensor:
        self.text.take_pairs(batch)
        query = batch["request_query"][batch["candidate_request"]]
        nearness = (self.text.query(query) * self.text.pair(batch["candidate"], query)).sum(1, keepdim=True)
        return nearness * self.scale + self.shift

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": functional.binary_cross_entropy_with_logits(self.score(batch), batch["labels"].float())}
'''

KIND = '''
"""The smallest kind: a behaviour asks for itself where its item is not the last of its history."""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from models.tables import commit, part_uris, write_part
from pipelines.data.audit.base import REQUEST
from pipelines.data.audit.sequences import behaviour_rows, check_history, check_lengths, check_splits, request_rows
from pipelines.data.retrieval.kind import Retrieval
from pipelines.data.retrieval.sequences import Rules, build_sequences
from pipelines.data.run import write_parts
from pipelines.data.schemas import sequences_schema
from pipelines.data.splits import NAMES
from pipelines.data.survey import read_coded


def changes(users):
    """`users` with the requests that ask for another item than the last of their history."""
    rows = users.to_pylist()
    for row in rows:
        before = [None, *row["item_index"]]
        row["requests"] = [asked for asked in row["requests"] if before[asked["history_end"]] != asked["candidates"][0]]
    return pa.Table.from_pylist(rows, schema=users.schema)


def write_one(uri, catalogue, rules, source):
    names = [name for name in rules.schema.names if name not in ("request_id", "position")]
    table, count = build_sequences(read_coded(source, names), catalogue, rules)
    if not table.num_rows:
        return None, count, None
    users = changes(table)
    splits = [asked["split"] for requests in users["requests"].to_pylist() for asked in requests]
    count.update({f"asked_{name}": splits.count(name) for name in NAMES})
    return write_part(uri, users), count, None


def sequences(run, events, items, split):
    config = run.config
    settings = {"kind": "changes", "split": config.split.settings(), "core": config.core, "ties": config.ties}
    inputs = {"events": events.hash, "items": items.hash}
    if finished := run.finished("sequences", settings, inputs):
        return finished
    rules = Rules(
        run.source.schema, split, config.core, run.before_ms(split), config.max_events, config.ties == "log_order", None
    )
    uri = run.table("sequences")
    with run.writing("sequences"):
        calls = [(source,) for source in part_uris(run.table("events"), events)]
        shared = (uri, run.catalogue(), rules)
        parts, count, _ = write_parts(run.engine, write_one, calls, shared, run.progress("sequences"))
        asked = {name: count[f"asked_{name}"] for name in NAMES}
        without = {name: count[f"without_history_{name}"] for name in NAMES}
        info = run.sequences_info(events, items, split, count)
        info |= {"family": "retrieval", "requests": asked, "requests_without_history": without}
        return commit(
            uri, "sequences", sequences_schema(run.source.schema), parts, config=settings, inputs=inputs, info=info
        )


def check_changes(tables, rules, core_users):
    requests = request_rows(tables.sequences)
    check_splits(tables, requests, rules["splits"])
    behaviours = behaviour_rows(check_lengths(tables.sequences, rules["behaviours"]))
    check_history(tables, behaviours, requests, rules["history"], tables.order_of_log)
    before = behaviours.select("row", "item_index", history_end=pl.col("place") + 1)
    rules["targets"].rows += requests.height
    asked = requests.with_columns(item_index=pl.col("candidates").list.first())
    again = asked.join(before, on=["row", "history_end", "item_index"], how="semi")
    rules["targets"].broken_rows(again, REQUEST + ": asks for the item before it")
    return core_users


class Changes(Retrieval):
    name = "changes"
    simulated = "changes"
    without = ()

    def sequences(self, run, events, items, split):
        return sequences(run, events, items, split)

    def audit(self, tables, rules, core_users):
        return check_changes(tables, rules, core_users)
'''


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project without its tests."""
    for name in ("models", "pipelines", "tuning", "jobs"):
        place = tmp_path / "project" / name
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(ROOT / name, place)
    return tmp_path / "project"


def add(copy: Path, file: str, content: str, imported: str, row: str) -> None:
    """One file, and one row of the registry with its import."""
    (copy / file).write_text(content.lstrip())
    registry = copy / "models/registry.py"
    text = registry.read_text()
    table = "MODELS: dict[str, Entry] = {\n"
    assert table in text
    registry.write_text(text.replace(table, f"{imported}\n\n{table}    {row}\n"))


COMMANDS = """
import importlib, json, sys
from functools import partial
from jobs import cli

for job, *words in json.loads(sys.argv[1]):
    module = importlib.import_module(f"jobs.{job}")
    if job == "train" and sys.argv[2] == "here":
        module.run_training = partial(module.run_training, heard=lambda about: None)
    module.run(cli.options_for(module, words))
"""
"""Commands one after the other, in one process: each takes seconds to start. A training is by a worker of Ray or, with
`here`, by that process."""


@pytest.fixture
def run(copy: Path, in_ray: dict[str, str], new_store: Callable[[Path], str], tmp_path: Path) -> Callable[..., str]:
    """Runs commands of the copy, on the shared Ray, whose workers import what the driver does."""
    new_store(tmp_path / "runs")

    def run(*commands: list[str], trains: str = "here") -> str:
        made = subprocess.run(
            [sys.executable, "-c", COMMANDS, json.dumps(commands), trains], cwd=copy, capture_output=True, text=True,
            check=False, env={**in_ray, "PYTHONPATH": str(copy)},
        )  # fmt: skip
        assert made.returncode == 0, made.stdout + made.stderr
        return made.stdout

    return run


def test_a_decoder_is_one_file_and_a_row(copy: Path, run: Callable[..., str], tmp_path: Path) -> None:
    tables, sids = training_tables.write_tables(tmp_path / "small")
    tiger = {"name": "tiger", "d_model": 16, "d_ff": 16, "num_heads": 1, "d_kv": 8, "num_encoder_layers": 1,
             "num_decoder_layers": 1}  # fmt: skip
    teacher = set_up(tiger, FitConfig(batch_size=8), Inputs(tables, sids))
    checkpoint.save(tmp_path / "tiger", teacher.model, teacher.checkpoint(epoch=1))
    add(
        copy, "models/retrieval/decoders/newest.py", DECODER,
        "from models.retrieval.decoders.newest import NewestConfig, NewestDecoder",
        ROW.strip(),
    )  # fmt: skip
    where = ["--tables", tables, "--sids", sids]
    (copy / "jobs/configs/newest.yaml").write_text(DECODER_YAML)
    train = ["--config", str(copy / "jobs/configs/newest.yaml"), "--model.teacher", str(tmp_path / "tiger")]
    fit = ["--storage", str(tmp_path / "runs"), "--name", "newest"]
    store = ["--experiment", "retrieval/small", "--tracking_uri", f"sqlite:///{tmp_path}/runs/mlflow.db"]
    said = run(
        ["train", *train, *where, *fit],
        ["evaluate", "--checkpoint", str(tmp_path / "runs/newest"), *where, "--scores", "codebook"],
        ["compare", *store],
        trains="by Ray",
    )
    trained, evaluated, compared = (said.index(text) for text in ("Trained newest", "newest on test", "val/ndcg@10"))
    assert trained < evaluated < compared
    assert "newest" in said[compared:]


def test_its_two_ways_agree(tmp_path: Path) -> None:
    """The check that the page proposes."""
    tables, sids = training_tables.write_tables(tmp_path / "small")
    catalogue = Catalogue.load(tables, sids)
    tiger = {"name": "tiger", "d_model": 16, "d_ff": 16, "num_heads": 1, "d_kv": 8, "num_encoder_layers": 1}
    backbone: Any = registry.build(registry.config_from_dict(tiger), catalogue).eval().backbone
    made: dict[str, Any] = {"__name__": "newest"}
    sys.modules["newest"] = types.ModuleType("newest")  # where dataclasses look
    try:
        exec(DECODER, made)
        decoder = made["NewestDecoder"](made["NewestConfig"](), backbone).eval()
    finally:
        del sys.modules["newest"]
    codes = backbone.tokens.codes(torch.arange(catalogue.num_items))
    history = History(torch.randn(len(codes), 3, 16), torch.full((len(codes),), 3))
    with torch.no_grad():
        exec(CHECK, {"torch": torch, "decoder": decoder, "history": history, "codes": codes})


def test_a_search_model_is_one_file_and_a_row(copy: Path, run: Callable[..., str], tmp_path: Path) -> None:
    tables, text = search_tables.write_search(tmp_path / "shop", users=20, requests=6)
    add(
        copy, "models/search/nearest.py", RANKER, "from models.search.nearest import Nearest, NearestConfig",
        '"nearest": Entry(NearestConfig, Nearest, SEARCH, unit="user"),',
    )  # fmt: skip
    where = ["--tables", tables, "--text", text]
    fit = ["--fit.batch_size", "8", "--fit.max_epochs", "1", "--fit.metric", "gauc"]
    store = ["--experiment", "search/search-test", "--tracking_uri", f"sqlite:///{tmp_path}/runs/mlflow.db"]
    said = run(
        ["train", "--model.name", "nearest", *where, *fit, "--storage", str(tmp_path / "runs"), "--name", "nearest"],
        ["evaluate", "--checkpoint", str(tmp_path / "runs/nearest"), *where],
        ["compare", *store],
    )
    trained, evaluated, compared = (said.index(text) for text in ("Trained nearest", "nearest on test", "val/gauc"))
    assert trained < evaluated < compared
    assert "nearest" in said[compared:]


def test_a_kind_of_request_is_one_file_and_a_row(copy: Path, run: Callable[..., str], tmp_path: Path) -> None:
    (copy / "pipelines/data/changes.py").write_text(KIND.lstrip())
    table = copy / "pipelines/data/kinds.py"
    text = table.read_text()
    row = "for kind in (Retrieval(), Search(), Actions())"
    assert row in text
    text = text.replace(row, "for kind in (Retrieval(), Search(), Actions(), Changes())")
    imported = "from pipelines.data.kind import Kind\n"
    table.write_text(text.replace(imported, f"{imported}from pipelines.data.changes import Changes\n"))
    raw, tables, runs = str(tmp_path / "raw"), str(tmp_path / "shop"), str(tmp_path / "runs")
    simulate = ["--kind", "changes", "--output", raw, "--users", "60", "--items", "30", "--events", "900"]
    model = ["--model.name", "sasrec", "--model.dim", "16", "--model.num_layers", "1", "--fit.max_epochs", "1"]
    store = ["--experiment", "retrieval/shop", "--tracking_uri", f"sqlite:///{runs}/mlflow.db"]
    said = run(
        ["simulate", *simulate],
        ["prepare", "--source", str(ROOT / "jobs/configs/sources/simulated.yaml"), "--kind", "changes", "--input", raw,
         "--output", tables],
        ["audit", "--tables", tables],
        ["train", *model, "--tables", tables, "--storage", runs, "--name", "sasrec"],
        ["evaluate", "--checkpoint", f"{runs}/sasrec", "--tables", tables],
        ["compare", *store],
    )  # fmt: skip
    order = ("No violations", "Trained sasrec", "sasrec on test", "val/ndcg@10")
    assert [said.index(text) for text in order] == sorted(said.index(text) for text in order)
    asked, repeats = 0, 0
    for user in read_table(f"{tables}/sequences", "sequences").to_pylist():
        asked += len(user["requests"])
        repeats += sum(a == b for a, b in pairwise(user["item_index"]))
        last = [user["item_index"][r["history_end"] - 1] for r in user["requests"] if r["history_end"]]
        assert all(r["candidates"] != [item] for r, item in zip(user["requests"][-len(last) :], last, strict=True))
    assert repeats
    assert asked < 900
