"""Shorten the text of a library's error for a one-line message."""

from __future__ import annotations

MAX_REASON_CHARS = 300
"""Longest quotation of another error in a message."""


def one_line(error: BaseException) -> str:
    """Return the start of an error's text in one line, or its class without text."""
    text = " ".join(str(error).split())
    return text[:MAX_REASON_CHARS] or type(error).__name__
