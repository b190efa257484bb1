"""Compare measured metrics with the figures that the papers print.

    papers = load()
    for table in beside_the_papers(comparison, papers):
        print(table.text())

`claims.yaml` has the printed figures, and the rules that assign runs to the systems of
the papers. Only runs on the papers' datasets are compared, by absolute figures and by
the change relative to the same reference system.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from models.config import check_known, read_yaml
from models.storage.tables import UserError
from pipelines.comparison.rows import (
    TEACHER_PARAMS,
    Comparison,
    Row,
    Run,
    lower_is_better,
    ratio,
)
from pipelines.comparison.table import Table, percent

CLAIMS = Path(__file__).with_name("claims.yaml")
"""File of rules and figures."""

USERS = {"Instruments": 57_439, "Scientific": 50_985, "Games": 94_762}
"""Users of the papers' datasets (Table 10 of SID-MLP), which identify runs on them:
logs of other years have similar names. The datasets of QGS and AttnMVP are not public.
"""


@dataclass(frozen=True)
class System:
    """A system of a paper, as a rule that recognises its rows."""

    model: str | list[str]
    """Name in the registry, or BENCHMARK/VARIANT; or several names."""
    params: dict[str, Any] = field(default_factory=dict)
    """Required params of the model: a value, a list of values, {above: n}, or any."""

    def matches(self, row: Row) -> bool:
        """Return whether a row measures this system.

        A row that was evaluated with other options than its checkpoint's matches only
        if the system requires a `beam` and the row's options have one.
        """
        if not fits(row.model, self.model):
            return False
        has_beam = "beam" in self.params and "beam" in row.options.names
        if row.options and not has_beam:
            return False
        return all(
            fits(param_value(row, name), required)
            for name, required in self.params.items()
        )


@dataclass(frozen=True)
class Published:
    """The figures of a paper's table."""

    source: str
    """Paper and table."""
    metrics: list[str]
    """Names of the metrics in this project."""
    datasets: dict[str, dict[str, list[float]]]
    """Figures of the metrics, in their order, by dataset and system."""
    reference: str | None = None
    """System to which the table's relative changes refer, if any."""
    relative: bool = False
    """Whether the paper prints only changes relative to the reference."""

    def value(self, dataset: str, system: str, metric: str) -> float | None:
        """Return the printed figure of a system, or None if the paper prints none.

        Args:
            dataset: Name of the dataset in the paper.
            system: Name of the system.
            metric: Name of the metric in this project.
        """
        figures = self.datasets[dataset].get(system)
        if not figures or metric not in self.metrics:
            return None
        value = figures[self.metrics.index(metric)]
        return None if math.isnan(value) else value

    def change(
        self, dataset: str, system: str, metric: str, reference: str | None = None
    ) -> float | None:
        """Return the relative change of a system over a reference.

        Args:
            dataset: Name of the dataset in the paper.
            system: Name of the system.
            metric: Name of the metric.
            reference: Name of the system to compare with; by default the table's
                reference.

        Returns:
            The change, such as 0.1 for 10% more, or None if the paper does not print
            both figures.
        """
        reference = reference or self.reference
        value = self.value(dataset, system, metric)
        base = self.value(dataset, reference, metric) if reference else None
        if value is None or base is None:
            return None
        if self.relative:
            return (1 + value) / (1 + base) - 1
        return ratio(value, base) - 1


@dataclass
class Papers:
    """Content of claims.yaml."""

    systems: dict[str, System]
    """Systems by name."""
    published: list[Published]
    """Tables of the papers."""
    claims: list[dict[str, Any]]
    """Rules of claims, which `papers.claims.read_claims` converts."""


def param_value(row: Row, name: str) -> str | None:
    """Return a param of a row, or None; `beam` is the beam width of its evaluation."""
    if name == "beam":
        return str(row.beam) if row.beam else None
    return row.params.get(name, row.params.get(f"model.{name}"))


def fits(value: str | None, required: Any) -> bool:
    """Return whether a param meets a requirement of claims.yaml.

    Args:
        value: Param of a run, as MLflow stores it; None if the run does not have it.
        required: A value, a list of values, `{above: n}`, or `any`.
    """
    if required == "any":
        return True
    if value is None:
        return False
    if isinstance(required, list):
        return any(fits(value, item) for item in required)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if isinstance(required, dict):
        return number > required["above"]
    if isinstance(required, int | float) and not isinstance(required, bool):
        return number == required
    return value == str(required)


def load(path: str | Path = CLAIMS) -> Papers:
    """Load systems, published figures and claims from a YAML file.

    Raises:
        UserError: If a key or a system is unknown (the message names the most similar),
            or a key is missing.
    """
    content = read_yaml(str(path), "give a file with systems, published and claims")
    check_names(content, ("systems", "published", "claims"), str(path))
    systems: dict[str, System] = {}
    for name, entry in content.get("systems", {}).items():
        systems[name] = parse_system(entry, systems, f"{path}, system {name}")
    published = [
        parse_published(entry, systems, f"{path}, {entry.get('source', 'published')}")
        for entry in content.get("published", [])
    ]
    claims = content.get("claims", [])
    for claim in claims:
        used = [claim[key] for key in ("left", "right", "system") if key in claim]
        check_names(used, systems, f"{path}, claim {claim.get('id')}")
    return Papers(systems, published, claims)


def parse_system(
    entry: dict[str, Any], systems: Mapping[str, System], label: str
) -> System:
    """Return the system of an entry in claims.yaml.

    Args:
        entry: Keys `model` or `like`, and `params`.
        systems: Systems above the entry, to which `like` refers.
        label: Name of the entry in messages.
    """
    check_names(entry, ("model", "like", "params"), label)
    params = entry.get("params", {})
    if "like" not in entry:
        check_required(entry, ("model",), label)
        return System(entry["model"], params)
    check_names([entry["like"]], systems, label)
    base = systems[entry["like"]]
    return System(base.model, {**base.params, **params})


def parse_published(
    entry: dict[str, Any], systems: Mapping[str, System], label: str
) -> Published:
    """Return the table of an entry in claims.yaml.

    Args:
        entry: Fields of `Published` by name.
        systems: Known systems.
        label: Name of the entry in messages.
    """
    check_names(entry, [field.name for field in fields(Published)], label)
    check_required(entry, ("source", "metrics", "datasets"), label)
    num_metrics = len(entry["metrics"])
    for figures_by_system in entry["datasets"].values():
        check_names(figures_by_system, systems, label)
        for name, figures in figures_by_system.items():
            if len(figures) != num_metrics:
                raise UserError(
                    f"{label}: {name} has {len(figures)} figures for {num_metrics} "
                    f"metrics"
                )
    return Published(**entry)


def check_names(names: Iterable[str], known: Iterable[str], label: str) -> None:
    """Raise UserError for a name that is not known, with the most similar known name.

    Args:
        names: Names to check.
        known: Allowed names.
        label: Start of the message, which says where the names are from.
    """
    check_known(
        names,
        known,
        lambda name, near: f"{label}: '{name}' is unknown; the nearest is '{near}'",
    )


def check_required(keys: Iterable[str], required: Iterable[str], label: str) -> None:
    """Raise UserError for a missing key.

    Args:
        keys: Keys of an entry.
        required: Keys that an entry must have.
        label: Name of the entry in the message.
    """
    missing = [name for name in required if name not in keys]
    if missing:
        raise UserError(
            f"{label}: {', '.join(missing)} missing; give {', '.join(required)}"
        )


STAGE_1_PARAMS = {
    "model.shared_mlp",
    "model.end_to_end",
    "model.encoder_layers",
    "model.encoder_width",
}
"""Params of SID-MLP++ that change its stage 1, and so the hash of the encoder."""


@dataclass(frozen=True)
class Pair:
    """Comparable rows of two systems, with the runs that correspond to each other."""

    left: Row
    """Row of the compared system, restricted to the runs in `runs`, if any."""
    right: Row
    """Row of the reference system, restricted to the runs in `runs`, if any."""
    runs: tuple[tuple[Run, Run], ...]
    """Pairs of a left run and the right run that is its teacher or has its seed; empty
    if the rows share no seed."""

    def values(self, metric: str) -> list[tuple[float, float]]:
        """Return the left and right value of each pair of runs.

        Without pairs, return one pair: the means of both rows.
        """
        values = [
            (left.metrics[metric], right.metrics[metric]) for left, right in self.runs
        ]
        return values or [(self.left.mean(metric), self.right.mean(metric))]

    def change(self, metric: str) -> float:
        """Return the mean of (left - right) / right over the pairs of runs.

        The mean is NaN if a right value is 0.
        """
        return statistics.fmean(
            ratio(left, right) - 1 for left, right in self.values(metric)
        )


def pair_runs(left_rows: Sequence[Row], right: Row, metric: str, match: str) -> Pair:
    """Pair runs by seed or by teacher; of several runs with equal seeds the last one.

    Args:
        left_rows: Rows of the compared system, which differ in the teacher at most.
        right: Row of the system to compare with.
        metric: Metric that paired runs must have.
        match: `teacher` or `settings`, see `pair_rows`.
    """
    left_runs = [run for row in left_rows for run in row.runs if metric in run.metrics]
    right_runs = [run for run in right.runs if metric in run.metrics]
    paired: dict[tuple[str, str], tuple[Run, Run]] = {}
    for left_run, right_run in product(left_runs, right_runs):
        seed = left_run.seed or left_run.id
        if match == "teacher" and left_run.teacher == right_run.weights:
            paired[seed, right_run.weights] = (left_run, right_run)
        elif match != "teacher" and seed == right_run.seed:
            paired[seed, ""] = (left_run, right_run)
    runs = tuple(paired.values())
    if not runs:
        return Pair(left_rows[0], right, runs)
    paired_left = {run.id: run for run, _ in runs}
    paired_right = {run.id: run for _, run in runs}
    return Pair(
        replace(left_rows[0], runs=list(paired_left.values())),
        replace(right, runs=list(paired_right.values())),
        runs,
    )


def pair_rows(
    rows: Sequence[Row], left: System, right: System, metric: str, match: str
) -> list[Pair]:
    """Pair the rows of two systems, one pair per experiment and trie.

    Of several pairs, the one with the most seeds is returned; of several of these, the
    one with the best left row by validation, then with the best right row.

    Args:
        rows: Rows of the comparison.
        left: Compared system.
        right: System to compare with.
        metric: Metric of the comparison.
        match: `teacher` pairs each student with its own teacher; `settings` pairs rows
            that differ only in the params of the systems, by seeds they share, if any.
    """
    params = {
        name if "." in name else f"model.{name}"
        for name in (*left.params, *right.params)
    }
    ignored = TEACHER_PARAMS if match == "teacher" else ()
    left_rows = [row for row in rows if left.matches(row) and row.values(metric)]
    right_rows = [row for row in rows if right.matches(row)]
    # Students that differ only in their teacher share a key per right row.
    candidates: dict[tuple[Any, ...], tuple[list[Row], Row]] = {}
    for left_row, right_row in product(left_rows, right_rows):
        if is_comparable(left_row, right_row, params, match):
            key = (id(right_row), *left_row.identity(ignored))
            candidates.setdefault(key, ([], right_row))[0].append(left_row)
    groups: dict[tuple[str, str], list[Pair]] = {}
    for equal_rows, right_row in candidates.values():
        pair = pair_runs(equal_rows, right_row, metric, match)
        if pair.runs or (match == "settings" and right_row.values(metric)):
            trie = equal_rows[0].params.get("table.trie", "")
            groups.setdefault((right_row.experiment, trie), []).append(pair)

    def rank(pair: Pair) -> tuple[float, ...]:
        seeds = [len({run.seed for run in row.runs}) for row in (pair.left, pair.right)]
        return (
            min(seeds),
            max(seeds),
            validation_rank(pair.left, metric),
            validation_rank(pair.right, metric),
        )

    return [max(group, key=rank) for group in groups.values()]


def is_comparable(left: Row, right: Row, params: set[str], match: str) -> bool:
    """Return whether two rows may be compared.

    Comparable rows have the same experiment and options of evaluation. With `match`
    `teacher`, right must be the teacher of left. Otherwise rows of one model or
    benchmark must have equal params, and rows of different models must have the same
    tables and teacher.

    Args:
        left: Compared row.
        right: Row to compare with.
        params: Params that define the two systems, which may differ.
        match: `teacher` or `settings`.
    """
    if left is right or left.experiment != right.experiment:
        return False
    evaluate_keys = {
        key for key in (*left.params, *right.params) if key.startswith("evaluate.")
    }
    if "model.beam" in params:
        evaluate_keys.discard("evaluate.beam")
    if any(left.params.get(key) != right.params.get(key) for key in evaluate_keys):
        return False
    if match == "teacher":
        teacher = left.runs[0].teacher
        return bool(teacher) and any(run.weights == teacher for run in right.runs)
    keys = left.params.keys() & right.params.keys()
    if left.model != right.model and "/" not in left.model:
        keys = {
            key
            for key in keys
            if key.startswith("table.") or key == "model.teacher_hash"
        }
    may_differ = params | {"evaluate.beam", "checkpoint"}
    if params & STAGE_1_PARAMS:
        may_differ.add("model.encoder_hash")
    return all(left.params[key] == right.params[key] for key in keys - may_differ)


def validation_rank(row: Row, metric: str) -> float:
    """Return a sort key by the metric on validation; the best row has the largest."""
    name = f"val/{metric.split('/', 1)[-1]}"
    sign = -1 if lower_is_better(metric) else 1
    return sign * row.mean(name) if row.values(name) else -math.inf


def best_row(rows: Sequence[Row], system: System, metric: str) -> Row | None:
    """Return the row of a system with the most seeds, then the best by validation.

    Args:
        rows: Rows to select from.
        system: System to match.
        metric: Metric that the row must have.
    """
    measured = [row for row in rows if system.matches(row) and row.values(metric)]
    return max(
        measured,
        key=lambda row: (len(row.by_repeat(metric)), validation_rank(row, metric)),
        default=None,
    )


def beside_the_papers(comparison: Comparison, papers: Papers) -> list[Table]:
    """Return a table per published table and dataset on which a system was measured."""
    tables = []
    for published in papers.published:
        for name, figures in published.datasets.items():
            rows = [
                row
                for row in comparison.rows
                if row.mean("test/users") == USERS.get(name)
            ]
            table = compare_with(
                replace(comparison, rows=rows),
                replace(published, datasets={name: figures}),
                papers.systems,
            )
            if table is not None:
                tables.append(table)
    return tables


def compare_with(
    comparison: Comparison, published: Published, systems: dict[str, System]
) -> Table | None:
    """Return a table that compares a published table with our runs.

    Args:
        comparison: Measured rows.
        published: Table of a paper.
        systems: Systems by name.

    Returns:
        The table, or None if no system was measured.
    """
    names = list(dict.fromkeys(chain(*published.datasets.values())))
    datasets, reference = list(published.datasets), published.reference
    matching = [
        row
        for row in comparison.rows
        if any(systems[name].matches(row) for name in names)
    ]
    experiments = {row.experiment_and_sids for row in matching}
    formatter = LineFormatter(published, shows_experiment=len(experiments) > 1)
    cells: list[list[str]] = []
    for metric in published.metrics:
        if reference is not None:
            cells += compare_with_reference(comparison.rows, formatter, systems, metric)
            continue
        for name in names:
            row = best_row(comparison.rows, systems[name], metric)
            if row is not None:
                cells.append(formatter.format(name, row, metric, None))
    if not cells:
        return None
    header = ["system", "run", "metric", "ours"]
    if not published.relative:
        header += datasets
    if reference:
        header.append(f"ours vs {reference}")
        header += [f"{dataset} vs {reference}" for dataset in datasets]
    notes = [
        f"{', '.join(datasets)}: as printed in {published.source}; ours on "
        f"{comparison.selection.title}."
    ]
    return Table(f"Beside the paper: {published.source}", header, cells, notes, 3)


@dataclass(frozen=True)
class LineFormatter:
    """Formatter of the lines of a table that compares runs with a published table."""

    published: Published
    """Table of a paper."""
    shows_experiment: bool
    """Whether the name of a run starts with its experiment and semantic IDs."""

    def format(
        self, name: str, row: Row, metric: str, change: float | None
    ) -> list[str]:
        """Return the cells of a system's line.

        Args:
            name: Name of the system.
            row: Measured row of the system.
            metric: Name of the metric.
            change: Measured change relative to the reference, or None.
        """
        published, run_name = self.published, row.name
        if self.shows_experiment:
            run_name = f"{row.experiment_and_sids}: {row.name}"
        cells = [
            name,
            run_name,
            metric,
            f"{row.mean(metric):.4f}",
        ]
        if not published.relative:
            for dataset in published.datasets:
                value = published.value(dataset, name, metric)
                cells.append("-" if value is None else f"{value:.4f}")
        if published.reference == name:
            cells += [""] * (1 + len(published.datasets))
        elif published.reference:
            cells.append(percent(change))
            for dataset in published.datasets:
                cells.append(percent(published.change(dataset, name, metric)))
        return cells


def compare_with_reference(
    rows: Sequence[Row],
    formatter: LineFormatter,
    systems: dict[str, System],
    metric: str,
) -> list[list[str]]:
    """Return the lines of a metric: each reference row, followed by its systems.

    Args:
        rows: Measured rows.
        formatter: Formatter of a published table with a reference.
        systems: Systems by name.
        metric: Name of the metric.
    """
    published = formatter.published
    reference = str(published.reference)
    # Lines by the runs of the reference: ablations may have other reference runs.
    blocks: dict[tuple[Any, ...], list[list[str]]] = {}
    for name in dict.fromkeys(chain(*published.datasets.values())):
        if name == reference:
            continue
        sides = (rows, systems[name], systems[reference], metric)
        for pair in pair_rows(*sides, "teacher") or pair_rows(*sides, "settings"):
            right_ids = [run.id for run in pair.right.runs]
            key = (pair.left.experiment_and_sids, pair.right.options, *right_ids)
            if key not in blocks:
                blocks[key] = [formatter.format(reference, pair.right, metric, None)]
            change = pair.change(metric)
            blocks[key].append(formatter.format(name, pair.left, metric, change))
    return list(chain(*blocks.values()))
