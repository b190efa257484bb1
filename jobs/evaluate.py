"""Measure a checkpoint on a split, ranking the full catalogue for every request.

    python -m jobs.evaluate --checkpoint runs/sasrec/best --tables TABLES --split test

It prints Recall@K and NDCG@K with the numbers of requests and users, or AUC, GAUC and
log loss of a model that scores candidates, and writes them beside the checkpoint and to
MLflow, as a child run of the training whose params are the options. With
--batch_inference FOLDER it writes the top K items of all users to a table instead (of
the items in --allowed FILE alone), with --split those of its requests, or the scores of
all candidates of the split; with --export FILE.pt2 a student as one program.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Literal

from jobs import cli
from jobs.options import most_derived
from models.config import check_positive, pluralize
from models.retrieval.options import RECOMMEND_OPTIONS
from models.storage.input_folders import require_folders
from models.storage.inputs import Inputs
from models.storage.uri import check_writable

if TYPE_CHECKING:
    from models.storage.checkpoint import Checkpoint
    from models.storage.tables import Manifest
    from pipelines.evaluation.record import Result

RECOMMENDS = most_derived(RECOMMEND_OPTIONS)
"""Dataclasses of the options of `recommend`; each option is an option of this job."""

RECOMMEND_NAMES = tuple(
    dict.fromkeys(field.name for kind in RECOMMENDS for field in fields(kind))
)
"""Names of the options of `recommend`."""


@dataclass(kw_only=True)
class Options:
    """Options of jobs.evaluate."""

    checkpoint: str
    """Folder of a checkpoint, or of a finished run, whose best one is taken."""
    tables: str
    """TABLES: the folder that jobs.prepare made."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models; models of actions can
    do without."""
    split: Literal["val", "test"] | None = None
    """Which requests to rank for; left out: test, and in --batch_inference of a model
    that ranks the catalogue what comes after everything that each user did."""
    batch_inference: str | None = None
    """Write to this folder the top K of all users, or of the requests of --split with
    their targets, as the table `recommendations`; of a model that ranks candidates the
    chances and labels of all candidates of the split as the table `scores`."""
    allowed: str | None = None
    """File of the only items that --batch_inference ranks: text with an id per line, or
    CSV or Parquet with a column item_id."""
    export: str | None = None
    """Write a SID-MLP or SID-MLP++ to this file as a program of torch.export, checked
    to rank as the model does."""
    nearest: str | None = None
    """Write each item's K nearest items to this Parquet file: by the cosine of SASRec's
    item embeddings or of the embeddings of TIGER's codes, or the neighbours of
    item_knn."""
    k: int = 20
    """Items per item of --nearest, and per user of --export and, of a model that ranks the catalogue,
    --batch_inference."""
    batch_size: int = 256
    """Requests per batch."""
    user_stride: int = 1
    """Measure the requests of every N-th user alone, the same users for every model,
    where the whole split takes too long."""
    shards: int = 1
    """Parts of the users ranked at once, each by a Ray task (or actor, in batch
    inference); 1: in this process, unless the job was submitted to a cluster."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: a GPU where there is one."""
    tracking_uri: str | None = None
    """MLflow, where it is no longer at the address of the training."""
    overwrite: bool = False
    """Replace the table of --batch_inference."""

    def __post_init__(self) -> None:
        check_positive(self, ("k", "batch_size", "shards", "user_stride"))
        if self.allowed and not self.batch_inference:
            raise ValueError(
                "allowed is given without batch_inference, and what is measured is of the whole catalogue; leave it out"
            )
        if self.nearest and (self.batch_inference or self.export):
            raise ValueError(
                "nearest is given with batch_inference or export; run jobs.evaluate twice"
            )
        if self.batch_inference == "":
            raise ValueError("batch_inference is empty; give a folder for the table")
        others = list(self.recommending())
        if self.batch_inference:
            others.append("batch_inference")
        if self.export and others:
            raise ValueError(
                f"{others[0]} is given with export, which keeps to the checkpoint's own options and measures nothing; "
                f"leave it out"
            )

    def recommending(self) -> dict[str, Any]:
        """Return the options of `recommend` that are given."""
        options = {name: vars(self)[name] for name in RECOMMEND_NAMES}
        return {name: value for name, value in options.items() if value is not None}


Config: Any = make_dataclass("Config", [], bases=(Options, *RECOMMENDS), kw_only=True)
Config.__doc__, Config.__module__ = Options.__doc__, __name__


def run(config: Options) -> Result | None:
    """Measure a checkpoint, or write its rankings, nearest items or exported program."""
    cli.say_loading("torch", "ray", "mlflow")
    from pipelines import tracking
    from pipelines.evaluation.checks import check_evaluation

    folders = {
        "checkpoint": config.checkpoint,
        "tables": config.tables,
        "sids": config.sids,
        "text": config.text,
    }
    require_folders(**folders)
    inputs = Inputs(config.tables, config.sids, config.text)
    if config.tracking_uri:
        tracking.find_store(config.tracking_uri)
    checked = check_evaluation(config.checkpoint, inputs, config.recommending())
    cli.preflight(
        **folders, batch_inference=config.batch_inference, export=config.export
    )
    if config.nearest:
        write_nearest_items(config, inputs, config.nearest)
    elif config.export:
        write_program(config, inputs, config.export)
    elif config.batch_inference:
        write_inference(config, inputs, config.batch_inference)
    else:
        return measure(config, inputs, checked.checkpoint)
    return None


def write_nearest_items(config: Options, inputs: Inputs, file: str) -> None:
    """Write the nearest items of each item to a file."""
    from pipelines.evaluation.nearest import write_nearest

    items = write_nearest(config.checkpoint, inputs, file, config.k)
    print(
        f"The {config.k} nearest items of {pluralize(items, 'item')} are in {file}: "
        f"item_id, nearest (best first), score."
    )


def write_program(config: Options, inputs: Inputs, file: str) -> None:
    """Export a student to a file as a program of torch.export."""
    from pipelines.serving.export import export

    num_requests = export(
        config.checkpoint,
        inputs,
        file,
        k=config.k,
        batch_size=config.batch_size,
        device=config.device,
    )
    print(
        f"Exported to {file}: (history, history_length, user) -> (items, scores), top "
        f"{config.k}."
    )
    print(
        f"  checked     the same items in the same order as the model for "
        f"{pluralize(num_requests, 'request')}"
    )
    print(
        "  use it      models.retrieval.search.export.load_exported, or "
        "torch.export.load(FILE).module()"
    )


def write_inference(config: Options, inputs: Inputs, folder: str) -> None:
    """Write the rankings of users or requests, or the scores of candidates, to a table."""
    from pipelines.evaluation.checks import Workers
    from pipelines.evaluation.inference import InferenceOptions, infer_all

    check_writable(folder)
    manifest, existed = infer_all(
        config.checkpoint,
        inputs,
        folder,
        InferenceOptions(
            k=config.k,
            split=config.split,
            batch_size=config.batch_size,
            recommend=config.recommending(),
            allowed=config.allowed,
            overwrite=config.overwrite,
        ),
        Workers(config.shards, config.device, bool(os.environ.get("RAY_ADDRESS"))),
        cli.start_ray,
    )
    done = "written"
    if existed:
        done = "is there already, from the same checkpoint and tables; nothing to do"
    if manifest.table == "scores":
        print_scores(manifest, folder, done)
    else:
        print_recommendations(config, manifest, folder, done)


def print_scores(manifest: Manifest, folder: str, done: str) -> None:
    """Print the size of a table of scores."""
    candidates = pluralize(manifest.info["candidates"], "candidate")
    requests = pluralize(manifest.rows, "request")
    model, split = manifest.info["model"], manifest.info["split"]
    print(f"Scores of {model} on {split}: {candidates} of {requests} {done}.")
    names = [column["name"] for column in manifest.schema]
    first_score = next(name for name in names if name.startswith("score_"))
    print(
        f"  table       {folder}: {', '.join(names)}; candidates best first by {first_score}"
    )


def print_recommendations(
    config: Options, manifest: Manifest, folder: str, done: str
) -> None:
    """Print the size of a table of recommendations, and the number of short rankings."""
    from models import registry

    model = manifest.info["model"]
    unit, on_split = "user", ""
    if config.split:
        unit, on_split = "request", f" on {config.split}"
    print(
        f"Recommendations of {model}{on_split}: top {config.k} of "
        f"{pluralize(manifest.rows, unit)} {done}."
    )
    num_short = manifest.info.get(f"{unit}s_below_k", 0)
    if num_short:
        items = "the allowed set" if config.allowed else "the catalogue"
        why = " has no more"
        if "beam" in registry.find(model).recommend_options():
            why = (
                " or the search within its beams has no more; a wider --beam than the "
                "model's searches further"
            )
        print(
            f"note: {num_short:,} of them have fewer than {config.k} items, as {items}{why}"
        )
    columns = ", ".join(column["name"] for column in manifest.schema)
    print(f"  table       {folder}: {columns}; items best first")


def measure(config: Options, inputs: Inputs, about: Checkpoint) -> Result:
    """Evaluate a checkpoint, print the metrics, and write them to a file and to MLflow."""
    from pipelines.evaluation.checks import Workers
    from pipelines.evaluation.ranking import evaluate
    from pipelines.evaluation.record import record_result

    # a cluster's GPUs are not where its jobs' drivers run
    is_job = bool(os.environ.get("RAY_ADDRESS"))
    workers = Workers(config.shards, config.device, is_job)
    if workers.use_ray:
        cli.start_ray()
    result, about = evaluate(
        config.checkpoint,
        inputs,
        split=config.split or "test",
        batch_size=config.batch_size,
        options=config.recommending(),
        user_stride=config.user_stride,
        workers=workers,
    )
    for line in describe_result(result, about, inputs):
        print(line)
    # last, as the metrics do not need MLflow
    path = record_result(result, about, config.tracking_uri)
    print(f"  written to  {path}")
    if about.tracking:
        uri = config.tracking_uri or about.tracking["uri"]
        experiment = about.tracking["experiment"]
        compare = cli.line("jobs.compare", experiment=experiment, tracking_uri=uri)
        print(f"  MLflow run  {about.tracking['run_id']}")
        print(f"  next        {compare}")
    return result


def describe_result(result: Result, about: Checkpoint, inputs: Inputs) -> list[str]:
    """Return the lines that describe the result of an evaluation."""
    from models import registry
    from models.metrics.ranking_metrics import describe_chance_level

    model_class = registry.find(result.model)
    ranked = pluralize(result.users, "user")
    if model_class.eval_unit != "user":  # else all candidates of a user are one request
        ranked = f"{pluralize(result.examples, 'request')} of {ranked}"
    lines = [f"{result.model} on {result.split}: {ranked}, seed {result.seed}"]
    lines += describe_limits(result, about, inputs)
    lines += model_class.format_metrics(result.metrics)
    lines += describe_first(result.metrics)
    chance_level = describe_chance_level(result.metrics)
    if chance_level:
        lines.append(f"warning: no better than without a model ({chance_level})")
    if model_class.ranks == "catalogue":
        left_out = f"{pluralize(result.skipped, 'request')} without history left out"
        speed = f"{result.users_per_s:,.0f} requests/s on {result.device}"
        lines.append(f"  {speed}; {left_out}")
    return lines


def describe_limits(result: Result, about: Checkpoint, inputs: Inputs) -> list[str]:
    """Return notes on the users, the log and the items that an evaluation leaves out."""
    from models.loaded_model import read_versions
    from models.retrieval.metrics import EXAMPLES, FIRST_PREFIX
    from models.storage import checkpoint

    notes = []
    stride = result.options.get("user_stride", 1)
    if stride > 1:
        notes.append(f"note: measured on every {stride}th user of the split")
    if checkpoint.is_extended(about, "sequences", read_versions(about.name, inputs)):
        notes.append(
            f"note: {inputs.tables} extends what was trained on; of items that are new "
            f"since nothing is learned"
        )
    elif result.is_fresh(about):
        notes.append(
            f"note: {inputs.tables} is another log than that of the training; what of it "
            f"was trained on is not known"
        )
    if result.options.get("unseen"):
        repeats = int(result.examples - result.metrics[FIRST_PREFIX + EXAMPLES])
        if repeats:
            notes.append(
                f"note: {pluralize(repeats, 'request')} of {result.examples:,} ask for an "
                f"item of the history, which --unseen leaves out; {FIRST_PREFIX} has "
                "the others"
            )
    return notes


def describe_first(metrics: dict[str, float]) -> list[str]:
    """Return a line on the requests for an item that is new to the user, if measured."""
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
        f"  {FIRST_PREFIX.rstrip('/')}  {count:,.0f} requests of an item that is not in the "
        f"history{''.join(values)}"
    ]


if __name__ == "__main__":
    cli.main(run, Config)
