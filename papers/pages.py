"""Pages of the saved runs: tables and plots, published figures, benchmarks and claims.

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
from papers.plots import beams, tokenizers
from papers.published import Papers, beside_the_papers, load
from papers.tables import origins_table, paper_tables
from pipelines import tracking
from pipelines.comparison.load import compare, load_rows
from pipelines.comparison.page import write
from pipelines.comparison.plots import plots
from pipelines.comparison.runs import Selection, select
from pipelines.comparison.table import Table
from pipelines.comparison.tables import tables

ORIGIN = ("hardware", tracking.COMMIT_TAG, "command")
"""Tags with the origin of a run."""


@dataclass
class Config:
    """Options of `python -m papers.pages`."""

    results: str = str(kept.RESULTS)
    """File of saved runs, or folder of such files."""
    output: str = "docs/results"
    """Folder for the pages and their plots."""


def run(config: Config) -> None:
    """Write all pages."""
    folder, papers = Path(config.output), load()
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
        found = verdicts([*load_rows(kept.select_all(uri)), *to_rows(timings)], papers)
    for name in sorted({line["benchmark"] for line in timings}):
        own = [line for line in timings if line["benchmark"] == name]
        origins = [
            (
                line["variant"],
                *(line.get(key, "") for key in ("hardware", "commit", "command")),
            )
            for line in own
        ]
        write_page(
            f"benchmark/{name}",
            [*benchmark_tables(to_rows(own)), origins_table(origins)],
            [],
            folder,
        )
    write_page("Claims", [verdicts_table(found)], [], folder)
    write_days(Path(config.results) / "days", folder)
    print(f"written to {folder}")


def write_comparison(selection: Selection, papers: Papers, folder: Path) -> None:
    """Write the page of an experiment or a sweep, with its plots as SVG files."""
    comparison = compare(selection)
    origins = [
        (str(run.info.run_name), *(run.data.tags.get(tag, "") for tag in ORIGIN))
        for run in selection.runs
    ]
    shown = [
        *tables(comparison),
        *paper_tables(comparison),
        *beside_the_papers(comparison, papers),
        origins_table(origins),
    ]
    words = []
    for plot in plots(comparison, more=(tokenizers, beams)):
        write(plot.to_file(), str(folder / f"{plot.name}.svg"))
        words.append(
            f"### {plot.title}\n\n![{plot.title}]({plot.name}.svg)\n\n{plot.caption}\n"
        )
    write_page(selection.title, shown, words, folder)


def write_days(results: Path, folder: Path) -> None:
    """Write the page of policies on logs that grow by days, if figures exist."""
    shown, words = [], []
    for of_log, plot in days.pages(results):
        shown += of_log
        write(plot.to_file(), str(folder / f"{plot.name}.svg"))
        words.append(
            f"### {plot.title}\n\n![{plot.title}]({plot.name}.svg)\n\n{plot.caption}\n"
        )
    if shown:
        shown.append(
            Table(
                "Policies",
                ["policy", "model"],
                [[f"`{name}`", text] for name, text in days.POLICIES.items()],
            )
        )
        write_page("Days", shown, words, folder)


def write_page(
    title: str, shown: Sequence[Table], words: Sequence[str], folder: Path
) -> None:
    """Write tables, then texts, as Markdown to a file named by the title."""
    content = "\n".join([*(table.markdown() for table in shown), *words])
    name = re.sub(r"\W+", "-", title.lower())
    write(f"# {title}\n\n{content}", str(folder / f"{name}.md"))


if __name__ == "__main__":
    cli.main(run, Config)
