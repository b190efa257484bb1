"""Measure a checkpoint on all requests of a split.

    config = EvaluateConfig(checkpoint="runs/sasrec", tables="tables", split="val")
    result, checked = evaluate(config)

The metrics depend on the model's kind, such as Recall@K and NDCG@K over the full
catalogue. Requests per second are measured after a warm-up. With several shards, each
Ray task measures some of the users, and the sums of the tasks are added.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch

from core.errors import UserError, pluralize
from core.tables import table_hashes
from models import registry
from models.dataset.dataset import Dataset
from models.evaluation import add_sums, measure_examples
from models.loaded_model import LoadedModel
from models.metrics.per_user_metrics import sampling_stride
from models.metrics.ranking_metrics import describe_chance_level
from models.retrieval.metrics import exposure
from models.retrieval.popular import load_counts, sum_popularity
from models.retrieval.recommend import required_history
from models.training import checkpoint
from pipelines import tracking
from pipelines.evaluation.checks import (
    CheckedEvaluation,
    open_evaluation,
    resolve_device,
    run_shards,
)
from pipelines.evaluation.config import EvaluateConfig
from pipelines.evaluation.result import Result, pop_per_user, record_result

SHOWN = "shown"
"""Key in the sums for the number of top 10 lists that contain each item."""


def evaluate(
    config: EvaluateConfig, *, in_ray: bool = False
) -> tuple[Result, CheckedEvaluation]:
    """Measure a checkpoint on a split, without writing anything.

    Args:
        config: Options of the evaluation.
        in_ray: Whether to run even a single shard as a Ray task, so that it can use the
            cluster's GPUs.

    Returns:
        The result, and the checkpoint with its tables.
    """
    began = time.monotonic()
    checked = open_evaluation(config)
    measured = run_shards(measure_shard, config, in_ray, checked, config)
    *shards, devices = zip(*measured, strict=True)
    sums, counts, popular = map(add_sums, shards)
    split = config.split or "test"
    if not counts["requests"]:
        raise UserError(
            f"the split '{split}' of {config.tables} has no request with a history"
        )
    device = devices[0]
    if config.shards > 1:
        device = f"{config.shards} x {device}"
    saved = checked.checkpoint
    by_user = pop_per_user(sums)
    shown = sums.pop(SHOWN, None)
    metrics = registry.find(saved.name).metric_means(sums)
    if shown is not None:
        metrics |= exposure(shown, load_counts(saved, len(shown)))
    current = table_hashes(checked.versions)
    result = Result(
        model=saved.name,
        checkpoint=checked.uri,
        split=split,
        examples=int(metrics.get("requests") or counts["requests"]),
        users=int(counts["users"]),
        skipped=int(counts["skipped"]),
        without_history={
            name: popular[name] / counts["skipped"]
            for name in popular
            if counts["skipped"]
        },
        metrics=metrics,
        requests_per_s=counts["requests_per_s"],
        seconds=time.monotonic() - began,
        seed=saved.fit.seed,
        options={**config.recommend_options(), "batch_size": config.batch_size},
        hashes={name: current[name] for name in saved.hashes if name in current},
        device=device,
        by_user=by_user,
    )
    return result, checked


def measure_checkpoint(config: EvaluateConfig) -> Result:
    """Measure a checkpoint on a split, and write the metrics to a file and MLflow."""
    if config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"):
        tracking.connect(tracking.find_store(config.tracking_uri))
    # The driver of a submitted job runs on a node without GPUs, so tasks do the work.
    result, checked = evaluate(config, in_ray=bool(os.environ.get("RAY_ADDRESS")))
    saved, model_class = checked.checkpoint, registry.find(result.model)
    ranked = pluralize(result.users, "user")
    if model_class.eval_unit != "user":
        ranked = f"{pluralize(result.examples, 'request')} of {ranked}"
    print(f"{result.model} on {result.split}: {ranked}, seed {result.seed}")
    sequences = checked.versions["sequences"].uri
    if checkpoint.is_extended(saved, "sequences", checked.versions):
        print(f"note: {sequences} extends the table of the training")
    print("\n".join(model_class.format_metrics(result.metrics)))
    chance_level = describe_chance_level(result.metrics)
    if chance_level and not model_class.is_baseline:
        print(f"warning: no better than without a model ({chance_level})")
    if model_class.ranks == "catalogue":
        skipped = f"{pluralize(result.skipped, 'request')} without history left out"
        if result.without_history:
            values = [f"{n} {v:.4f}" for n, v in result.without_history.items()]
            skipped += f", where popularity reaches {', '.join(values)}"
        print(
            f"  {result.requests_per_s:,.0f} requests/s on {result.device}; {skipped}"
        )
    # Record the metrics after they are printed, in case MLflow does not answer.
    path = record_result(result, saved, config.tracking_uri)
    print(f"  written to  {path}")
    return result


def measure_shard(
    checked: CheckedEvaluation, config: EvaluateConfig, rank: int
) -> tuple[dict[str, Any], dict[str, float], dict[str, float], str]:
    """Measure the users of one shard, given its number from 0.

    Returns:
        Sums from which the metrics are computed; numbers of ranked `requests`, of
        requests without a history (`skipped`), of `users`, and of requests per second
        of `recommend` or `score`; sums of metrics of the most popular items over the
        requests without a history; and the name of the GPU, or `cpu` with the threads.
    """
    device = resolve_device(config.device)
    loaded = LoadedModel.load(checked.uri, config.inputs, device)
    options = config.recommend_options()
    model, catalogue = loaded.model, loaded.catalogue
    load = partial(Dataset.load, model, catalogue, rank=rank, world=config.shards)
    split = config.split or "test"
    max_history = required_history(model.config.max_history, options)
    examples = load(split, max_history=max_history)
    sequences = catalogue.versions["sequences"]
    options["by_user"] = sampling_stride(sequences.rows)
    measure = partial(
        measure_examples,
        model,
        examples,
        batch_size=config.batch_size,
        device=device,
    )
    if len(examples):  # one batch without its result, so that timings are steady
        measure(limit=min(config.batch_size, len(examples)), options=options)
    popular: dict[str, float] = {}
    if model.ranks == "catalogue":
        num_items = catalogue.num_items
        behaviours = load(split, unit="behaviour")
        requests: Any = behaviours.examples.take(behaviours.evaluation_rows())
        options["trained"] = load_counts(loaded.checkpoint, num_items)
        popular = sum_popularity(
            options["trained"], requests.target_sets[requests.end == 0]
        )
        options["shown"] = torch.zeros(num_items, dtype=torch.long, device=device)
    measured = measure(options=options)
    sums = measured.sums
    if "shown" in options:
        sums[SHOWN] = options["shown"].cpu()
    speed = measured.num_examples / measured.seconds if measured.seconds else 0.0
    counts = {
        "requests": measured.num_examples,
        "skipped": examples.num_skipped,
        "users": examples.count_users(),
        "requests_per_s": speed,
    }
    name = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    return sums, counts, popular, name
