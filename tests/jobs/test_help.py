"""Test the text that --help prints."""

from __future__ import annotations

from types import ModuleType

import pytest

from jobs import cli, train


def print_help(
    module: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """Return the help text of a job with these further words."""
    with pytest.raises(SystemExit):
        cli.config_from_words(module, [*words, "--help"])
    return capsys.readouterr().out


def test_the_help_of_a_training_shows_the_options_of_the_named_model(capsys):
    text = print_help(train, ["--model.name", "attn_mvp"], capsys)
    assert "--model.action_weight" in text
    (place,) = [
        i for i, line in enumerate(text.splitlines()) if "--model.width" in line
    ]
    assert text.splitlines()[place + 1].startswith("        ")  # of a base class
    assert "--model.action_weight" not in print_help(train, [], capsys)
