"""Build a self-contained HTML page of a comparison: tables, and plots as SVG.

    write(build(title, uri, tables, plots), "page.html")

The page loads nothing from the network, and follows the colour scheme of the browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from core.errors import UserError
from pipelines.comparison.runs import Selection
from pipelines.comparison.svg import Plot
from pipelines.comparison.table import Table
from pipelines.tracking import KIND_TAG

STYLE = """
:root { color-scheme: light dark; --page: #fdfdfc; --ink: #1c1e21; --soft: #6a6f76;
  --line: #dcdedf; --row: #f3f4f4; }
@media (prefers-color-scheme: dark) {
  :root { --page: #17191c; --ink: #e4e6e8; --soft: #9aa0a6; --line: #34383d;
    --row: #1f2226; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 84rem;
  background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
nav { color: var(--soft); } nav a { color: inherit; margin-right: .9em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .5rem; text-align: left;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.number { text-align: right; } tbody tr:hover { background: var(--row); }
.notes { color: var(--soft); font-size: 12.5px; margin: .5rem 0; padding-left: 1.2em; }
figure { margin: 0; }
figure svg { width: 100%; max-width: 60rem; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 13px; max-width: 60rem; }
"""


def build(
    title: str, source: str, tables: Sequence[Table], plots: Sequence[Plot]
) -> str:
    """Build a page: the first two tables, the plots, then the other tables.

    Args:
        title: Heading of the page.
        source: Text that names the store of the runs.
        tables: Tables, those with verdicts first.
        plots: Rendered plots.

    Returns:
        The HTML document.
    """
    links = "".join(
        f'<a href="#{escape(plot.name)}">{escape(plot.title)}</a>' for plot in plots
    )
    sections = [
        *(table.html() for table in tables[:2]),
        *map(build_section, plots),
        *(table.html() for table in tables[2:]),
    ]
    body = "\n".join(sections)
    return f"""<!doctype html>
<html lang=en>
<meta charset=utf-8>
<meta name=viewport content="width=device-width">
<link rel=icon href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
<body>
<h1>{escape(title)}</h1>
<p class=notes>from {escape(source)}</p>
<nav>{links}</nav>
{body}
</body></html>
"""


def build_section(plot: Plot) -> str:
    """Return a plot as an HTML section with heading and caption."""
    title = escape(plot.title)
    return (
        f'<section id="{escape(plot.name)}"><h2>{title}</h2>\n'
        f'<figure role=group aria-label="{title}">{plot.svg}\n'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure></section>"
    )


def write(content: str, path: str) -> None:
    """Write a file, and create its folder if needed."""
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})") from error


def log_page(selection: Selection, content: str, markdown: str) -> str:
    """Log a page as `compare.html`, and its tables as `compare.md`, to MLflow.

    The files become artifacts of the compared sweep, or else of a run `compare` in the
    experiment of the first compared run.

    Args:
        selection: Runs that the page compares.
        content: HTML of the page.
        markdown: The tables as Markdown.

    Returns:
        The name of the MLflow run.
    """
    client = selection.client
    run = selection.sweep or open_page_run(selection)
    client.log_text(run.info.run_id, content, "compare.html")
    client.log_text(run.info.run_id, markdown, "compare.md")
    if selection.sweep is None:
        client.set_terminated(run.info.run_id)
    return str(run.info.run_name)


def open_page_run(selection: Selection) -> Any:
    """Return the MLflow run of an experiment's page, and create it if needed."""
    client = selection.client
    experiment_id = next(iter(selection.experiments))
    if selection.runs:
        experiment_id = selection.runs[0].info.experiment_id
    pages = client.search_runs(
        [experiment_id], f"tags.`{KIND_TAG}` = 'compare'", max_results=1
    )
    if pages:
        return pages[0]
    tags = {KIND_TAG: "compare"}
    return client.create_run(experiment_id, run_name="compare", tags=tags)
