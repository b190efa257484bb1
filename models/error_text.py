"""Shorten the text of a library's error for a one-line message."""

from __future__ import annotations

MAX_REASON_CHARS = 300
"""Longest quotation of another error in a message."""


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's text, or else its class name.

    Whitespace becomes single spaces, and the line is cut to `MAX_REASON_CHARS`.
    """
    for line in str(error).splitlines():
        words = line.split()
        if words:
            return " ".join(words)[:MAX_REASON_CHARS]
    return type(error).__name__


def one_line(error: BaseException, max_chars: int | None = MAX_REASON_CHARS) -> str:
    """Return an error's whole text in one line, or its class without text.

    Args:
        error: Error of a library or of this project.
        max_chars: Number of characters after which the text is cut off; None to return
            all of it, such as a message of our own that ends with a remedy.
    """
    text = " ".join(str(error).split())
    return text[:max_chars] or type(error).__name__
