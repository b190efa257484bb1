"""Test that the command line has the options of all models."""

from __future__ import annotations

import pytest

from core.errors import UserError
from core.options import parse
from models import registry
from pipelines.evaluation.config import RECOMMEND_NAMES, EvaluateConfig


def test_the_command_line_has_the_options_of_all_models() -> None:
    assert set(RECOMMEND_NAMES) == {
        option
        for name in registry.MODELS
        for option in registry.find(name).recommend_options()
    }
    words = [
        "--checkpoint",
        "C",
        "--tables",
        "T",
        "--beam",
        "5",
        "--unseen",
        "false",
    ]
    assert parse(EvaluateConfig, words).recommend_options() == {
        "beam": 5,
        "unseen": False,
    }
    with pytest.raises(UserError, match="scores is 'all'; input should be 'children'"):
        parse(EvaluateConfig, [*words, "--scores", "all"])
