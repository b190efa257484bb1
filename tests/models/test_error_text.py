"""Errors of libraries shortened for one-line messages."""

from __future__ import annotations

from models.error_text import MAX_REASON_CHARS, first_line, one_line


def test_an_error_is_shortened_to_one_line() -> None:
    error = OSError("\n  cannot  read\nthe file")
    assert first_line(error) == "cannot read"
    assert one_line(error) == "cannot read the file"
    long_error = ValueError("x" * 1000)
    assert len(first_line(long_error)) == len(one_line(long_error)) == MAX_REASON_CHARS
    assert one_line(long_error, None) == "x" * 1000


def test_an_error_without_text_is_named_by_its_class() -> None:
    assert first_line(EOFError()) == "EOFError"
    assert one_line(KeyError()) == "KeyError"
