"""Train one model in this process, with PyTorch but without Ray and MLflow.

    python -m models.train --config sasrec.yaml --tables TABLES --output DIR

Configs, training loop and checkpoints are the same as in `jobs.train`. The same command
resumes a stopped training. SIGINT and SIGTERM save a checkpoint before the process
exits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# OpenMP threads sleep while they wait, as in the jobs. Set before PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from models import registry
from models.config import build, read_configs
from models.storage import attempts, checkpoint
from models.storage.checkpoint import BEST, Checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join
from models.training.fit import (
    CONTINUE,
    STOP,
    EpochEvent,
    FitConfig,
    HeartbeatEvent,
    best_fields,
    describe,
    drop_undefined,
    fit,
)
from models.training.fit_config import check_replay
from models.training_run import TrainingRun, check_fit, resolve_training

SECTIONS = ["model", "fit", "ray"]
"""Sections of a config of jobs.train; `ray` is ignored here."""


def check_same(previous: Checkpoint, current: Checkpoint, output: str) -> None:
    """Check that a resumed training has the settings that it was started with.

    Args:
        previous: Last checkpoint of the training.
        current: Checkpoint with the current settings.
        output: Folder of the checkpoints, for the message.

    Raises:
        UserError: If an option of the model or of the training loop differs.
    """
    for section in ("model", "fit"):
        old = getattr(previous, section)
        new = json.loads(json.dumps(getattr(current, section), default=str))
        for key in sorted(old.keys() & new.keys()):
            if old[key] != new[key]:
                raise UserError(
                    f"{output} was started with {section}.{key} {old[key]}, not "
                    f"{new[key]}"
                )


@contextmanager
def record_signals() -> Iterator[list[int]]:
    """Record the first SIGINT or SIGTERM in a list while the block runs.

    A second signal of the same kind ends the process.
    """
    signals: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)

    previous_handlers = {
        number: signal.signal(number, record)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield signals
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def train_sgd(
    run: TrainingRun,
    output: str,
    attempt: str,
    state: dict[str, Any] | None,
    last: Checkpoint | None,
) -> Checkpoint | None:
    """Train by gradient descent and return the last checkpoint.

    After SIGINT or SIGTERM a checkpoint is saved and the process exits.

    Args:
        run: Model and data.
        output: Folder of the checkpoints.
        attempt: Number of this attempt at the training.
        state: State to resume from.
        last: Checkpoint that the state belongs to.
    """
    with record_signals() as signals:
        run.should_stop = lambda: bool(signals)
        for event in fit(
            run.model,
            run.train,
            run.validate,
            run.fit,
            means=run.means,
            lr_multipliers=run.lr_multipliers,
            state=state,
            device=run.device,
            next_action=lambda: STOP if signals else CONTINUE,
        ):
            if isinstance(event, HeartbeatEvent):
                print(describe(event, run.fit, run.progress_unit), flush=True)
            if not event.state:
                continue
            metadata = run.checkpoint(
                epoch=event.epoch,
                step=event.step,
                metrics=drop_undefined(event.metrics),
                best=best_fields(event.state),
                attempt=attempt,
            )
            metadata.set_best_folder(last)
            last = metadata
            if event.metrics or isinstance(event, EpochEvent):
                print(describe(event, run.fit, run.progress_unit), flush=True)
            checkpoint.keep(output, run.model, metadata, event.state)
            if event.interrupted:
                print(f"stopped at step {event.step}; the same command again continues")
                sys.exit(128 + signals[0])
    return last


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; None reads `sys.argv`."""
    parser = argparse.ArgumentParser(
        prog="python -m models.train",
        description="Train one model with PyTorch, without Ray and MLflow.",
    )
    parser.add_argument(
        "--config",
        required=True,
        action="append",
        help="YAML file with the sections model and fit, as for jobs.train; may be "
        "repeated, and later files override earlier ones",
    )
    parser.add_argument("--tables", required=True, help="output folder of jobs.prepare")
    parser.add_argument(
        "--sids",
        help="output folder of jobs.tokenize, for models that use semantic IDs",
    )
    parser.add_argument(
        "--text",
        help="output folder of jobs.encode, required by search models and optional "
        "for actions models",
    )
    parser.add_argument(
        "--output",
        required=True,
        help="folder for the checkpoints; the same command again resumes from them",
    )
    parser.add_argument(
        "--init",
        help="checkpoint whose weights the training starts from; the tables may "
        "extend the tables of its training",
    )
    return parser.parse_args(argv)


def load_configs(uris: list[str], init: str | None) -> tuple[Any, FitConfig]:
    """Load the options of the model and of the training loop from YAML files.

    Args:
        uris: The files; later files override earlier ones.
        init: Checkpoint of the option --init, if given.

    Raises:
        UserError: If a section, an option or a value is not valid.
    """
    content = read_configs(uris)
    for section, values in content.items():
        if section not in SECTIONS:
            raise UserError(f"unknown key '{section}'")
        if not isinstance(values, dict):
            raise UserError(f"'{section}' is {values!r}, it must be a mapping")
    model_options = content.get("model", {})
    name = model_options.pop("name", None)
    if name is None:
        raise UserError(f"{uris[-1]} has no model.name")
    try:
        fit_config = build(FitConfig, content.get("fit", {}), "fit.")
        check_replay(fit_config, init)
        config = build(registry.find(name).config_class, model_options, "model.")
    except (TypeError, ValueError) as error:
        raise UserError(f"{error}") from error
    return config, fit_config


def resume(run: TrainingRun, output: str, last: Checkpoint) -> dict[str, Any] | None:
    """Load the last checkpoint of a training, and return the state of the loop.

    Args:
        run: Model and data.
        output: Folder of the checkpoints.
        last: Last checkpoint of the training.

    Raises:
        UserError: If the settings of the training have changed.
    """
    check_same(last, run.checkpoint(), output)
    state = run.resume(output, last)
    is_within = bool(state and state["cursor"]["step_in_epoch"])
    preposition = "in" if is_within else "after"
    print(f"continuing {preposition} epoch {last.epoch}, step {last.step}")
    return state


def train(options: argparse.Namespace) -> None:
    """Train the model that the command line describes, and print its progress.

    Raises:
        UserError: If the options, configs or tables are not valid.
    """
    output = options.output
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = Inputs(options.tables, options.sids, options.text)
    config, fit_config = load_configs(options.config, options.init)
    init = checkpoint.locate(options.init) if options.init else None
    attempt = attempts.begin(output)
    last = checkpoint.last(output)
    config, inputs = resolve_training(config, fit_config, inputs, init)
    run = TrainingRun.build(
        config, fit_config, inputs, device=device, last=last, init=init
    )
    check_fit(fit_config, type(run.model), run.catalogue)
    for message in run.messages:
        print(message)
    state = resume(run, output, last) if last else None
    run.check_metric()
    if not run.model.trains_by_gradient:
        run.fit_in_one_pass()
        uri = join(output, BEST)
        checkpoint.save(uri, run.model, run.checkpoint(epoch=1))
        print(f"counted; checkpoint {uri}")
        return
    last = train_sgd(run, output, str(attempt), state, last)
    if last:
        print(f"best checkpoint: {checkpoint.publish(output, last)}")


def main(argv: list[str] | None = None) -> None:
    """Run the command line that the module describes."""
    options = parse_arguments(argv)
    try:
        train(options)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
