"""A look at a trial before any starts: that its parts work, and with `timed` how long they take.

It builds the trial's model on the tables, so all that a training would refuse is refused here, in one line. What
all trials share and only the first one makes, such as a table of a teacher's outputs, is made here too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from models.fit import FitConfig, autocast, to_device
from models.setup import Setup, set_up
from models.tables import UserError
from models.uri import absolute
from tuning.grid import Grid, Trial

ROWS = 32
"""Validation rows that are measured."""

STEPS = 3
"""Steps that are timed."""


def look(
    trial: Trial, tables: str, extra: str | None, timed: bool, threads: int, say: Callable[[str], None] = print
) -> float:
    """Builds the trial's model and measures a few validation rows. `timed` also takes a few steps, and gives the
    estimated seconds of the trial at all of its epochs; else 0."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        began = time.perf_counter()
        setup = set_up(trial.model, FitConfig(**trial.fit), tables, extra)
        loading = time.perf_counter() - began
        for note in setup.notes:
            say(note)
        if not setup.entry.gradient:
            return loading if timed else 0.0
        if len(setup.val) == 0:
            raise UserError(f"the validation split of {tables} has no request; check the split of jobs.prepare")
        few = replace(setup, fit=replace(setup.fit, eval_examples=ROWS, eval_batch_size=ROWS))
        began = time.perf_counter()
        sums, count = few.validate(setup.model)
        per_row = (time.perf_counter() - began) / count
        setup.means(sums)
        if not timed:
            return 0.0
        epochs, rows = setup.fit.max_epochs, setup.fit.eval_examples or len(setup.val)
        evaluations = -(-epochs // setup.fit.eval_every_epochs)
        cost = epochs * setup.train.steps(0) * step_seconds(setup) + evaluations * rows * per_row
        return loading + cost
    finally:
        torch.set_num_threads(before)


def estimate(grid: Grid, trials: list[Trial], tables: str, extra: str | None, threads: int) -> float:
    """Estimated seconds of all trials one after the other, at all of their epochs, from a look at three of them."""
    if not trials or grid.kind == "evaluate":
        return math.nan
    places = sorted({0, len(trials) // 2, len(trials) - 1})
    own = [t.extra(extra) for t in trials]
    looks = [look(trials[i], absolute(tables), own[i], True, threads) for i in places]
    return len(trials) * sum(looks) / len(looks)


def check_models(trials: list[Trial], tables: str, extra: str | None, threads: int, say: Callable[[str], None]) -> None:
    """Refuses what no trial could do, by a look at one of each model and folder."""
    seen: dict[tuple, Trial] = {}
    for trial in trials:
        seen.setdefault((trial.model.get("name"), *sorted(trial.folders.items())), trial)
    for trial in seen.values():
        look(trial, tables, trial.extra(extra), False, threads, say)


def step_seconds(setup: Setup) -> float:
    """Seconds of a training step, with its batch; the mean of a few after the first."""
    model: Any = setup.model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.0)
    batches = setup.train(0, 0)
    began, taken = 0.0, 0
    for number, batch in zip(range(STEPS + 1), batches, strict=False):
        if number == 1:
            began = time.perf_counter()
        with autocast(setup.fit.precision, setup.device):
            loss = model(to_device(batch, setup.device))["loss"]
        loss.backward()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        taken = number
    return (time.perf_counter() - began) / taken if taken else 0.0
