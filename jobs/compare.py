"""MLflow runs beside each other, beside the papers, as tables and as a page of plots; and the papers' claims.

    python -m jobs.compare --experiment retrieval/DATASET --tracking_uri sqlite:////ABSOLUTE/runs/mlflow.db
    python -m jobs.compare --sweep SWEEP_NAME --html page.html --register MODEL_NAME
    python -m jobs.compare --run RUN --run OTHER_RUN
    python -m jobs.compare --claims --tracking_uri STORE --tracking_uri OTHER_STORE
    python -m jobs.compare --sids SIDS --sids OTHER_SIDS

Runs that differ in their seed alone are one row. Students stand beside their teachers with the test of whether they
are as good. --markdown FILE writes the same as Markdown (into a folder: a page and its plots for each experiment),
--html FILE one self-contained page with the plots, --pareto FILE.png accuracy against requests per second alone.
--export FILE.jsonl keeps the runs as a small file, from which --from FILE compares them again without their store.
--claims decides the papers' numeric claims by what is in MLflow, in several stores together where several are named.
With --sids it shows tokenizers: branching, codes in use, collisions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pyarrow import fs

from jobs import cli
from models.places import reach
from models.tables import UserError, file_info
from pipelines.comparison.options import Options
from pipelines.tracking import named_stores

LISTS = ("experiment", "run", "sids", "tracking_uri", "benchmark", "results")
"""Options that may be given several times."""


@dataclass
class Config(Options):
    """Options."""


def parse(job: str, argv: Sequence[str] | None = None) -> Config:
    """The command line; every option of LISTS adds one."""
    given = list(sys.argv[1:] if argv is None else argv)
    words = [re.sub(r"^--from(?==|$)", "--results", word) for word in given]
    return cli.parse(Config, job, [added(word) for word in words])


def added(word: str) -> str:
    """`--sids` as jsonargparse's `--sids+`, and so for all options of LISTS."""
    name = word.removeprefix("--").split("=", 1)[0]
    return word.replace(f"--{name}", f"--{name}+", 1) if word.startswith("--") and name in LISTS else word


def run(config: Config) -> None:
    """Prints the tables, and writes what is asked for."""
    read = {"from": config.results, "benchmark": config.benchmark, "claims_file": [config.claims_file or ""]}
    for option, paths in read.items():
        for path in paths:
            if path and file_info(path).type == fs.FileType.NotFound:
                raise UserError(f"cannot read {path} (no such file); check --{option}")
    for folder in config.sids:
        reach(sids=folder)
    uris: list[str] = []
    if config.from_mlflow and not config.results:
        uris = named_stores(config.tracking_uri, new=bool(config.benchmark))
    from jobs import comparing  # imports MLflow, and a wrong command line has its answer before that

    comparing.run(config, uris)


if __name__ == "__main__":
    cli.main(run, Config, parse)
