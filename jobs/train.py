r"""Train one model on the tables of jobs.prepare, or continue a stopped run.

    python -m jobs.train --config jobs/configs/retrieval/sasrec.yaml --tables TABLES \
        --storage runs --name sasrec

`model.name` in the config file selects the model, also FILE.py:CLASS of your own.
Options of the command line override the file, such as --model.num_layers 2 or --fit.lr
0.001. --model.name NAME --help shows the options of a model. The same command continues
a stopped run of the same --name. Under `ray job submit`, the cluster trains. Otherwise
one worker trains in this process, and several workers (--ray.num_workers) train on a
local Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs import cli
from pipelines.training.config import TrainConfig

if TYPE_CHECKING:
    from pipelines.training.run import TrainingResult

Config = TrainConfig


def run(config: TrainConfig) -> TrainingResult:
    """Train a model, and print the next command."""
    cli.say_loading("torch", "ray", "mlflow")
    from models import registry
    from pipelines.training.run import run_training

    cli.preflight(config)
    result = run_training(config)
    if result.was_finished:
        print("--overwrite trains it again from scratch")
    reads = registry.find(result.best.name).extra_inputs
    inputs = config.inputs.select(result.best.name, reads).folders()
    evaluate = {"checkpoint": result.checkpoint, **inputs, "split": "test"}
    if result.best.code:
        evaluate["trust_code"] = "true"
    print(f"  next        {cli.command_line('jobs.evaluate', **evaluate)}")
    return result


if __name__ == "__main__":
    cli.main(run)
