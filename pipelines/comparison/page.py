"""One self-contained HTML page of a comparison: tables, plots as SVG, nothing from the network.

    page.write(page.build("retrieval/DATASET", tables, plots), "page.html")

Light or dark as the reader's system is.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from models.storage.tables import UserError
from pipelines.comparison.plots import Plot
from pipelines.comparison.runs import KIND, Selection
from pipelines.comparison.table import Table

STYLE = """
:root { color-scheme: light dark; --page: #fdfdfc; --ink: #1c1e21; --soft: #6a6f76; --line: #dcdedf; --row: #f3f4f4; }
@media (prefers-color-scheme: dark) {
  :root { --page: #17191c; --ink: #e4e6e8; --soft: #9aa0a6; --line: #34383d; --row: #1f2226; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 84rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
nav { color: var(--soft); } nav a { color: inherit; margin-right: .9em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.number { text-align: right; } tbody tr:hover { background: var(--row); }
.notes { color: var(--soft); font-size: 12.5px; margin: .5rem 0; padding-left: 1.2em; }
figure { margin: 0; } figure svg { width: 100%; max-width: 60rem; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 13px; max-width: 60rem; }
"""


def build(
    title: str, source: str, tables: Sequence[Table], plots: Sequence[Plot]
) -> str:
    """The page: `title`, where the runs are from, links to the plots; the first table, the plots, the other tables."""
    links = "".join(
        f'<a href="#{escape(plot.name)}">{escape(plot.title)}</a>' for plot in plots
    )
    figures = "\n".join(
        f'<section id="{escape(plot.name)}"><h2>{escape(plot.title)}</h2>\n<figure role=group aria-label='
        f'"{escape(plot.title)}">{plot.svg}\n<figcaption>{escape(plot.caption)}</figcaption></figure></section>'
        for plot in plots
    )
    return (
        f'<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<meta name=viewport content="width=device-width">\n'
        f'<link rel=icon href="data:,">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n<body>\n'
        f"<h1>{escape(title)}</h1>\n<p class=notes>from {escape(source)}</p>\n<nav>{links}</nav>\n"
        + "\n".join(
            [
                *(table.html() for table in tables[:1]),
                figures,
                *(table.html() for table in tables[1:]),
            ]
        )
        + "\n</body></html>\n"
    )


def write(content: str, path: str) -> None:
    """Writes a file, with its folder; UserError where that cannot be."""
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); choose another file"
        ) from error


def log(selection: Selection, content: str, markdown: str) -> str:
    """Logs the page as `compare.html`, and the tables as `compare.md`, to the sweep's run, else to the run named
    `compare` of the experiment of the first run, made if need be; gives the name of that run."""
    client = selection.client
    run = selection.sweep
    if run is None:
        home = (
            selection.runs[0].info.experiment_id
            if selection.runs
            else next(iter(selection.experiments))
        )
        found = client.search_runs([home], f"tags.`{KIND}` = 'compare'", max_results=1)
        run = (
            found[0]
            if found
            else client.create_run(home, run_name="compare", tags={KIND: "compare"})
        )
    client.log_text(run.info.run_id, content, "compare.html")
    client.log_text(run.info.run_id, markdown, "compare.md")
    if selection.sweep is None:
        client.set_terminated(run.info.run_id)
    return str(run.info.run_name)
