"""Published figures of the papers, compared with measured ones.

    papers = load()
    for table in beside_the_papers(comparison, papers):
        print(table.text())

`claims.yaml` defines how systems are recognised among runs, and has their figures.
Figures are shown for runs on the papers' datasets only, as printed and relative to the
same reference system.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
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
        """Return whether a row is this system, under its options or a given `beam`."""
        if not fits(row.model, self.model) or (
            row.options and not ("beam" in self.params and "beam" in row.options.names)
        ):
            return False
        return all(
            fits(param_value(row, name), wanted) for name, wanted in self.params.items()
        )


@dataclass(frozen=True)
class Published:
    """A table of a paper."""

    source: str
    """Paper and table."""
    metrics: list[str]
    """Names of the metrics in this project."""
    datasets: dict[str, dict[str, list[float]]]
    """A figure per metric, by dataset and system."""
    reference: str | None = None
    """System that the others are compared with."""
    relative: bool = False
    """Whether figures are changes against the reference, without absolute figures."""

    def value(self, dataset: str, system: str, metric: str) -> float | None:
        """Return the printed figure, or None."""
        line = self.datasets[dataset].get(system)
        value = (
            line[self.metrics.index(metric)]
            if line and metric in self.metrics
            else math.nan
        )
        return None if math.isnan(value) else value

    def change(
        self, dataset: str, system: str, metric: str, reference: str | None = None
    ) -> float | None:
        """Return the relative change of `system` over `reference`.

        Return None if the paper does not print both figures.
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
    """Content of the file."""

    systems: dict[str, System]
    published: list[Published]
    claims: list[dict[str, Any]]
    """Rules, which `claims.py` reads."""


def param_value(row: Row, name: str) -> str | None:
    """Return a param of a row; `beam` is that of its evaluation."""
    if name == "beam":
        return str(row.beam) if row.beam else None
    return row.params.get(name, row.params.get(f"model.{name}"))


def fits(value: str | None, wanted: Any) -> bool:
    """Return whether a param, a string, has a wanted value."""
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
    """Load the file of rules and figures.

    Raises:
        UserError: If a key or a system is unknown (the message names the nearest).
    """
    content = read_yaml(str(path), "give a file with systems, published and claims")
    check_names(content, ("systems", "published", "claims"), str(path))
    systems: dict[str, System] = {}
    for name, given in content.get("systems", {}).items():
        check_names(given, ("model", "like", "params"), f"{path}, system {name}")
        if "like" in given:
            check_names([given["like"]], systems, f"{path}, system {name}")
            base = systems[given["like"]]
            systems[name] = System(
                base.model, {**base.params, **given.get("params", {})}
            )
        else:
            check_there(given, ("model",), f"{path}, system {name}")
            systems[name] = System(given["model"], given.get("params", {}))
    published = []
    for given in content.get("published", []):
        where = f"{path}, {given.get('source', 'published')}"
        check_names(given, [f.name for f in fields(Published)], where)
        check_there(given, ("source", "metrics", "datasets"), where)
        published.append(Published(**given))
        for lines in given["datasets"].values():
            check_names(lines, systems, where)
            for name, line in lines.items():
                if len(line) != len(given["metrics"]):
                    raise UserError(
                        f"{where}: {name} has {len(line)} figures for "
                        f"{len(given['metrics'])} metrics"
                    )
    for claim in content.get("claims", []):
        used = [claim[side] for side in ("left", "right", "system") if side in claim]
        check_names(used, systems, f"{path}, claim {claim.get('id')}")
    return Papers(systems, published, content.get("claims", []))


def check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise a UserError for an unknown name."""
    check_known(
        given,
        known,
        lambda name, near: f"{where}: '{name}' is unknown; the nearest is '{near}'",
    )


def check_there(given: Iterable[str], needed: Iterable[str], where: str) -> None:
    """Raise UserError for a missing key."""
    if missing := [name for name in needed if name not in given]:
        raise UserError(
            f"{where}: {', '.join(missing)} missing; give {', '.join(needed)}"
        )


OF_STAGE_1 = {
    "model.shared_mlp",
    "model.end_to_end",
    "model.encoder_layers",
    "model.encoder_width",
}
"""Params of SID-MLP++ that change its stage 1, and so the hash of the encoder."""


@dataclass(frozen=True)
class Pair:
    """Two comparable rows, restricted to runs with a partner if any run has one."""

    left: Row
    """The compared row; for students of several teachers, all of their runs."""
    right: Row
    """The row that `left` is compared with."""
    runs: tuple[tuple[Run, Run], ...]
    """Each run of `left` with its teacher, or with the run of its seed; empty if no
    seed is shared.
    """

    def values(self, metric: str) -> list[tuple[float, float]]:
        """Return the values of each pair of runs, or means of rows without pairs."""
        both = [
            (one.metrics[metric], other.metrics[metric]) for one, other in self.runs
        ]
        return both or [(self.left.mean(metric), self.right.mean(metric))]

    def change(self, metric: str) -> float:
        """Return the mean of (left - right) / right over the pairs of runs.

        It is NaN if a right value is 0.
        """
        return statistics.fmean(
            ratio(one, other) - 1 for one, other in self.values(metric)
        )


def pair_runs(lefts: Sequence[Row], right: Row, metric: str, match: str) -> Pair:
    """Pair the runs with the metric by seed or teacher; of equal ones the newest."""
    ours = [run for row in lefts for run in row.runs if metric in run.metrics]
    theirs = [run for run in right.runs if metric in run.metrics]
    told: dict[tuple[str, str], tuple[Run, Run]] = {}
    for run, its in product(ours, theirs):
        seed = run.seed or run.id
        if run.teacher == its.weights if match == "teacher" else seed == its.seed:
            told[seed, its.weights if match == "teacher" else ""] = (run, its)
    runs = tuple(told.values())
    left = replace(
        lefts[0], runs=list({run.id: run for run, _ in runs}.values()) or lefts[0].runs
    )
    return Pair(
        left,
        replace(
            right, runs=list({its.id: its for _, its in runs}.values()) or right.runs
        ),
        runs,
    )


def pairs(
    rows: Sequence[Row], left: System, right: System, metric: str, match: str
) -> list[Pair]:
    """Pair rows of two systems, one pair per experiment and trie.

    Of several, the pair with the most seeds is returned, then the best left, then the
    best right on validation.

    Args:
        rows: Rows of the comparison.
        left: System that is compared.
        right: System that it is compared with.
        metric: Metric of the comparison.
        match: "teacher" if right has taught left, each student with its own teacher;
            "settings" if all else is equal, on the seeds that both have, if any.
    """
    named = {
        name if "." in name else f"model.{name}"
        for name in (*left.params, *right.params)
    }
    alike: dict[tuple[Any, ...], tuple[list[Row], Row]] = {}
    for ours in rows:
        for theirs in rows if left.matches(ours) and ours.values(metric) else ():
            if right.matches(theirs) and comparable(ours, theirs, named, match):
                key = (
                    id(theirs),
                    *ours.identity(TEACHER_PARAMS if match == "teacher" else ()),
                )
                alike.setdefault(key, ([], theirs))[0].append(ours)
    groups: dict[tuple[str, str], list[Pair]] = {}
    for lefts, theirs in alike.values():
        pair = pair_runs(lefts, theirs, metric, match)
        if pair.runs or (match == "settings" and theirs.values(metric)):
            place = (theirs.experiment, lefts[0].params.get("table.trie", ""))
            groups.setdefault(place, []).append(pair)

    def rank(pair: Pair) -> tuple[float, ...]:
        fewer, more = sorted(
            len({run.seed for run in row.runs}) for row in (pair.left, pair.right)
        )
        return (
            fewer,
            more,
            validation_rank(pair.left, metric),
            validation_rank(pair.right, metric),
        )

    return [max(group, key=rank) for group in groups.values()]


def comparable(left: Row, right: Row, named: set[str], match: str) -> bool:
    """Return whether two rows may be compared.

    They need the same experiment, tables and evaluation, and equal settings except for
    the params `named` if the models are the same or of one benchmark. With `match`
    "teacher", right must have taught left.
    """
    if left is right or left.experiment != right.experiment:
        return False
    how = {
        key
        for row in (left, right)
        for key in row.params
        if key.startswith("evaluate.")
    }
    how -= {"evaluate.beam"} if "model.beam" in named else set()
    if any(left.params.get(key) != right.params.get(key) for key in how):
        return False
    if match == "teacher":
        return bool(left.runs[0].teacher) and any(
            run.weights == left.runs[0].teacher for run in right.runs
        )
    shared = left.params.keys() & right.params.keys()
    if left.model != right.model and "/" not in left.model:
        shared = {
            key
            for key in shared
            if key.startswith("table.") or key == "model.teacher_hash"
        }
    apart = (
        named
        | {"evaluate.beam", "checkpoint"}
        | ({"model.encoder_hash"} if named & OF_STAGE_1 else set())
    )
    return all(left.params[key] == right.params[key] for key in shared - apart)


def validation_rank(row: Row, metric: str) -> float:
    """Return the metric on validation, larger is better, -inf if it is unknown."""
    name = f"val/{metric.split('/', 1)[-1]}"
    sign = -1 if lower_is_better(metric) else 1
    return sign * row.mean(name) if row.values(name) else -math.inf


def best_row(rows: Sequence[Row], system: System, metric: str) -> Row | None:
    """Return the system's row with the most seeds, then the best on validation."""
    there = [row for row in rows if system.matches(row) and row.values(metric)]
    return max(
        there,
        key=lambda row: (len(row.by_seed(metric)), validation_rank(row, metric)),
        default=None,
    )


def beside_the_papers(comparison: Comparison, papers: Papers) -> list[Table]:
    """Make a table per source and dataset with a system that is measured on it."""
    made = []
    for published, name in (
        (each, name) for each in papers.published for name in each.datasets
    ):
        rows = [
            row for row in comparison.rows if row.mean("test/users") == USERS.get(name)
        ]
        printed = replace(published, datasets={name: published.datasets[name]})
        made.append(
            compare_with(replace(comparison, rows=rows), printed, papers.systems)
        )
    return [table for table in made if table is not None]


def compare_with(
    comparison: Comparison, published: Published, systems: dict[str, System]
) -> Table | None:
    """Make the table of one source, or None if no system can be compared."""
    names = list(
        dict.fromkeys(name for lines in published.datasets.values() for name in lines)
    )
    datasets, reference = list(published.datasets), published.reference
    there = [
        row
        for row in comparison.rows
        if any(systems[name].matches(row) for name in names)
    ]
    several = len({row.place for row in there}) > 1
    cells: list[list[str]] = []

    def line(name: str, row: Row, metric: str, change: float | None) -> list[str]:
        absolute = [published.value(dataset, name, metric) for dataset in datasets]
        theirs = [published.change(dataset, name, metric) for dataset in datasets]
        return [
            name,
            f"{row.place}: {row.name}" if several else row.name,
            metric,
            f"{row.mean(metric):.4f}",
            *(
                []
                if published.relative
                else ("-" if value is None else f"{value:.4f}" for value in absolute)
            ),
            *(
                [
                    percent(value) if name != reference else ""
                    for value in (change, *theirs)
                ]
                if reference
                else []
            ),
        ]

    for metric in published.metrics:
        if reference is None:
            found = [
                (name, best_row(comparison.rows, systems[name], metric))
                for name in names
            ]
            cells += [
                line(name, row, metric, None) for name, row in found if row is not None
            ]
            continue
        blocks: dict[
            tuple, list[list[str]]
        ] = {}  # a reference with what is seen against it; ablations may have others
        for name in names:
            sides = (comparison.rows, systems[name], systems[reference], metric)
            for pair in (
                []
                if name == reference
                else pairs(*sides, "teacher") or pairs(*sides, "settings")
            ):
                told = (
                    pair.left.place,
                    pair.right.options,
                    *(run.id for run in pair.right.runs),
                )
                block = blocks.setdefault(
                    told, [line(reference, pair.right, metric, None)]
                )
                block.append(line(name, pair.left, metric, pair.change(metric)))
        cells += [cells for block in blocks.values() for cells in block]
    if not cells:
        return None
    against = f"vs {reference}"
    header = ["system", "run", "metric", "ours"] + (
        [] if published.relative else datasets
    )
    header += (
        [f"ours {against}", *(f"{dataset} {against}" for dataset in datasets)]
        if reference
        else []
    )
    notes = [
        f"{', '.join(datasets)}: as printed in {published.source}; ours on "
        f"{comparison.selection.title}."
    ]
    return Table(f"Beside the paper: {published.source}", header, cells, notes, 3)
