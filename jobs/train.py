"""Train one model on the tables that jobs.prepare made, or continue the run of that name where it was stopped.

    python -m jobs.train --config jobs/configs/sasrec.yaml --tables TABLES --storage runs --name sasrec

The config's `model.name` says which model; any option of it can be set on the line, as --model.num_layers 2
or --fit.lr 0.001. With a model named, --help shows its options. Under `ray job submit` it trains on that cluster, else
here: one worker in this process, several (--ray.num_workers) on a Ray that is started for them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from functools import partial
from typing import Any

from jobs import cli
from jobs.options import read
from models.config import pluralize
from models.storage.input_folders import require_folders
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.storage.uri import check_writable
from models.training.fit_config import FitConfig
from pipelines.training.ray_options import FEWER, RayOptions


@dataclass
class Config:
    """Options."""

    tables: str
    """TABLES: the folder that jobs.prepare made."""
    storage: str
    """Folder for all runs: checkpoints, and MLflow's SQLite store where no other is named."""
    name: str
    """Name of this run; the same name again continues it."""
    model: dict[str, Any] = field(default_factory=dict)
    """The model: `name`, and its own options."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models; models of actions can do without."""
    fit: FitConfig = field(default_factory=FitConfig)
    """The training loop."""
    ray: RayOptions = field(default_factory=RayOptions)
    """Workers and their resources."""
    tracking_uri: str | None = None
    """MLflow; by default MLFLOW_TRACKING_URI, else a SQLite file in the storage folder."""
    experiment: str | None = None
    """MLflow experiment; by default family/dataset."""
    log_model: bool = True
    """Store the best model in MLflow, with the tables that it needs to be served."""
    init: str | None = None
    """A run, or its checkpoint, whose weights it begins with, of tables that these may extend: it goes on with another
    day. `fit.replay_fraction` then says how much of the days before is trained on again."""
    overwrite: bool = False
    """Throw away what the run of this name has made, and train anew."""


def options_of(name: str) -> type:
    """The model's config dataclass with its `name` as one more option."""
    from models import registry

    config = registry.find(name).config_class
    about = {"about": f"Which model: one of {', '.join(registry.MODELS)}."}
    named = make_dataclass(
        "ModelOptions",
        [("name", str, field(default=name, metadata=about))],
        bases=(config,),
    )
    named.__doc__, named.__module__ = config.__doc__, config.__module__
    return named


def parse(argv: Sequence[str] | None = None) -> Config:
    """The command line; the model's options are those of the model that it names, and --help shows them."""
    argv = sys.argv[1:] if argv is None else argv
    helping = bool({"--help", "-h"} & set(argv))
    given = read(
        Config, [word for word in argv if word not in ("--help", "-h")]
    ).values.get("model", {})
    if not helping:
        cli.say_loading("torch", "ray", "mlflow")
    from models import registry

    first = next(iter(registry.MODELS))
    if "name" not in given and not helping:
        raise UserError(
            f"no model is named; give a --config that has `model: {{name: ...}}`, or --model.name, with one of "
            f"{', '.join(registry.MODELS)}"
        )
    kind = make_dataclass(
        "Config", [("model", options_of(given.get("name", first)))], bases=(Config,)
    )
    kind.__module__ = __name__
    config: Any = cli.parse(kind, argv)
    return Config(**{**vars(config), "model": asdict(config.model)})


def still_rising(best: int, done: int, fit: FitConfig) -> str:
    """A line where the best epoch is the last of several measured ones, else nothing."""
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


def describe_floor(config: Config, trained: Any) -> str:
    """Return a warning or a note on a training beside the models without training.

    They are read from the training's experiment and not computed here.
    """
    from models import registry
    from pipelines.comparison.floors import best_trained_floor

    model_class = registry.find(trained.about.name)
    if model_class.is_floor or model_class.is_diagnostic:
        return ""
    names = registry.find_floors(model_class.family)
    floor = best_trained_floor(trained.run, config.fit.metric) if names else None
    about = trained.about
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


def run(config: Config) -> Any:
    """Trains and prints what was made; returns it, a `pipelines.training.run.Trained`."""
    cli.say_loading("torch", "ray", "mlflow")
    from models import registry
    from models.metrics.ranking_metrics import format_metric
    from pipelines import tracking
    from pipelines.training.run import run_training
    from pipelines.training.settings import check

    require_folders(tables=config.tables, sids=config.sids, text=config.text)
    check_writable(config.storage)
    model_class = registry.find(config.model["name"])
    checked = check(
        model=config.model,
        fit=config.fit,
        ray_options=config.ray,
        inputs=Inputs(config.tables, config.sids, config.text),
        storage=config.storage,
        name=config.name,
        tracking_uri=config.tracking_uri,
        overwrite=config.overwrite,
        init=config.init,
    )
    cli.check_cpus(config.ray.least(checked.workers), config.ray.cpus_per_worker, FEWER)
    cli.preflight(
        tables=config.tables, sids=config.sids, text=config.text, storage=config.storage
    )
    trained = run_training(
        checked,
        experiment=config.experiment,
        log_model=config.log_model,
        say=partial(print, flush=True),
        start=cli.start_ray,
    )
    best = trained.about
    if trained.already:
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
            print(still_rising(best.epoch, trained.epochs, config.fit), end="")
    shown = "  ".join(
        f"{name} {format_metric(best.metrics.get(name))}"
        for name in model_class.shown_metrics
    )
    read = {option: vars(config)[option] for option in checked.inputs.given()}
    evaluate = {"checkpoint": trained.checkpoint, **read, "split": "test"}
    print(
        f"  best epoch  {best.epoch}: {shown} on val\n"
        f"  checkpoint  {trained.checkpoint}\n"
        f"  MLflow run  {trained.run.run_id} in {trained.run.experiment}\n"
        f"  look at it  {tracking.viewer(trained.run.uri)}\n"
        f"  next        {cli.line('jobs.evaluate', **evaluate)}"
    )
    return trained


if __name__ == "__main__":
    cli.main(run, Config, parse)
