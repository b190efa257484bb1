"""Train one model with PyTorch and no other dependency of this project, on any machine.

    python -m models.train --config jobs/configs/sasrec.yaml --tables TABLES --output DIR

The same configs, loop and checkpoints as `jobs.train`, without Ray and MLflow. Run
again, it resumes. SIGINT and SIGTERM save a checkpoint of the current step first.
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

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads that wait sleep, as those of the jobs do

import torch

from models import registry
from models.config import build, did_you_mean_key, read_configs
from models.storage import attempts, checkpoint
from models.storage.checkpoint import BEST, Checkpoint
from models.storage.input_folders import require_folders
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join
from models.storage.uri import check_buckets_first
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
"""Of a config of jobs.train; what `ray` says is for clusters."""


def check_same(about: Checkpoint, now: Checkpoint, output: str) -> None:
    """Raise UserError if a run would continue with other settings, or with another teacher."""
    for part in ("model", "fit"):
        before, wanted = (
            getattr(about, part),
            json.loads(json.dumps(getattr(now, part), default=str)),
        )
        for key in sorted(before.keys() & wanted.keys()):
            if before[key] != wanted[key]:
                raise UserError(
                    f"{output} was begun with {part}.{key} {before[key]}, not {wanted[key]}; give another --output"
                )


@contextmanager
def note_signals() -> Iterator[list[int]]:
    """Collect the first SIGINT or SIGTERM in a list. A second one ends the process."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_sgd(
    setup: TrainingRun,
    output: str,
    attempt: str,
    state: dict[str, Any] | None,
    about: Checkpoint | None,
) -> Checkpoint | None:
    """Train to the end and return the last checkpoint. A signal saves a checkpoint and exits.

    Args:
        setup: Model and data.
        output: Folder of the checkpoints.
        attempt: Number of this attempt at the training.
        state: State to resume from.
        about: Checkpoint that the state belongs to.
    """
    with note_signals() as signals:
        setup.should_stop = lambda: bool(signals)
        for event in fit(
            setup.model,
            setup.train,
            setup.validate,
            setup.fit,
            means=setup.means,
            lr_multipliers=setup.lr_multipliers,
            state=state,
            device=setup.device,
            next_action=lambda: STOP if signals else CONTINUE,
        ):
            if isinstance(event, HeartbeatEvent):
                print(describe(event, setup.fit, setup.progress_unit), flush=True)
            if not event.state:
                continue
            before = about
            about = setup.checkpoint(
                epoch=event.epoch,
                step=event.step,
                metrics=drop_undefined(event.metrics),
                best=best_fields(event.state),
                attempt=attempt,
            )
            about.follow(before)
            if event.metrics or isinstance(event, EpochEvent):
                print(describe(event, setup.fit, setup.progress_unit), flush=True)
            checkpoint.keep(output, setup.model, about, event.state)
            if event.interrupted:
                print(f"stopped at step {event.step}; the same command again continues")
                sys.exit(128 + signals[0])
    return about


def main(argv: list[str] | None = None) -> None:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m models.train",
        description="Trains one model with PyTorch alone.",
    )
    parser.add_argument(
        "--config",
        required=True,
        action="append",
        help="YAML file with the sections model and fit, as of jobs.train; of several the later ones win",
    )
    parser.add_argument("--tables", required=True, help="folder that jobs.prepare made")
    parser.add_argument(
        "--sids",
        help="folder that jobs.tokenize made, for models that use semantic IDs",
    )
    parser.add_argument(
        "--text",
        help="folder that jobs.encode made, for models of search, and if given of actions",
    )
    parser.add_argument(
        "--output",
        required=True,
        help="folder for the checkpoints; run again, it resumes from them",
    )
    parser.add_argument(
        "--init",
        help="checkpoint whose weights it begins with, of tables that these may extend",
    )
    options = parser.parse_args(argv)
    check_buckets_first()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        require_folders(tables=options.tables, sids=options.sids, text=options.text)
        inputs = Inputs(options.tables, options.sids, options.text)
        content = read_configs(options.config, "check --config")
        for section, values in content.items():
            if section not in SECTIONS:
                raise UserError(
                    f"unknown key '{section}'; {did_you_mean_key(section, SECTIONS)}"
                )
            if not isinstance(values, dict):
                raise UserError(
                    f"'{section}' is {values!r}, it must be a mapping; correct the config"
                )
        options_of_model = content.get("model", {})
        name = options_of_model.pop("name", None)
        if name is None:
            raise UserError(
                f"{options.config[-1]} names no model; give the config that it is read after first"
            )
        try:
            fit_config = build(FitConfig, content.get("fit", {}), "fit.")
            check_replay(fit_config, options.init)
            config_class = registry.find(name).config_class
            config = build(config_class, options_of_model, "model.")
        except (TypeError, ValueError) as error:
            raise UserError(f"{error}; correct the config") from error
        output = options.output
        init = checkpoint.locate(options.init) if options.init else None
        attempt = attempts.begin(output)
        about = checkpoint.last(output)
        config, inputs = resolve_training(config, fit_config, inputs, init)
        setup = TrainingRun.build(
            config, fit_config, inputs, device=device, last=about, init=init
        )
        check_fit(fit_config, type(setup.model), setup.catalogue)
        for message in setup.messages:
            print(message)
        state = None
        if about:
            check_same(about, setup.checkpoint(), output)
            state = setup.resume(output, about)
            inside = bool(state and state["cursor"]["step_in_epoch"])
            where = "in" if inside else "after"
            print(f"continuing {where} epoch {about.epoch}, step {about.step}")
        setup.check_metric()
        if not setup.model.trains_by_gradient:
            setup.fit_counts()
            place = join(output, BEST)
            checkpoint.save(place, setup.model, setup.checkpoint(epoch=1))
            print(f"counted; checkpoint {place}")
            return
        about = train_sgd(setup, output, str(attempt), state, about)
        if about:
            print(f"best checkpoint: {checkpoint.publish(output, about)}")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
