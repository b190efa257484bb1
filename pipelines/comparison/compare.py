"""Group MLflow runs that differ only in their seed into rows, best first.

    comparison = compare(uri, "retrieval/DATASET")
    comparison.rows.select("name", "test/ndcg@10", "test/ndcg@10 ±")

A training that was evaluated with several options, such as all items and known items
left out, has a row for each. Missing columns and values are null.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import polars as pl
from polars import selectors as cs

from core.errors import UserError, did_you_mean
from models import registry
from models.metrics.metric import lower_is_better
from pipelines import tracking
from pipelines.comparison.runs import (
    describe_incomplete,
    filter_sweeps,
    filter_trainings,
    find_run,
    read_evaluations,
    read_runs,
    select_trainings,
)

TEACHER = "model.teacher_hash"
"""Param with the hash of the weights of a student's teacher."""

PARAMS_WITHOUT_EFFECT = (
    TEACHER,
    "model.encoder_hash",
    "model.teacher",
    "fit.seed",
    "fit.log_every_steps",
    "fit.eval_batch_size",
    "fit.checkpoint_every_steps",
    "fit.checkpoint_every_minutes",
)
"""Params in which the runs of one row may differ; teachers count by their row."""

SEED_SUFFIX = re.compile(r"[-_]?(seed[-_]?)?\d*$")
"""End of the common prefix of run names that differ in their seed."""

ALL_ITEMS, KNOWN_LEFT_OUT = "all items", "known items left out"
"""Names of the two rankings of the catalogue: with and without items of the history."""

REPEATS = 0.05
"""Share of test requests for an item of the user's history from which the ranking of
all items fits the log."""


@dataclass
class Comparison:
    """Compared runs. A row is a group of runs that differ only in their seed."""

    uri: str
    """Tracking URI."""
    title: str
    """Heading, such as the name of the experiment."""
    metric: str
    """Metric that sorts the rows, without its split."""
    rows: pl.DataFrame
    """A line per group, best first (`summarise`)."""
    runs: pl.DataFrame
    """A line per training and options of its evaluations, with its group in `row`."""
    notes: list[str]
    """Notes on runs that were left out."""


def compare(
    uri: str,
    experiment: str | None = None,
    sweep: str | None = None,
    runs: Sequence[str] = (),
    metric: str | None = None,
) -> Comparison:
    """Compare the trainings of an experiment, the trials of a sweep, or single runs.

    Args:
        uri: Tracking URI.
        experiment: Name of the experiment to search; None for all.
        sweep: Name or id of the sweep whose trials are compared.
        runs: Names or ids of the compared runs.
        metric: Metric that sorts the rows, without its split. By default the metric of
            the sweep, else gauc, mean/normalised_entropy or ndcg@10, whichever of them
            the runs have first.
    """
    all_runs = read_runs(uri, [experiment] if experiment else [])
    trainings, notes = filter_trainings(all_runs), []
    defaults = ["gauc", "mean/normalised_entropy", "ndcg@10"]
    title = experiment or "all experiments"
    if sweep:
        sweep_run = find_run(filter_sweeps(all_runs), sweep, "sweep", uri)
        trainings = trainings.filter(pl.col(tracking.PARENT_TAG) == sweep_run["id"])
        notes = describe_incomplete(sweep_run)
        title = f"{sweep_run['experiment']}: {sweep_run['name']}"
        defaults.insert(0, sweep_run["sweep.metric"].partition("/")[2])
    elif runs:
        found = [find_run(trainings, name, "run", uri) for name in runs]
        trainings = pl.DataFrame(found, schema=trainings.schema)
        title = ", ".join(trainings["name"])
    else:
        trainings, notes = select_trainings(all_runs)
    if trainings.is_empty():
        raise UserError("; ".join([f"{title} at {uri} has no runs", *notes]))
    grouped = number_rows(join_evaluations(trainings, read_evaluations(all_runs)))
    metric = choose_metric(grouped, title, metric, defaults)
    # a metric of one split is null on the other
    columns = {f"val/{metric}": pl.Float64, f"test/{metric}": pl.Float64}
    grouped = pl.concat([grouped, pl.DataFrame(schema=columns)], how="diagonal")
    return Comparison(uri, title, metric, summarise(grouped, metric), grouped, notes)


def choose_metric(
    runs: pl.DataFrame, title: str, metric: str | None, defaults: Sequence[str]
) -> str:
    """Return the given metric, or the first of `defaults` that runs have.

    Args:
        runs: Runs with their metrics.
        title: Name of the runs, for messages.
        metric: Metric that the user has chosen, if any.
        defaults: Other metrics, the last of them for runs without any.
    """
    measured = {name.split("/", 1)[1] for name in measured_metrics(runs)}
    if not measured and "FINISHED" not in runs["status"]:
        raise UserError(f"no run of {title} is finished")
    if metric is None:
        return next((name for name in defaults if name in measured), defaults[-1])
    if metric not in measured:
        raise UserError(
            f"no run of {title} has the metric '{metric}' on val or test; "
            f"{did_you_mean(metric, sorted(measured))}"
        )
    return metric


def join_evaluations(
    trainings: pl.DataFrame, evaluations: pl.DataFrame
) -> pl.DataFrame:
    """Return a row per training and options of its evaluations, with all metrics.

    Metrics on test are those of the newest evaluation with the same options. Metrics on
    val are the training's own, or else those of an evaluation.
    """
    trainings = trainings.rename({"id": "training"})
    val, test = "^val/.*$", "^test/.*$"
    own = trainings.select(
        "training",
        "artifacts",
        val,
        test,
        options=pl.lit(""),
        is_unseen=pl.lit(False),
    )
    is_counted = pl.col("split").ne_missing("val")
    measured = (
        pl.concat([own, evaluations], how="diagonal")
        .group_by("training", "options", maintain_order=True)
        .agg(
            pl.col("is_unseen").first(),
            pl.col(val).drop_nulls().first(),
            pl.col(test).drop_nulls().last(),
            pl.col("artifacts").filter(is_counted).last(),
        )
    )
    trainings = trainings.drop("artifacts", cs.matches(val) | cs.matches(test))
    return trainings.join(measured, on="training", maintain_order="left_right")


def number_rows(runs: pl.DataFrame) -> pl.DataFrame:
    """Add the number of the row and other columns to runs.

    Students share a row if their teachers do, whose hashes differ by their seeds.
    `log` is equal for comparable rows: experiment, hashes of tables, and ranking.
    `settings` are the params in which rows of the model differ.
    """
    model = pl.col("model.name")
    names = set(runs["model.name"]) & set(registry.MODELS)
    models = [registry.find(name) for name in names]
    baselines = [model.name for model in models if model.is_baseline]
    diagnostics = [model.name for model in models if model.is_diagnostic]
    runs = runs.with_row_index("row").with_columns(
        # the encoder of SID-MLP++ is a checkpoint
        pl.when(pl.col("model.encoder_hash").is_null()).then("model.encoder"),
        # of a trial that evaluates a checkpoint
        pl.when(pl.col("evaluate.batch_size").is_not_null()).then("checkpoint"),
        seed=pl.col("fit.seed").fill_null(""),
        model=model,
        model_label=pl.coalesce(tracking.RANKS_BY_TAG, model),
        ranking=pl.when("is_unseen")
        .then(pl.lit(KNOWN_LEFT_OUT))
        .otherwise(pl.lit(ALL_ITEMS)),
        is_baseline=model.is_in(baselines),
        is_diagnostic=model.is_in(diagnostics),
    )
    params = [
        name
        for name in sorted(runs.columns)
        if name.startswith(("model.", "fit.", "evaluate.", "table."))
        and name not in PARAMS_WITHOUT_EFFECT
    ]
    params.append("checkpoint")
    log = ["experiment", "table.items", "table.sequences", "ranking"]
    of_model = ["experiment", "model"]
    settings = [
        pl.when(pl.col(name).n_unique().over(of_model) > 1).then(
            pl.format(
                "{} {}", pl.lit(name), pl.col(name).fill_null("none").str.slice(0, 12)
            )
        )
        for name in params
    ]
    runs = runs.with_columns(
        key=pl.concat_str(pl.col(*of_model, *params).fill_null(""), separator="\n"),
        log=pl.concat_str(pl.col(log).fill_null(""), separator="\n"),
        settings=pl.concat_str(settings, separator=", ", ignore_nulls=True),
    )
    weights = runs.select(tracking.WEIGHTS_TAG, "key").drop_nulls()
    keys = dict(weights.reverse().rows())  # of equal weights the first run
    lineage = pl.coalesce(pl.col(TEACHER).replace(keys), "model.encoder_hash")
    row = pl.col("row").first().over("options", "key", lineage)
    return runs.with_columns(row=row)


def summarise(runs: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Return a line per `row` of runs, best first: the first run's, and means of seeds.

    Lines of the leading ranking come first, sorted by the metric on test, then on val.
    Of the runs of a seed the newest one counts. The sample standard deviation of the
    metric `m` is in the column `m ±`. `label` is the name after the model's name.
    """
    newest = runs.group_by("row", "seed", maintain_order=True).agg(
        cs.float().drop_nulls().last()
    )
    metrics = newest.group_by("row", maintain_order=True).agg(
        cs.float().mean(), cs.float().std().name.suffix(" ±")
    )
    texts = runs.group_by("row").agg(
        pl.col("name").alias("names"),
        num_seeds=pl.col("seed").n_unique(),
        num_unfinished=(pl.col("status") != "FINISHED").sum(),
    )
    rows = runs.unique("row", keep="first", maintain_order=True).drop(cs.float())
    for table in (texts, metrics):
        rows = rows.join(table, on="row", maintain_order="left")
    names = [
        name_runs(*line) for line in rows.select("names", "model", "options").rows()
    ]
    name, model = pl.col("name"), pl.col("model")
    rows = rows.with_columns(name=pl.Series(names, dtype=pl.String))
    is_named = name.str.starts_with(model)
    label = pl.when(is_named).then(name).otherwise(pl.format("{}: {}", model, name))
    sign = 1 if lower_is_better(metric) else -1
    return rows.with_columns(label=label).sort(
        "is_diagnostic",
        pl.col("ranking") != leading_ranking(rows),
        sign * pl.col(f"test/{metric}"),
        sign * pl.col(f"val/{metric}"),
        nulls_last=True,
        maintain_order=True,
    )


def name_runs(names: Sequence[str], model: str, options: str) -> str:
    """Return the common prefix of runs' names with `*`, and the options of evaluation.

    The start of a seed is removed: `tiger-seed-42` and `tiger-seed-43` give `tiger*`.
    Equal names are returned unchanged.
    """
    name = names[0]
    if len(set(names)) > 1:
        prefix = SEED_SUFFIX.sub("", commonprefix(names))  # noqa: RUF071 - characters
        name = f"{prefix or model}*"
    return f"{name} [{options}]" if options else name


def measured_metrics(rows: pl.DataFrame) -> list[str]:
    """Return the names of the val and test metrics that at least one row has.

    Deviations, the columns with ±, are left out.
    """
    return [
        column.name
        for column in rows
        if re.match(r"(val|test)/(?!.* ±$)", column.name) and column.count()
    ]


def repeat_share(rows: pl.DataFrame) -> float | None:
    """Return the share of test requests for an item of the history, if measured."""
    requests, first = pl.col("test/examples"), pl.col("test/first/examples")
    shares = rows.filter(requests > 0).select(1 - first / requests)
    return next(iter(shares.to_series().drop_nulls()), None)


def leading_ranking(rows: pl.DataFrame) -> str:
    """Return the ranking that fits the log.

    Known items are left out if fewer than `REPEATS` of the test requests are for an
    item of the user's history.
    """
    share = repeat_share(rows)
    return KNOWN_LEFT_OUT if share is not None and share < REPEATS else ALL_ITEMS


def find_best_run(comparison: Comparison) -> dict[str, Any]:
    """Return the finished run that is best on validation."""
    metric = f"val/{comparison.metric}"
    runs = comparison.runs.drop_nulls(metric).filter(
        ~pl.col("is_diagnostic"), options="", status="FINISHED"
    )
    if runs.is_empty():
        raise UserError(f"no finished run of {comparison.title} has {metric}")
    descending = not lower_is_better(metric)
    runs = runs.sort(metric, descending=descending, maintain_order=True)
    return runs.row(0, named=True)
