"""Measure a checkpoint on every request of a split.

    result, about = evaluate("runs/sasrec", Inputs(tables), split="test")

The metrics are those of the model's family, such as Recall@K and NDCG@K of the full
catalogue, with requests per second in steady state. With several shards, Ray tasks
measure a part of the users each; their sums add up exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from models import registry
from models.dataset.dataset import RequestDataset
from models.evaluation import measure_examples
from models.loaded_model import LoadedModel
from models.metrics.per_user_metrics import sampling_stride
from models.retrieval.metrics import add_sums, exposure
from models.retrieval.recommend import required_history
from models.storage.checkpoint import Checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, read_manifest
from pipelines.evaluation.checks import (
    CheckedEvaluation,
    Workers,
    check_evaluation,
    resolve_device,
)
from pipelines.evaluation.record import Result, pop_per_user

SPLITS = ("val", "test")

SHOWN, TRAINED = "shown", "trained"
"""Keys of counts per item among the sums: in a top 10, and in training behaviours."""


@dataclass(frozen=True)
class Task:
    """Arguments of every shard of an evaluation."""

    uri: str
    """Folder of the checkpoint."""
    inputs: Inputs
    """The tables."""
    split: Any
    """`val` or `test`."""
    batch_size: int
    """Requests per batch."""
    options: dict[str, Any]
    """Options of `recommend`."""
    user_stride: int
    """Every `user_stride`-th user is measured."""
    workers: Workers
    """Processes and devices."""


@dataclass(frozen=True)
class ShardResult:
    """The result of one shard."""

    sums: dict[str, Any]
    """Sums that add up to metrics."""
    requests: int
    """Requests ranked."""
    skipped: int
    """Requests without a history."""
    seconds: float
    """Time spent in `recommend` or `score`."""
    device: str
    """CPU threads, or the GPU's name."""
    users: int
    """Users with a ranked request."""


def evaluate(
    uri: str,
    inputs: Inputs,
    *,
    split: str = "test",
    batch_size: int = 256,
    options: dict[str, Any] | None = None,
    user_stride: int = 1,
    workers: Workers | None = None,
) -> tuple[Result, Checkpoint]:
    """Measure a checkpoint on a split, without writing anything.

    Args:
        uri: folder of a checkpoint, or of a run, whose best checkpoint is taken.
        inputs: the tables.
        split: `val` or `test`.
        batch_size: requests per batch.
        options: options of `recommend`.
        user_stride: measure every `user_stride`-th user of the table, the same users
            for
            every model.
        workers: processes and devices, by default this process.

    Raises:
        UserError: if checkpoint, tables and options do not fit, or the split is empty.
    """
    began = time.monotonic()
    if split not in SPLITS:
        raise UserError(f"--split is '{split}', it must be one of {', '.join(SPLITS)}")
    checked = check_evaluation(uri, inputs, options or {})
    workers = workers or Workers()
    task = Task(
        checked.uri, inputs, split, batch_size, checked.options, user_stride, workers
    )
    shards = measure_shards(task)
    if sum(shard.requests for shard in shards) == 0:
        raise UserError(
            f"the split '{split}' of {inputs.tables} has no request with a history; "
            f"choose another --split"
        )
    return to_result(task, checked, shards, time.monotonic() - began), checked.about


def measure_shards(task: Task) -> list[ShardResult]:
    """Measure all shards, in this process or in Ray tasks."""
    if not task.workers.use_ray:
        return [measure_shard(task, 0)]
    # a trial's placement group holds no CPU, so tasks are scheduled outside of it
    remote = ray.remote(
        num_cpus=1,
        num_gpus=1 if task.workers.needs_gpu(1) else 0,
        scheduling_strategy="DEFAULT",
    )(measure_shard)
    return ray.get([remote.remote(task, rank) for rank in range(task.workers.shards)])


def measure_shard(task: Task, rank: int) -> ShardResult:
    """Measure the users of one shard."""
    if task.workers.num_threads:
        torch.set_num_threads(task.workers.num_threads)
    device = resolve_device(task.workers.device)
    loaded = LoadedModel.load(task.uri, task.inputs, device)
    history = required_history(loaded.model.config.max_history, task.options)
    examples = loaded.load_examples(
        task.inputs,
        task.split,
        max_history=history,
        rank=rank,
        world=task.workers.shards,
    )
    stride = sampling_stride(read_manifest(task.inputs.sequences, "sequences").rows)
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
        user_stride=task.user_stride,
    )
    if loaded.model.ranks == "catalogue":
        measured.sums[SHOWN] = options["shown"].cpu()
        measured.sums[TRAINED] = count_trained_items(
            loaded, task.inputs, rank, task.workers.shards
        )
    name = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    users = examples.count_users(task.user_stride)
    return ShardResult(
        measured.sums,
        measured.num_examples,
        examples.num_skipped,
        measured.seconds,
        name,
        users,
    )


def warm_up(
    loaded: LoadedModel,
    examples: RequestDataset,
    batch_size: int,
    options: dict[str, Any],
    device: torch.device,
) -> None:
    """Measure one batch, so that the timing is of the steady state."""
    measure_examples(
        loaded.model,
        examples,
        batch_size=batch_size,
        device=device,
        limit=min(batch_size, len(examples)),
        options=options,
    )


def count_trained_items(
    loaded: LoadedModel, inputs: Inputs, rank: int, world: int
) -> torch.Tensor:
    """Return the (N,) training behaviours per item, by the users of one shard."""
    train: Any = loaded.model.dataset_class.load(
        inputs.sequences,
        "train",
        fold=loaded.fold(inputs),
        unit="behaviour",
        max_history=1,
        rank=rank,
        world=world,
    )
    targets = train.targets[train.evaluation_rows()]
    counts = np.bincount(targets, minlength=loaded.catalogue.num_items)
    return torch.from_numpy(counts)


def to_result(
    task: Task, checked: CheckedEvaluation, shards: list[ShardResult], seconds: float
) -> Result:
    """Return the metrics of all shards together."""
    about = checked.about
    sums: dict[str, Any] = add_sums(shard.sums for shard in shards)
    by_user = pop_per_user(sums)
    exposed: dict[str, float] = {}
    if SHOWN in sums:
        exposed = exposure(sums.pop(SHOWN), sums.pop(TRAINED))
    metrics = registry.find(about.name).metric_means(sums) | exposed
    requests = sum(shard.requests for shard in shards)
    device = shards[0].device
    if task.workers.shards > 1:
        device = f"{task.workers.shards} x {device}"
    options = {**checked.options, "batch_size": task.batch_size}
    if task.user_stride > 1:
        options["user_stride"] = task.user_stride
    result = Result(
        model=about.name,
        checkpoint=checked.uri,
        split=task.split,
        examples=int(metrics.get("requests", requests)),
        users=sum(shard.users for shard in shards),
        skipped=sum(shard.skipped for shard in shards),
        metrics=metrics,
        users_per_s=sum(s.requests / s.seconds for s in shards if s.seconds > 0),
        seconds=seconds,
        seed=about.fit.get("seed"),
        options=options,
        hashes={
            name: checked.hashes[name]
            for name in about.hashes
            if name in checked.hashes
        },
        device=device,
        by_user=by_user,
    )
    if result.is_fresh(about):  # the training items of a fresh log are unknown
        metrics.pop("new_items@10", None)
    return result
