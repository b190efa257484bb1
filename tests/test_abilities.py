"""Test that the command line has the options of all models."""

from __future__ import annotations

from dataclasses import fields

import pytest

from core.errors import UserError
from core.options import build, read_words
from models import registry
from pipelines.evaluation.config import RECOMMEND_NAMES, EvaluateConfig


def test_the_command_line_has_the_options_of_all_models():
    assert set(RECOMMEND_NAMES) == {
        option.name
        for name in registry.MODELS
        for option in fields(registry.find(name).options_class)
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
    content = read_words(words, EvaluateConfig)
    assert build(EvaluateConfig, content).recommend_options() == {
        "beam": 5,
        "unseen": False,
    }
    with pytest.raises(UserError, match="scores is 'all'; input should be 'children'"):
        build(EvaluateConfig, {**content, "scores": "all"})
