"""Attempt numbers of a training, by which a newer attempt fences off the workers of older attempts.

    job = attempts.begin(folder)               # a job trains the run
    attempt = attempts.start(folder, job)      # its workers start: older ones are superseded from here on
    attempts.require_current(folder, attempt)  # before a worker changes what another attempt may read

A worker that counts as lost may only be paused. When it wakes up, it has the number of
its own attempt and finds a newer number in the run's folder.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from models.storage.uri import UserError, join, read_json, write_file

ATTEMPT = "attempt.json"
"""File in a run's folder with the number of the newest attempt."""


class SupersededError(UserError):
    """A newer attempt trains the run, so the older one must not change it any more."""


class Attempt(NamedTuple):
    """Number of an attempt at a training. A newer attempt has a larger number."""

    job: int
    """Number of jobs that have trained the run, this one included."""
    start: int
    """Number of worker starts in the job, this one included; 0 before the first."""

    def __str__(self) -> str:
        return f"{self.job}.{self.start}"

    @classmethod
    def parse(cls, text: str) -> Attempt:
        """Return the attempt with the number that `str` has formatted."""
        job, start = text.split(".")
        return cls(int(job), int(start))


UNNUMBERED = Attempt(0, 0)
"""Attempt of an untrained run, and of checkpoints without a number in their name."""


def read_attempt(folder: str) -> Attempt:
    """Return the newest attempt at the run in `folder`."""
    try:
        content = read_json(join(folder, ATTEMPT))
        return UNNUMBERED if content is None else Attempt.parse(content["attempt"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{folder}/{ATTEMPT} is damaged ({error}); see that no other process trains this run, remove that file, "
            f"then run the same command again"
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

    A training reads the last checkpoint only after this call. So a worker of an older
    attempt that completes a checkpoint and then still finds its own number may remove
    older checkpoints: an attempt that claims the run later reads the completed
    checkpoint.
    """
    write_file(join(folder, ATTEMPT), json.dumps({"attempt": str(attempt)}).encode())


def start(folder: str, job: Attempt) -> Attempt:
    """Claim and return the number of the next start of workers in the job that `begin` numbered.

    Raises:
        SupersededError: if a newer job trains the run.
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
    """Raise SupersededError unless the job of `attempt` is the newest job that trains the run."""
    newest = read_attempt(folder)
    if newest.job != attempt.job:
        raise _superseded_error(folder, attempt, newest)


def _superseded_error(
    folder: str, attempt: Attempt, newest: Attempt
) -> SupersededError:
    return SupersededError(
        f"attempt {newest} trains the run in {folder} meanwhile, so attempt {attempt} ends without changing it; wait "
        f"for the other job, or stop it and run the same command again"
    )
