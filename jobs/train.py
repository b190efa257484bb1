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
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jobs import cli
from jobs.options import read
from models.config import pluralize
from models.fit_config import FitConfig
from models.inputs import Inputs
from models.places import reach
from models.tables import UserError, join, read_manifest
from models.uri import check_writable
from pipelines.training.ray_options import FEWER, RayOptions

if TYPE_CHECKING:
    from models.checkpoint import Checkpoint

LARGE = 2**30
"""Bytes of `sequences` above which popularity is not counted beside a training."""


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
    day. `fit.replay` then says how much of the days before is trained on again."""
    overwrite: bool = False
    """Throw away what the run of this name has made, and train anew."""


def options_of(name: str) -> type:
    """The model's config dataclass with its `name` as one more option."""
    from models import registry

    config = registry.model_config(name)
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


def popularity_of(config: Config, about: Checkpoint) -> float:
    """What popularity has on the same validation, by the training's metric; NaN where that is not measured of it, and
    for tables too large to be read here."""
    from models.setup import set_up

    sequences = read_manifest(join(config.tables, "sequences"), "sequences")
    if sum(part.bytes for part in sequences.files) > LARGE:
        return math.nan
    unseen = config.fit.eval_options.get("unseen")
    fit = replace(
        config.fit, batch_size=8192, train_examples=0, eval_options={"unseen": unseen}
    )
    model = {
        "name": "popularity",
        "max_history": about.model["max_history"] if unseen else 1,
    }
    setup = set_up(model, fit, Inputs(config.tables), goes_on=about)
    setup.fit_counts()
    return setup.means(setup.validate(setup.model)[0]).get(fit.metric, math.nan)


def learned_nothing(
    found: Mapping[str, float],
    fit: FitConfig,
    popularity: float = math.nan,
    gradient: bool = True,
) -> str:
    """Return a warning where the metrics of the best epoch are no better than without a model, or nothing.

    Without a model there is popularity for retrieval, and base rates and chance for search and actions.
    """
    from models.ranking_metrics import below_chance

    below = below_chance(found)
    if (value := found.get(fit.metric, math.nan)) < popularity:
        below = f"{fit.metric} {value:.4f}, popularity {popularity:.4f}"
    if not below:
        return ""
    warning = f"warning: no better than without a model ({below})"
    if not gradient:
        return f"{warning}: give it more days or other features\n"
    return (
        f"{warning}: train longer, --fit.max_epochs {3 * fit.max_epochs} goes on; or under another --name with a "
        f"larger --fit.lr than {fit.lr:g} or a smaller --fit.batch_size\n"
    )


def run(config: Config) -> Any:
    """Trains and prints what was made; returns it, a `pipelines.training.run.Trained`."""
    cli.say_loading("torch", "ray", "mlflow")
    from models import registry
    from models.ranking_metrics import format_metric
    from pipelines import tracking
    from pipelines.training.run import run_training
    from pipelines.training.settings import check

    reach(tables=config.tables, sids=config.sids, text=config.text)
    check_writable(config.storage)
    entry = registry.find(config.model["name"])
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
        popularity = (
            popularity_of(config, best)
            if entry.gradient and entry.recommends
            else math.nan
        )
        warning = learned_nothing(best.metrics, config.fit, popularity, entry.gradient)
        print(warning or still_rising(best.epoch, trained.epochs, config.fit), end="")
    shown = "  ".join(
        f"{name} {format_metric(best.metrics.get(name))}"
        for name in entry.measured.SHOWN
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
