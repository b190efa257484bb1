"""Compute the models without training from tables, and measure them on a split.

    (baselines,) = measure_baselines("sasrec", Inputs(tables), "test", [{}])

`jobs.daily` compares its models with the baselines. Nothing is written; `jobs.train`
trains a baseline as a run of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from core.schemas import Inputs
from models import registry
from models.dataset.dataset import Dataset
from models.evaluation import measure_examples
from models.metrics.per_user_metrics import sampling_stride
from models.retrieval.recommend import required_history
from models.training.fit_config import FitConfig
from models.training_run import TrainingRun, resolve_config
from pipelines.evaluation.result import pop_per_user

BATCH_SIZES = {"behaviour": 8192, "request": 1024, "user": 64}
"""Examples per batch while a baseline counts, by the model's unit of examples."""


@dataclass(frozen=True)
class Baseline:
    """Metrics of one model without training."""

    model: str
    """Name of the model in the registry."""
    name: str
    """The column by which the model ranks, or its name in the registry."""
    metrics: dict[str, float]
    """Metrics on the split, by name."""
    by_user: dict[str, dict[str, str]]
    """Metrics per user, as in the result of an evaluation."""
    is_shown_order: bool = False
    """Whether it is the order that the log showed, which no model has to exceed."""


def build_fit(name: str, **options: Any) -> FitConfig:
    """Return the options with which a baseline counts in one pass."""
    batch_size = BATCH_SIZES[registry.find(name).example_unit]
    return FitConfig(batch_size=batch_size, **options)


def measure_baselines(
    model: str, inputs: Inputs, split: str, rankings: list[dict[str, Any]]
) -> list[list[Baseline]]:
    """Measure the baselines of a model's kind on a split.

    Args:
        model: Name of a trained model.
        inputs: Folders of the tables, semantic IDs and text embeddings.
        split: `val` or `test`.
        rankings: Options of `recommend`, such as `{"unseen": True}`; the baselines are
            measured once with each.

    Returns:
        A list of baselines per ranking, empty for a kind without baselines.
    """
    baselines: list[list[Baseline]] = [[] for _ in rankings]
    for name in registry.find_baselines(registry.find(model).kind.name):
        fit = build_fit(name)
        config = registry.find(name).config_class(name=name)
        config = resolve_config(config, inputs)
        run = TrainingRun.build(config, fit, inputs)
        run.fit_in_one_pass()
        baseline, sequences = run.model, run.catalogue.versions["sequences"]
        stride = sampling_stride(sequences.rows)
        for options, ranking_baselines in zip(rankings, baselines, strict=True):
            history = required_history(config.max_history, options)
            examples = Dataset.load(baseline, run.catalogue, split, max_history=history)
            sums = measure_examples(
                baseline,
                examples,
                batch_size=256,
                device=torch.device("cpu"),
                options={**options, "by_user": stride},
            ).sums
            by_user = pop_per_user(sums)
            ranking_baselines.append(
                Baseline(
                    name,
                    baseline.ranks_by or name,
                    baseline.metric_means(sums),
                    by_user,
                    baseline.is_diagnostic,
                )
            )
    return baselines
