"""Print the tables of compared runs, write their page, and register the best run.

compare_runs(CompareConfig(experiment="retrieval/DATASET", html="page.html"))
"""

from __future__ import annotations

from core.files import storage_errors, write_file
from core.schemas import RunRef
from pipelines import tracking
from pipelines.comparison.compare import Comparison, compare, find_best_run
from pipelines.comparison.config import CompareConfig
from pipelines.comparison.tables import Table, build_tables, to_markdown
from pipelines.comparison.verdicts import measure_differences

MAX_ROWS, MAX_NOTES = 20, 3
"""Largest number of printed rows and notes of a table."""


def compare_runs(config: CompareConfig) -> Comparison:
    """Print tables of runs, write the requested files, and register the best run."""
    uri = tracking.find_store(config.tracking_uri)
    comparison = compare(
        uri, config.experiment, config.sweep, config.run, config.metric
    )
    differences = measure_differences(comparison)
    tables = build_tables(comparison, differences)
    shown = tables if config.all else map(shorten, tables)
    print("\n".join(map(to_markdown, shown)))
    if config.html:
        from pipelines.comparison.page import build_page

        page = build_page(comparison, differences, tables)
        with storage_errors(config.html):
            write_file(config.html, page.encode())
        print(f"page written to {config.html}")
    if config.register:
        from pipelines.serving.registered_model import register

        name, metric = config.register, f"val/{comparison.metric}"
        best = find_best_run(comparison)
        best_run = RunRef(uri, best["experiment"], best["training"])
        version = register(best_run, name, metric, config.trust_code).version
        print(
            f"registered: version {version} of {name} is the best checkpoint of "
            f"{best['name']} by validation\n"
            f"  load it   mlflow.pyfunc.load_model('models:/{name}/{version}')"
        )
    print(f"look at it: {tracking.view_command(uri)}")
    return comparison


def shorten(table: Table) -> Table:
    """Return the first rows and notes of a table."""
    title, frame, notes = table
    if len(frame) > MAX_ROWS:
        title = f"{title}: {MAX_ROWS} of {len(frame)} rows (all: --all true)"
    return title, frame.head(MAX_ROWS), notes[:MAX_NOTES]
