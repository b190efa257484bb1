"""Attempts at a training: an older one that wakes up changes nothing that a newer one
reads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.storage import attempts, checkpoint
from models.storage.attempts import Attempt, SupersededError
from models.storage.tables import UserError


def save(
    folder: Path | str,
    attempt: Attempt,
    step: int,
    best: int,
    before: checkpoint.Checkpoint | None,
    uploads: checkpoint.Uploads | None = None,
) -> checkpoint.Checkpoint:
    """Save the checkpoint of a step, whose weights are that step, and return its
    config.
    """
    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float(step))
    about = checkpoint.Checkpoint(
        {"name": "any"}, step=step, best={"step": best}, attempt=str(attempt)
    )
    about.set_best_folder(before)
    checkpoint.keep(str(folder), model, about, {"step": step}, uploads)
    return about


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


class HeldUploads(checkpoint.Uploads):
    """Uploads that wait until the test lets them go, as those of a paused process."""

    def __init__(self) -> None:
        self.held: list[Callable[[], None]] = []

    def __call__(self, upload: Callable[[], None]) -> None:
        self.held.append(upload)


def test_numbers_grow_by_job_and_by_start_of_workers(tmp_path: Path) -> None:
    first = attempts.begin(str(tmp_path))
    started = attempts.start(str(tmp_path), first)
    again = attempts.start(str(tmp_path), first)
    second = attempts.begin(str(tmp_path))

    assert (first, started, again, second) == ((1, 0), (1, 1), (1, 2), (2, 0))
    assert attempts.read_attempt(str(tmp_path)) == second
    with pytest.raises(SupersededError, match=r"attempt 2\.0 trains the run in .*1\.0"):
        attempts.start(str(tmp_path), first)
    with pytest.raises(SupersededError):
        attempts.require_job(str(tmp_path), first)


def test_a_damaged_number_is_one_line(tmp_path: Path) -> None:
    (tmp_path / attempts.ATTEMPT).write_text('{"attempt": "two"}')

    with pytest.raises(UserError, match=r"attempt\.json is damaged .*remove the file"):
        attempts.read_attempt(str(tmp_path))


def test_an_older_attempt_removes_no_checkpoint_and_completes_none(
    tmp_path: Path,
) -> None:
    old = attempts.begin(str(tmp_path))
    at_10 = save(tmp_path, old, 10, 10, None)
    at_20 = save(tmp_path, old, 20, 20, at_10)
    new = attempts.begin(str(tmp_path))
    at_30 = save(tmp_path, new, 30, 20, at_20)
    before = names(tmp_path)

    with pytest.raises(SupersededError):
        save(tmp_path, old, 25, 25, at_20)

    assert before == ["step-00000020-a1.0", "step-00000030-a2.0"]
    assert set(before) <= set(names(tmp_path))
    assert checkpoint.last(str(tmp_path)) == at_30
    at_40 = save(tmp_path, new, 40, 20, at_30)  # clears away what the old one began
    assert names(tmp_path) == ["step-00000020-a1.0", "step-00000040-a2.0"]
    best = checkpoint.publish(str(tmp_path), at_40)
    assert checkpoint.read(best).step == 20


def test_the_last_checkpoint_is_one_of_the_newest_attempt(tmp_path: Path) -> None:
    """The older attempt was paused between its look at the number and its last file."""
    old = attempts.begin(str(tmp_path))
    new = attempts.begin(str(tmp_path))
    at_30 = save(tmp_path, new, 30, 30, None)
    late = checkpoint.Checkpoint({"name": "any"}, step=50, attempt=str(old))

    checkpoint.save(tmp_path / late.folder, torch.nn.Linear(2, 1), late)

    assert names(tmp_path) == ["step-00000030-a2.0", "step-00000050-a1.0"]
    assert checkpoint.last(str(tmp_path)) == at_30


def test_a_checkpoint_of_the_layout_without_attempts_is_gone_on_from(
    tmp_path: Path,
) -> None:
    before = save(tmp_path, attempts.UNNUMBERED, 10, 10, None)
    del before.best["folder"]
    attempt = attempts.start(str(tmp_path), attempts.begin(str(tmp_path)))

    after = save(tmp_path, attempt, 20, 10, before)

    assert names(tmp_path) == ["step-00000010", "step-00000020-a1.1"]
    assert checkpoint.read(checkpoint.publish(str(tmp_path), after)).step == 10


def test_an_upload_that_a_pause_held_back_leaves_the_newer_attempt_alone(
    s3: str,
) -> None:
    run = f"{s3}/paused"
    old = attempts.begin(run)
    at_10 = save(run, old, 10, 10, None)
    paused = HeldUploads()
    save(run, old, 20, 20, at_10, paused)
    new = attempts.begin(run)
    resumed: Any = checkpoint.last(run)
    at_20 = save(run, new, 20, 10, resumed)

    with pytest.raises(SupersededError):
        paused.held[0]()

    assert checkpoint.last(run) == at_20
    with checkpoint.local(f"{run}/{at_20.best_folder}") as folder:
        assert checkpoint.verify_file(folder, checkpoint.WEIGHTS, folder)
    assert checkpoint.read(checkpoint.publish(run, at_20)).step == 10
