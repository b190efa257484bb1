"""Compare MLflow runs in tables and on a page with plots.

    python -m jobs.compare --experiment retrieval/DATASET --tracking_uri sqlite:////ABSOLUTE/runs/mlflow.db
    python -m jobs.compare --sweep SWEEP_NAME --html page.html --register MODEL_NAME
    python -m jobs.compare --run RUN --run OTHER_RUN

Runs that differ only in their seed are averaged into one row. --markdown FILE
writes the tables as Markdown, --html FILE one self-contained page with plots: learning
curves, accuracy against requests per second, the effect of a sweep's axes.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from core.errors import pluralize
from core.options import STRICT
from core.schemas import RunRef
from jobs import cli

if TYPE_CHECKING:
    from pipelines.comparison.rows import Comparison
    from pipelines.comparison.table import Table


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
    from pipelines.comparison.load import compare
    from pipelines.comparison.runs import select
    from pipelines.comparison.tables import best_table, tables

    uri = tracking.find_store(config.tracking_uri)
    if config.sweep or config.run:
        selections = [select(uri, config.experiment, config.sweep, config.run)]
    else:
        selections = [select(uri, [name]) for name in config.experiment]
    comparisons = [compare(selection, config.metric) for selection in selections]
    all_tables = [table for comparison in comparisons for table in tables(comparison)]
    best = best_table(comparisons)
    if best:
        all_tables.append(best)
    print("\n\n".join(table.text() for table in all_tables))
    write_files(config, uri, comparisons, all_tables)
    if config.register:
        register_best(comparisons[0], config.register)
    print(f"look at it: {tracking.view_command(uri)}")


def write_files(
    config: Config, uri: str, comparisons: list[Comparison], tables: list[Table]
) -> None:
    """Write the files of `--markdown` and `--html`, and log the page to MLflow.

    Args:
        config: Options of the job.
        uri: Tracking URI of MLflow.
        comparisons: Runs of each experiment, for the plots.
        tables: Tables that the job prints.
    """
    from pipelines.comparison import page
    from pipelines.comparison.plots import choose_colours, plots

    markdown = "\n".join(table.markdown() for table in tables)
    if config.markdown:
        page.write(markdown, config.markdown)
        print(f"tables written to {config.markdown}")
    if not config.html:
        return
    colours = choose_colours(comparisons)
    all_plots = []
    for comparison in comparisons:
        all_plots += plots(comparison, colours)
    title = ", ".join(comparison.selection.title for comparison in comparisons)
    content = page.build(title, uri, tables, all_plots)
    page.write(content, config.html)
    name = page.log_page(comparisons[0].selection, content, markdown)
    print(
        f"{pluralize(len(all_plots), 'plot')} written to {config.html}, and to MLflow "
        f"as compare.html of '{name}'"
    )


def register_best(comparison: Comparison, name: str) -> None:
    """Register the checkpoint with the best validation metric as a model version."""
    from pipelines.comparison.load import find_best_run
    from pipelines.serving.registered_model import register

    best = find_best_run(comparison)
    run = RunRef(best.uri, comparison.rows[0].experiment, best.id)
    version = register(run, name, f"val/{comparison.metric}").version
    print(
        f"registered: version {version} of {name} is the best checkpoint of "
        f"{best.name} by validation"
    )
    print(f"  load it   mlflow.pyfunc.load_model('models:/{name}/{version}')")


if __name__ == "__main__":
    cli.main(run)
