"""Measure a checkpoint on a split, ranking the full catalogue for every request.

    python -m jobs.evaluate --checkpoint runs/sasrec/best --tables TABLES --split test

It prints Recall@K and NDCG@K with the numbers of requests and users, or AUC, GAUC and
log loss of a model that scores candidates. It writes the metrics beside the checkpoint
and to MLflow, as a child run of the training whose params are the options.

Instead of the metrics, --batch_inference FOLDER writes a table: the top K items of all
users, or of all requests of --split, or the scores of all candidates of the split.
--allowed FILE limits the ranked items.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from core.errors import pluralize
from core.options import STRICT, Folder
from core.schemas import Inputs, PredictionsInfo
from jobs import cli
from models.retrieval.options import (
    RECOMMEND_OPTIONS,
    AtSpeedOptions,
    StudentOptions,
)

if TYPE_CHECKING:
    from core.tables import Table
    from pipelines.evaluation.checks import CheckedEvaluation
    from pipelines.evaluation.record import Result

RECOMMEND_NAMES = tuple(
    dict.fromkeys(field.name for kind in RECOMMEND_OPTIONS for field in fields(kind))
)
"""Names of the options of all models' `recommend`, which are options of this job."""


@dataclass(config=STRICT, kw_only=True)
class Config(StudentOptions, AtSpeedOptions):
    """Options of jobs.evaluate."""

    checkpoint: Folder
    """Folder of a checkpoint, or of a finished run, whose best checkpoint is loaded."""
    tables: Folder
    """TABLES: the folder that jobs.prepare made."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models; optional for models of
    actions."""
    split: Literal["val", "test"] | None = None
    """Split whose requests are ranked. By default test. --batch_inference of a model
    that ranks the catalogue by default predicts the next item after each user's whole
    history."""
    batch_inference: Folder | None = None
    """Write the top K items of all users, or of the requests of --split with their
    targets, to this folder as the table `recommendations`. For a model that ranks
    candidates, write the probabilities and labels of all candidates of the split as the
    table `scores`."""
    allowed: str | None = None
    """File with the ids of the items that --batch_inference may recommend: text with an
    id per line, or CSV or Parquet with a column item_id."""
    nearest: Folder | None = None
    """Write the K nearest items of each item to this Parquet file: by cosine similarity
    of SASRec's item embeddings or of the embeddings of TIGER's codes, or the neighbours
    of item_knn."""
    k: PositiveInt = 20
    """Number of items: per item with --nearest, and with --batch_inference of a model
    that ranks the catalogue per user or request."""
    batch_size: PositiveInt = 256
    """Requests per batch."""
    shards: PositiveInt = 1
    """Number of Ray tasks (actors in batch inference) that rank the users; 1: this
    process ranks them, unless the job was submitted to a cluster."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: a GPU if there is one."""
    tracking_uri: str | None = None
    """MLflow tracking URI, if MLflow has moved since the training."""
    overwrite: bool = False
    """Replace the table of --batch_inference."""

    def __post_init__(self) -> None:
        if self.allowed and not self.batch_inference:
            raise ValueError(
                "--allowed is given without --batch_inference; metrics rank the whole "
                "catalogue, remove --allowed"
            )
        if self.nearest and self.batch_inference:
            raise ValueError("--nearest is given with --batch_inference")
        ignored = list(self.recommend_options())
        if self.split:
            ignored.append("split")
        if self.nearest and ignored:
            raise ValueError(
                f"--{ignored[0]} is given with --nearest, which ranks no requests"
            )

    def recommend_options(self) -> dict[str, Any]:
        """Return the options of `recommend` that have a value, by name."""
        options = {name: vars(self)[name] for name in RECOMMEND_NAMES}
        return {name: value for name, value in options.items() if value is not None}


def run(config: Config) -> Result | None:
    """Measure a checkpoint, or write its rankings or nearest items.

    Returns:
        The metrics, or None if a file or table is written instead.
    """
    cli.say_loading("torch", "ray", "mlflow")
    from pipelines import tracking
    from pipelines.evaluation.checks import check_evaluation

    inputs = Inputs(config.tables, config.sids, config.text)
    if config.tracking_uri:
        tracking.check_store(config.tracking_uri)
    cli.preflight(config)
    if config.batch_inference:
        write_inference(config, inputs, config.batch_inference)
        return None
    checked = check_evaluation(config.checkpoint, inputs, config.recommend_options())
    if config.nearest:
        write_nearest_items(config, inputs, config.nearest)
        return None
    return measure(config, inputs, checked)


def write_nearest_items(config: Config, inputs: Inputs, file: str) -> None:
    """Write the nearest items of each item to a Parquet file, and print its columns."""
    from pipelines.evaluation.nearest import write_nearest

    num_items, num_empty = write_nearest(config.checkpoint, inputs, file, config.k)
    print(
        f"The nearest items of {pluralize(num_items, 'item')}, at most {config.k} "
        f"each, are in {file}: item_id, nearest (best first), score."
    )
    if num_empty:
        print(f"note: the lists of {pluralize(num_empty, 'item')} are empty")


def write_inference(config: Config, inputs: Inputs, folder: str) -> None:
    """Write the table of `--batch_inference`, and print its size."""
    from pipelines.evaluation.checks import Workers
    from pipelines.evaluation.inference import InferenceOptions, infer_all

    table, existed = infer_all(
        config.checkpoint,
        inputs,
        folder,
        InferenceOptions(
            k=config.k,
            split=config.split,
            batch_size=config.batch_size,
            recommend=config.recommend_options(),
            allowed=config.allowed,
            overwrite=config.overwrite,
        ),
        Workers(config.shards, config.device, bool(os.environ.get("RAY_ADDRESS"))),
    )
    status = "written"
    if existed:
        status = "already exist, from the same checkpoint and tables; nothing to do"
    if table.table == "scores":
        print_scores(table, folder, status)
    else:
        print_recommendations(config, table, folder, status)


def print_scores(table: Table[PredictionsInfo], folder: str, status: str) -> None:
    """Print the size and columns of a table of scores.

    Args:
        table: The table.
        folder: Folder of the table.
        status: End of the first line: whether the table is new.
    """
    candidates = pluralize(table.info.candidates, "candidate")
    requests = pluralize(table.rows, "request")
    model, split = table.info.model, table.info.split
    print(f"Scores of {model} on {split}: {candidates} of {requests} {status}.")
    names = [column["name"] for column in table.schema]
    first_score = next(name for name in names if name.startswith("score_"))
    print(
        f"  table       {folder}: {', '.join(names)}; candidates best first by "
        f"{first_score}"
    )


def print_recommendations(
    config: Config, table: Table[PredictionsInfo], folder: str, status: str
) -> None:
    """Print the size and columns of a table of recommendations.

    A note gives the number of rankings with fewer than K items.

    Args:
        config: Options of the job.
        table: The table.
        folder: Folder of the table.
        status: End of the first line: whether the table is new.
    """
    from models import registry

    model = table.info.model
    unit, on_split = "user", ""
    if config.split:
        unit, on_split = "request", f" on {config.split}"
    print(
        f"Recommendations of {model}{on_split}: top {config.k} of "
        f"{pluralize(table.rows, unit)} {status}."
    )
    num_short = table.info.below_k
    if num_short:
        items = "the allowed set" if config.allowed else "the catalogue"
        reason = f"{items} has no more"
        if "beam" in registry.find(model).recommend_options():
            reason = (
                f"{items} or the beam search has no more; a larger --beam than the "
                f"model's finds more"
            )
        print(
            f"note: {num_short:,} of them have fewer than {config.k} items, as {reason}"
        )
    columns = ", ".join(column["name"] for column in table.schema)
    print(f"  table       {folder}: {columns}; items best first")


def measure(config: Config, inputs: Inputs, checked: CheckedEvaluation) -> Result:
    """Evaluate a checkpoint, and write the metrics to stdout, a file and MLflow."""
    from pipelines.evaluation.checks import Workers
    from pipelines.evaluation.ranking import evaluate
    from pipelines.evaluation.record import choose_store, record_result

    # The driver of a submitted job runs on a node without GPUs, so tasks do the work.
    is_job = bool(os.environ.get("RAY_ADDRESS"))
    workers = Workers(config.shards, config.device, is_job)
    result, metadata = evaluate(
        config.checkpoint,
        inputs,
        split=config.split or "test",
        batch_size=config.batch_size,
        options=config.recommend_options(),
        workers=workers,
        checked=checked,
    )
    for line in describe_result(result, checked):
        print(line)
    # Record the metrics after they are printed, in case MLflow does not answer.
    path = record_result(result, metadata, config.tracking_uri)
    print(f"  written to  {path}")
    if metadata.tracking:
        uri = choose_store(result.checkpoint, metadata, config.tracking_uri)
        if uri:
            print(f"  MLflow run  {metadata.tracking['run_id']}")
            compare = cli.command_line(
                "jobs.compare",
                experiment=metadata.tracking["experiment"],
                tracking_uri=uri,
            )
            print(f"  next        {compare}")
    return result


def describe_result(result: Result, checked: CheckedEvaluation) -> list[str]:
    """Return the printed lines of an evaluation: size, notes, metrics and speed."""
    from models import registry
    from models.metrics.ranking_metrics import describe_chance_level

    model_class = registry.find(result.model)
    ranked = pluralize(result.users, "user")
    if model_class.eval_unit != "user":
        ranked = f"{pluralize(result.examples, 'request')} of {ranked}"
    lines = [f"{result.model} on {result.split}: {ranked}, seed {result.seed}"]
    lines += describe_limits(result, checked)
    lines += model_class.format_metrics(result.metrics)
    lines += describe_first_time_items(result.metrics)
    chance_level = describe_chance_level(result.metrics)
    if chance_level and not model_class.is_baseline:
        lines.append(f"warning: no better than without a model ({chance_level})")
    if model_class.ranks == "catalogue":
        skipped = f"{pluralize(result.skipped, 'request')} without history left out"
        speed = f"{result.users_per_s:,.0f} requests/s on {result.device}"
        lines.append(f"  {speed}; {skipped}")
    return lines


def describe_limits(result: Result, checked: CheckedEvaluation) -> list[str]:
    """Return notes on what restricts the metrics.

    The notes are about a sample of users, and tables that differ from the training's.
    """
    from models.training import checkpoint

    trained, uri = checked.checkpoint, checked.versions["sequences"].uri
    if checkpoint.is_extended(trained, "sequences", checked.versions):
        return [f"note: {uri} extends the table of the training"]
    if result.is_fresh(trained):
        return [f"note: {uri} is of another log than the training's"]
    return []


def describe_first_time_items(metrics: dict[str, float]) -> list[str]:
    """Return a line on the requests whose target is new to the user, if measured."""
    from models.metrics.ranking_metrics import format_metric
    from models.retrieval.metrics import EXAMPLES, FIRST_PREFIX

    count = metrics.get(FIRST_PREFIX + EXAMPLES)
    if count is None:
        return []
    values = [
        f", {name} {format_metric(metrics[FIRST_PREFIX + name])}"
        for name in ("recall@10", "ndcg@10")
        if FIRST_PREFIX + name in metrics
    ]
    return [
        f"  {FIRST_PREFIX.rstrip('/')}  {count:,.0f} requests whose target is not in "
        f"the history{''.join(values)}"
    ]


if __name__ == "__main__":
    cli.main(run)
