"""Judge models on the same users by a paired bootstrap over the test split.

    differences = measure_differences(comparison)

`jobs.evaluate` stores a metric per user, which is averaged over the runs of a row.
Users are drawn with replacement `DRAWS` times, and the interval holds the middle 95% of
the mean differences. The interval covers the choice of users, not of seeds.

A baseline is a model whose class has `is_baseline`. Each log and ranking has its own
best baseline, chosen on test, which favours the baseline.

Shapes: `U` users, `D` differences.
"""

from __future__ import annotations

import json
import posixpath
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from mlflow.artifacts import download_artifacts, list_artifacts
from numpy.typing import NDArray

from core.schemas import Inputs, Verdict
from models import registry
from models.dataset.dataset import Dataset
from models.evaluation import measure_examples
from models.metrics.metric import lower_is_better
from models.metrics.per_user_metrics import decode_values, sampling_stride
from models.retrieval.recommend import required_history
from models.training.checkpoint import Checkpoint
from models.training.fit_config import FitConfig
from models.training_run import TrainingRun, resolve_config
from pipelines.comparison.compare import (
    ALL_ITEMS,
    KNOWN_LEFT_OUT,
    REPEATS,
    Comparison,
)
from pipelines.evaluation.result import Result, artifact_name, pop_per_user

DRAWS, CHUNK = 2000, 100
"""Number of draws of the bootstrap, and of draws that are computed at once."""

MIN_USERS = 200
"""Smallest number of users for which an interval has a verdict."""

DIFFERENCES = "better", "worse", "noise"
"""Words for a difference of two models."""

VERDICTS = CLEARS, BELOW, UNDECIDED = "clears it", "below it", "not told apart"
"""Verdicts on a model and its baseline."""

TIES = 0.5
"""GAUC of a shown order in which all results tie, as in a log without positions."""

SHOWN_ORDER_NOTE = "The shown order is the present ranking's; clicks on it favour it."

BATCH_SIZES = {"behaviour": 8192, "request": 1024, "user": 64}
"""Examples per batch while a baseline counts, by the model's unit of examples."""


def bootstrap_intervals(
    differences: NDArray[np.float64], counts: NDArray[np.number]
) -> pl.DataFrame:
    """Return the intervals of mean differences, with the same draws for all.

    Args:
        differences: (D, U) differences per user.
        counts: (U,) requests per user, the weights of the mean.

    Returns:
        Columns `mean`, `low` and `high` with a line per difference.
    """
    num_users = len(counts)
    sums = differences * counts  # (D, U)
    generator = np.random.default_rng(0)
    means = np.empty((DRAWS, len(differences)))
    for start in range(0, DRAWS, CHUNK):
        multiplicity = np.empty((CHUNK, num_users))  # how often each user was drawn
        for draw in range(CHUNK):
            users = generator.integers(num_users, size=num_users)
            multiplicity[draw] = np.bincount(users, minlength=num_users)
        totals = multiplicity @ counts.astype(np.float64)  # (CHUNK,)
        means[start : start + CHUNK] = multiplicity @ sums.T / totals[:, None]
    low, high = np.quantile(means, [0.025, 0.975], axis=0)  # (D,) each
    return pl.DataFrame({"mean": sums.sum(1) / counts.sum(), "low": low, "high": high})


def judge_difference(
    low: float,
    high: float,
    num_users: int,
    metric: str,
    words: tuple[str, str, str] = DIFFERENCES,
) -> str:
    """Return the word for a better, worse or undecided metric; `-` for too few users.

    Args:
        low: Lower end of the interval of the difference.
        high: Upper end of the interval.
        num_users: Number of users.
        metric: Name of the metric.
        words: Words to choose from.
    """
    better, worse, undecided = words
    if num_users < MIN_USERS:
        return "-"
    if low <= 0 <= high:
        return undecided
    return better if (low > 0) != lower_is_better(metric) else worse


def measure_differences(comparison: Comparison) -> pl.DataFrame:
    """Return the differences of rows to their bases on the same users, best row first.

    A row is compared with two bases: of the `kind` `baseline` the best baseline of its
    log and ranking, and `shown` the order that the log showed.

    Returns:
        A line per row and kind: `kind`, `row`, `model`, `label` and `ranking`, the
        `base`, the `metric` (the first that is stored per user, unless the metric of
        the comparison is), the number of `users`, `mean`, `low` and `high`. Without
        metrics per user the frame is empty.
    """
    newest = comparison.runs.drop_nulls(f"test/{comparison.metric}").unique(
        ["row", "seed"], keep="last", maintain_order=True
    )
    with ThreadPoolExecutor() as threads:
        load = partial(load_per_user, comparison.uri)
        loaded = list(threads.map(load, newest["artifacts"]))
    metrics = [*chain.from_iterable(loaded)]
    metric = comparison.metric
    if metric not in metrics:  # it is not a mean over users
        metric = next(iter(metrics), "")
    runs: dict[int, list[dict[str, str]]] = {}  # by row
    for row_number, by_metric in zip(newest["row"], loaded, strict=True):
        if metric in by_metric:
            runs.setdefault(row_number, []).append(by_metric[metric])
    averages = {number: average_runs(of_row) for number, of_row in runs.items()}
    rows = comparison.rows.filter(pl.col("row").is_in(list(averages)))
    bases = [
        rows.filter(is_base)
        .unique("log", keep="first", maintain_order=True)
        .select("log", kind=pl.lit(kind), base="model_label", base_row="row")
        for kind, is_base in (("baseline", "is_baseline"), ("shown", "is_diagnostic"))
    ]
    pairs = (
        rows.filter(is_baseline=False, is_diagnostic=False)
        .join(pl.concat(bases), on="log", maintain_order="left_right")
        .select("kind", "row", "model", "label", "ranking", "base", "base_row")
        .with_columns(metric=pl.lit(metric))
    )
    by_users: dict[str, list[tuple[Any, ...]]] = {}
    for pair in pairs.rows(named=True):
        users, counts, values = averages[pair["row"]]
        base_users, _, base_values = averages[pair["base_row"]]
        if base_users != users:
            continue
        if pair["kind"] == "shown" and base_values @ counts / counts.sum() == TIES:
            continue
        line = {**pair, "users": len(counts)}
        by_users.setdefault(users, []).append((line, values - base_values, counts))
    tables = [pairs.clear()]
    for same_users in by_users.values():
        lines, differences, all_counts = zip(*same_users, strict=True)
        intervals = bootstrap_intervals(np.stack(differences), all_counts[0])
        tables.append(pl.DataFrame(lines).hstack(intervals))
    return pl.concat(tables, how="diagonal_relaxed")


def average_runs(runs: list[dict[str, str]]) -> tuple[str, NDArray, NDArray]:
    """Return the hash of users, their requests, and the metric's mean over runs."""
    decoded = [decode_values(run) for run in runs if run["users"] == runs[0]["users"]]
    values, counts = zip(*decoded, strict=True)
    return runs[0]["users"], counts[0], np.mean(values, 0)


def load_per_user(uri: str, artifacts: str) -> dict[str, dict[str, str]]:
    """Return the metrics per user of an evaluation on test, encoded, by name.

    Args:
        uri: Tracking URI.
        artifacts: URI of the artifacts of an MLflow run.
    """
    files = list_artifacts(artifact_uri=artifacts, tracking_uri=uri)
    name = artifact_name("test")
    if name not in [posixpath.basename(file.path) for file in files]:
        return {}
    file = download_artifacts(f"{artifacts}/{name}", tracking_uri=uri)
    return json.loads(Path(file).read_text()).get("by_user", {})


@dataclass(frozen=True)
class Baseline:
    """Metrics of one model without training."""

    model: str
    """Name of the model in the registry."""
    name: str
    """The column by which the model ranks, or its name in the registry."""
    metrics: dict[str, float]
    """Metrics on the split, by name."""
    by_user: dict[str, dict[str, str]]
    """Metrics per user, as in the result of an evaluation."""
    is_shown_order: bool = False
    """Whether it is the order that the log showed, which no model has to exceed."""


def build_fit(name: str, **options: Any) -> FitConfig:
    """Return the training options of a baseline, which counts in one pass."""
    batch_size = BATCH_SIZES[registry.find(name).example_unit]
    return FitConfig(batch_size=batch_size, **options)


def judge_results(
    results: list[Result], inputs: Inputs, trained: Checkpoint
) -> list[Verdict]:
    """Compare results of a checkpoint on test with the models without training.

    The models are computed from the tables, and measured; nothing is written.

    Args:
        results: Result over all items, and of a model that ranks the catalogue also
            without the items of the user's history.
        inputs: Folders of the tables.
        trained: Content of the checkpoint.

    Returns:
        One verdict per result. The ranking over all items comes first if users often
        repeat items. Empty for a kind without such models.
    """
    inputs = Inputs(inputs.tables)
    baselines: list[list[Baseline]] = [[] for _ in results]
    for name in registry.find_baselines(registry.find(trained.name).kind.name):
        config = resolve_config(registry.find(name).config_class(name=name), inputs)
        run = TrainingRun.build(config, build_fit(name), inputs)
        run.fit_in_one_pass()
        model, sequences = run.model, run.catalogue.versions["sequences"]
        for result, measured in zip(results, baselines, strict=True):
            options = {"unseen": True} if result.options.get("unseen") else {}
            history = required_history(config.max_history, options)
            sums = measure_examples(
                model,
                Dataset.load(model, run.catalogue, "test", max_history=history),
                batch_size=256,
                device=torch.device("cpu"),
                options={**options, "by_user": sampling_stride(sequences.rows)},
            ).sums
            by_user = pop_per_user(sums)
            metrics, ranks_by = model.metric_means(sums), model.ranks_by or name
            measured.append(
                Baseline(name, ranks_by, metrics, by_user, model.is_diagnostic)
            )
    verdicts = [
        judge_result(result, measured, trained.fit.metric)
        for result, measured in zip(results, baselines, strict=True)
        if measured
    ]
    if verdicts and verdicts[0].repeats < REPEATS:
        verdicts.reverse()
    return verdicts


def judge_result(result: Result, baselines: list[Baseline], metric: str) -> Verdict:
    """Return the verdict on the result of an evaluation against the best baseline.

    Args:
        result: Result of the model's evaluation.
        baselines: Results of the baselines on the same requests.
        metric: Name of the metric. If it is not measured per user, the first metric
            that is measured per user replaces it.
    """
    if metric not in result.by_user:
        metric = next(iter(result.by_user))
    sign = -1 if lower_is_better(metric) else 1
    best = max(
        (baseline for baseline in baselines if not baseline.is_shown_order),
        key=lambda baseline: sign * baseline.metrics[metric],
    )
    values, counts = decode_values(result.by_user[metric])

    def find_interval(baseline: Baseline) -> tuple[float, float, float]:
        encoded = baseline.by_user[metric]
        assert encoded["users"] == result.by_user[metric]["users"]
        difference = values - decode_values(encoded)[0]
        return bootstrap_intervals(difference[None], counts).row(0)

    _, low, high = find_interval(best)
    shown_order = ""
    for baseline in baselines:
        if baseline.is_shown_order and baseline.metrics[metric] != TIES:
            shown_order = "{:+.4f} (95% {:+.4f} to {:+.4f})".format(
                *find_interval(baseline)
            )
    ranking = KNOWN_LEFT_OUT if result.options.get("unseen") else ALL_ITEMS
    if "first/examples" not in result.metrics:
        ranking = "candidates"
    first = result.metrics.get("first/examples", 0.0)
    return Verdict(
        ranking=ranking,
        repeats=1 - first / result.examples,
        metric=metric,
        value=result.metrics[metric],
        baseline=best.name,
        baseline_value=best.metrics[metric],
        low=low,
        high=high,
        users=len(counts),
        verdict=judge_difference(low, high, MIN_USERS, metric, VERDICTS),
        shown_order=shown_order,
        baseline_model=best.model,
    )


def describe_verdict(verdict: Verdict) -> str:
    """Describe a verdict in a line, and the shown order in a second one."""
    shown_order = ""
    if verdict.shown_order:
        shown_order = f"\n  against the shown order: {verdict.shown_order}. "
        shown_order += SHOWN_ORDER_NOTE
    return (
        f"{verdict.ranking}: {verdict.metric} {verdict.value:.4f}, best "
        f"baseline ({verdict.baseline}) {verdict.baseline_value:.4f} "
        f"(95% of the difference {verdict.low:+.4f} to {verdict.high:+.4f}, "
        f"{verdict.users:,} users): {verdict.verdict}{shown_order}"
    )
