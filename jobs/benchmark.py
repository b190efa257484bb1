"""Paired timings, one JSON line per variant and size.

    python -m jobs.benchmark decode [--histories TABLES]  users per second by model, path and size
    python -m jobs.benchmark search_encoder               encoders of search models, by mode and length
    python -m jobs.benchmark actions                      models of actions, by mode and length
    python -m jobs.benchmark shares --histories TABLES    memory of training workers, and bytes they read
    python -m jobs.benchmark sequences                    events per second of the sequence step, beside polars
    python -m jobs.benchmark scale [--nodes N]            the same, up to 100 million events in a small object store
    python -m jobs.benchmark catalogue                    tokenizing, tries and decoding, up to 10 million items
    python -m jobs.benchmark serve                        requests end to end, with users' states and without
    python -m jobs.benchmark sweep --histories TABLES     what a sweep adds to the trainings in it

--json FILE also writes the lines to a file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import cli
from models.config import hint
from models.places import reach
from models.tables import UserError
from models.words import number_of


@dataclass
class Config:
    """Options of the benchmarks; the name may stand first, without its option."""

    name: str
    """Which benchmark: decode, search_encoder, actions, shares, sequences, scale, catalogue, serve or sweep."""
    json: str | None = None
    """File for the JSON lines, which are printed too."""
    runs: int = 5
    """Timings of each variant; of `serve` 20 requests each."""
    threads: int = 2
    """CPU threads of all but `sequences`, `scale` and `catalogue`."""
    histories: str | None = None
    """Tables of jobs.prepare whose test histories `decode` takes, random ones, 9 items in the mean, without; and those
    that `sweep` trains on and `shares` reads."""
    checkpoints: list[str] = field(default_factory=list)
    """Trained models, each a checkpoint or a run, that `decode` times on --histories in place of random weights."""
    sids: str | None = None
    """The semantic IDs that the checkpoints were trained with."""
    sizes: list[int] | None = None
    """Events in the logs of `sequences` (1, 5 and 20 million) and of `scale` (2, 20, 50 and 100 million), items of
    `catalogue` (10 thousand, 100 thousand, 1 and 10 million)."""
    store_mb: int = 1024
    """MiB of Ray's object store for `scale`, on each node."""
    nodes: int = 1
    """More than 1: `scale` has a variant on so many Ray nodes of this machine, whose CPUs they share: what the exchange
    between nodes costs, not what they save."""

    def __post_init__(self) -> None:
        if self.name not in BENCHMARKS:
            raise ValueError(f"unknown benchmark '{self.name}'; {hint(self.name, BENCHMARKS)}")
        if self.runs < 1 or self.threads < 1 or self.nodes < 1:
            raise ValueError(f"runs {self.runs}, threads {self.threads} and nodes {self.nodes} need to be at least 1")


def _of_models(config: Config, **options: Any) -> Iterable[dict[str, Any]]:
    from models.bench.table import BENCHMARKS as MODELS

    return MODELS[config.name](runs=config.runs, threads=config.threads, **options)


def _sequences(config: Config) -> Iterable[dict[str, Any]]:
    from benchmarks import sequences

    return sequences.run(config.sizes or [1_000_000, 5_000_000, 20_000_000], config.runs)


def _scale(config: Config) -> Iterable[dict[str, Any]]:
    from benchmarks import sequences

    sizes = config.sizes or [2_000_000, 20_000_000, 50_000_000, 100_000_000]
    return sequences.run(sizes, config.runs, config.store_mb, "scale", config.nodes)


def _catalogue(config: Config) -> Iterable[dict[str, Any]]:
    from benchmarks import catalogue

    return catalogue.run(config.sizes or [10_000, 100_000, 1_000_000, 10_000_000])


def _serve(config: Config) -> Iterable[dict[str, Any]]:
    from pipelines.serving import benchmark

    return benchmark.serve(config.runs, config.threads)


def _sweep(config: Config) -> Iterable[dict[str, Any]]:
    from tuning import bench

    cli.start_ray()
    return bench.bench(config.histories, config.runs, config.threads)


BENCHMARKS: dict[str, Callable[[Config], Iterable[dict[str, Any]]]] = {
    "decode": lambda config: _of_models(
        config, histories=config.histories, checkpoints=config.checkpoints, sids=config.sids
    ),
    "search_encoder": _of_models,
    "shares": lambda config: _of_models(config, histories=config.histories),
    "actions": _of_models,
    "sequences": _sequences,
    "scale": _scale,
    "catalogue": _catalogue,
    "serve": _serve,
    "sweep": _sweep,
}


def run(config: Config) -> None:
    """Runs the benchmark; the rows' ratios to the first variant of their size are printed last."""
    reach(histories=config.histories, sids=config.sids)
    for checkpoint in config.checkpoints:
        reach(checkpoints=checkpoint)
    if config.json:
        try:
            Path(config.json).touch()
        except OSError as error:
            raise UserError(f"cannot write {config.json} ({error.strerror}); choose another --json") from error
    from models.bench.harness import write_rows  # PyTorch and MLflow: a wrong command line has its answer before
    from pipelines import tracking

    origin = {
        "command": tracking.command(),
        "hardware": tracking.hardware(),
        "commit": tracking.git("rev-parse", "HEAD"),
    }
    rows = write_rows(BENCHMARKS[config.name](config), config.json, origin)
    for row in rows:
        if "error" in row:
            print(f"{row['variant']:>20} failed: {row['error']}")
            continue
        line = f"{row['variant']:>20} {row['items_per_s']:>14,.1f} per second"
        if config.name == "catalogue":  # steps, not ways to do the same
            print(f"{line}, {number_of(row['params']['items'], 'item')}")
            continue
        base = next(other for other in rows if other["params"] == row["params"] and "error" not in other)
        print(f"{line}, {base['median_s'] / row['median_s']:.2f} times {base['variant']}")
    if config.json:
        print(f"written to {config.json}")


def parse(job: str, argv: Sequence[str] | None = None) -> Config:
    """Takes `benchmark decode` for `benchmark --name decode`."""
    words = list(sys.argv[1:] if argv is None else argv)
    named = bool(words) and not words[0].startswith("-")
    return cli.parse(Config, job, ["--name", *words] if named else words)


if __name__ == "__main__":
    cli.main(run, Config, parse)
