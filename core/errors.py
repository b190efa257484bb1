"""Errors that a user can cure, and words for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

MAX_REASON_CHARS = 300
"""Longest quotation of another error in a message."""


def one_line(error: BaseException) -> str:
    """Return the start of an error's text in one line, or the name of its class."""
    text = " ".join(str(error).split())
    return text[:MAX_REASON_CHARS] or type(error).__name__


class UserError(Exception):
    """An error in the input or configuration, with a one-line message for the user.

    The message names the value and the limit. Jobs print the message
    without a traceback and exit with code 1. Every other exception is a bug and is
    printed with its traceback.

    Attributes:
        cause: Key of the command or option that cures the error; "" if there is none.
    """

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str]]:
        """Return the arguments, so that the cause crosses processes."""
        return type(self), (str(self), self.cause)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a clause that suggests the nearest valid name, or lists the first 8.

    Names with the same last part, such as `lr` of `fit.lr`, are preferred, then names
    of the same section.
    """
    section, _, last = word.rpartition(".")
    parts = [(*name.rpartition("."), name) for name in known]
    near = [part for part in parts if part[2] == last]
    near = near or [part for part in parts if part[0] == section] or parts
    names = {part[2]: part[3] for part in near}
    nearest = difflib.get_close_matches(last, names, n=1, cutoff=0.5)
    if nearest:
        return f"the nearest is '{names[nearest[0]]}'"
    return f"it takes {', '.join(map(repr, [*names.values()][:8])) or 'none'}"


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun: `1 row`, `2,000 rows` or `0 queries`."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{count:,} {noun[:-1]}ies"
    ending = "es" if noun.endswith(("rch", "tch")) else "s"
    return f"{count:,} {noun}{ending}"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours, with about two digits."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def raise_first(*checks: tuple[Any, str]) -> None:
    """Raise UserError with the message of the first check that fails.

    Args:
        checks: Pairs of a condition, true if the check fails, and a message.
    """
    for failed, message in checks:
        if failed:
            raise UserError(message)
