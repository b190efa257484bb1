"""The runs of an MLflow experiment as a table: models beside each other, mean and deviation over seeds.

    python -m jobs.compare --experiment retrieval/DATASET --tracking_uri sqlite:////ABSOLUTE/runs/mlflow.db

Runs that differ in their seed alone are one row. --markdown FILE writes the same table as Markdown.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from jobs import cli
from models.tables import UserError
from pipelines import tracking
from pipelines.evaluation.comparison import compare


@dataclass
class Config:
    """Options."""

    experiment: str
    """MLflow experiment: family/dataset."""
    tracking_uri: str | None = None
    """MLflow; by default MLFLOW_TRACKING_URI, else runs/mlflow.db here."""
    markdown: str | None = None
    """Also write the table to this file as Markdown."""
    metric: str = "ndcg@10"
    """Rows are sorted by this metric on test, then on val."""


def run(config: Config) -> None:
    """Prints the table."""
    uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        if not Path("runs/mlflow.db").is_file():
            raise UserError("no MLflow store is named; give --tracking_uri, as jobs.train prints it")
        uri = f"sqlite:///{Path('runs/mlflow.db').absolute()}"
    table = compare(tracking.resolve_uri(uri, "."), config.experiment, config.metric)
    print(table.text())
    if config.markdown:
        try:
            Path(config.markdown).parent.mkdir(parents=True, exist_ok=True)
            Path(config.markdown).write_text(table.markdown())
        except OSError as error:
            raise UserError(f"cannot write {config.markdown} ({error.strerror}); choose another file") from error
        print(f"written to {config.markdown}")
    print(f"look at it: mlflow ui --backend-store-uri {uri}")


if __name__ == "__main__":
    cli.main(run, Config)
