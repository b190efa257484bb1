r"""Train one model on the tables of jobs.prepare, or continue a stopped run.

    python -m jobs.train --config jobs/configs/retrieval/sasrec.yaml --tables TABLES \
        --storage runs --name sasrec

`model.name` in the config file selects the model. Options of the command line override
the file, such as --model.num_layers 2 or --fit.lr 0.001. --model.name NAME --help shows
the options of a model. The same command continues a stopped run of the same --name.
Under `ray job submit`, the cluster trains. Otherwise one worker trains in this process,
and several workers (--ray.num_workers) train on a local Ray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from core.errors import pluralize
from jobs import cli
from pipelines.training.config import TrainConfig

if TYPE_CHECKING:
    from pipelines.training.run import TrainingResult

Config = TrainConfig


def describe_no_gain(
    metrics: Mapping[str, float], metric: str, baseline: tuple[str, float] | None = None
) -> str:
    """Return a warning if the best epoch is no better than a model without training.

    Args:
        metrics: Validation metrics of the best epoch.
        metric: Metric of the training (`fit.metric`).
        baseline: Name of the best baseline, and its value of `metric`. With None, only
            chance level is compared, which `metrics` imply.
    """
    from models.metrics.ranking_metrics import describe_chance_level

    comparison = describe_chance_level(metrics)
    value = metrics.get(metric, math.nan)
    if baseline and value < baseline[1]:
        comparison = f"{metric} {value:.4f}, {baseline[0]} {baseline[1]:.4f}"
    if not comparison:
        return ""
    return f"warning: no better than without training ({comparison})\n"


def describe_baseline(config: TrainConfig, result: TrainingResult) -> str:
    """Return a warning if a training is no better than models without training."""
    from models import registry
    from pipelines.comparison.verdicts import best_trained_baseline

    model_class = registry.find(result.best.name)
    if model_class.is_baseline or model_class.is_diagnostic:
        return ""
    metric = config.fit.metric
    names = registry.find_baselines(model_class.kind)
    baseline = best_trained_baseline(result.run, metric) if names else None
    return describe_no_gain(result.best.metrics, metric, baseline)


def print_result(config: TrainConfig, result: TrainingResult) -> None:
    """Print the result of a training, and the commands to run next."""
    from models import registry
    from models.metrics.ranking_metrics import format_metric
    from pipelines import tracking

    best = result.best
    if result.was_finished:
        print(
            f"The run '{result.name}' is finished; nothing to do. --overwrite trains "
            f"it again from scratch."
        )
    else:
        print(
            f"Trained {best.name} for {pluralize(result.epochs, 'epoch')} in "
            f"{result.seconds:.0f} s."
        )
        print(describe_baseline(config, result), end="")
        if best.epoch == config.fit.max_epochs > config.fit.eval_every_epochs:
            print("note: the best epoch is the last (--fit.max_epochs)")
    model_class = registry.find(best.name)
    metrics = "  ".join(
        f"{name} {format_metric(best.metrics.get(name))}"
        for name in model_class.shown_metrics
    )
    inputs = config.inputs.select(best.name, model_class.extra_inputs).folders()
    evaluate = {"checkpoint": result.checkpoint, **inputs, "split": "test"}
    print(
        f"  best epoch  {best.epoch}: {metrics} on val\n"
        f"  checkpoint  {result.checkpoint}\n"
        f"  MLflow run  {result.run.run_id} in {result.run.experiment}\n"
        f"  look at it  {tracking.view_command(result.run.uri)}\n"
        f"  next        {cli.command_line('jobs.evaluate', **evaluate)}"
    )


def run(config: TrainConfig) -> TrainingResult:
    """Train a model, and print the result and the next commands."""
    cli.say_loading("torch", "ray", "mlflow")
    from pipelines.training.run import run_training

    cli.preflight(config)
    say = partial(print, flush=True)
    result = run_training(config, say=say)
    print_result(config, result)
    return result


if __name__ == "__main__":
    cli.main(run)
