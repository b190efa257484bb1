"""What jobs.compare does once its line is read: tables printed, pages, plots and files written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from models.tables import UserError
from models.words import number_of
from pipelines import tracking
from pipelines.comparison import results, sweep_plots
from pipelines.comparison.benchmark_plots import read_lines
from pipelines.comparison.benchmark_runs import log_lines
from pipelines.comparison.benchmark_tables import of_benchmark
from pipelines.comparison.claims import verdicts, verdicts_table
from pipelines.comparison.options import Options
from pipelines.comparison.published import CLAIMS, Papers, beside_the_papers, load, of_grid
from pipelines.comparison.rows import Comparison, best_run, compare, rows_of
from pipelines.comparison.run_tables import best_table, origins_table, tables
from pipelines.comparison.runs import select, select_all, sweeps_of
from pipelines.comparison.table import Table
from pipelines.comparison.tokenizer_tables import sids_table
from pipelines.tracking import unknown


def homes(uris: Sequence[str], experiments: Sequence[str]) -> dict[str, list[str]]:
    """The experiments by the store that they are in; UserError for one that is in none."""
    known = {uri: {found.name for found in tracking.connect(uri).search_experiments()} for uri in uris}
    for name in experiments:
        if not any(name in there for there in known.values()):
            raise UserError(unknown("experiment", name, uris, set().union(*known.values())))
    return {uri: [name for name in experiments if name in known[uri]] for uri in uris}


def comparisons(config: Options, uris: Sequence[str]) -> list[Comparison]:
    """One for each experiment, or for the sweep or the runs."""
    if config.sweep or config.run:
        return [compare(select(uris[0], config.experiment, config.sweep, config.run), config.metric)]
    there = homes(uris, config.experiment)
    found = []
    for name in config.experiment:
        first, *others = (select(uri, [name]) for uri in uris if name in there[uri])
        found.append(compare(first, config.metric, others))
    return found


def paper_tables(found: Sequence[Comparison], papers: Papers) -> list[Table]:
    """Ours beside what the papers print, by claims.yaml or else by the grid of the sweep."""
    shown = []
    for comparison in found:
        points = sweep_plots.grid_of(comparison).get("published") or []
        theirs = of_grid(points, comparison.rows[0].model)
        shown += beside_the_papers(comparison, papers) or beside_the_papers(comparison, theirs)
    return shown


def claims_table(config: Options, uris: Sequence[str], papers: Papers) -> Table:
    """All claims, by the runs of the experiments and of benchmarks, or by all."""
    selections = []
    for uri, names in homes(uris, config.experiment).items():
        chosen = [e.name for e in tracking.connect(uri).search_experiments() if e.name.startswith("benchmark/")]
        selections.append(select_all(uri, [*names, *chosen] if config.experiment else None))
    return verdicts_table(verdicts(rows_of(*selections), papers))


def write_page(
    config: Options, uris: Sequence[str], found: Sequence[Comparison], shown: Sequence[Table], path: str
) -> None:
    """Writes the page and logs it to MLflow, of several stores to the first one's."""
    from pipelines.comparison import page
    from pipelines.comparison.plots import benchmark_plots, plots

    drawn = [
        replace(plot, title=f"{comparison.selection.title}: {plot.title}") if len(found) > 1 else plot
        for comparison in found
        for plot in plots(comparison)
    ]
    drawn += benchmark_plots([line for file in config.benchmark for line in read_lines(file)])
    title = ", ".join(comparison.selection.title for comparison in found) or "Claims of the papers"
    content = page.build(title, ", ".join(uris), shown, drawn)
    page.write(content, path)
    selection = found[0].selection if found else select_all(uris[0])
    run = page.log(selection, content, "\n".join(table.markdown() for table in shown))
    print(f"{number_of(len(drawn), 'plot')} written to {path}, and to MLflow as compare.html of the run '{run}'")


def write_pages(
    config: Options, uris: Sequence[str], found: Sequence[Comparison], papers: Papers, claims: Sequence[Table]
) -> None:
    """A Markdown page for each comparison and for each sweep in it, with its tables, those of the papers and its plots
    as SVG beside it; and one of the claims, where they are asked for."""
    from pipelines.comparison.page import write
    from pipelines.comparison.plots import plots

    folder = Path(str(config.markdown))
    sweeps = [
        compare(select(uri, [name], sweep), config.metric)
        for uri, names in homes(uris, config.experiment).items()
        for name in names
        for sweep in sweeps_of(uri, name)
    ]
    for comparison in [*found, *sweeps]:
        name = re.sub(r"\W+", "-", comparison.selection.title)
        shown = [*tables(comparison), *paper_tables([comparison], papers), origins_table(comparison)]
        words = [table.markdown() for table in shown]
        for plot in [] if of_benchmark(comparison.rows) else plots(comparison):
            write(plot.alone(), str(folder / f"{plot.name}.svg"))
            words.append(f"### {plot.title}\n\n![{plot.title}]({plot.name}.svg)\n\n{plot.caption}\n")
        write(f"# {comparison.selection.title}\n\n" + "\n".join(words), str(folder / f"{name}.md"))
        print(f"written to {folder / name}.md")
    for table in claims:
        write(f"# Claims\n\n{table.markdown()}", str(folder / "claims.md"))
        print(f"written to {folder}/claims.md")


def register_best(comparison: Comparison, name: str) -> None:
    """The comparison's best run by validation as a version of the registered model `name`."""
    from pipelines.serving.registered_model import register

    best = best_run(comparison)
    ref = tracking.RunRef(best.uri, comparison.rows[0].experiment, best.id)
    version = register(ref, name, f"val/{comparison.metric}")
    print(f"registered: version {version.version} of {name} is the best checkpoint of {best.name} by validation")
    print(f"  load it   mlflow.pyfunc.load_model('models:/{name}/{version.version}')")


def run(config: Options, uris: Sequence[str]) -> None:
    """Prints the tables of the stores, or of the files in place of them, and writes what is asked for."""
    if config.results:
        with results.store(config.results) as uri:
            named = bool(config.experiment or config.sweep or config.run)
            every = [] if named else [e.name for e in tracking.connect(uri).search_experiments() if e.name != "Default"]
            show(replace(config, experiment=sorted([*config.experiment, *every])), [uri])
        return
    show(config, uris)
    for uri in uris:
        print(f"look at it: {tracking.viewer(uri)}")


def show(config: Options, uris: Sequence[str]) -> None:
    """Prints the tables of the runs in the stores, and writes what is asked for."""
    for file, lines in [(file, read_lines(file)) for file in config.benchmark]:  # all are read before one is logged
        print(f"{log_lines(uris[0], lines)} new lines of {file} logged to MLflow")
    found = comparisons(config, uris)
    papers = load(config.claims_file or CLAIMS) if config.from_mlflow else Papers({}, [], [])
    shown = [table for comparison in found for table in tables(comparison)]
    shown += [best] if (best := best_table(found)) else []
    shown += paper_tables(found, papers)
    claims = [claims_table(config, uris, papers)] if config.claims else []
    shown += claims
    shown += [sids_table(config.sids)] if config.sids else []
    print("\n\n".join(table.text() for table in shown))
    if config.export:
        exported = results.export([c.selection for c in found], config.export)
        print(f"{number_of(exported, 'run')} exported to {config.export}")
    if config.markdown and (config.markdown.endswith("/") or Path(config.markdown).is_dir()):
        write_pages(config, uris, found, papers, claims)
    elif config.markdown:
        from pipelines.comparison.page import write

        write("\n".join(table.markdown() for table in shown), config.markdown)
        print(f"written to {config.markdown}")
    if config.html:
        write_page(config, uris, found, shown, config.html)
    if config.register:
        register_best(found[0], config.register)
    if config.pareto:
        from pipelines.comparison.pareto import draw

        print(f"{number_of(draw(found[0], config.pareto), 'point')} drawn to {config.pareto}")
