"""The runs of an MLflow experiment as a table: models beside each other, mean and deviation over seeds.

    python -m jobs.compare --experiment retrieval/DATASET --tracking_uri sqlite:////ABSOLUTE/runs/mlflow.db
    python -m jobs.compare --sids SIDS --sids OTHER_SIDS

Runs that differ in their seed alone are one row. Students stand beside their teachers with the test of
whether they are as good. --markdown FILE writes the same as Markdown, --pareto FILE.png draws accuracy
against users per second. With --sids it shows tokenizers: branching, codes in use, collisions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs import cli
from models.tables import UserError
from pipelines import tracking
from pipelines.evaluation.comparison import compare, ranked_rows
from pipelines.evaluation.table import Table
from pipelines.evaluation.tokenizers import sids_table


@dataclass
class Config:
    """Options."""

    experiment: str | None = None
    """MLflow experiment: family/dataset."""
    tracking_uri: str | None = None
    """MLflow; by default MLFLOW_TRACKING_URI, else runs/mlflow.db here."""
    markdown: str | None = None
    """Also write the tables to this file as Markdown."""
    metric: str | None = None
    """Rows are sorted by this metric on test, then on val; by default gauc where runs have it, else ndcg@10."""
    pareto: str | None = None
    """Also draw the metric on test against users per second to this file (.png, .svg or .pdf)."""
    sids: list[str] = field(default_factory=list)
    """SIDS: folders that jobs.tokenize made, to compare their tokenizers; once per folder."""

    def __post_init__(self) -> None:
        if not self.experiment and not self.sids:
            raise ValueError("neither experiment nor sids is given; name the MLflow experiment, or folders of SIDs")
        if self.pareto and not self.experiment:
            raise ValueError(f"pareto is {self.pareto}, but there is no experiment to draw; give --experiment too")


def parse(job: str, argv: Sequence[str] | None = None) -> Config:
    """The command line; every --sids adds a folder."""
    words = list(sys.argv[1:] if argv is None else argv)
    return cli.parse(
        Config, job, ["--sids+" + word.removeprefix("--sids") if is_sids(word) else word for word in words]
    )


def is_sids(word: str) -> bool:
    return word == "--sids" or word.startswith("--sids=")


def store(option: str | None) -> str:
    """The tracking URI of the option, the environment, or this folder; UserError where there is none."""
    uri = option or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        if not Path("runs/mlflow.db").is_file():
            raise UserError("no MLflow store is named; give --tracking_uri, as jobs.train prints it")
        uri = f"sqlite:///{Path('runs/mlflow.db').absolute()}"
    return tracking.resolve_uri(uri, ".")


def run(config: Config) -> None:
    """Prints the tables."""
    uri = store(config.tracking_uri) if config.experiment else ""
    tables: list[Table] = compare(uri, config.experiment, config.metric) if config.experiment else []
    tables += [sids_table(config.sids)] if config.sids else []
    print("\n\n".join(table.text() for table in tables))
    if config.markdown:
        try:
            Path(config.markdown).parent.mkdir(parents=True, exist_ok=True)
            Path(config.markdown).write_text("\n".join(table.markdown() for table in tables))
        except OSError as error:
            raise UserError(f"cannot write {config.markdown} ({error.strerror}); choose another file") from error
        print(f"written to {config.markdown}")
    if config.experiment and config.pareto:
        from pipelines.evaluation.pareto import draw

        drawn = draw(*ranked_rows(uri, config.experiment, config.metric), config.pareto, config.experiment)
        print(f"{drawn} points drawn to {config.pareto}")
    if config.experiment:
        print(f"look at it: mlflow ui --backend-store-uri {uri}")


if __name__ == "__main__":
    cli.main(run, Config, parse)
