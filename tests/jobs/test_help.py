"""What --help prints."""

from __future__ import annotations

from types import ModuleType

import pytest

from jobs import cli, compare, train


def shown(
    module: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]
) -> str:
    with pytest.raises(SystemExit):
        cli.config_from_words(module, words)
    return capsys.readouterr().out


def test_commands_keep_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(compare, ["--help"], capsys).splitlines()
    assert (
        lines[0] == "usage: python -m jobs.compare [--config FILE] [--OPTION VALUE ...]"
    )
    assert sum(line.startswith("    python -m jobs.compare ") for line in lines) == 3


def test_training_shows_the_options_of_the_model_that_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(train, ["--model.name", "attn_mvp", "--help"], capsys)
    assert "--model.action_weight" in text
    assert (
        "--model.name TEXT\n        Which model: one of popularity, own_items" in text
    )
    assert "--model.action_weight" not in shown(train, ["--help"], capsys)


def test_popularity_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(
        shown(train, ["--model.name", "popularity", "--help"], capsys).split()
    )
    assert "recommends the most frequent items of training to every user." in text
