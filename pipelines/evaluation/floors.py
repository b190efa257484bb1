"""Models without training, computed from tables and measured on a split at once.

    for floor in measure_floors("sasrec", Inputs(tables), "test"): print(floor.name)

They are the bar of `jobs.daily`. Nothing is written; `jobs.train` trains each of them as a
run of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from models import registry
from models.evaluation import measure_examples
from models.metrics.per_user_metrics import (
    PER_USER_PREFIX,
    PerUserValues,
    sampling_stride,
)
from models.retrieval.recommend import history_to_give
from models.storage.inputs import Inputs
from models.storage.tables import read_manifest
from models.training.fit import FitConfig
from models.training_run import TrainingRun

BATCH_SIZES = {"behaviour": 8192, "request": 1024, "user": 64}
"""Rows per batch of counting, by the unit of a model's training rows."""


@dataclass(frozen=True)
class Floor:
    """Metrics of one model without training."""

    name: str
    """Name in the registry."""
    metrics: dict[str, float]
    """Metrics of the split."""
    by_user: dict[str, dict[str, str]]
    """Metrics user by user, as an evaluation of a checkpoint has them."""


def measure_floors(
    model: str, inputs: Inputs, split: str, rankings: list[dict[str, Any]]
) -> list[list[Floor]]:
    """Measure every model without training of a model's family on a split.

    Args:
        model: name of a trained model.
        inputs: the tables.
        split: `val` or `test`.
        rankings: options of `recommend`, such as `{"unseen": True}`.

    Returns:
        For each of the rankings all floors; nothing for a family that has none.
    """
    floors: list[list[Floor]] = [[] for _ in rankings]
    for name in registry.find_floors(registry.find(model).family):
        batch_size = BATCH_SIZES[registry.find(name).example_unit]
        setup = TrainingRun.build(
            {"name": name}, FitConfig(batch_size=batch_size), inputs
        )
        setup.fit_counts()
        for options, of_ranking in zip(rankings, floors, strict=True):
            of_ranking.append(measure_floor(setup, name, inputs, split, options))
    return floors


def measure_floor(
    setup: Any, name: str, inputs: Inputs, split: str, options: dict[str, Any]
) -> Floor:
    """Measure one computed model on a split."""
    model = setup.model
    examples = model.dataset_class.load(
        inputs.sequences,
        split,
        unit=model.eval_unit,
        max_history=history_to_give(model.config.max_history, options),
        **model.dataset_class.dataset_options(model.config),
    )
    stride = sampling_stride(read_manifest(inputs.sequences, "sequences").rows)
    sums = measure_examples(
        model,
        examples,
        batch_size=256,
        device=torch.device("cpu"),
        options={**options, "by_user": stride},
    ).sums
    by_user: dict[str, PerUserValues] = {
        key: sums.pop(key) for key in list(sums) if key.startswith(PER_USER_PREFIX)
    }
    packed = {
        key.removeprefix(PER_USER_PREFIX): user.to_text()
        for key, user in by_user.items()
    }
    return Floor(name, setup.means(sums), packed)
