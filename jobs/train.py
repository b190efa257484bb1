"""Train one model on the tables that jobs.prepare made, or continue the run of that name where it was stopped.

    python -m jobs.train --config jobs/configs/sasrec.yaml --tables TABLES --storage runs --name sasrec

The config's `model.name` says which model; any option of it can be set on the line, as
--model.num_layers 2 or --fit.lr 0.001. With a model named, --help shows its options.
Under `ray job submit` it trains on that cluster, else here: one worker in this process,
several (--ray.num_workers) on a Ray that is started for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from jobs import cli
from models.config import pluralize
from models.storage.input_folders import require_folders
from models.storage.uri import check_writable
from models.training.fit_config import FitConfig
from pipelines.training.config import FEWER, TrainConfig

if TYPE_CHECKING:
    from pipelines.training.run import TrainingResult

Config = TrainConfig


def describe_late_best(best: int, done: int, fit: FitConfig) -> str:
    """Return a note if the best epoch is the last of several measured ones.

    Args:
        best: The best epoch.
        done: Epochs of the run.
        fit: The training's options.
    """
    if not best == done == fit.max_epochs > fit.eval_every_epochs:
        return ""
    return f"note: the best epoch is the last; more epochs may be better: --fit.max_epochs {2 * done} goes on\n"


def learned_nothing(
    found: Mapping[str, float],
    fit: FitConfig,
    floor: tuple[str, float] | None = None,
    gradient: bool = True,
) -> str:
    """Return a warning if the best epoch is no better than a ranking without training.

    Args:
        found: validation metrics of the best epoch.
        fit: the training's options.
        floor: name and value, by `fit.metric`, of the best model without training;
            base rates and chance need none.
        gradient: whether the model is trained by gradient.
    """
    from models.metrics.ranking_metrics import describe_chance_level

    below = describe_chance_level(found)
    value = found.get(fit.metric, math.nan)
    if floor and value < floor[1]:
        below = f"{fit.metric} {value:.4f}, {floor[0]} {floor[1]:.4f}"
    if not below:
        return ""
    warning = f"warning: no better than without training ({below})"
    if not gradient:
        return f"{warning}: give it more days or other features\n"
    return (
        f"{warning}: train longer, --fit.max_epochs {3 * fit.max_epochs} goes on; or under another --name with a "
        f"larger --fit.lr than {fit.lr:g} or a smaller --fit.batch_size\n"
    )


def describe_floor(config: TrainConfig, trained: TrainingResult) -> str:
    """Return a warning or a note on a training beside the models without training.

    They are read from the training's experiment and not computed here.
    """
    from models import registry
    from pipelines.comparison.floors import best_trained_floor

    model_class = registry.find(trained.best.name)
    if model_class.is_floor or model_class.is_diagnostic:
        return ""
    names = registry.find_floors(model_class.family)
    floor = best_trained_floor(trained.run, config.fit.metric) if names else None
    about = trained.best
    warning = learned_nothing(
        about.metrics, config.fit, floor, model_class.trains_by_gradient
    )
    if warning or floor or not names:
        return warning
    folder = "" if model_class.family == "retrieval" else f"{model_class.family}/"
    lines = ", ".join(f"jobs/configs/{folder}{name}.yaml" for name in names)
    return (
        f"note: {trained.run.experiment} has no model without training to compare with; "
        f"train them in seconds: {lines}\n"
    )


def print_result(config: TrainConfig, trained: TrainingResult) -> None:
    """Print the result of a training, and the commands to run next."""
    from models import registry
    from models.metrics.ranking_metrics import format_metric
    from pipelines import tracking

    best = trained.best
    if trained.was_finished:
        print(
            f"The run '{trained.name}' is finished; nothing to do. --overwrite trains it anew."
        )
    else:
        print(
            f"Trained {best.name} for {pluralize(trained.epochs, 'epoch')} in {trained.seconds:.0f} s."
        )
        floor = describe_floor(config, trained)
        print(floor, end="")
        if not floor.startswith("warning"):
            print(describe_late_best(best.epoch, trained.epochs, config.fit), end="")
    model_class = registry.find(best.name)
    metrics = "  ".join(
        f"{name} {format_metric(best.metrics.get(name))}"
        for name in model_class.shown_metrics
    )
    inputs = config.inputs.select(best.name, model_class.extra_inputs).folders()
    evaluate = {"checkpoint": trained.checkpoint, **inputs, "split": "test"}
    print(
        f"  best epoch  {best.epoch}: {metrics} on val\n"
        f"  checkpoint  {trained.checkpoint}\n"
        f"  MLflow run  {trained.run.run_id} in {trained.run.experiment}\n"
        f"  look at it  {tracking.view_command(trained.run.uri)}\n"
        f"  next        {cli.command_line('jobs.evaluate', **evaluate)}"
    )


def run(config: TrainConfig) -> TrainingResult:
    """Train a model, print the result, and return it."""
    cli.say_loading("torch", "ray", "mlflow")
    from pipelines.training.run import run_training
    from pipelines.training.settings import check_training

    folders = config.inputs.folders()
    require_folders(**folders)
    check_writable(config.storage)
    training = check_training(config)
    ray = training.config.ray
    cli.check_cpus(ray.fewest_workers, ray.cpus_per_worker, FEWER)
    cli.preflight(**folders, storage=config.storage)
    say = partial(print, flush=True)
    trained = run_training(training, say=say, start=cli.start_ray)
    print_result(config, trained)
    return trained


if __name__ == "__main__":
    cli.main(run, Config)
