"""Compare MLflow runs in tables and on a page with plots.

    python -m jobs.compare --experiment retrieval/DATASET --tracking_uri sqlite:////ABSOLUTE/runs/mlflow.db
    python -m jobs.compare --sweep SWEEP_NAME --html page.html --register MODEL_NAME
    python -m jobs.compare --run RUN --run OTHER_RUN

Runs that differ only in their seed are averaged into one row. The tables are Markdown;
--html FILE writes one self-contained page with plots: differences to the best model
without training, and learning curves.
"""

from __future__ import annotations

from jobs import cli
from pipelines.comparison.config import CompareConfig

Config = CompareConfig


def run(config: CompareConfig) -> None:
    """Print the tables, write the requested files, and register the best run."""
    cli.say_loading("mlflow")
    from pipelines.comparison.report import compare_runs

    compare_runs(config)


if __name__ == "__main__":
    cli.main(run)
