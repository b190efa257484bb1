"""Measure a model on the examples of a split.

    result = measure_examples(model, examples, batch_size=256, device=device)

`TrainingRun` validates with it, and `pipelines/evaluation` evaluates checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from models.dataset.dataset import RequestDataset
from models.metrics.per_user_metrics import PerUserValues
from models.metrics.ranking_metrics import Histogram
from models.training.fit import Sums, ValidationStopped


@dataclass(frozen=True)
class Measurement:
    """Sums of a model's metrics over examples."""

    sums: Sums
    """By metric; they add up over batches and workers."""
    num_examples: int
    """Examples measured."""
    seconds: float
    """Time spent in measuring, without reading examples."""


def measure_examples(
    model: Any,
    examples: RequestDataset,
    *,
    batch_size: int,
    device: torch.device,
    limit: int = 0,
    options: dict[str, Any] | None = None,
    user_stride: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
    measure: Callable[..., Sums] | None = None,
) -> Measurement:
    """Measure a model on this worker's examples.

    Scores are float32: bfloat16 ties scores that are close, and swaps them.

    Args:
        model: A model in any mode; it is left in evaluation mode.
        examples: The examples.
        batch_size: Weight of a batch, such as its number of requests.
        device: Device of the model.
        limit: Examples of all workers together, spread evenly over the lengths of
            their histories; 0 for all.
        options: Keyword arguments of the model's `measure`.
        user_stride: Only every `user_stride`-th user of the table is measured.
        should_stop: Called before every batch.
        measure: `measure(batch, **options)` returns the sums of a batch; None for the
            model's own.

    Raises:
        ValidationStopped: As soon as `should_stop()` is true.
    """
    measure = measure or model.measure
    sums: Sums = {}
    count, seconds = 0, 0.0
    model.eval()
    chosen = examples.keep_users(examples.evaluation_rows(limit), user_stride)
    for rows in examples.cut_batches(chosen, batch_size):
        if should_stop():
            raise ValidationStopped
        batch = examples.collate(rows).to(device)
        start = time.perf_counter()
        with torch.no_grad():
            batch_sums = measure(batch, **(options or {}))
        for name, value in batch_sums.items():
            if not isinstance(value, (Histogram, PerUserValues)):
                value = torch.as_tensor(value, dtype=torch.float64)
            sums[name] = sums.get(name, 0.0) + value.cpu()  # waits for the device
        seconds += time.perf_counter() - start
        count += len(rows)
    return Measurement(sums, count, seconds)
