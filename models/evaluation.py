"""Measurement of a model on the examples of a split.

    result = measure_examples(model, examples, batch_size=256, device=device)

`TrainingRun` validates models with this module, and `pipelines/evaluation` evaluates
checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from models.dataset.dataset import Dataset
from models.metrics.per_user_metrics import KeyedSums
from models.training.loop import ValidationStopped

Sums = dict[str, Any]
"""Sums from which metrics are computed: numbers, tensors or histograms, which can be
added over batches and workers."""


@dataclass(frozen=True)
class Measurement:
    """Sums of a model's metrics over examples."""

    sums: Sums
    """Sums by name, which can be added over batches and workers."""
    num_examples: int
    """Number of measured examples."""
    seconds: float
    """Duration of the measurement, without loading of examples."""


def measure_examples(
    model: Any,
    examples: Dataset,
    *,
    batch_size: int,
    device: torch.device,
    limit: int = 0,
    options: dict[str, Any] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Measurement:
    """Measure a model on this worker's examples.

    Scores are computed in float32, because bfloat16 rounds close scores to ties.

    Args:
        model: The model; it is set to evaluation mode.
        examples: Examples of this worker's shards.
        batch_size: Weight of a batch, such as its number of requests.
        device: Device of the model.
        limit: Approximate number of requests over all workers, spread evenly over the
            lengths of histories; 0 for all.
        options: Keyword arguments of the model's `measure`.
        should_stop: Called before every batch; the measurement stops if it returns
            true.

    Raises:
        ValidationStopped: If `should_stop` returns true.
    """
    sums: Sums = {}
    count, seconds = 0, 0.0
    model.eval()
    for rows in examples.evaluation_batches(batch_size, limit):
        if should_stop():
            raise ValidationStopped
        batch = examples.collate(rows).to(device)
        start = time.perf_counter()
        with torch.no_grad():
            batch_sums = model.measure(batch, **(options or {}))
        for name, value in batch_sums.items():
            if not isinstance(value, KeyedSums):
                value = torch.as_tensor(value, dtype=torch.float64)
            sums[name] = sums.get(name, 0.0) + value.cpu()  # waits for the device
        seconds += time.perf_counter() - start
        count += len(rows)
    return Measurement(sums, count, seconds)


def add_sums(parts: Iterable[Sums]) -> Sums:
    """Return the total of the sums of several batches or workers, by name."""
    total: Sums = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
