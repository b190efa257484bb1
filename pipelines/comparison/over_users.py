"""Compare two models on the same users by a paired bootstrap over the test split.

    for table in over_users_tables(comparison):
        print(table.text())

`jobs.evaluate` stores a metric per user. Differences per user are averaged over pairs
of runs of any seed, users are drawn with replacement `DRAWS` times, and the interval
holds the middle 95% of the mean differences. A difference whose interval contains 0 is
called noise. The interval covers the choice of users, not of seeds, which the tests
over seeds cover (`tables.py`).

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
    EvaluationOptions,
    Row,
    Run,
    connect_once,
    lower_is_better,
)
from pipelines.comparison.table import Table, percent
from pipelines.evaluation.record import artifact_name

DRAWS = 2000
"""Number of draws of the bootstrap."""

MIN_USERS = 200
"""Smallest number of users for which an interval has a verdict."""

DIFFERENCES = "better", "worse", "noise"
"""Words for a difference of two models."""

PER_USER_METRIC = {
    "mean/normalised_entropy": "eval_loss",
    "mean/rig": "eval_loss",
    "mean/auc": "eval_loss",
}
"""Metrics per user that replace metrics which are not a mean over users."""


@dataclass
class Group:
    """Runs of one row, or of students whose teachers differ only in their seed."""

    row: Row
    """First row of the group."""
    teacher: Row | None
    """Row of the teachers, or None if it is not compared."""
    runs: list[Run]
    """Runs of all rows of the group."""

    @property
    def name(self) -> str:
        """The common prefix of the runs' names, and the options of the evaluation."""
        return replace(self.row, runs=self.runs).name

    @property
    def label(self) -> str:
        """The name, prefixed by the model's name unless it begins with the model's."""
        return replace(self.row, runs=self.runs).label


@dataclass(frozen=True)
class Pair:
    """A group and its base: the group's teachers, or the best group of its log."""

    name: str
    """Name of the group."""
    base: str
    """Name of the base."""
    runs: tuple[tuple[Run, Run], ...]
    """Pairs of a run of the group and a run of the base."""
    training_difference: str
    """Differences of their trainings in steps, batch size or seeds."""

    @classmethod
    def from_groups(
        cls, group: Group, base: Group, runs: Iterable[tuple[Run, Run]]
    ) -> Self:
        """Pair two groups.

        Args:
            group: Runs of the compared row.
            base: Runs of the row with which it is compared.
            runs: Pairs of a run of the group and a run of the base.
        """
        row = replace(group.row, runs=group.runs)
        base_row = replace(base.row, runs=base.runs)
        difference = row.describe_training_difference(base_row)
        return cls(group.name, base.name, tuple(runs), difference)


@dataclass(frozen=True)
class PairedMetric:
    """A metric per user of two models, averaged over pairs of their runs."""

    users: str
    """Hash of the users and their counts."""
    difference: NDArray[np.float64]
    """(U,) difference to the base."""
    base: NDArray[np.float64]
    """(U,) metric of the base."""
    counts: NDArray[np.number]
    """(U,) requests per user."""

    @property
    def base_mean(self) -> float:
        """Mean of the base over all requests."""
        return float(self.base @ self.counts / self.counts.sum())


@dataclass(frozen=True)
class Interval:
    """A mean difference and the middle 95% of its bootstrap draws."""

    mean: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """Whether the interval contains 0."""
        return self.low <= 0 <= self.high

    def __str__(self) -> str:
        return f"{self.low:+.4f} to {self.high:+.4f}"


def bootstrap_intervals(
    differences: NDArray[np.float64], counts: NDArray[np.number]
) -> list[Interval]:
    """Return the bootstrap intervals of mean differences, with the same draws for all.

    Args:
        differences: (D, U) differences per user.
        counts: (U,) requests per user, the weights of the mean.
    """
    num_users = len(counts)
    sums = differences * counts  # (D, U)
    weights = counts.astype(np.float64)  # (U,)
    generator = np.random.default_rng(0)
    means = np.empty((DRAWS, len(differences)))
    for draw in range(DRAWS):
        users = generator.integers(num_users, size=num_users)
        # (U,) how often each user was drawn
        multiplicity = np.bincount(users, minlength=num_users).astype(np.float64)
        means[draw] = (sums @ multiplicity) / (weights @ multiplicity)
    lows, highs = np.quantile(means, [0.025, 0.975], axis=0)  # (D,) each
    observed = sums.sum(1) / weights.sum()  # (D,)
    return [
        Interval(float(mean), float(low), float(high))
        for mean, low, high in zip(observed, lows, highs, strict=True)
    ]


def group_rows(comparison: Comparison) -> list[Group]:
    """Group the rows that have the metric on test, best first."""
    groups: dict[tuple[Any, ...], Group] = {}
    for row in comparison.rows:
        if math.isnan(row.mean(f"test/{comparison.metric}")):
            continue
        teacher = find_teacher(comparison, row)
        key = (id(teacher), *row.identity(TEACHER_PARAMS if teacher else ()))
        groups.setdefault(key, Group(row, teacher, [])).runs.extend(row.runs)
    return list(groups.values())


def find_teacher(comparison: Comparison, student: Row) -> Row | None:
    """Return the row of a student's teacher, or None if it is not compared.

    A row with the student's evaluation options is preferred to a row without options.
    """
    weights = student.runs[0].teacher
    if not weights:
        return None
    teachers = [
        row
        for row in (*comparison.rows, *comparison.teachers)
        if any(run.weights == weights for run in row.runs)
    ]
    for options in (student.options, EvaluationOptions()):
        for row in teachers:
            if row.options == options:
                return row
    return None


def pair_groups(comparison: Comparison) -> list[Pair]:
    """Pair students with their teachers, then all groups with the best of their log."""
    groups = group_rows(comparison)
    pairs = [pair_teacher(group, group.teacher) for group in groups if group.teacher]
    best: dict[tuple[str, ...], Group] = {}
    for group in groups:
        base = best.setdefault(group.row.log, group)
        if base is group or group.teacher is base.row:
            continue
        runs = list(product(newest_runs(group), newest_runs(base)))
        pairs.append(Pair.from_groups(group, base, runs))
    return pairs


def pair_teacher(group: Group, teacher: Row) -> Pair:
    """Pair students with their teachers, each run with the run of its own teacher."""
    runs = []
    for run in group.runs:
        teacher_runs = [other for other in teacher.runs if other.weights == run.teacher]
        runs += [(run, teacher_run) for teacher_run in teacher_runs]
    base = Group(teacher, None, teacher.runs)
    return Pair.from_groups(group, base, runs)


def newest_runs(group: Group) -> list[Run]:
    """Return the newest run of each seed, and all runs without a seed."""
    return list({run.repeat: run for run in group.runs}.values())


def load_paired_metric(
    runs: Sequence[tuple[Run, Run]], metric: str
) -> PairedMetric | None:
    """Load a metric per user, averaged over pairs of runs with the same users.

    Args:
        runs: Pairs of a run of a model and a run of its base.
        metric: Name of a metric per user, without its split.

    Returns:
        The averages, or None if no pair has the metric for the same users.
    """
    users = ""
    counts = np.zeros(0, np.int64)
    values, base_values = [], []
    for run, base_run in runs:
        encoded = load_per_user(run).get(metric)
        encoded_base = load_per_user(base_run).get(metric)
        if not encoded or not encoded_base:
            continue
        if encoded["users"] != encoded_base["users"]:
            continue
        users = encoded["users"]
        value, counts = decode_values(encoded)
        values.append(value)
        base_values.append(decode_values(encoded_base)[0])
    if not values or not len(counts):  # no user has a request that the metric counts
        return None
    base = np.mean(base_values, 0)
    difference = np.mean(values, 0) - base
    return PairedMetric(users, difference, base, counts)


def over_users_tables(comparison: Comparison) -> list[Table]:
    """Return the table of paired differences, or [] without metrics per user."""
    metric = PER_USER_METRIC.get(comparison.metric, comparison.metric)
    by_users: dict[str, list[tuple[Pair, PairedMetric]]] = {}
    for pair in pair_groups(comparison):
        paired = load_paired_metric(pair.runs, metric)
        if paired is not None:
            by_users.setdefault(paired.users, []).append((pair, paired))
    cells = []
    for pairs in by_users.values():
        counts = pairs[0][1].counts
        differences = np.stack([paired.difference for _, paired in pairs])  # (D, U)
        intervals = bootstrap_intervals(differences, counts)
        for (pair, paired), interval in zip(pairs, intervals, strict=True):
            base = paired.base_mean
            cells.append(to_cells(pair, interval, base, len(counts), metric))
    if not cells:
        return []
    header = ["model", "against", "pairs of runs", "users", f"test/{metric}"]
    header += ["95% interval", "relative", "verdict", "training differs"]
    note = (
        "Differences per user, averaged over the pairs of runs; the interval is of a "
        f"bootstrap over users ({DRAWS:,} draws) and does not cover other seeds. Below "
        f"{MIN_USERS} users there is no verdict."
    )
    return [Table("On the same users", header, cells, [note])]


def to_cells(
    pair: Pair, interval: Interval, base: float, num_users: int, metric: str
) -> list[str]:
    """Return the table cells of a pair.

    Args:
        pair: Row and base whose difference is shown.
        interval: Interval of the mean difference.
        base: Mean of the base's metric.
        num_users: Number of users.
        metric: Name of the metric, without its split.
    """
    return [
        pair.name,
        pair.base,
        str(len(pair.runs)),
        f"{num_users:,}",
        f"{interval.mean:+.4f}",
        str(interval),
        percent(interval.mean / base if base else math.nan),
        judge_difference(interval, num_users, metric),
        pair.training_difference,
    ]


def judge_difference(
    interval: Interval,
    num_users: int,
    metric: str,
    words: tuple[str, str, str] = DIFFERENCES,
) -> str:
    """Return the word for a better, worse or undecided metric.

    It is `-` below `MIN_USERS` users.
    """
    better, worse, undecided = words
    if num_users < MIN_USERS:
        return "-"
    if interval.is_noise:
        return undecided
    return better if (interval.mean > 0) != lower_is_better(metric) else worse


def load_per_user(run: Run) -> dict[str, Any]:
    """Return a run's metrics per user on test by name; {} if there are none."""
    if not run.uri:
        return {}
    return download_per_user(run.uri, run.evaluation_id).get(artifact_name("test"), {})


@lru_cache
def download_per_user(uri: str, run_id: str) -> dict[str, dict[str, Any]]:
    """Return the metrics per user of an MLflow run, by artifact and name."""
    client = connect_once(uri)
    per_user = {}
    for artifact in client.list_artifacts(run_id):
        if artifact.path.startswith("evaluation-") and artifact.path.endswith(".json"):
            with open(client.download_artifacts(run_id, artifact.path)) as file:
                metrics = json.load(file).get("by_user")
            if metrics:
                per_user[artifact.path] = metrics
    return per_user
