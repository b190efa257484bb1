r"""Train the models of the retrieval quickstart on a log of RESULTS.md.

    python -m papers.floors --log amazon18_industrial --input FOLDER --output OUT
    python -m papers.floors --log amazon18_industrial --input FOLDER --output OUT \
        --seeds '[42,43,44]'
    python -m papers.kept --experiment retrieval/amazon18_industrial \
        --tracking_uri sqlite:///OUT/amazon18_industrial/runs/mlflow.db \
        --output papers/results/small_amazon18_industrial.jsonl

Without `--seeds`, only the models without training run, with their shipped configs.
With seeds, SASRec, TIGER and SID-MLP are trained as in the quickstart, but without its
time budget: for all of their epochs, or at most `--epochs`. Each model is evaluated on
test, over all items and without the items of the user's history. The same command
continues from finished steps. `papers.kept` saves the runs.
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
    """Options of `python -m papers.floors`."""

    log: str
    """Name of the log, whose source file is jobs/configs/sources/LOG.yaml."""
    input: str
    """Folder of the raw log."""
    output: str
    """Folder for tables and runs, in a subfolder with the name of the log."""
    experiment: str | None = None
    """MLflow experiment; by default retrieval/LOG."""
    source: str | None = None
    """Source file of the log, instead of jobs/configs/sources/LOG.yaml."""
    seeds: list[int] = field(default_factory=list)
    """Seeds of SASRec, TIGER and SID-MLP; without seeds they are not trained."""
    epochs: int = 1000
    """Largest number of epochs of a trained model."""


def run(config: Config) -> None:
    """Prepare a log, and train and evaluate its models."""
    folder = Path(config.output).absolute() / config.log
    tables, sids, runs = (str(folder / name) for name in ("tables", "sids", "runs"))
    source = config.source or str(quickstart.CONFIGS / "sources" / f"{config.log}.yaml")
    folders = Folders(
        config.log, "retrieval", source, Path(config.input), tables, sids, runs
    )
    trainings = plan_trainings(config)
    steps = Steps(num_steps=1 + bool(config.seeds) + 3 * len(trainings))
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
    """Return the models to train, each with options of the quickstart.

    Models without training come first, once each. The other models follow, once per
    seed.
    """
    floors = []
    gradient_models = []
    for model_run in quickstart.FLOWS["retrieval"].models:
        if registry.find(model_run.model).trains_by_gradient:
            gradient_models.append(model_run)
        else:
            floors.append(model_run)
    default = quickstart.Config(data=config.input)
    trainings = [(default, model_run) for model_run in floors]
    for seed in config.seeds:
        seeded = quickstart.Config(data=config.input, seed=seed)
        trainings += [(seeded, model_run) for model_run in gradient_models]
    return trainings


if __name__ == "__main__":
    cli.main(run, Config)
