"""What the papers print, beside what runs here measured: `claims.yaml` says both how a system is told and its figures.

    papers = load("claims.yaml")
    for table in beside_the_papers(comparison, papers): print(table.text())

Datasets differ, so figures stand beside each other as they are and relative to the same reference system.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from models.tables import UserError
from pipelines.evaluation.comparison import Comparison, Row, lower_is_better
from pipelines.evaluation.table import Table

CLAIMS = Path(__file__).parents[2] / "claims.yaml"
"""The file of this checkout."""


@dataclass(frozen=True)
class System:
    """How a system of a paper is told among rows."""

    model: str | list[str]
    """Name in the registry, or BENCHMARK/VARIANT; or several names."""
    params: dict[str, Any] = field(default_factory=dict)
    """Params of the model and what they are: a value, a list of values, {above: n}, or any."""

    def matches(self, row: Row) -> bool:
        """Whether the row is this system's, evaluated as it was trained or with the `beam` that is asked for."""
        if not fits(row.model, self.model) or (
            row.options and not ("beam" in self.params and row.options[:5] == "beam-")
        ):
            return False
        return all(fits(value_of(row, name), wanted) for name, wanted in self.params.items())


@dataclass(frozen=True)
class Published:
    """A table of a paper, or what a grid file knows of it."""

    source: str
    """Paper and table."""
    metrics: list[str]
    """Metrics, as runs here have them."""
    datasets: dict[str, dict[str, list[float]]]
    """By dataset and system, a figure per metric."""
    reference: str | None = None
    """System that others are seen against."""
    relative: bool = False
    """Whether the figures are changes against the reference, and absolute ones are not printed."""

    def value(self, dataset: str, system: str, metric: str) -> float | None:
        """The printed figure, or None."""
        line = self.datasets[dataset].get(system)
        value = line[self.metrics.index(metric)] if line and metric in self.metrics else math.nan
        return None if math.isnan(value) else value

    def change(self, dataset: str, system: str, metric: str, reference: str | None = None) -> float | None:
        """(system - reference) / reference, or None where one is not printed."""
        reference = reference or self.reference
        value = self.value(dataset, system, metric)
        base = self.value(dataset, reference, metric) if reference else None
        if value is None or base is None:
            return None
        if self.relative:
            return (1 + value) / (1 + base) - 1
        return value / base - 1


@dataclass
class Papers:
    """The content of the file."""

    systems: dict[str, System]
    published: list[Published]
    claims: list[dict[str, Any]]
    """Rules, as `claims.py` reads them."""


def value_of(row: Row, name: str) -> str | None:
    """The row's param; `beam` is that of its evaluation."""
    if name == "beam":
        return str(row.beam) if row.beam else None
    return row.params.get(name, row.params.get(f"model.{name}"))


def fits(value: str | None, wanted: Any) -> bool:
    """Whether a param, a string, is what is wanted."""
    if wanted == "any" or value is None:
        return bool(wanted == "any")
    if isinstance(wanted, list):
        return any(fits(value, each) for each in wanted)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if isinstance(wanted, dict):
        return number > wanted["above"]
    if isinstance(wanted, int | float) and not isinstance(wanted, bool):
        return number == wanted
    return value == str(wanted)


def load(path: str | Path = CLAIMS) -> Papers:
    """The file's content; UserError with the nearest name for an unknown key or system."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {path} ({' '.join(str(error).split())}); give another --claims_file") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}; it needs systems, published and claims")
    check_names(content, ("systems", "published", "claims"), str(path))
    systems: dict[str, System] = {}
    for name, given in content.get("systems", {}).items():
        check_names(given, ("model", "like", "params"), f"{path}, system {name}")
        if "like" in given:
            check_names([given["like"]], systems, f"{path}, system {name}")
            base = systems[given["like"]]
            systems[name] = System(base.model, {**base.params, **given.get("params", {})})
        else:
            systems[name] = System(given["model"], given.get("params", {}))
    published = []
    for given in content.get("published", []):
        where = f"{path}, {given.get('source', 'published')}"
        check_names(given, [f.name for f in fields(Published)], where)
        published.append(Published(**given))
        for lines in given["datasets"].values():
            check_names(lines, systems, where)
            for name, line in lines.items():
                if len(line) != len(given["metrics"]):
                    raise UserError(f"{where}: {name} has {len(line)} figures for {len(given['metrics'])} metrics")
    for claim in content.get("claims", []):
        used = [claim[side] for side in ("left", "right", "system") if side in claim]
        check_names(used, systems, f"{path}, claim {claim.get('id')}")
    return Papers(systems, published, content.get("claims", []))


def check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """UserError for a name that is not known."""
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            raise UserError(f"{where}: '{name}' is unknown; the nearest is '{near[0] if near else 'none'}'")


def best_row(rows: Sequence[Row], system: System, metric: str) -> Row | None:
    """Of the system's rows that have the metric the one that is best on validation."""
    there = [row for row in rows if system.matches(row) and row.values(metric)]
    on_val = f"val/{metric.split('/', 1)[1]}"
    sign = 1 if lower_is_better(metric) else -1

    def rank(row: Row) -> float:
        return sign * row.mean(on_val) if row.values(on_val) else math.inf

    return min(there, key=rank) if there else None


def beside_the_papers(comparison: Comparison, papers: Papers) -> list[Table]:
    """A table per source that has a system which is measured here."""
    made = [beside(comparison, published, papers.systems) for published in papers.published]
    return [table for table in made if table is not None]


def beside(comparison: Comparison, published: Published, systems: dict[str, System]) -> Table | None:
    """Ours beside one source's; None where no system is measured here, or none beside the reference."""
    names = list(dict.fromkeys(name for lines in published.datasets.values() for name in lines))
    datasets = list(published.datasets)
    cells: list[list[str]] = []
    for metric in published.metrics:
        found = {name: best_row(comparison.rows, systems[name], metric) for name in names}
        ours = {name: row for name, row in found.items() if row is not None}
        base = ours.get(published.reference or "")
        if not ours or (published.reference and (base is None or len(ours) == 1)):
            continue
        for name, row in ours.items():
            change = row.mean(metric) / base.mean(metric) - 1 if base and base is not row else None
            absolute = [published.value(dataset, name, metric) for dataset in datasets]
            theirs = [published.change(dataset, name, metric) for dataset in datasets]
            cells.append(
                [name, row.name, metric, f"{row.mean(metric):.4f}"]
                + ([] if published.relative else ["-" if value is None else f"{value:.4f}" for value in absolute])
                + (
                    [percent(change), *("" if name == published.reference else percent(value) for value in theirs)]
                    if published.reference
                    else []
                )
            )
    if not cells:
        return None
    against = f"vs {published.reference}"
    header = ["system", "run", "metric", "ours"] + ([] if published.relative else datasets)
    header += [f"ours {against}", *(f"{dataset} {against}" for dataset in datasets)] if published.reference else []
    notes = [f"{', '.join(datasets)}: as printed in {published.source}; ours on {comparison.selection.title}."]
    return Table(f"Beside the paper: {published.source}", header, cells, notes, 3)


def percent(change: float | None) -> str:
    return "" if change is None else f"{change:+.1%}" if abs(change) >= 0.01 else f"{change:+.2%}"


def of_grid(points: Sequence[dict[str, Any]], model: str) -> Papers:
    """The published results of a grid file: a system per point, of `model` where the point names none."""
    systems: dict[str, System] = {}
    sources: dict[tuple[str, str | None], Published] = {}

    def system(point: dict[str, Any]) -> str:
        params = {key: value for key, value in point.items() if key != "model.name"}
        words = [point["model.name"]] if "model.name" in point else []
        name = ", ".join(words + [f"{key.removeprefix('model.')} {value}" for key, value in params.items()])
        systems[name] = System(point.get("model.name", model), params)
        return name

    for given in points:
        name, source = system(given.get("point", {})), given.get("source", "the grid's paper")
        base = system(given["relative_to"]) if "relative_to" in given else None
        entry = sources.setdefault((source, base), Published(source, [], {}, base, relative=base is not None))
        entry.metrics.extend(metric for metric in given.get("metrics", {}) if metric not in entry.metrics)
        lines = entry.datasets.setdefault(given.get("dataset", "published"), {})
        for each, figures in ((base, {}), (name, given.get("metrics", {}))):
            if each is not None:
                known = dict(zip(entry.metrics, lines.get(each, []), strict=False)) | figures
                empty = 0.0 if each == base else math.nan
                lines[each] = [known.get(metric, empty) for metric in entry.metrics]
    for entry in sources.values():
        for lines in entry.datasets.values():
            for name, line in lines.items():
                line += [0.0 if name == entry.reference else math.nan] * (len(entry.metrics) - len(line))
    return Papers(systems, list(sources.values()), [])
