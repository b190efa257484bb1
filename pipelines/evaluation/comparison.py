"""The runs of an MLflow experiment side by side: one row per model and settings, seeds together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.tables import UserError
from pipelines import tracking

SHOWN = ("val/ndcg@10", "test/recall@5", "test/recall@10", "test/ndcg@5", "test/ndcg@10")
"""Metrics of the table, in order; those that no run has are left out."""

OTHER = {"model.name", "fit.seed", "fit.log_every_steps", "fit.eval_batch_size", "fit.checkpoint_every_steps"}
"""Params in which runs of one row may differ."""


@dataclass
class Row:
    """Runs that differ in their seed alone."""

    name: str
    """Names of the runs, those of one row shortened to what they share."""
    model: str
    """Name in the registry."""
    settings: dict[str, str] = field(default_factory=dict)
    """Params in which it differs from other rows of the same model."""
    seeds: list[str] = field(default_factory=list)
    """Seeds of its runs."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> one value per run that has it."""
    unfinished: int = 0
    """Runs that are not finished."""

    def mean(self, metric: str) -> float:
        """Mean over the runs, or NaN."""
        return statistics.fmean(self.values[metric]) if self.values.get(metric) else math.nan

    def deviation(self, metric: str) -> float:
        """Sample standard deviation over the runs, or NaN for one run."""
        values = self.values.get(metric, [])
        return statistics.stdev(values) if len(values) > 1 else math.nan


@dataclass
class Table:
    """A comparison, to be printed."""

    experiment: str
    """Name of the experiment."""
    header: list[str]
    """Names of the columns."""
    cells: list[list[str]]
    """One list per row."""
    notes: list[str]
    """Lines under the table."""

    def text(self) -> str:
        """For the terminal: columns aligned."""
        widths = [max(len(line[i]) for line in [self.header, *self.cells]) for i in range(len(self.header))]

        def line(cells: Iterable[str]) -> str:
            left = 2  # model and run are words, the rest are numbers
            aligned = [
                c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            ]
            return "  ".join(aligned).rstrip()

        rule = "-" * len(line(self.header).ljust(sum(widths) + 2 * (len(widths) - 1)))
        return "\n".join([self.experiment, line(self.header), rule, *map(line, self.cells), *self.notes])

    def markdown(self) -> str:
        """As a Markdown table with the notes below."""
        align = ["---"] * 2 + ["---:"] * (len(self.header) - 2)
        lines = [self.header, align, *([cell.replace("|", "\\|") for cell in row] for row in self.cells)]
        body = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        notes = "".join(f"\n{note}\n" for note in self.notes)
        return f"### {self.experiment}\n\n{body}\n{notes}"


def read_rows(uri: str, experiment: str) -> list[Row]:
    """The experiment's runs, grouped; UserError with the nearest name for an experiment that is not there."""
    client = tracking.connect(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        known = [e.name for e in client.search_experiments() if e.name != "Default"]
        there = f"there are {', '.join(known)}" if known else "it holds none"
        raise UserError(f"the experiment '{experiment}' is not at {uri}; {there}")
    runs: list[Any] = []
    token: str | None = None
    while True:
        page = client.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"], page_token=token)
        runs += page
        token = page.token
        if not token:
            break
    rows: dict[tuple, Row] = {}
    params: dict[tuple, dict[str, str]] = {}
    for run in runs:
        given = run.data.params
        if "model.name" not in given:
            continue
        alike = {key: value for key, value in given.items() if key not in OTHER and key.startswith(("model.", "fit."))}
        tables = {key: value for key, value in run.data.tags.items() if key.startswith("table.")}
        key = (given["model.name"], *sorted(alike.items()), *sorted(tables.items()))
        row = rows.setdefault(key, Row(run.info.run_name, given["model.name"]))
        params.setdefault(key, alike | tables)
        row.name = shared_name(row.name, run.info.run_name)
        row.seeds.append(given.get("fit.seed", ""))
        row.unfinished += run.info.status != "FINISHED"
        best = {
            name.removeprefix("best/"): value for name, value in run.data.metrics.items() if name.startswith("best/")
        }
        measured = {name: value for name, value in run.data.metrics.items() if not name.startswith(("best/", "val/"))}
        last = {name: value for name, value in run.data.metrics.items() if name.startswith("val/")}
        for name, value in {**measured, **last, **{f"val/{name}": value for name, value in best.items()}}.items():
            row.values.setdefault(tracking.shown_name(name), []).append(value)
    for key, row in rows.items():
        others = [p for other, p in params.items() if other[0] == key[0]]
        for name in sorted({name for p in others for name in p}):
            if len({p.get(name) for p in others}) > 1:
                row.settings[name] = params[key].get(name, "none")
    return list(rows.values())


def shared_name(first: str, second: str) -> str:
    """What two names begin with, as `tiger-seed*`."""
    if first == second:
        return first
    common = Path(first.rstrip("*")).name
    while not second.startswith(common):
        common = common[:-1]
    return f"{common}*"


def compare(uri: str, experiment: str, metric: str = "ndcg@10") -> Table:
    """The table of an experiment, best first by `metric` on test, then on val."""
    rows = read_rows(uri, experiment)
    if not rows:
        raise UserError(f"the experiment '{experiment}' at {uri} has no runs; train one with jobs.train")

    def rank(row: Row) -> tuple[float, float]:
        test, val = row.mean(f"test/{metric}"), row.mean(f"val/{metric}")
        return (-test if math.isfinite(test) else math.inf, -val if math.isfinite(val) else math.inf)

    rows.sort(key=rank)
    wanted = list(dict.fromkeys([f"val/{metric}", *SHOWN, f"test/{metric}"]))
    metrics = [name for name in wanted if any(name in row.values for row in rows)]
    others = sorted(
        {name for row in rows for name in row.values if name.startswith("test-") and name.endswith(f"/{metric}")}
    )
    header = ["model", "run", "seeds", *metrics, *others, "users", "params", "epoch", "train s", "users/s"]
    cells = [
        [
            row.model,
            row.name,
            str(len(set(row.seeds))),
            *(figure(row, name) for name in metrics + others),
            number(row, "test/examples"),
            number(row, "train/parameters"),
            number(row, "val/epoch"),
            number(row, "train/total_seconds"),
            number(row, "test/users_per_s"),
        ]
        for row in rows
    ]
    notes = ["val: at the best epoch. users: requests ranked on test over the full catalogue, one each."]
    if any(len(row.seeds) > 1 for row in rows):
        notes.append("±: sample standard deviation over the runs of a row, which differ in their seed alone.")
    for row in rows:
        if row.settings:
            shown = ", ".join(f"{name} {value[:12]}" for name, value in row.settings.items())
            notes.append(f"{row.name}: {shown}")
        if row.unfinished:
            notes.append(f"{row.name}: {row.unfinished} of {len(row.seeds)} runs not finished")
    return Table(experiment, header, cells, notes)


def figure(row: Row, metric: str) -> str:
    """Mean, with the deviation where there are several runs."""
    mean, deviation = row.mean(metric), row.deviation(metric)
    if math.isnan(mean):
        return "-"
    return f"{mean:.4f}" if math.isnan(deviation) else f"{mean:.4f} ± {deviation:.4f}"


def number(row: Row, metric: str) -> str:
    """Mean as a whole number."""
    return "-" if math.isnan(row.mean(metric)) else f"{row.mean(metric):,.0f}"
