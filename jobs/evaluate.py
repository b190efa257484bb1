"""Measure a checkpoint on a split: the full catalogue is ranked for every request.

    python -m jobs.evaluate --checkpoint runs/sasrec/best --tables TABLES --split test

Prints Recall@K and NDCG@K with the numbers of requests and users, or AUC, GAUC and log loss of a model that scores
candidates; writes them beside the checkpoint and into the MLflow run of the training. --item_shift adds those of
requests whose target is a new item, --replay true estimates of online metrics of a search model. With
--batch_inference FOLDER it writes the top K items of all users to a table instead; with --export FILE.pt2 a student as
one program.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, get_type_hints

from docstring_parser import parse_from_object

from jobs import cli
from models import registry
from models.tables import reach
from pipelines.data.tables import check_can_write, check_place
from pipelines.evaluation.ranking import Result, device_of, evaluate, find_checkpoint, record
from pipelines.training.run import absolute


@dataclass
class Config:
    """Options."""

    checkpoint: str
    """Folder of a checkpoint, or of a finished run, whose best one is taken."""
    tables: str
    """TABLES: the folder that jobs.prepare made."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models."""
    split: Literal["val", "test"] = "test"
    """Which requests to rank for."""
    batch_inference: str | None = None
    """Write the top K of all users, after all they did, to this folder as the table `recommendations`."""
    export: str | None = None
    """Write a SID-MLP or SID-MLP++ to this file as a program of torch.export, checked to rank as the model does."""
    k: int = 20
    """Items per user of --batch_inference and --export."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the model's `recommend` takes (`models/retrieval/search_options.py`); by default the checkpoint's own."""
    item_shift: bool = False
    """Also measure on targets first seen after the global 80% and 90% timestamp (App. E.3 of SID-MLP)."""
    replay: bool = False
    """Search: also estimate online metrics by replaying logged searches (`pipelines/evaluation/replay.py`)."""
    replay_page: int = 10
    """Results on a page of the replay."""
    replay_base: str | None = None
    """Checkpoint or run that lifts of the replay are over; by default the order in which the log showed results."""
    replay_propensities: list[float] = field(default_factory=list)
    """Chance that a user looks at each position, from the first; by default the click rates by position in training."""
    batch_size: int = 256
    """Requests per batch."""
    shards: int = 1
    """Parts of the users ranked at once, each by a Ray task (or actor, in batch inference)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto: a GPU where there is one."""
    tracking_uri: str | None = None
    """MLflow, where it is no longer at the address of the training."""
    overwrite: bool = False
    """Replace the table of --batch_inference."""

    def __post_init__(self) -> None:
        for name in ("k", "batch_size", "shards", "replay_page"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, the least is 1; give a positive number")
        if (self.replay_base or self.replay_propensities or self.replay_page != 10) and not self.replay:
            raise ValueError("options of the replay are given without it; add --replay true")
        if self.replay and (self.batch_inference or self.export):
            raise ValueError("replay is true, but batch_inference and export measure nothing; run jobs.evaluate twice")
        if self.item_shift and self.batch_inference:
            raise ValueError("item_shift is true, but batch_inference measures nothing; run jobs.evaluate twice")
        if self.export:
            given = [*self.options, *(["batch_inference"] if self.batch_inference else [])]
            given += ["item_shift"] if self.item_shift else []
            if given:
                raise ValueError(
                    f"{given[0]} is given with export, which keeps to the checkpoint's own options and measures "
                    f"nothing; leave it out"
                )
        if self.text and self.batch_inference:
            raise ValueError(
                "text is given, but search models rank what they are asked about; leave out batch_inference"
            )


def parse(job: str, argv: Sequence[str] | None = None) -> Config:
    """The command line; --batch-inference is --batch_inference."""
    import sys

    words = list(sys.argv[1:] if argv is None else argv)
    spelled = [word.replace("--batch-inference", "--batch_inference", 1) for word in words]
    return cli.parse(Config, job, spelled, options=model_options())


def model_options() -> list[cli.Option]:
    """What any model's `recommend` takes, with the models that take it."""
    takers: dict[str, list[str]] = {}
    declared: dict[str, tuple[Any, str]] = {}
    for name, entry in registry.MODELS.items():
        for kind in entry.recommends.__mro__ if entry.recommends else ():
            if is_dataclass(kind):
                types = get_type_hints(kind)
                for param in parse_from_object(kind).params:
                    if param.arg_name in vars(kind).get("__annotations__", {}):
                        declared.setdefault(param.arg_name, (types[param.arg_name], param.description or ""))
                        takers.setdefault(param.arg_name, []).append(name)
    return [
        cli.Option(name, type_, f"{text} Of {', '.join(takers[name])}; by default the checkpoint's own.")
        for name, (type_, text) in declared.items()
    ]


def replay_of(config: Config, result: Result) -> list[str]:
    """Replays and adds what was found to the metrics; the lines to print."""
    from pipelines.evaluation.replay import replay

    found = replay(
        result.checkpoint, absolute(config.tables), config.text, split=config.split, page=config.replay_page,
        base=find_checkpoint(config.replay_base) if config.replay_base else None,
        propensities=config.replay_propensities, batch_size=config.batch_size, device=device_of(config.device),
    )  # fmt: skip
    result.metrics |= found.metrics()
    return found.lines()


def summary(result: Result, replayed: list[str]) -> list[str]:
    """What was found, with the lines of a replay."""
    entry = registry.find(result.model)
    users = f"{result.users:,} users"  # where a row is a user, all candidates of one are one request
    asked = users if entry.family.eval_unit == "user" else f"{result.examples:,} requests of {users}"
    return [
        f"{result.model} on {result.split}: {asked}, seed {result.seed}", *entry.measures.summary(result), *replayed
    ]  # fmt: skip


def run(config: Config) -> Result | None:
    """Evaluates and prints, or writes recommendations."""
    reach(config.checkpoint, config.tables, config.sids, config.text)  # what does not answer is said before Ray starts
    if config.export:
        from pipelines.serving.export import export

        requests = export(
            config.checkpoint, config.tables, config.sids, config.export, k=config.k, batch_size=config.batch_size,
            device=config.device,
        )  # fmt: skip
        print(f"Exported to {config.export}: (history, history_length, user) -> (items, scores), top {config.k}.")
        print(f"  checked     the same items in the same order as the model for {requests:,} requests")
        print("  use it      models.retrieval.decoding.export.load_exported, or torch.export.load(FILE).module()")
        return None
    if config.batch_inference:
        from pipelines.evaluation.inference import recommend_all

        check_can_write(config.batch_inference)
        check_place(config.batch_inference, "recommendations")  # before Ray takes its seconds to start
        cli.start_ray()
        manifest, already = recommend_all(
            config.checkpoint, config.tables, config.sids, config.batch_inference, k=config.k,
            batch_size=config.batch_size, actors=config.shards, device=config.device, options=config.options,
            overwrite=config.overwrite,
        )  # fmt: skip
        what = "is there already, from the same checkpoint and tables; nothing to do" if already else "written"
        print(f"Recommendations of {manifest.info['model']}: top {config.k} of {manifest.rows:,} users {what}.")
        print(f"  table       {config.batch_inference}: user_id, item_id (best first), score")
        return None
    remote = bool(os.environ.get("RAY_ADDRESS"))  # a cluster's GPUs are not where its jobs' drivers run
    if config.shards > 1 or remote:
        cli.start_ray()
    result, about = evaluate(
        config.checkpoint, config.tables, config.text or config.sids, split=config.split, batch_size=config.batch_size,
        shards=config.shards, device=config.device, options=config.options, item_shift=config.item_shift,
        remote=remote,
    )  # fmt: skip
    replayed = replay_of(config, result) if config.replay else []
    print("\n".join(summary(result, replayed)))
    place = record(result, about, config.tracking_uri)  # after the figures, which MLflow need not be there for
    print(f"  written to  {place}")
    if about.tracking:
        uri = config.tracking_uri or about.tracking["uri"]
        print(f"  MLflow run  {about.tracking['run_id']}")
        print(f"  next        python -m jobs.compare --experiment {about.tracking['experiment']} --tracking_uri {uri}")
    return result


if __name__ == "__main__":
    cli.main(run, Config, parse)
