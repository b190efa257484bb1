"""Attempts of a training: an older attempt that resumes late changes no file that a newer
attempt reads.
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


def save_step(
    folder: Path | str,
    attempt: Attempt,
    step: int,
    best: int,
    previous: checkpoint.Checkpoint | None,
    uploads: checkpoint.Uploads | None = None,
) -> checkpoint.Checkpoint:
    """Save the checkpoint of a step, whose weights are its number; return its metadata."""
    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float(step))
    metadata = checkpoint.Checkpoint(
        {"name": "any"}, step=step, best={"step": best}, attempt=str(attempt)
    )
    metadata.set_best_folder(previous)
    checkpoint.keep(str(folder), model, metadata, {"step": step}, uploads)
    return metadata


def list_checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


class DeferredUploads(checkpoint.Uploads):
    """Uploads that wait until the test calls them, as in a paused process."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []

    def __call__(self, upload: Callable[[], None]) -> None:
        self.pending.append(upload)


def test_attempts_are_numbered_by_job_and_by_start_of_the_workers(
    tmp_path: Path,
) -> None:
    first = attempts.begin(str(tmp_path))
    first_start = attempts.start(str(tmp_path), first)
    second_start = attempts.start(str(tmp_path), first)
    second = attempts.begin(str(tmp_path))

    assert first == (1, 0)
    assert first_start == (1, 1)
    assert second_start == (1, 2)
    assert second == (2, 0)
    assert attempts.read_attempt(str(tmp_path)) == second
    with pytest.raises(SupersededError, match=r"attempt 2\.0 trains the run in .*1\.0"):
        attempts.start(str(tmp_path), first)
    with pytest.raises(SupersededError):
        attempts.require_job(str(tmp_path), first)


def test_a_damaged_attempt_file_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / attempts.ATTEMPT).write_text('{"attempt": "two"}')

    with pytest.raises(UserError, match=r"attempt\.json is damaged .*remove the file"):
        attempts.read_attempt(str(tmp_path))


def test_an_older_attempt_neither_deletes_nor_completes_a_checkpoint(
    tmp_path: Path,
) -> None:
    old = attempts.begin(str(tmp_path))
    at_10 = save_step(tmp_path, old, 10, 10, None)
    at_20 = save_step(tmp_path, old, 20, 20, at_10)
    new = attempts.begin(str(tmp_path))
    at_30 = save_step(tmp_path, new, 30, 20, at_20)
    before = list_checkpoints(tmp_path)

    with pytest.raises(SupersededError):
        save_step(tmp_path, old, 25, 25, at_20)

    assert before == ["step-00000020-a1.0", "step-00000030-a2.0"]
    assert set(before) <= set(list_checkpoints(tmp_path))
    assert checkpoint.last(str(tmp_path)) == at_30
    at_40 = save_step(
        tmp_path, new, 40, 20, at_30
    )  # deletes the partial checkpoint of the old attempt
    assert list_checkpoints(tmp_path) == ["step-00000020-a1.0", "step-00000040-a2.0"]
    best = checkpoint.publish(str(tmp_path), at_40)
    assert checkpoint.read(best).step == 20


def test_the_last_checkpoint_is_that_of_the_newest_attempt(tmp_path: Path) -> None:
    """The older attempt was paused between reading the number and writing its last file."""
    old = attempts.begin(str(tmp_path))
    new = attempts.begin(str(tmp_path))
    at_30 = save_step(tmp_path, new, 30, 30, None)
    late_metadata = checkpoint.Checkpoint({"name": "any"}, step=50, attempt=str(old))

    checkpoint.save(
        tmp_path / late_metadata.folder, torch.nn.Linear(2, 1), late_metadata
    )

    assert list_checkpoints(tmp_path) == ["step-00000030-a2.0", "step-00000050-a1.0"]
    assert checkpoint.last(str(tmp_path)) == at_30


def test_training_continues_from_a_checkpoint_without_an_attempt(
    tmp_path: Path,
) -> None:
    before = save_step(tmp_path, attempts.UNNUMBERED, 10, 10, None)
    del before.best["folder"]
    attempt = attempts.start(str(tmp_path), attempts.begin(str(tmp_path)))

    after = save_step(tmp_path, attempt, 20, 10, before)

    assert list_checkpoints(tmp_path) == ["step-00000010", "step-00000020-a1.1"]
    assert checkpoint.read(checkpoint.publish(str(tmp_path), after)).step == 10


def test_a_delayed_upload_of_an_older_attempt_changes_no_newer_checkpoint(
    s3: str,
) -> None:
    run = f"{s3}/paused"
    old = attempts.begin(run)
    at_10 = save_step(run, old, 10, 10, None)
    paused = DeferredUploads()
    save_step(run, old, 20, 20, at_10, paused)
    new = attempts.begin(run)
    resumed: Any = checkpoint.last(run)
    at_20 = save_step(run, new, 20, 10, resumed)

    with pytest.raises(SupersededError):
        paused.pending[0]()

    assert checkpoint.last(run) == at_20
    with checkpoint.local(f"{run}/{at_20.best_folder}") as folder:
        assert checkpoint.verify_file(folder, checkpoint.WEIGHTS, folder)
    assert checkpoint.read(checkpoint.publish(run, at_20)).step == 10
