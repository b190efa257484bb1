r"""The models of the retrieval quickstart on a log of RESULTS.md, as runs to keep.

    python -m papers.floors --log amazon18_industrial --input FOLDER --output OUT
    python -m papers.floors --log amazon18_industrial --input FOLDER --output OUT --seeds '[42,43,44]'
    python -m papers.kept --experiment retrieval/amazon18_industrial \
        --tracking_uri sqlite:///OUT/amazon18_industrial/runs/mlflow.db \
        --output papers/results/small_amazon18_industrial.jsonl

Without `--seeds` only the models without gradient training run, with their shipped
configs. With seeds, SASRec, TIGER and SID-MLP follow as in the quickstart, but for all
of their epochs, or at most `--epochs`. Each model is evaluated on test, with all items
and without known items. The same command continues from finished steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import cli, quickstart
from jobs.quickstart import Folders, ModelRun, Steps
from jobs.time_budget import EVAL_EXAMPLES, Schedule
from models import registry


@dataclass
class Config:
    """Options."""

    log: str
    """Name of the log: its mapping file is jobs/configs/sources/LOG.yaml."""
    input: str
    """Folder of the raw log."""
    output: str
    """Folder for tables and runs, in a subfolder with the name of the log."""
    experiment: str | None = None
    """MLflow experiment; by default retrieval/LOG."""
    source: str | None = None
    """Another mapping file."""
    seeds: list[int] = field(default_factory=list)
    """Seeds of the trained models; without any, these are left out."""
    epochs: int = 1000
    """Epochs of a trained model at most."""


def run(config: Config) -> None:
    """Prepare a log, and train and evaluate all models without gradient training."""
    folder = Path(config.output).absolute() / config.log
    tables, sids, runs = (str(folder / name) for name in ("tables", "sids", "runs"))
    source = config.source or str(quickstart.CONFIGS / "sources" / f"{config.log}.yaml")
    folders = Folders(
        config.log, "retrieval", source, Path(config.input), tables, sids, runs
    )
    trainings = plan_trainings(config)
    steps = Steps(count=1 + bool(config.seeds) + 3 * len(trainings))
    log = {"source": source, "input": config.input, "output": tables}
    steps.run("Raw log to tables", "prepare", log)
    if config.seeds:
        quickstart.make_extra(trainings[0][0], folders, steps)
    for quick, model_run in trainings:
        name = quickstart.plan_training(quick, folders, model_run).name
        options: dict[str, Any] = {
            "experiment": config.experiment or f"retrieval/{config.log}"
        }
        if registry.find(model_run.model).trains_by_gradient:
            options["fit"] = {
                "max_epochs": min(model_run.epochs, config.epochs),
                "eval_examples": EVAL_EXAMPLES,
            }
        quickstart.train_and_evaluate(
            quick, folders, steps, model_run, Schedule({name: options})
        )


def plan_trainings(config: Config) -> list[tuple[quickstart.Config, ModelRun]]:
    """Return the models to train, each with the quickstart's options: seed after seed.

    Models without training come once.
    """
    models = quickstart.FLOWS["retrieval"].models
    learned = [
        model for model in models if registry.find(model.model).trains_by_gradient
    ]
    counted = [model for model in models if model not in learned]
    quick = quickstart.Config(data=config.input)
    seeded = [
        (quickstart.Config(data=config.input, seed=seed), model)
        for seed in config.seeds
        for model in learned
    ]
    return [(quick, model) for model in counted] + seeded


if __name__ == "__main__":
    cli.main(run, Config)
