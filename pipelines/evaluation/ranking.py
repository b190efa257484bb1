"""Evaluation of a checkpoint: what its family measures of every request of a split.

The metrics with the number of examples, such as Recall@K and NDCG@K of the full catalogue ranked, and requests per
second in steady state.
With more than one shard, Ray tasks rank a part of the users each and send back sums, which add up exactly.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import ray
import torch
from mlflow.exceptions import MlflowException

from models import registry
from models.evaluation import measure_examples
from models.loaded_model import LoadedModel, accept_other_log, read_versions
from models.metrics.per_user_metrics import (
    PER_USER_PREFIX,
    PerUserValues,
    sampling_stride,
)
from models.retrieval.metrics import add_sums, exposure
from models.retrieval.recommend import history_to_give
from models.storage import checkpoint
from models.storage.checkpoint import Checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join, read_manifest, table_hashes
from models.storage.uri import write_file
from pipelines import cluster, tracking
from pipelines.training.record import find_checkpoint

SPLITS = ("val", "test")

SHOWN, TRAINED = "shown", "trained"
"""Among the sums of models that rank a catalogue: how often each item was in a top 10, and its behaviours in training.
"""


@dataclass
class Result:
    """What an evaluation found, as `evaluation-SPLIT.json` beside the checkpoint."""

    model: str
    """Name in the registry."""
    checkpoint: str
    """What was evaluated."""
    split: str
    """val or test."""
    examples: int
    """Requests ranked."""
    users: int
    """Users whose requests they are."""
    skipped: int
    """Requests without a history, left out."""
    metrics: dict[str, float]
    """By name, such as `recall@K` and `ndcg@K`."""
    users_per_s: float
    """Requests per second of `recommend`, all shards together; under this name in MLflow from the first."""
    seconds: float
    """Time of the evaluation."""
    seed: int | None
    """Seed of the training."""
    options: dict[str, Any]
    """Options of `recommend` and the batch size."""
    hashes: dict[str, str]
    """Hashes of the tables."""
    device: str
    """`cpu` with the number of threads, or the GPU's name; before it how many worked at once, if more than one."""
    by_user: dict[str, dict[str, str]]
    """Metrics user by user (`models/metrics/per_user_metrics.py`, packed), for comparisons on the same users."""

    def is_fresh(self, about: Checkpoint) -> bool:
        """Whether the requests are of another log than that of the training."""
        return self.hashes.get("sequences") != about.hashes.get("sequences")


def check(
    uri: str, inputs: Inputs, options: dict[str, Any]
) -> tuple[str, Checkpoint, dict[str, Any], dict[str, str]]:
    """(its folder, what it says of itself, the options that are given, hashes of the tables) of the checkpoint, or the
    best one of a run. UserError where it takes other tables, or its model has no such options of `recommend`."""
    uri = find_checkpoint(uri)
    about = checkpoint.read(uri)
    chosen = recommend_options(about.name, options)
    versions = read_versions(about.name, inputs)
    checkpoint.check(about, uri, accept_other_log(versions, about), extending=True)
    return uri, about, chosen, table_hashes(versions)


def recommend_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Those options that were given; UserError where the model has no such option, or refuses its value."""
    chosen = {key: value for key, value in given.items() if value is not None}
    known = registry.find(name).recommend_options()
    for key in chosen:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UserError(
                f"the model '{name}' has no option --{key} when recommending; {takes}"
            )
    if options := registry.find(name).options_class:
        try:
            options(**chosen)
        except ValueError as error:
            raise UserError(str(error)) from error
    return chosen


def device_of(option: str) -> torch.device:
    """auto: a GPU of this machine where there is one."""
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if option == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but PyTorch sees no GPU here; use --device cpu")
    return torch.device(option)


def takes_gpu(option: str, at_once: int) -> bool:
    """Whether `at_once` Ray tasks or actors take a GPU each: the cluster's, as a job's own machine may have none.

    UserError where there are too few of them and no autoscaler; auto takes none where there are none.
    """
    takes = option == "cuda" or (
        option == "auto" and bool(ray.cluster_resources().get("GPU", 0))
    )
    if takes:
        cluster.check_room(at_once, {"GPU": 1}, "lower --shards or use --device cpu")
    return takes


def trained(loaded: LoadedModel, inputs: Inputs, rank: int, world: int) -> torch.Tensor:
    """(N,) behaviours in training of each item, by the users of shard (rank, world)."""
    size = loaded.catalogue.num_items
    train: Any = loaded.model.dataset_class.load(
        inputs.sequences,
        "train",
        unit="behaviour",
        max_history=1,
        rank=rank,
        world=world,
    )
    targets = train.targets[train.evaluation_rows()]
    return torch.from_numpy(np.bincount(targets, minlength=size))


def rank_shard(
    uri: str,
    inputs: Inputs,
    split: Any,
    batch_size: int,
    options: dict[str, Any],
    device: str,
    user_stride: int,
    threads: int,
    shard: tuple[int, int],
) -> tuple[dict[str, Any], int, int, float, str, int]:
    """(sums, requests, skipped, seconds in recommend, device, users) of shard (rank, world): the users of its parts."""
    rank, world = shard
    if threads:
        torch.set_num_threads(threads)
    where = device_of(device)
    loaded = LoadedModel.load(uri, inputs, where)
    history = history_to_give(loaded.model.config.max_history, options)
    examples = loaded.load_examples(
        inputs, split, max_history=history, rank=rank, world=world
    )
    model = loaded.model
    stride = sampling_stride(read_manifest(inputs.sequences, "sequences").rows)
    common: dict[str, Any] = {"batch_size": batch_size, "device": where}
    asked = {**options, "by_user": stride}
    if len(examples):
        measure_examples(
            model,
            examples,
            limit=min(batch_size, len(examples)),
            options=asked,
            **common,
        )  # warms up
    if loaded.model.ranks == "catalogue":
        asked["shown"] = torch.zeros(
            loaded.catalogue.num_items, dtype=torch.long, device=where
        )
    result = measure_examples(
        model, examples, options=asked, user_stride=user_stride, **common
    )
    sums = result.sums
    if loaded.model.ranks == "catalogue":
        sums |= {
            SHOWN: asked["shown"].cpu(),
            TRAINED: trained(loaded, inputs, rank, world),
        }
    label = (
        torch.cuda.get_device_name()
        if where.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )
    users = examples.count_users(user_stride)
    return (
        sums,
        result.num_examples,
        examples.skipped,
        result.seconds,
        label,
        users,
    )


def evaluate(
    uri: str,
    inputs: Inputs,
    *,
    split: str = "test",
    batch_size: int = 256,
    shards: int = 1,
    device: str = "auto",
    options: dict[str, Any] | None = None,
    remote: bool = False,
    user_stride: int = 1,
) -> tuple[Result, Checkpoint]:
    """Rank and measure, in this process, or where `shards` is above 1 or with `remote` in Ray tasks. Write nothing.
    Only every `user_stride`-th user of the table is measured, the same users for every model."""
    began = time.monotonic()
    if split not in SPLITS:
        raise UserError(f"--split is '{split}', it must be one of {', '.join(SPLITS)}")
    uri, about, chosen, given = check(uri, inputs, options or {})
    arguments = (uri, inputs, split, batch_size, chosen, device, user_stride)
    if shards == 1 and not remote:
        parts = [rank_shard(*arguments, 0, (0, 1))]
    else:
        # not in the placement group of a sweep's trial, which holds no CPU
        task = ray.remote(
            num_cpus=1,
            num_gpus=1 if takes_gpu(device, 1) else 0,
            scheduling_strategy="DEFAULT",
        )(rank_shard)
        parts = ray.get(
            [task.remote(*arguments, 1, (rank, shards)) for rank in range(shards)]
        )
    count = sum(part[1] for part in parts)
    if count == 0:
        raise UserError(
            f"the split '{split}' of {inputs.tables} has no request with a history; choose another --split"
        )
    total: dict[str, Any] = add_sums(part[0] for part in parts)
    by_user: dict[str, PerUserValues] = {
        name: total.pop(name)
        for name in list(total)
        if name.startswith(PER_USER_PREFIX)
    }
    exposed = exposure(total.pop(SHOWN), total.pop(TRAINED)) if SHOWN in total else {}
    if given.get("sequences") != about.hashes.get(
        "sequences"
    ):  # of another log it is not known what was trained on
        exposed.pop("new_items@10", None)
    metrics = registry.find(about.name).metric_means(total) | exposed
    return (
        Result(
            model=about.name,
            checkpoint=uri,
            split=split,
            examples=int(metrics.get("requests", count)),
            users=sum(part[5] for part in parts),
            skipped=sum(part[2] for part in parts),
            metrics=metrics,
            users_per_s=sum(part[1] / part[3] for part in parts if part[3] > 0),
            seconds=time.monotonic() - began,
            seed=about.fit.get("seed"),
            options={
                **chosen,
                "batch_size": batch_size,
                **({"user_stride": user_stride} if user_stride > 1 else {}),
            },
            hashes={name: given[name] for name in about.hashes if name in given},
            device=parts[0][4] if shards == 1 else f"{shards} x {parts[0][4]}",
            by_user={
                name.removeprefix(PER_USER_PREFIX): value.to_text()
                for name, value in by_user.items()
            },
        ),
        about,
    )


def record(
    result: Result,
    about: Checkpoint,
    tracking_uri: str | None = None,
) -> str:
    """Writes the result beside the checkpoint and into the training's MLflow run; returns the
    file's place.

    Options that differ from the model's own are part of the names, so that an evaluation with another decoder does not
    take the place of the plain one; so is another log than that of the training. UserError where MLflow or the run in
    it is not there any more.
    """
    suffix = "".join(
        f"-{key}-{value}"
        for key, value in sorted(result.options.items())
        if key not in ("batch_size", "user_stride") and about.model.get(key) != value
    )
    if result.is_fresh(about):
        suffix += f"-fresh-{result.hashes['sequences'][:8]}"
    place = join(result.checkpoint, f"evaluation-{result.split}{suffix}.json")
    content = standard_json(asdict(result))
    write_file(
        place, json.dumps(content, indent=2, sort_keys=True, allow_nan=False).encode()
    )
    if about.tracking:
        run = tracking.RunRef(
            **{**about.tracking, **({"uri": tracking_uri} if tracking_uri else {})}
        )
        prefix = f"{result.split}{suffix}"
        values = {f"{prefix}/{name}": value for name, value in result.metrics.items()}
        values |= {
            f"{prefix}/examples": result.examples,
            f"{prefix}/users": result.users,
        }
        values |= {f"{prefix}/users_per_s": result.users_per_s}
        try:
            logger = tracking.Logger(run)
            logger.update(values, about.step)
            logger.tag(
                **{tracking.WEIGHTS_TAG: checkpoint.weights_hash(result.checkpoint)}
            )
            tracking.log_json(run, content, os.path.basename(place))
        except (MlflowException, UserError) as error:
            first = " ".join(str(error).split())[:200]
            raise UserError(
                f"the figures are in {place}, but not in MLflow: run {run.run_id} at {run.uri} ({first}); "
                f"give the --tracking_uri where that run is now, and evaluate again"
            ) from error
    return place


def standard_json(value: Any) -> Any:
    """Return the value as JSON knows it, with null for a number that is not defined."""
    if isinstance(value, dict):
        return {key: standard_json(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
