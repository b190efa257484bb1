"""Test the command line of the benchmarks."""

from __future__ import annotations

import sys

import pytest

from benchmarks.__main__ import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decod"], "invalid choice: 'decod'"),
        (
            ["actions", "--sizes", "3"],
            "actions takes no --sizes; it takes runs, threads",
        ),
        (["actions", "--json", "/gone/rows.jsonl"], "can't open '/gone/rows.jsonl'"),
    ],
)
def test_a_wrong_line_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
