"""Write the pages of docs/results from saved runs: tables, plots, benchmarks, claims.

python -m papers.pages
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import benchmark_tables, to_rows
from jobs import cli
from papers import days, kept
from papers.claims import verdicts, verdicts_table
from papers.plots import draw_beams, draw_tokenizers
from papers.published import Papers, beside_the_papers, load
from papers.tables import origins_table, paper_tables
from pipelines import tracking
from pipelines.comparison.load import compare, load_rows
from pipelines.comparison.page import write
from pipelines.comparison.plots import plots
from pipelines.comparison.runs import Selection, select
from pipelines.comparison.svg import Plot
from pipelines.comparison.table import Table
from pipelines.comparison.tables import tables

ORIGIN = ("hardware", tracking.COMMIT_TAG, "command")
"""Tags that describe where a run comes from."""


@dataclass
class Config:
    """Options of `python -m papers.pages`."""

    results: str = str(kept.RESULTS)
    """File of saved runs, or folder of such files."""
    output: str = "docs/results"
    """Folder for the pages and their plots."""


def run(config: Config) -> None:
    """Write all pages and their plots."""
    folder = Path(config.output)
    papers = load()
    runs, timings = kept.read(config.results)
    with kept.store(runs) as uri:
        for name in sorted({line["experiment"] for line in runs}):
            sweeps = [
                line["name"]
                for line in runs
                if line["experiment"] == name and "grid" in line
            ]
            for sweep in (None, *sweeps):
                write_comparison(select(uri, [name], sweep), papers, folder)
        rows = [*load_rows(kept.select_all(uri)), *to_rows(timings)]
        decisions = verdicts(rows, papers)
    for name in sorted({line["benchmark"] for line in timings}):
        write_benchmark(
            name, [line for line in timings if line["benchmark"] == name], folder
        )
    write_page("Claims", [verdicts_table(decisions)], [], folder)
    write_days(Path(config.results) / "days", folder)
    print(f"written to {folder}")


def write_benchmark(name: str, lines: Sequence[kept.Line], folder: Path) -> None:
    """Write the page of a benchmark.

    Args:
        name: Name of the benchmark.
        lines: JSON lines of the benchmark.
        folder: Folder for the page.
    """
    origins = [
        (
            line["variant"],
            *(line.get(key, "") for key in ("hardware", "commit", "command")),
        )
        for line in lines
    ]
    tables = [*benchmark_tables(to_rows(lines)), origins_table(origins)]
    write_page(f"benchmark/{name}", tables, [], folder)


def write_comparison(selection: Selection, papers: Papers, folder: Path) -> None:
    """Write the page of an experiment or a sweep, with its plots as SVG files.

    Args:
        selection: Runs of the experiment or sweep.
        papers: Published figures.
        folder: Folder for the page and the plots.
    """
    comparison = compare(selection)
    origins = [
        (str(run.info.run_name), *(run.data.tags.get(tag, "") for tag in ORIGIN))
        for run in selection.runs
    ]
    all_tables = [
        *tables(comparison),
        *paper_tables(comparison),
        *beside_the_papers(comparison, papers),
        origins_table(origins),
    ]
    all_plots = plots(comparison, more=(draw_tokenizers, draw_beams))
    write_page(selection.title, all_tables, all_plots, folder)


def write_days(results: Path, folder: Path) -> None:
    """Write the page of training policies on growing logs, if there are results.

    Args:
        results: Folder with a file LOG.jsonl per log.
        folder: Folder for the page and the plots.
    """
    all_tables: list[Table] = []
    all_plots: list[Plot] = []
    for tables_of_log, plot in days.pages(results):
        all_tables += tables_of_log
        all_plots.append(plot)
    if all_tables:
        policies = [[f"`{name}`", text] for name, text in days.POLICIES.items()]
        all_tables.append(Table("Policies", ["policy", "model"], policies))
        write_page("Days", all_tables, all_plots, folder)


def write_page(
    title: str, tables: Sequence[Table], plots: Sequence[Plot], folder: Path
) -> None:
    """Write a Markdown page with tables and plots, and the plots as SVG files.

    Args:
        title: Title of the page, from which its file name is made.
        tables: Tables of the page.
        plots: Plots of the page, which follow the tables.
        folder: Folder for the page and the plots.
    """
    sections = [table.markdown() for table in tables]
    for plot in plots:
        write(plot.to_file(), str(folder / f"{plot.name}.svg"))
        sections.append(
            f"### {plot.title}\n\n![{plot.title}]({plot.name}.svg)\n\n{plot.caption}\n"
        )
    content = "\n".join(sections)
    name = re.sub(r"\W+", "-", title.lower())
    write(f"# {title}\n\n{content}", str(folder / f"{name}.md"))


if __name__ == "__main__":
    cli.main(run, Config)
