"""Compare two models on the same users: a paired bootstrap over the users of the test split.

    for table in over_users_tables(comparison): print(table.text())

`jobs.evaluate` stores a metric per user. Differences per user are averaged over pairs
of runs of any seed, users are drawn with replacement `DRAWS` times, and the middle 95%
of the mean differences are the interval. A difference whose interval holds 0 is called
noise. The interval covers users; how much trainings with other seeds differ, the tests
over seeds show (`tables.py`).

Shapes: `U` users, `D` differences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from models.metrics.per_user_metrics import decode_values
from pipelines.comparison.rows import (
    TEACHER_PARAMS,
    Comparison,
    Row,
    Run,
    connect_once,
    lower_is_better,
    shared_name,
)
from pipelines.comparison.table import Table, percent
from pipelines.evaluation.record import artifact_name

DRAWS = 2000
"""Draws of the bootstrap."""

FOLDS_NOTE = (
    "Over folds, which weigh the same, a user counts once in each; that makes the "
    "interval somewhat too narrow."
)
"""Note on intervals over the users of several folds."""

MIN_USERS = 200
"""Users below which an interval has no verdict."""

PER_USER_METRIC = {
    "mean/normalised_entropy": "eval_loss",
    "mean/rig": "eval_loss",
    "mean/auc": "eval_loss",
}
"""Stand-ins for metrics that are no mean over users."""


@dataclass
class Group:
    """Runs of one setting: a row, or students that differ in their teacher's seed alone."""

    row: Row
    """First row of the group."""
    teacher: Row | None
    """The row of the teachers, if it is compared too."""
    name: str
    """Common prefix of the runs' names."""
    runs: list[Run]
    """All runs."""


@dataclass(frozen=True)
class Pair:
    """A group beside its teachers, or beside the best group of its log."""

    name: str
    """Name of the group."""
    other: str
    """Name of the other group."""
    runs: tuple[tuple[Run, Run], ...]
    """Pairs of their runs."""
    training_difference: str
    """How their trainings differ in steps, batch or seeds."""

    @classmethod
    def of(cls, group: Group, other: Group, runs: Iterable[tuple[Run, Run]]) -> Self:
        """Pair two groups by these of their runs."""
        row, other_row = (replace(side.row, runs=side.runs) for side in (group, other))
        difference = row.describe_training_difference(other_row)
        return cls(group.name, other.name, tuple(runs), difference)


@dataclass(frozen=True)
class SameUsers:
    """A metric of two models on the users that they share, averaged over pairs of runs."""

    users: str
    """Hash of the users and their counts."""
    difference: NDArray[np.float64]
    """(U,) difference to the base."""
    base: NDArray[np.float64]
    """(U,) metric of the base."""
    counts: NDArray[np.number]
    """(U,) requests per user; of several folds scaled so that all folds weigh the
    same."""

    @property
    def mean(self) -> float:
        """The base's mean over all requests."""
        return float(self.base @ self.counts / self.counts.sum())


@dataclass(frozen=True)
class Interval:
    """A mean difference and the middle 95% of its draws."""

    mean: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds 0."""
        return self.low <= 0 <= self.high

    def __str__(self) -> str:
        return f"{self.low:+.4f} to {self.high:+.4f}"


def intervals(
    differences: NDArray[np.float64], counts: NDArray[np.number]
) -> list[Interval]:
    """Return the bootstrap intervals of mean differences, with the same draws for all.

    Args:
        differences: (D, U) differences per user.
        counts: (U,) requests per user, the weights of the mean.
    """
    num_users = len(counts)
    sums, weights = differences * counts, counts.astype(np.float64)
    generator = np.random.default_rng(0)
    means = np.empty((DRAWS, len(differences)))
    for draw in range(DRAWS):
        drawn = generator.integers(num_users, size=num_users)
        times = np.bincount(drawn, minlength=num_users).astype(np.float64)
        means[draw] = (sums @ times) / (weights @ times)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    mean = sums.sum(1) / weights.sum()
    return [
        Interval(float(m), float(a), float(b))
        for m, a, b in zip(mean, low, high, strict=True)
    ]


def group_rows(comparison: Comparison) -> list[Group]:
    """Return the groups of rows with a value on test, best first."""
    groups: dict[tuple[Any, ...], Group] = {}
    for row in comparison.rows:
        if math.isnan(row.mean(f"test/{comparison.metric}")):
            continue
        teacher = find_teacher(comparison, row)
        key = (id(teacher), *row.identity(TEACHER_PARAMS if teacher else ()))
        group = groups.setdefault(key, Group(row, teacher, row.name, []))
        if group.runs:
            group.name = shared_name(group.name, row.name)
        group.runs += row.runs
    return list(groups.values())


def find_teacher(comparison: Comparison, student: Row) -> Row | None:
    """Return the row of a student's teacher, preferably evaluated as the student was."""
    weights = student.runs[0].teacher
    if not weights:
        return None
    teachers = [
        row
        for row in (*comparison.rows, *comparison.teachers)
        if any(run.weights == weights for run in row.runs)
    ]
    alike = [row for row in teachers if row.options == student.options]
    plain = [row for row in teachers if not row.options]
    return next(iter([*alike, *plain]), None)


def pair_groups(comparison: Comparison) -> list[Pair]:
    """Pair students with their teachers, then all groups with the best of their log."""
    groups = group_rows(comparison)
    pairs = []
    for group in groups:
        if teacher := group.teacher:
            taught = [
                (run, teacher_run)
                for run in group.runs
                for teacher_run in teacher.runs
                if run.teacher == teacher_run.weights
            ]
            other = Group(teacher, None, teacher.name, teacher.runs)
            pairs.append(Pair.of(group, other, taught))
    best: dict[tuple[str, ...], Group] = {}
    for group in groups:
        first = best.setdefault(group.row.log, group)
        if first is group or group.teacher is first.row:
            continue
        newest, newest_of_best = (
            {run.repeat: run for run in side.runs}.values() for side in (group, first)
        )
        same_fold = [
            (run, other)
            for run, other in product(newest, newest_of_best)
            if run.fold == other.fold
        ]
        pairs.append(Pair.of(group, first, same_fold))
    return pairs


def same_users(runs: Sequence[tuple[Run, Run]], metric: str) -> SameUsers | None:
    """Average a metric per user over the pairs of runs that were measured on the same users.

    Runs of different folds are no pair. The users of several folds follow each other,
    so a user counts once in each fold, and all folds weigh the same.

    Returns:
        The averages, or None if no pair has the metric of the same users.
    """
    by_fold: dict[str, list[tuple[Run, Run]]] = {}
    for run, other in runs:
        if run.fold == other.fold:
            by_fold.setdefault(run.fold, []).append((run, other))
    folds = [same_users_of_fold(by_fold[fold], metric) for fold in sorted(by_fold)]
    measured = [fold for fold in folds if fold is not None]
    if len(measured) < 2:
        return measured[0] if measured else None
    mean_requests = np.mean([fold.counts.sum() for fold in measured])
    weights = [fold.counts * (mean_requests / fold.counts.sum()) for fold in measured]
    return SameUsers(
        " ".join(fold.users for fold in measured),
        np.concatenate([fold.difference for fold in measured]),
        np.concatenate([fold.base for fold in measured]),
        np.concatenate(weights),
    )


def same_users_of_fold(
    runs: Sequence[tuple[Run, Run]], metric: str
) -> SameUsers | None:
    """Average a metric per user over pairs of runs of one fold (see `same_users`)."""
    users = ""
    counts = np.zeros(0, np.int64)
    values, bases = [], []
    for run, other in runs:
        mine = load_per_user(run).get(metric)
        theirs = load_per_user(other).get(metric)
        if mine and theirs and mine["users"] == theirs["users"]:
            users = mine["users"]
            value, counts = decode_values(mine)
            values.append(value)
            bases.append(decode_values(theirs)[0])
    if not values or not len(counts):  # no user has a request that the metric counts
        return None
    base = np.mean(bases, 0)
    return SameUsers(users, np.mean(values, 0) - base, base, counts)


def over_users_tables(comparison: Comparison) -> list[Table]:
    """Return the table of paired differences, or nothing without metrics per user."""
    metric = PER_USER_METRIC.get(comparison.metric, comparison.metric)
    by_users: dict[str, list[tuple[Pair, SameUsers]]] = {}
    for pair in pair_groups(comparison):
        same = same_users(pair.runs, metric)
        if same is not None:
            by_users.setdefault(same.users, []).append((pair, same))
    cells = []
    for pairs in by_users.values():
        counts = pairs[0][1].counts
        found = intervals(np.stack([same.difference for _, same in pairs]), counts)
        for (pair, same), interval in zip(pairs, found, strict=True):
            cells.append(to_cells(pair, interval, same.mean, len(counts), metric))
    if not cells:
        return []
    header = ["model", "against", "pairs of runs", "users", f"test/{metric}"]
    header += ["95% interval", "relative", "verdict", "training differs"]
    note = (
        f"Differences per user, averaged over the pairs of runs; the interval is of a "
        f"bootstrap over users ({DRAWS:,} draws) and does not cover other seeds. Below "
        f"{MIN_USERS} users there is no verdict."
    )
    if any(row.folds for row in comparison.rows):
        note += f" {FOLDS_NOTE}"
    return [Table("On the same users", header, cells, [note])]


def to_cells(
    pair: Pair, interval: Interval, base: float, users: int, metric: str
) -> list[str]:
    """Return the cells of a pair."""
    return [
        pair.name,
        pair.other,
        str(len(pair.runs)),
        f"{users:,}",
        f"{interval.mean:+.4f}",
        str(interval),
        percent(interval.mean / base if base else math.nan),
        judge_difference(interval, users, metric),
        pair.training_difference,
    ]


def judge_difference(interval: Interval, users: int, metric: str) -> str:
    """Return `better`, `worse` or `noise`, or `-` for too few users."""
    if users < MIN_USERS:
        return "-"
    if interval.is_noise:
        return "noise"
    is_better = (interval.mean > 0) != lower_is_better(metric)
    return "better" if is_better else "worse"


def load_per_user(run: Run) -> dict[str, Any]:
    """Return the metrics per user of a run's evaluation on test, empty without any."""
    if not run.uri:
        return {}
    return download_per_user(run.uri, run.evaluation_id).get(artifact_name("test"), {})


@lru_cache
def download_per_user(uri: str, run_id: str) -> dict[str, dict[str, Any]]:
    """Return the metrics per user of an MLflow run by the name of their artifact."""
    client = connect_once(uri)
    per_user = {}
    for artifact in client.list_artifacts(run_id):
        if artifact.path.startswith("evaluation-") and artifact.path.endswith(".json"):
            with open(client.download_artifacts(run_id, artifact.path)) as file:
                metrics = json.load(file).get("by_user")
            if metrics:
                per_user[artifact.path] = metrics
    return per_user
