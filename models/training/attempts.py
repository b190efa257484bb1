"""Attempt numbers of a training: a newer attempt fences off older workers.

    job = attempts.begin(folder)               # when a job starts to train the run
    attempt = attempts.start(folder, job)      # when the workers of the job start
    attempts.require_current(folder, attempt)  # before a worker changes shared files

A worker that was declared lost may only have been paused. When it resumes, it finds in
the run's folder a newer number than the number of its own attempt, and stops.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from core.errors import UserError
from core.files import join, read_json, write_file

ATTEMPT = "attempt.json"
"""File of a run's folder that holds the number of the newest attempt."""


class SupersededError(UserError):
    """Raised in an attempt when a newer attempt trains the run."""


class Attempt(NamedTuple):
    """Number of an attempt at a training; newer attempts compare greater."""

    job: int
    """Number of the job among the jobs that have trained the run, from 1."""
    start: int
    """Number of the start of workers within the job, from 1; 0 before the first."""

    def __str__(self) -> str:
        return f"{self.job}.{self.start}"

    @classmethod
    def parse(cls, text: str) -> Attempt:
        """Parse the text that `str(attempt)` returns."""
        job, start = text.split(".")
        return cls(int(job), int(start))


UNNUMBERED = Attempt(0, 0)
"""Attempt number of an untrained run, and of checkpoints without an attempt in their
folder name."""


def read_attempt(folder: str) -> Attempt:
    """Return the newest attempt at the run in `folder`."""
    try:
        content = read_json(join(folder, ATTEMPT))
        return UNNUMBERED if content is None else Attempt.parse(content["attempt"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{folder}/{ATTEMPT} is damaged ({error})", "damaged"
        ) from error


def begin(folder: str) -> Attempt:
    """Claim and return the number of a new job that trains the run in `folder`.

    The caller holds the run's lock, so that no two jobs get the same number.
    """
    attempt = Attempt(read_attempt(folder).job + 1, 0)
    claim(folder, attempt)
    return attempt


def claim(folder: str, attempt: Attempt) -> None:
    """Make `attempt` the newest attempt at the run.

    An attempt reads the last checkpoint only after it has claimed the run. So a worker
    that completes a checkpoint, and then still finds its own attempt number, may remove
    older checkpoints: an attempt that claims the run later reads the new checkpoint.
    """
    write_file(join(folder, ATTEMPT), json.dumps({"attempt": str(attempt)}).encode())


def start(folder: str, job: Attempt) -> Attempt:
    """Claim and return the number of the next start of workers.

    Args:
        folder: Folder of the run.
        job: Attempt from `begin`.

    Raises:
        SupersededError: If a newer job trains the run.
    """
    require_job(folder, job)
    attempt = Attempt(job.job, read_attempt(folder).start + 1)
    claim(folder, attempt)
    return attempt


def require_current(folder: str, attempt: Attempt) -> None:
    """Raise SupersededError unless `attempt` is the newest attempt at the run."""
    newest = read_attempt(folder)
    if newest != attempt:
        raise _superseded_error(folder, attempt, newest)


def require_job(folder: str, attempt: Attempt) -> None:
    """Raise SupersededError unless the job of `attempt` is the run's newest job."""
    newest = read_attempt(folder)
    if newest.job != attempt.job:
        raise _superseded_error(folder, attempt, newest)


def _superseded_error(
    folder: str, attempt: Attempt, newest: Attempt
) -> SupersededError:
    return SupersededError(
        f"attempt {newest} trains the run in {folder} meanwhile, so attempt {attempt} "
        "ends without changing it; wait for the other job, or stop it and run the same "
        "command again"
    )
