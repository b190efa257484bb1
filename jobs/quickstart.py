"""The whole flow in minutes: a log, tables, audit, semantic IDs, SASRec, TIGER and its student SID-MLP, compared.

Without options it simulates a small log (`results are labelled simulated`); `--data FOLDER` takes a real
one whose mapping file is `jobs/configs/sources/FOLDER.yaml`, or the one that `--source` names. Every step
is one of the other commands and is printed as such before it runs, so each can be repeated on its own.
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
from typing import Any

from jobs import cli
from models import registry
from models.tables import UserError, read_manifest

CONFIGS = Path(__file__).parent / "configs"


@dataclass
class Config:
    """Options."""

    data: str | None = None
    """Folder of a real raw log; without it a log is simulated."""
    source: str | None = None
    """Mapping file of the real log; by default the one named after the folder."""
    output: str = "runs"
    """Folder for everything that is made: one folder below it per dataset."""
    encoder: str = "tfidf"
    """Encoder of the item texts: tfidf, minilm (make encoder), or a transformers name or path."""
    epochs: int = 20
    """Most epochs of each model, half as many for the student, which learns from its teacher in fewer. A real model
    wants more: see the walk-through in the README."""
    users: int = 1500
    """Users of the simulated log."""
    items: int = 400
    """Items of the simulated log."""
    events: int = 15000
    """Events of the simulated log."""
    seed: int = 42
    """Seed of the simulation and of the trainings."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
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


def run(config: Config) -> None:
    """Runs the flow."""
    name = Path(config.data).resolve().name if config.data else "simulated"
    source = Path(config.source) if config.source else CONFIGS / "sources" / f"{name}.yaml"
    if not source.is_file():
        raise UserError(f"there is no mapping file {source} for {config.data}; name one with --source")
    if config.data and not Path(config.data).is_dir():
        raise UserError(f"{config.data} is not a folder; --data takes the folder of a raw log")
    home = Path(config.output).absolute() / name
    raw, tables, sids, runs = (
        Path(config.data).absolute() if config.data else home / "raw",
        str(home / "tables"),
        str(home / "sids"),
        str(home / "runs"),
    )
    models = {"popularity": "popularity", "sasrec": "sasrec", "tiger": "tiger_small", "sid_mlp": "sid_mlp_small"}
    steps = Steps(count=5 + 2 * len(models) - (1 if config.data else 0))
    cli.start_ray()

    if not config.data:
        size = ["--users", str(config.users), "--items", str(config.items), "--events", str(config.events)]
        steps.run("Simulate a raw log", "simulate", "--output", str(raw), *size, "--seed", str(config.seed))
    steps.run("Raw log to tables", "prepare", "--source", str(source), "--input", str(raw), "--output", tables)
    steps.run("Prove the tables free of leakage", "audit", "--tables", tables)
    texts = read_manifest(f"{tables}/items", "items").info["texts"]
    published = published_sids(raw)
    if texts:
        tokenizer = ["--tokenizer", "rqkmeans", "--encoder", config.encoder]
        tokenizer += [] if config.data else ["--rqkmeans.codebook_size", "32"]
    elif published:
        tokenizer = ["--tokenizer", "published", "--published", str(published)]
    else:
        raise UserError(f"{config.data} has neither item texts nor published semantic IDs; TIGER needs one of them")
    steps.run("Items to semantic IDs and a trie", "tokenize", "--tables", tables, *tokenizer, "--output", sids)
    for model, file in models.items():
        place = ["--tables", tables, *(["--sids", sids] if registry.find(model).sids else [])]
        student = ["--model.teacher", f"{runs}/tiger"] if model == "sid_mlp" else []
        epochs = -(-config.epochs // 2) if student else config.epochs
        fit = ["--fit.max_epochs", str(epochs), "--fit.seed", str(config.seed)] if model != "popularity" else []
        train = ["--config", str(CONFIGS / f"{file}.yaml"), *place, "--storage", runs, "--name", model, *student, *fit]
        steps.run(f"Distil {model} from tiger" if student else f"Train {model}", "train", *train)
        steps.run(f"Evaluate {model} on test", "evaluate", "--checkpoint", f"{runs}/{model}", *place, "--split", "test")
    uri = f"sqlite:///{runs}/mlflow.db"
    steps.run("Compare", "compare", "--experiment", f"retrieval/{name}", "--tracking_uri", uri)
    label = "simulated data: the figures say that the flow works, nothing about a real log" if not config.data else ""
    print(f"\nDone in {time.monotonic() - steps.started:.0f} s. {label}")
    print(f"  tables        {tables}\n  semantic IDs  {sids}\n  checkpoints   {runs}")
    print(f"  look at it    {Path(sys.executable).parent}/mlflow ui --backend-store-uri {uri}")


if __name__ == "__main__":
    cli.main(run, Config)
