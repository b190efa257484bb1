"""The whole flow in minutes: a log, tables, audit, the models of a family, compared.

    python -m jobs.quickstart                     # next items: semantic IDs, SASRec, TIGER and its student SID-MLP
    python -m jobs.quickstart --family search     # searches: text embeddings, Base, HSTU, HLLM and QGS
    python -m jobs.quickstart --family actions    # a feed: interleaved, AttnLFA, AttnMVP; without actions

Without `--data` it simulates a small log (`results are labelled simulated`); `--data FOLDER` takes a real
one whose mapping file is `jobs/configs/sources/FOLDER_FAMILY.yaml` or `FOLDER.yaml` there, or the one that `--source`
names. Every step is one of the other commands and is printed as such before it runs, so each can be repeated on its
own.
"""

from __future__ import annotations

import importlib
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jobs import cli
from models import registry
from models.tables import UserError, read_manifest
from pipelines import tracking
from pipelines.data.sources import load_source

CONFIGS = Path(__file__).parent / "configs"

SEARCH_MODELS = {
    "base": ["search/base"], "hstu": ["qgs", "search/hstu", "search/small"],
    "hllm": ["qgs", "search/hllm", "search/small"], "qgs": ["qgs", "search/small"],
}  # fmt: skip
"""Models of the search flow and their configs, the base first."""

ACTIONS_MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "interleaved": ("interleaved", ()),
    "attn_lfa": ("attn_lfa", ()),
    "attn_mvp": ("attn_mvp", ()),
    "without_actions": ("attn_mvp_no_lfa", ("--model.action_weight", "0")),
}
"""Runs of the actions flow: model and options."""


@dataclass
class Config:
    """Options."""

    family: Literal["retrieval", "search", "actions"] = "retrieval"
    """Which models: `retrieval` finds the next item in a catalogue, `search` ranks what a search shows, `actions`
    predicts what a user will do with an item."""
    data: str | None = None
    """Folder of a real raw log; without it a log is simulated."""
    source: str | None = None
    """Mapping file of the real log; by default the one named after the folder."""
    output: str = "runs"
    """Folder for everything that is made: one folder below it per dataset."""
    encoder: str = "tfidf"
    """Encoder of the texts: tfidf, minilm (make encoder), or a transformers name or path."""
    epochs: int | None = None
    """Most epochs of each model, half as many for a student, which learns from its teacher in fewer; by default 20, of
    search 4, of actions 10. A real model wants more: see the walk-through in the README."""
    users: int = 1500
    """Users of the simulated log."""
    items: int = 400
    """Items of the simulated log."""
    events: int = 15000
    """Events or searches of the simulated log; impressions of a feed are twice as many."""
    seed: int = 42
    """Seed of the simulation and of the trainings."""

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}, the least is 1; give a positive number")


class Steps:
    """Runs commands in this process one after the other, each printed as the line to repeat it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.number = 0
        self.started = time.monotonic()

    def run(self, title: str, job: str, *argv: str) -> Any:
        self.number += 1
        elapsed = time.monotonic() - self.started
        print(f"\n[{self.number}/{self.count}] {title}   ({elapsed:.0f} s so far)", flush=True)
        print(f"$ python -m jobs.{job} {shlex.join(argv)}", flush=True)
        module = importlib.import_module(f"jobs.{job}")
        parse: Callable[..., Any] = getattr(module, "parse", partial(cli.parse, module.Config))
        return module.run(parse(job, list(argv)))


def published_sids(folder: Path) -> Path | None:
    """The file of published semantic IDs in a raw folder, if it has one."""
    found = sorted([*folder.glob("*index*.json*"), *folder.glob("published_sids.csv*")])
    return found[0] if found else None


@dataclass(frozen=True)
class Place:
    """Where a flow reads and writes."""

    dataset: str
    """Name of the dataset."""
    source: str
    """Mapping file of the log."""
    raw: Path
    """Folder of the log."""
    tables: str
    """Folder of the tables."""
    extra: str
    """Folder of what models need beside them: semantic IDs or text embeddings."""
    runs: str
    """Folder of the runs."""


def retrieval(config: Config, place: Place, steps: Steps) -> None:
    """Semantic IDs, popularity, SASRec, TIGER, and SID-MLP distilled from it."""
    texts = read_manifest(f"{place.tables}/items", "items").info["texts"]
    published = published_sids(place.raw)
    if texts:
        tokenizer = ["--tokenizer", "rqkmeans", "--encoder", config.encoder]
        tokenizer += [] if config.data else ["--rqkmeans.codebook_size", "32"]
    elif published:
        tokenizer = ["--tokenizer", "published", "--published", str(published)]
    else:
        raise UserError(f"{config.data} has neither item texts nor published semantic IDs; TIGER needs one of them")
    made = ["--tables", place.tables, *tokenizer, "--output", place.extra]
    steps.run("Items to semantic IDs and a trie", "tokenize", *made)
    most = config.epochs or 20
    measure(config, place, steps, "popularity", ["popularity"], None)
    measure(config, place, steps, "sasrec", ["sasrec"], most)
    measure(config, place, steps, "tiger", ["tiger_small"], most)
    teacher = ("--model.teacher", f"{place.runs}/tiger")
    measure(config, place, steps, "sid_mlp", ["sid_mlp_small"], -(-most // 2), *teacher)


def search(config: Config, place: Place, steps: Steps) -> None:
    """Text embeddings, then Base, HSTU, HLLM and QGS in one small size."""
    made = ["--tables", place.tables, "--encoder", config.encoder, "--output", place.extra]
    steps.run("Queries, documents and shown pairs to text embeddings", "encode", *made)
    for model, files in SEARCH_MODELS.items():
        measure(config, place, steps, model, files, config.epochs or 4)


def actions(config: Config, place: Place, steps: Steps) -> None:
    """The interleaved baseline, AttnLFA, AttnMVP, and AttnMVP that is shown no action and so knows the items alone."""
    small = ("--model.num_layers", "2", "--fit.batch_size", "16", "--fit.lr", "0.002", "--fit.patience", "0")
    for name, (model, options) in ACTIONS_MODELS.items():
        files = ["attn_mvp", f"actions/{model}"] if model != "attn_mvp" else ["attn_mvp"]
        measure(config, place, steps, model, files, config.epochs or 10, *small, *options, name=name)


def measure(
    config: Config,
    place: Place,
    steps: Steps,
    model: str,
    files: list[str],
    epochs: int | None,
    *options: str,
    name: str | None = None,
) -> None:
    """Trains a model, by at most `epochs` where it is trained by gradient, and evaluates it on test."""
    name = name or model
    extra = registry.find(model).extra
    where = ["--tables", place.tables, *([f"--{extra}", place.extra] if extra else [])]
    fit = ["--fit.max_epochs", str(epochs), "--fit.seed", str(config.seed)] if epochs else []
    configs = [word for file in files for word in ("--config", str(CONFIGS / f"{file}.yaml"))]
    train = [*configs, *where, "--storage", place.runs, "--name", name]
    title = f"Distil {name}" if "--model.teacher" in options else f"Train {name}"
    steps.run(title, "train", *train, *options, *fit)
    checkpoint = ["--checkpoint", f"{place.runs}/{name}"]
    steps.run(f"Evaluate {name} on test", "evaluate", *checkpoint, *where, "--split", "test")


@dataclass(frozen=True)
class Flow:
    """What one family does with tables, and how its log is simulated."""

    run: Callable[[Config, Place, Steps], None]
    """From audited tables to evaluated models."""
    steps: int
    """Commands that `run` runs."""
    simulated: str
    """Name of the simulated dataset and of its mapping file."""
    extra: str
    """Folder of what models need beside the tables, or nothing."""
    log: str
    """Kind of the simulated log."""
    events: int = 1
    """Events of it per event that is asked for."""


FLOWS = {
    "retrieval": Flow(retrieval, 9, "simulated", "sids", "retrieval"),
    "search": Flow(search, 9, "simulated_search", "text", "search"),
    "actions": Flow(actions, 8, "simulated_feed", "", "feed", events=2),
}


def locate(config: Config) -> Place:
    """Where everything is; UserError for a log that is not there or of another family."""
    flow = FLOWS[config.family]
    name = Path(config.data).resolve().name if config.data else flow.simulated
    named = [CONFIGS / "sources" / f"{stem}.yaml" for stem in (f"{name}_{config.family}", name)]
    source = Path(config.source) if config.source else next((file for file in named if file.is_file()), named[-1])
    if not source.is_file():
        raise UserError(f"there is no mapping file {source} for {config.data}; name one with --source")
    if config.data and not Path(config.data).is_dir():
        raise UserError(f"{config.data} is not a folder; --data takes the folder of a raw log")
    kind = load_source(str(source))[1].get("kind", "retrieval")
    if kind != config.family:
        raise UserError(f"{source} makes tables of kind '{kind}', not '{config.family}'; give --family {kind}")
    home = Path(config.output).absolute() / name
    raw = Path(config.data).absolute() if config.data else home / "raw"
    return Place(name, str(source), raw, str(home / "tables"), str(home / flow.extra), str(home / "runs"))


def run(config: Config) -> None:
    """Runs the flow."""
    flow, place = FLOWS[config.family], locate(config)
    steps = Steps(count=flow.steps + 3 + (0 if config.data else 1))
    cli.start_ray()
    if not config.data:
        events = str(config.events * flow.events)
        size = ["--users", str(config.users), "--items", str(config.items), "--events", events]
        kind = [] if config.family == "retrieval" else ["--kind", flow.log]
        log = [*kind, "--output", str(place.raw), *size, "--seed", str(config.seed)]
        steps.run("Simulate a raw log", "simulate", *log)
    log = ["--source", place.source, "--input", str(place.raw), "--output", place.tables]
    steps.run("Raw log to tables", "prepare", *log)
    steps.run("Prove the tables free of leakage", "audit", "--tables", place.tables)
    flow.run(config, place, steps)
    uri = tracking.resolve_uri(None, place.runs)  # where the trainings logged
    steps.run("Compare", "compare", "--experiment", f"{config.family}/{place.dataset}", "--tracking_uri", uri)
    label = "simulated data: the figures say that the flow works, nothing about a real log" if not config.data else ""
    print(f"\nDone in {time.monotonic() - steps.started:.0f} s. {label}")
    print(f"  tables        {place.tables}")
    if flow.extra:
        print(f"  {'semantic IDs' if flow.extra == 'sids' else 'text        '}  {place.extra}")
    print(f"  checkpoints   {place.runs}")
    print(f"  look at it    {tracking.viewer(uri, f'{Path(sys.executable).parent}/mlflow')}")


if __name__ == "__main__":
    cli.main(run, Config)
