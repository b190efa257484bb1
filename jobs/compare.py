"""MLflow runs beside each other, as tables and as a page of plots.

    python -m jobs.compare --experiment retrieval/DATASET --tracking_uri sqlite:////ABSOLUTE/runs/mlflow.db
    python -m jobs.compare --sweep SWEEP_NAME --html page.html --register MODEL_NAME
    python -m jobs.compare --run RUN --run OTHER_RUN

Runs that differ in their seed alone are one row. --markdown FILE writes the tables as Markdown, --html FILE one
self-contained page with the plots: learning curves, accuracy against requests per second, what a sweep's axes do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobs import cli
from models.config import pluralize

if TYPE_CHECKING:
    from pipelines.comparison.rows import Comparison


@dataclass
class Config:
    """Options."""

    experiment: list[str] = field(default_factory=list)
    """MLflow experiment: family/dataset; once per experiment."""
    sweep: str | None = None
    """A sweep's trials: its name or the id of its run."""
    run: list[str] = field(default_factory=list)
    """A run: its name or id; once per run."""
    tracking_uri: str | None = None
    """MLflow; by default MLFLOW_TRACKING_URI, else runs/mlflow.db here."""
    metric: str | None = None
    """Rows are sorted by it on test, then on val; by default the sweep's, gauc where runs have it, or ndcg@10."""
    markdown: str | None = None
    """Also write the tables to this file as Markdown."""
    html: str | None = None
    """Also write tables and plots to this file as one page, which is logged to MLflow too."""
    register: str | None = None
    """Register the best checkpoint by validation under this name in MLflow's model registry."""

    def __post_init__(self) -> None:
        if not (self.experiment or self.sweep or self.run):
            raise ValueError(
                "nothing is given to compare; name an --experiment, a --sweep or a --run"
            )
        if self.sweep and self.run:
            raise ValueError(
                f"sweep is {self.sweep} and run is {self.run[0]}; give one of them"
            )
        if self.register and not (self.sweep or self.run) and len(self.experiment) > 1:
            raise ValueError(
                f"register is {self.register}, which is of one experiment; give one --experiment"
            )
        if set(self.register or "") & set("/:"):
            raise ValueError(
                f"register is {self.register}, which MLflow takes without '/' and ':'; give another name"
            )


def run(config: Config) -> None:
    """Prints the tables, and writes what is asked for."""
    cli.say_loading("mlflow")
    from pipelines import tracking
    from pipelines.comparison import page
    from pipelines.comparison.plots import plots
    from pipelines.comparison.rows import compare
    from pipelines.comparison.runs import select
    from pipelines.comparison.tables import best_table, tables

    uri = tracking.named_store(config.tracking_uri)
    if config.sweep or config.run:
        chosen = [select(uri, config.experiment, config.sweep, config.run)]
    else:
        chosen = [select(uri, [name]) for name in config.experiment]
    found = [compare(selection, config.metric) for selection in chosen]
    shown = [table for comparison in found for table in tables(comparison)]
    shown += [best] if (best := best_table(found)) else []
    print("\n\n".join(table.text() for table in shown))
    markdown = "\n".join(table.markdown() for table in shown)
    if config.markdown:
        page.write(markdown, config.markdown)
        print(f"written to {config.markdown}")
    if config.html:
        drawn = [plot for comparison in found for plot in plots(comparison)]
        title = ", ".join(comparison.selection.title for comparison in found)
        content = page.build(title, uri, shown, drawn)
        page.write(content, config.html)
        name = page.log(found[0].selection, content, markdown)
        print(
            f"{pluralize(len(drawn), 'plot')} written to {config.html}, and to MLflow as compare.html of '{name}'"
        )
    if config.register:
        register_best(found[0], config.register)
    print(f"look at it: {tracking.viewer(uri)}")


def register_best(comparison: Comparison, name: str) -> None:
    """The comparison's best run by validation as a version of the registered model `name`."""
    from pipelines import tracking
    from pipelines.comparison.rows import best_run
    from pipelines.serving.registered_model import register

    best = best_run(comparison)
    ref = tracking.RunRef(best.uri, comparison.rows[0].experiment, best.id)
    version = register(ref, name, f"val/{comparison.metric}")
    print(
        f"registered: version {version.version} of {name} is the best checkpoint of {best.name} by validation"
    )
    print(f"  load it   mlflow.pyfunc.load_model('models:/{name}/{version.version}')")


if __name__ == "__main__":
    cli.main(run, Config)
