"""Test that models declare their abilities, and that no code probes them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from core.errors import UserError
from core.options import parse
from models import registry
from pipelines.evaluation.config import RECOMMEND_NAMES, EvaluateConfig

ROOT = Path(__file__).parents[1]
PROBES = {
    "pipelines/faults.py": "exceptions of Ray and MLflow, whose causes have several names",
    "pipelines/encode/texts.py": "configs of Hugging Face",
    "models/text/pretrained.py": "modules of Hugging Face",
    "models/text/text_encoder.py": "modules of Hugging Face",
    "models/search/hllm.py": "configs of Hugging Face",
    "pipelines/serving/served_model.py": "messages of refusals, which MLflow assigns too",
    "tuning/grid.py": "configs of students, of which some train all parts",
    "models/retrieval/retriever.py": "configs of models, of which some choose scores",
    "models/retrieval/distillation/teacher.py": "configs of students, of which some cache",
    "jobs/cli.py": "jobs whose command line is more than their dataclass",
    "pipelines/prepare/kinds/summary.py": "infos of sequences, of which two layouts count ties",
    "pipelines/prepare/run.py": "infos of tables, of which some have stamps of files",
}
"""Modules that probe objects for attributes, and the objects."""


def probes_attributes(source: str) -> bool:
    """Return whether code asks an object for an attribute that it may lack."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name == "hasattr" or (name == "getattr" and len(node.args) == 3):
                return True
    return False


def test_only_listed_modules_probe_attributes() -> None:
    files = [
        path
        for package in ("core", "models", "pipelines", "tuning", "benchmarks", "jobs")
        for path in (ROOT / package).rglob("*.py")
    ]
    probing = [path for path in files if probes_attributes(path.read_text())]
    assert {str(path.relative_to(ROOT)) for path in probing} <= set(PROBES)


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
        "--constrained",
        "false",
    ]
    assert parse(EvaluateConfig, words).recommend_options() == {
        "beam": 5,
        "constrained": False,
    }
    with pytest.raises(UserError, match="scores is 'all'; input should be 'children'"):
        parse(EvaluateConfig, [*words, "--scores", "all"])
