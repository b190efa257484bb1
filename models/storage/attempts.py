"""Numbers of the attempts at a training, by which a newer attempt fences off the workers of older ones.

    job = attempts.begin(folder)               # a job trains the run
    attempt = attempts.start(folder, job)      # its workers start: older ones are superseded from here on
    attempts.require_current(folder, attempt)  # before a worker changes what another attempt may read

A worker that was lost may only have been paused. When it wakes up, it still has the number of its own attempt and
finds another one in the run's folder.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from models.storage.uri import UserError, join, read_json, write_file

ATTEMPT = "attempt.json"
"""In a run's folder: the newest attempt at its training."""


class SupersededError(UserError):
    """Another attempt trains the run meanwhile, so this one changes nothing any more."""


class Attempt(NamedTuple):
    """Number of an attempt at a training; a newer attempt is larger."""

    job: int
    """Jobs that trained the run so far, this one included."""
    start: int
    """Starts of workers in this job, this one included; 0 while none has started."""

    def __str__(self) -> str:
        return f"{self.job}.{self.start}"

    @classmethod
    def parse(cls, text: str) -> Attempt:
        """Return the attempt that `str` wrote."""
        job, start = text.split(".")
        return cls(int(job), int(start))


UNNUMBERED = Attempt(0, 0)
"""Attempt of a run that nobody has trained, and of checkpoints from before attempts had numbers."""


def read_attempt(folder: str) -> Attempt:
    """Return the newest attempt at the run in `folder`."""
    try:
        content = read_json(join(folder, ATTEMPT))
        return UNNUMBERED if content is None else Attempt.parse(content["attempt"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{folder}/{ATTEMPT} is damaged ({error}); see that no other process trains this run, remove that file, "
            f"then run the same line again"
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

    Whoever trains reads the last checkpoint only after this. A worker of an older attempt that completes a checkpoint
    and then still finds its own number may therefore remove what that checkpoint replaces: whoever claims later reads
    the completed one.
    """
    write_file(join(folder, ATTEMPT), json.dumps({"attempt": str(attempt)}).encode())


def start(folder: str, job: Attempt) -> Attempt:
    """Claim and return the number of the next start of workers in the job that `begin` numbered.

    Raises SupersededError where another job trains the run.
    """
    require_job(folder, job)
    attempt = Attempt(job.job, read_attempt(folder).start + 1)
    claim(folder, attempt)
    return attempt


def require_current(folder: str, attempt: Attempt) -> None:
    """Raise SupersededError where another attempt than `attempt` is the newest at the run."""
    newest = read_attempt(folder)
    if newest != attempt:
        raise _superseded(folder, attempt, newest)


def require_job(folder: str, attempt: Attempt) -> None:
    """Raise SupersededError where another job than that of `attempt` is the newest to train the run."""
    newest = read_attempt(folder)
    if newest.job != attempt.job:
        raise _superseded(folder, attempt, newest)


def _superseded(folder: str, attempt: Attempt, newest: Attempt) -> SupersededError:
    return SupersededError(
        f"attempt {newest} trains the run in {folder} meanwhile, so attempt {attempt} ends without changing it; wait "
        f"for the other job, or stop it and run the same line again"
    )
