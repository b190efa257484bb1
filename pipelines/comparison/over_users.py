"""Two models on the same users: a paired bootstrap over the users of the test split.

`jobs.evaluate` keeps a metric of every user (`models/metrics/per_user_metrics.py`). Of two models the differences user by user are
averaged over their runs, of any seed, users are drawn with replacement `DRAWS` times, and the middle 95% of the mean
differences are the interval. A difference whose interval holds 0 is called noise. Between users alone: how much two
trainings with other seeds differ, the tests over seeds say (`tables.py`).

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
from mlflow import MlflowClient
from numpy.typing import NDArray

from models.metrics.per_user_metrics import decode_values
from pipelines.comparison.rows import (
    OF_TEACHER,
    Comparison,
    Row,
    Run,
    client_of,
    lower_is_better,
    shared_name,
)
from pipelines.comparison.table import Table, percent

DRAWS = 2000
"""Draws of the bootstrap."""

LEAST = 200
"""Users below whom an interval stands without a verdict."""

COARSER = {
    "mean/normalised_entropy": "eval_loss",
    "mean/rig": "eval_loss",
    "mean/auc": "eval_loss",
}
"""Metrics that are no mean over users, and the one that stands in their place."""


@dataclass
class Group:
    """Runs of one setting: those of a row, or students that differ in nothing but which run of one teacher's row has
    taught them."""

    row: Row
    """The first of its rows."""
    teacher: Row | None
    """The row of its teachers, where it is here."""
    name: str
    """What the names of its runs share."""
    runs: list[Run]
    """All of them."""


@dataclass(frozen=True)
class Pair:
    """A group beside its teachers, or beside the best of the log."""

    name: str
    """Name of the one."""
    other: str
    """Name of the other."""
    runs: tuple[tuple[Run, Run], ...]
    """Their runs, pair by pair."""
    options: tuple[str, str]
    """Options of the evaluations of both."""
    unlike: str
    """How their trainings differ in steps, batch or seeds."""

    @classmethod
    def of(cls, one: Group, other: Group, runs: Iterable[tuple[Run, Run]]) -> Self:
        """The groups with these of their runs beside each other."""
        rows = [replace(group.row, runs=group.runs) for group in (one, other)]
        options = (one.row.options, other.row.options)
        return cls(one.name, other.name, tuple(runs), options, rows[0].unlike(rows[1]))


@dataclass(frozen=True)
class SameUsers:
    """Pairs of runs on the users that they share, in the mean over the pairs."""

    users: str
    """Hash of the users and their counts."""
    difference: NDArray[np.float64]
    """(U,) of the one less the other."""
    base: NDArray[np.float64]
    """(U,) of the other."""
    counts: NDArray[np.int64]
    """(U,) requests of each user."""

    @property
    def mean(self) -> float:
        """The other's mean over the requests."""
        return float(self.base @ self.counts / self.counts.sum())


@dataclass(frozen=True)
class Interval:
    """A mean difference and the middle 95% of the draws."""

    mean: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """Whether it holds 0."""
        return self.low <= 0 <= self.high


def intervals(
    differences: NDArray[np.float64], counts: NDArray[np.int64]
) -> list[Interval]:
    """Of differences (D, U) of means over the `counts` (U,) requests of each user, all with the same draws of users."""
    users = len(counts)
    above, below = differences * counts, counts.astype(np.float64)
    found, generator = (
        np.empty((DRAWS, len(differences))),
        np.random.default_rng(0),
    )  # the same draws for all pairs
    for draw in range(DRAWS):
        times = np.bincount(
            generator.integers(users, size=users), minlength=users
        ).astype(np.float64)
        found[draw] = (above @ times) / (below @ times)
    low, high = np.quantile(found, [0.025, 0.975], axis=0)
    mean = above.sum(1) / below.sum()
    return [
        Interval(float(m), float(a), float(b))
        for m, a, b in zip(mean, low, high, strict=True)
    ]


def groups_of(comparison: Comparison) -> list[Group]:
    """The rows with a value on test, best first."""
    every = [*comparison.rows, *comparison.teachers]
    groups: dict[tuple[Any, ...], Group] = {}
    for row in comparison.rows:
        if math.isnan(row.mean(f"test/{comparison.metric}")):
            continue
        taught_by = row.runs[0].teacher
        homes = [
            other
            for other in every
            for run in other.runs
            if taught_by and run.weights == taught_by
        ]
        teacher = next((home for home in homes if home.options == row.options), None)
        teacher = teacher or next((home for home in homes if not home.options), None)
        key = (id(teacher), *row.alike(but=OF_TEACHER if teacher else ()))
        group = groups.setdefault(key, Group(row, teacher, row.name, []))
        group.name = shared_name(group.name, row.name) if group.runs else row.name
        group.runs += row.runs
    return list(groups.values())


def pairs(comparison: Comparison) -> list[Pair]:
    """Students beside their teachers, run by run, then all beside the best of their log, each run beside each."""
    groups, found = groups_of(comparison), []
    best: dict[tuple[str, ...], Group] = {}
    for group in groups:
        if home := group.teacher:
            taught = [
                (run, its)
                for run in group.runs
                for its in home.runs
                if run.teacher == its.weights
            ]
            found.append(
                Pair.of(group, Group(home, None, home.name, home.runs), taught)
            )
    for group in groups:
        if (
            first := best.setdefault(group.row.log, group)
        ) is not group and group.teacher is not first.row:
            ours, theirs = (
                {run.seed or run.id: run for run in each.runs}.values()
                for each in (group, first)
            )
            found.append(Pair.of(group, first, product(ours, theirs)))
    return found


def same_users(
    runs: Sequence[tuple[Run, Run]], options: tuple[str, str], metric: str
) -> SameUsers | None:
    """The pairs whose evaluations on test have kept the metric of the same users; None where none has."""
    users, both = "", []
    counts = np.zeros(0, np.int64)
    for one, other in runs:
        mine, its = (
            of_run(one, options[0]).get(metric),
            of_run(other, options[1]).get(metric),
        )
        if mine and its and mine["users"] == its["users"]:
            users = mine["users"]
            value, counts = decode_values(mine)
            both.append((value, decode_values(its)[0]))
    if not both or not len(counts):  # no user has a request that the metric counts
        return None
    value, base = np.mean(both, 0)
    return SameUsers(users, value - base, base, counts)


def over_users_tables(comparison: Comparison) -> list[Table]:
    """The pairs with their intervals; none where no two evaluations have kept their users."""
    metric = COARSER.get(comparison.metric, comparison.metric)
    groups: dict[str, list[tuple[Pair, SameUsers]]] = {}
    for pair in pairs(comparison):
        if (same := same_users(pair.runs, pair.options, metric)) is not None:
            groups.setdefault(same.users, []).append((pair, same))
    cells = []
    for group in groups.values():
        counts = group[0][1].counts
        found = intervals(np.stack([same.difference for _, same in group]), counts)
        for (pair, same), interval in zip(group, found, strict=True):
            cells.append(line(pair, interval, same.mean, len(counts), metric))
    if not cells:
        return []
    header = [
        "model",
        "against",
        "pairs of runs",
        "users",
        f"test/{metric}",
        "95% interval",
        "relative",
        "verdict",
    ]
    header.append("trained unlike")
    notes = [
        f"Differences user by user, averaged over the pairs of runs; the interval is of a bootstrap over users "
        f"({DRAWS:,} draws). It says nothing of other seeds. Below {LEAST} users it stands without a verdict."
    ]
    return [Table("On the same users", header, cells, notes)]


def line(
    pair: Pair, interval: Interval, base: float, users: int, metric: str
) -> list[str]:
    """The cells of a pair."""
    better = (interval.mean > 0) != lower_is_better(metric)
    verdict = "noise" if interval.is_noise else "better" if better else "worse"
    verdict = verdict if users >= LEAST else "-"
    bounds = f"{interval.low:+.4f} to {interval.high:+.4f}"
    relative = percent(interval.mean / base if base else math.nan)
    return [
        pair.name,
        pair.other,
        str(len(pair.runs)),
        f"{users:,}",
        f"{interval.mean:+.4f}",
        bounds,
        relative,
        verdict,
        pair.unlike,
    ]


def of_run(run: Run, options: str) -> dict[str, Any]:
    """What the run's evaluation on test with these options has kept, by metric; nothing where it has kept none."""
    name = f"evaluation-test{f'-{options}' if options else ''}.json"
    return kept(run.uri, run.id).get(name, {}) if run.uri else {}


@lru_cache
def kept(uri: str, run_id: str) -> dict[str, dict[str, Any]]:
    return evaluated(client_of(uri), run_id)


def evaluated(client: MlflowClient, run_id: str) -> dict[str, dict[str, Any]]:
    """By file, what the evaluations of a run have kept of every user."""
    found = {}
    for artifact in client.list_artifacts(run_id):
        if artifact.path.startswith("evaluation-") and artifact.path.endswith(".json"):
            with open(client.download_artifacts(run_id, artifact.path)) as file:
                if values := json.load(file).get("by_user"):
                    found[artifact.path] = values
    return found
