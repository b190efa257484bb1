"""Compare MLflow runs in tables and on a page with plots.

    python -m jobs.compare --experiment retrieval/DATASET --tracking_uri sqlite:////ABSOLUTE/runs/mlflow.db
    python -m jobs.compare --sweep SWEEP_NAME --html page.html --register MODEL_NAME
    python -m jobs.compare --run RUN --run OTHER_RUN

Runs that differ only in their seed are averaged into one row. --markdown FILE writes
the tables as Markdown, --html FILE one self-contained page with plots: differences to
the best model without training, learning curves, the effect of a sweep's axes, accuracy
against requests per second.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from core.files import storage_errors, write_file
from core.options import STRICT
from core.schemas import RunRef
from jobs import cli

if TYPE_CHECKING:
    from pipelines.comparison.tables import Table

MAX_LINES = 60
"""Largest number of printed lines of a comparison with a long table."""


@dataclass(config=STRICT)
class Config:
    """Options of jobs.compare."""

    experiment: list[str] = field(default_factory=list)
    """MLflow experiment whose runs are compared: KIND/DATASET; may be repeated."""
    sweep: str | None = None
    """Sweep whose trials are compared: its name or the id of its MLflow run."""
    run: list[str] = field(default_factory=list)
    """Run to compare: its name or MLflow id; may be repeated."""
    tracking_uri: str | None = None
    """MLflow tracking URI; by default MLFLOW_TRACKING_URI, else runs/mlflow.db in the
    working directory."""
    metric: str | None = None
    """Metric by which rows are sorted, on test, or on val without an evaluation on
    test; by default the sweep's metric, gauc if runs have it, or ndcg@10."""
    markdown: str | None = None
    """Also write the tables to this Markdown file."""
    all: bool = False
    """Print all rows of tables with more than 30 rows, not the best 4 alone, and more
    than 60 lines."""
    html: str | None = None
    """Also write the tables and plots to this HTML file, and log it to MLflow."""
    register: str | None = None
    """Register the checkpoint with the best validation metric under this name in
    MLflow's model registry."""

    def __post_init__(self) -> None:
        if not (self.experiment or self.sweep or self.run):
            raise ValueError(
                "no runs are selected; give an --experiment, a --sweep or a --run"
            )
        if self.sweep and self.run:
            raise ValueError(
                f"both --sweep {self.sweep} and --run {self.run[0]} are given"
            )
        if self.register and not (self.sweep or self.run) and len(self.experiment) > 1:
            raise ValueError(
                f"--register {self.register} takes the best run of one experiment, and "
                f"{len(self.experiment)} are given"
            )


def run(config: Config) -> None:
    """Print the tables, write the requested files, and register the best run."""
    cli.say_loading("mlflow")
    from pipelines import tracking
    from pipelines.comparison.compare import compare, find_best_run
    from pipelines.comparison.tables import (
        best_tables,
        build_tables,
        to_markdown,
    )
    from pipelines.comparison.verdicts import measure_differences

    uri = tracking.find_store(config.tracking_uri)
    experiments = [[name] for name in config.experiment]
    if config.sweep or config.run:
        experiments = [config.experiment]
    comparisons = [
        compare(uri, names, config.sweep, config.run, config.metric)
        for names in experiments
    ]
    differences = list(map(measure_differences, comparisons))
    tables = []
    for pair in zip(comparisons, differences, strict=True):
        tables += build_tables(*pair)
    tables += best_tables(comparisons)
    shown = tables if config.all else map(shorten, tables)
    lines = "\n".join(map(to_markdown, shown)).splitlines()
    is_long = any(len(frame) > 30 for _, frame, _ in tables)
    if is_long and not config.all:
        lines = [line for line in lines if line]
        lines[MAX_LINES - 4 :] = ["more: --all true"]
    print("\n".join(lines))
    markdown = "\n".join(map(to_markdown, tables))
    if config.markdown:
        with storage_errors(config.markdown):
            write_file(config.markdown, markdown.encode())
        print(f"tables written to {config.markdown}")
    if config.html:
        from pipelines.comparison.page import build_page, log_page

        page = build_page(comparisons, differences, tables)
        with storage_errors(config.html):
            write_file(config.html, page.encode())
        name = log_page(comparisons[0], page, markdown)
        print(
            f"page written to {config.html}, and to MLflow as compare.html of '{name}'"
        )
    if config.register:
        from pipelines.serving.registered_model import register

        name, metric = config.register, f"val/{comparisons[0].metric}"
        best = find_best_run(comparisons[0])
        best_run = RunRef(uri, best["experiment"], best["training"])
        version = register(best_run, name, metric).version
        print(
            f"registered: version {version} of {name} is the best checkpoint of "
            f"{best['name']} by validation\n"
            f"  load it   mlflow.pyfunc.load_model('models:/{name}/{version}')"
        )
    print(f"look at it: {tracking.view_command(uri)}")


def shorten(table: Table) -> Table:
    """Return the best rows of a table that has more than 30."""
    title, frame, _ = table
    if len(frame) > 30:
        title = f"{title}: the best 4 of {len(frame)} rows (all: --all true)"
        return title, frame.head(4), []
    return table


if __name__ == "__main__":
    cli.main(run)
