"""Models without training on the logs of RESULTS.md, as runs that can be kept beside trained models.

    python -m papers.floors --log amazon18_industrial --input FOLDER --output OUT
    python -m papers.kept --experiment retrieval/amazon18_industrial \
        --tracking_uri sqlite:///OUT/amazon18_industrial/runs/mlflow.db \
        --output papers/results/floors_amazon18_industrial.jsonl

Each model is trained with its shipped config and evaluated on test, with all items and with
known items left out. The line again goes on from what is finished.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import cli
from models import registry
from models.families import RETRIEVAL

CONFIGS = Path(__file__).parents[1] / "jobs" / "configs"


@dataclass
class Config:
    """Options."""

    log: str
    """Name of the log: its mapping file is jobs/configs/sources/LOG.yaml."""
    input: str
    """Folder of the raw log."""
    output: str
    """Folder for tables and runs, in a folder named by the log."""
    experiment: str | None = None
    """MLflow experiment; by default retrieval/LOG."""
    source: str | None = None
    """Another mapping file."""


def run(config: Config) -> None:
    """Prepare the log, and train and evaluate each model without training."""
    folder = Path(config.output).absolute() / config.log
    tables, runs = str(folder / "tables"), str(folder / "runs")
    source = config.source or str(CONFIGS / "sources" / f"{config.log}.yaml")
    run_job("prepare", source=source, input=config.input, output=tables)
    for name in registry.floors(RETRIEVAL):
        run_job(
            "train",
            config=str(CONFIGS / f"{name}.yaml"),
            tables=tables,
            storage=runs,
            name=name,
            experiment=config.experiment or f"retrieval/{config.log}",
        )
        where = {"checkpoint": f"{runs}/{name}", "tables": tables}
        run_job("evaluate", **where)
        run_job("evaluate", **where, unseen="true")


def run_job(job: str, **options: str) -> Any:
    """Run a job in this process."""
    module = importlib.import_module(f"jobs.{job}")
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return module.run(cli.options_for(module, words))


if __name__ == "__main__":
    cli.main(run, Config)
