"""Measure a checkpoint on all requests of a split.

    result, checkpoint = evaluate("runs/sasrec", Inputs(tables), split="test")

The metrics depend on the model's kind, such as Recall@K and NDCG@K over the full
catalogue. Requests per second are measured after a warm-up. With several shards, each
Ray task measures some of the users, and the sums of the tasks are added.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from core.errors import UserError
from core.schemas import Inputs
from core.tables import table_hashes
from models import registry
from models.dataset.dataset import RequestDataset
from models.evaluation import add_sums, measure_examples
from models.loaded_model import LoadedModel
from models.metrics.per_user_metrics import sampling_stride
from models.retrieval.metrics import exposure
from models.retrieval.recommend import required_history
from models.training.checkpoint import Checkpoint
from pipelines.evaluation.checks import (
    CheckedEvaluation,
    Workers,
    check_evaluation,
    resolve_device,
)
from pipelines.evaluation.record import Result, pop_per_user

SPLITS = ("val", "test")

SHOWN, TRAINED = "shown", "trained"
"""Keys in the sums for counts per item: how often it is in a top 10, and how often in
the training behaviours."""


@dataclass(frozen=True)
class Task:
    """Arguments that all shards of an evaluation share."""

    uri: str
    """Folder of the checkpoint."""
    inputs: Inputs
    """Folders of the tables that are evaluated."""
    split: Any
    """`val` or `test`."""
    batch_size: int
    """Requests per batch."""
    options: dict[str, Any]
    """Options of `recommend`."""
    workers: Workers
    """Processes and devices."""


@dataclass(frozen=True)
class ShardResult:
    """The result of one shard."""

    sums: dict[str, Any]
    """Sums from which the metrics are computed."""
    requests: int
    """Number of ranked requests."""
    skipped: int
    """Number of requests without a history, which are not ranked."""
    seconds: float
    """Time spent in `recommend` or `score`."""
    device: str
    """Name of the GPU, or `cpu` with the number of threads."""
    users: int
    """Number of users with a ranked request."""


def evaluate(
    uri: str,
    inputs: Inputs,
    *,
    split: str = "test",
    batch_size: int = 256,
    options: dict[str, Any] | None = None,
    workers: Workers | None = None,
    checked: CheckedEvaluation | None = None,
) -> tuple[Result, Checkpoint]:
    """Measure a checkpoint on a split, without writing anything.

    Args:
        uri: Folder of a checkpoint, or of a run, whose best checkpoint is used.
        inputs: Folders of the tables, semantic IDs and text embeddings.
        split: `val` or `test`.
        batch_size: Requests per batch.
        options: Options of `recommend`.
        workers: Processes and devices; by default this process.
        checked: Result of `check_evaluation`, if it is known.

    Returns:
        The result, and the content of the checkpoint's `config.json`.
    """
    began = time.monotonic()
    checked = checked or check_evaluation(uri, inputs, options or {})
    workers = workers or Workers()
    task = Task(
        uri=checked.uri,
        inputs=inputs,
        split=split,
        batch_size=batch_size,
        options=checked.options,
        workers=workers,
    )
    shards = measure_shards(task)
    if sum(shard.requests for shard in shards) == 0:
        raise UserError(
            f"the split '{split}' of {inputs.tables} has no request with a history"
        )
    result = to_result(task, checked, shards, time.monotonic() - began)
    return result, checked.checkpoint


def measure_shards(task: Task) -> list[ShardResult]:
    """Measure all shards, in this process or in Ray tasks."""
    if not task.workers.use_ray:
        return [measure_shard(task, 0)]
    # the placement group of a trial has no CPU, so tasks are scheduled outside of it
    remote = ray.remote(
        num_cpus=1,
        num_gpus=1 if task.workers.needs_gpu(1) else 0,
        scheduling_strategy="DEFAULT",
    )(measure_shard)
    return ray.get([remote.remote(task, rank) for rank in range(task.workers.shards)])


def measure_shard(task: Task, rank: int) -> ShardResult:
    """Measure the users of one shard.

    Args:
        task: Arguments that all shards share.
        rank: Number of the shard, from 0.
    """
    if task.workers.num_threads:
        torch.set_num_threads(task.workers.num_threads)
    device = resolve_device(task.workers.device)
    loaded = LoadedModel.load(task.uri, task.inputs, device)
    history = required_history(loaded.model.config.max_history, task.options)
    examples = loaded.model.load_examples(
        loaded.catalogue,
        task.split,
        max_history=history,
        rank=rank,
        world=task.workers.shards,
    )
    stride = sampling_stride(loaded.catalogue.versions["sequences"].rows)
    options: dict[str, Any] = {**task.options, "by_user": stride}
    if len(examples):
        warm_up(loaded, examples, task.batch_size, options, device)
    if loaded.model.ranks == "catalogue":
        options["shown"] = torch.zeros(
            loaded.catalogue.num_items, dtype=torch.long, device=device
        )
    measured = measure_examples(
        loaded.model,
        examples,
        batch_size=task.batch_size,
        device=device,
        options=options,
    )
    if loaded.model.ranks == "catalogue":
        measured.sums[SHOWN] = options["shown"].cpu()
        measured.sums[TRAINED] = count_trained_items(loaded, rank, task.workers.shards)
    device_name = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name()
    return ShardResult(
        sums=measured.sums,
        requests=measured.num_examples,
        skipped=examples.num_skipped,
        seconds=measured.seconds,
        device=device_name,
        users=examples.count_users(),
    )


def warm_up(
    loaded: LoadedModel,
    examples: RequestDataset,
    batch_size: int,
    options: dict[str, Any],
    device: torch.device,
) -> None:
    """Measure one batch without using the result, so that later timings are steady."""
    measure_examples(
        loaded.model,
        examples,
        batch_size=batch_size,
        device=device,
        limit=min(batch_size, len(examples)),
        options=options,
    )


def count_trained_items(loaded: LoadedModel, rank: int, world: int) -> torch.Tensor:
    """Count the training behaviours per item of one shard's users.

    Args:
        loaded: The model, whose catalogue has N items.
        rank: Number of the shard, from 0.
        world: Number of shards.

    Returns:
        (N,) counts.
    """
    train = loaded.model.load_examples(
        loaded.catalogue, "train", "behaviour", rank=rank, world=world
    )
    targets = train.targets[train.evaluation_rows()]
    counts = np.bincount(targets, minlength=loaded.catalogue.num_items)
    return torch.from_numpy(counts)


def to_result(
    task: Task, checked: CheckedEvaluation, shards: list[ShardResult], seconds: float
) -> Result:
    """Combine the results of all shards.

    Args:
        task: Arguments that all shards share.
        checked: Checkpoint with its options and tables.
        shards: Results of all shards.
        seconds: Wall time of the evaluation.
    """
    saved = checked.checkpoint
    sums: dict[str, Any] = add_sums(shard.sums for shard in shards)
    by_user = pop_per_user(sums)
    exposure_metrics: dict[str, float] = {}
    if SHOWN in sums:
        exposure_metrics = exposure(sums.pop(SHOWN), sums.pop(TRAINED))
    metrics = registry.find(saved.name).metric_means(sums) | exposure_metrics
    requests = sum(shard.requests for shard in shards)
    device = shards[0].device
    if task.workers.shards > 1:
        device = f"{task.workers.shards} x {device}"
    options = {**checked.options, "batch_size": task.batch_size}
    current = table_hashes(checked.versions)
    hashes = {name: current[name] for name in saved.hashes if name in current}
    timed = [shard for shard in shards if shard.seconds > 0]
    result = Result(
        model=saved.name,
        checkpoint=checked.uri,
        split=task.split,
        examples=int(metrics.get("requests", requests)),
        users=sum(shard.users for shard in shards),
        skipped=sum(shard.skipped for shard in shards),
        metrics=metrics,
        users_per_s=sum(shard.requests / shard.seconds for shard in timed),
        seconds=seconds,
        seed=saved.fit.get("seed"),
        options=options,
        hashes=hashes,
        device=device,
        by_user=by_user,
    )
    if result.is_fresh(saved):  # items of the training are unknown for a fresh log
        metrics.pop("new_items@10", None)
    return result
