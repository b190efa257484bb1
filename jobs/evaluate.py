"""Measure a checkpoint on a split: the full catalogue is ranked for every request.

    python -m jobs.evaluate --checkpoint runs/sasrec/best --tables TABLES --split test

Prints Recall@K and NDCG@K with the numbers of requests and users, or AUC, GAUC and log loss of a model that scores
candidates; writes them beside the checkpoint and into the MLflow run of the training. With --batch_inference FOLDER it
writes the top K items of all users to a table instead (of the items in --allowed FILE alone), with --split those of its
requests, or the scores of all candidates of the split; with --export FILE.pt2 a student as one program.
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
    from pipelines.evaluation.ranking import Result

RECOMMENDS = most_derived(RECOMMEND_OPTIONS)
"""What the models declare as options of their `recommend`; each is an option of this job."""

OPTIONS = tuple(dict.fromkeys(f.name for kind in RECOMMENDS for f in fields(kind)))


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
    """TEXT: the folder that jobs.encode made, for search models; models of actions can do without."""
    split: Literal["val", "test"] | None = None
    """Which requests to rank for; left out: test, and in --batch_inference of a model that ranks the catalogue what
    comes after everything that each user did."""
    batch_inference: str | None = None
    """Write to this folder the top K of all users, or of the requests of --split with their targets, as the table
    `recommendations`; of a model that ranks candidates the chances and labels of all candidates of the split as the
    table `scores`."""
    allowed: str | None = None
    """File of the only items that --batch_inference ranks: text with an id per line, or CSV or Parquet with a column
    item_id."""
    export: str | None = None
    """Write a SID-MLP or SID-MLP++ to this file as a program of torch.export, checked to rank as the model does."""
    nearest: str | None = None
    """Write each item's K nearest items to this Parquet file: by the cosine of SASRec's item embeddings or of the
    embeddings of TIGER's codes, or the neighbours of item_knn."""
    k: int = 20
    """Items per item of --nearest, and per user of --export and, of a model that ranks the catalogue,
    --batch_inference."""
    batch_size: int = 256
    """Requests per batch."""
    user_stride: int = 1
    """Measure the requests of every N-th user alone, the same users for every model, where the whole split takes too
    long."""
    shards: int = 1
    """Parts of the users ranked at once, each by a Ray task (or actor, in batch inference); 1: in this process, unless
    the job was submitted to a cluster."""
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
        given = [
            *self.recommending(),
            *(["batch_inference"] if self.batch_inference else []),
        ]
        if self.export and given:
            raise ValueError(
                f"{given[0]} is given with export, which keeps to the checkpoint's own options and measures nothing; "
                f"leave it out"
            )

    def recommending(self) -> dict[str, Any]:
        """The options of `recommend` that are given."""
        return {
            name: value for name in OPTIONS if (value := vars(self)[name]) is not None
        }


Config: Any = make_dataclass("Config", [], bases=(Options, *RECOMMENDS), kw_only=True)
Config.__doc__, Config.__module__ = Options.__doc__, __name__


def repeats_of(result: Result) -> int:
    """The requests for known items of an evaluation without those."""
    from models.retrieval.metrics import EXAMPLES, FIRST

    return (
        int(result.examples - result.metrics[FIRST + EXAMPLES])
        if result.options.get("unseen")
        else 0
    )


def first_lines(metrics: dict[str, float]) -> list[str]:
    """What is known of the requests whose target is new to the user, where they are measured apart."""
    from models.metrics.ranking_metrics import format_metric
    from models.retrieval.metrics import EXAMPLES, FIRST

    if (count := metrics.get(FIRST + EXAMPLES)) is None:
        return []
    found = "".join(
        f", {name} {format_metric(metrics[FIRST + name])}"
        for name in ("recall@10", "ndcg@10")
        if FIRST + name in metrics
    )
    return [
        f"  {FIRST.rstrip('/')}  {count:,.0f} requests of an item that is not in the history{found}"
    ]


def asked(result: Result) -> str:
    """How many requests were ranked, and whose they are; where a user's candidates are one request, users alone."""
    from models import registry

    users = pluralize(result.users, "user")
    by_user = registry.find(result.model).eval_unit == "user"
    return users if by_user else f"{pluralize(result.examples, 'request')} of {users}"


def run(config: Options) -> Result | None:
    """Evaluates and prints, or writes recommendations or a program."""
    cli.say_loading("torch", "ray", "mlflow")
    from pipelines import tracking
    from pipelines.evaluation.ranking import check

    require_folders(
        checkpoint=config.checkpoint,
        tables=config.tables,
        sids=config.sids,
        text=config.text,
    )
    inputs = Inputs(config.tables, config.sids, config.text)
    if config.tracking_uri:
        tracking.named_store(config.tracking_uri)
    name = check(config.checkpoint, inputs, config.recommending())[1].name
    cli.preflight(
        checkpoint=config.checkpoint,
        tables=config.tables,
        sids=config.sids,
        text=config.text,
        batch_inference=config.batch_inference,
        export=config.export,
    )
    if config.nearest:
        from pipelines.evaluation.nearest import write_nearest

        items = write_nearest(config.checkpoint, inputs, config.nearest, config.k)
        print(
            f"The {config.k} nearest items of {pluralize(items, 'item')} are in "
            f"{config.nearest}: item_id, nearest (best first), score."
        )
    elif config.export:
        write_program(config, inputs, config.export)
    elif config.batch_inference:
        write_inference(config, inputs, config.batch_inference, name)
    else:
        return measure(config, inputs, name)
    return None


def write_program(config: Options, inputs: Inputs, file: str) -> None:
    """Exports the model to a file."""
    from pipelines.serving.export import export

    requests = export(
        config.checkpoint,
        inputs,
        file,
        k=config.k,
        batch_size=config.batch_size,
        device=config.device,
    )
    print(
        f"Exported to {file}: (history, history_length, user) -> (items, scores), top {config.k}."
    )
    print(
        f"  checked     the same items in the same order as the model for {pluralize(requests, 'request')}"
    )
    print(
        "  use it      models.retrieval.search.export.load_exported, or torch.export.load(FILE).module()"
    )


def write_inference(config: Options, inputs: Inputs, folder: str, name: str) -> None:
    """Writes the top K of all users, or the scores of all candidates of the split, as a table."""
    from models import registry
    from pipelines.evaluation.inference import infer_all

    check_writable(folder)
    manifest, already = infer_all(
        config.checkpoint,
        inputs,
        folder,
        k=config.k,
        split=config.split,
        batch_size=config.batch_size,
        actors=config.shards,
        device=config.device,
        options=config.recommending(),
        allowed=config.allowed,
        overwrite=config.overwrite,
        start=cli.start_ray,
        remote=bool(os.environ.get("RAY_ADDRESS")),
    )
    what = (
        "is there already, from the same checkpoint and tables; nothing to do"
        if already
        else "written"
    )
    if manifest.table == "scores":
        counted = f"{pluralize(manifest.info['candidates'], 'candidate')} of {pluralize(manifest.rows, 'request')}"
        print(
            f"Scores of {manifest.info['model']} on {manifest.info['split']}: {counted} {what}."
        )
        names = [column["name"] for column in manifest.schema]
        scores = [name for name in names if name.startswith("score_")]
        print(
            f"  table       {folder}: {', '.join(names)}; candidates best first by {scores[0]}"
        )
        return
    who, of_split = ("request", f" on {config.split}") if config.split else ("user", "")
    print(
        f"Recommendations of {manifest.info['model']}{of_split}: "
        f"top {config.k} of {pluralize(manifest.rows, who)} {what}."
    )
    if short := manifest.info.get(f"{who}s_below_k", 0):
        beams = "beam" in registry.find(name).recommend_options()
        why = " or the search within its beams has no more; a wider --beam than the model's searches further"
        whole = "the allowed set" if config.allowed else "the catalogue"
        print(
            f"note: {short:,} of them have fewer than {config.k} items, as {whole}{why if beams else ' has no more'}"
        )
    columns = ", ".join(column["name"] for column in manifest.schema)
    print(f"  table       {folder}: {columns}; items best first")


def measure(config: Options, inputs: Inputs, name: str) -> Result:
    """Evaluates on the split, prints what was found, and writes it beside the checkpoint and to MLflow."""
    from models import registry
    from models.loaded_model import read_versions
    from models.metrics.ranking_metrics import describe_chance_level
    from models.retrieval.metrics import FIRST
    from models.storage import checkpoint
    from pipelines.evaluation.ranking import evaluate, record

    model_class = registry.find(name)
    remote = bool(
        os.environ.get("RAY_ADDRESS")
    )  # a cluster's GPUs are not where its jobs' drivers run
    if config.shards > 1 or remote:
        cli.start_ray()
    result, about = evaluate(
        config.checkpoint,
        inputs,
        split=config.split or "test",
        batch_size=config.batch_size,
        shards=config.shards,
        device=config.device,
        options=config.recommending(),
        remote=remote,
        user_stride=config.user_stride,
    )
    print(f"{result.model} on {result.split}: {asked(result)}, seed {result.seed}")
    if config.user_stride > 1:
        print(f"note: measured on every {config.user_stride}th user of the split")
    if checkpoint.is_extended(about, "sequences", read_versions(name, inputs)):
        print(
            f"note: {config.tables} extends what was trained on; of items that are new since nothing is learned"
        )
    elif result.is_fresh(about):
        print(
            f"note: {config.tables} is another log than that of the training; what of it was trained on is not known"
        )
    if repeats := repeats_of(result):
        print(
            f"note: {pluralize(repeats, 'request')} of {result.examples:,} ask for an item of the history, which "
            f"--unseen leaves out; {FIRST} has the others"
        )
    for line in [
        *model_class.format_metrics(result.metrics),
        *first_lines(result.metrics),
    ]:
        print(line)
    if below := describe_chance_level(result.metrics):
        print(f"warning: no better than without a model ({below})")
    if model_class.ranks == "catalogue":
        left_out = f"{pluralize(result.skipped, 'request')} without history left out"
        print(f"  {result.users_per_s:,.0f} requests/s on {result.device}; {left_out}")
    # last, as the figures do not need MLflow
    place = record(result, about, config.tracking_uri)
    print(f"  written to  {place}")
    if about.tracking:
        uri = config.tracking_uri or about.tracking["uri"]
        print(f"  MLflow run  {about.tracking['run_id']}")
        compare = cli.line(
            "jobs.compare", experiment=about.tracking["experiment"], tracking_uri=uri
        )
        print(f"  next        {compare}")
    return result


if __name__ == "__main__":
    cli.main(run, Config)
