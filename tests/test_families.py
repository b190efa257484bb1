"""What models and families declare is what they have, and nothing is found out by probing."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jobs.evaluate import model_options, parse
from models.registry import MODELS, Entry
from models.retrieval.search_options import BeamOptions, SidMlpOptions
from models.tables import UserError

ROOT = Path(__file__).parents[1]
PROBES = {
    "pipelines/faults.py": "exceptions of Ray and MLflow, whose causes have several names",
    "pipelines/data/sids/embed.py": "configs of Hugging Face",
    "models/text_encoder.py": "configs and modules of Hugging Face",
    "models/search/item_tower.py": "configs of Hugging Face",
    "models/uri.py": "named tuples, which have no class of their own",
    "jobs/quickstart.py": "jobs whose command line is more than their dataclass",
    "models/retrieval/decoding/kernels.py": "exceptions of subprocess, some of which have the compiler's words",
    "models/retrieval/decoding/fast.py": "T5 with and without an encoder",
    "models/retrieval/kernels/__init__.py": "exceptions of subprocess, some of which have the compiler's words",
}
"""Where an object is asked what it has, and whose it is."""


def probes(source: str) -> bool:
    """Whether a module asks an object for what it may not have."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3))
        for node in ast.walk(ast.parse(source))
    )


def test_what_a_model_can_do_is_declared_and_not_probed() -> None:
    files = [path for package in ("models", "pipelines", "jobs", "tuning") for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if probes(path.read_text())}
    assert found <= set(PROBES)


def test_a_probe_is_seen() -> None:
    assert probes("hasattr(x, 'a')")
    assert probes("getattr(x, 'a', 1)")
    assert not probes("getattr(x, name)")


@pytest.mark.parametrize("entry", MODELS.values(), ids=MODELS)
def test_declared_options_are_those_of_recommend(entry: Entry) -> None:
    recommend: Any = inspect.getattr_static(entry.build, "recommend", None)
    assert (recommend is None) == (entry.recommends is None)
    assert set(entry.options) == set(list(inspect.signature(recommend).parameters)[3:] if recommend else [])
    assert not entry.recommends or all(field.default is None for field in fields(entry.recommends))


@pytest.mark.parametrize("entry", MODELS.values(), ids=MODELS)
def test_declared_abilities_are_those_of_the_module(entry: Entry) -> None:
    has = {name: inspect.getattr_static(entry.build, name, None) is not None for name in ("score", "measure")}
    assert has["score"] == entry.family.scores
    assert has["measure"] == (entry.own_measures is not None)
    counts = inspect.getattr_static(entry.build, "parameter_counts", None)
    assert (counts is not None) == entry.parameter_counts


def test_options_refuse_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match="beam is 0, the least is 1"):
        BeamOptions(beam=0)
    with pytest.raises(ValueError, match="path is of the search in the trie, and constrained is false"):
        SidMlpOptions(constrained=False, path="fast")


def test_the_command_line_has_the_options_of_all_models_and_says_whose_they_are() -> None:
    found = {option.name: option.help for option in model_options()}
    assert set(found) == {name for entry in MODELS.values() for name in entry.options}
    assert "Of tiger;" in found["decoder"]
    line = ["--checkpoint", "C", "--tables", "T", "--beam", "5", "--constrained", "false"]
    assert parse("evaluate", line).options == {"beam": 5, "constrained": False}
    with pytest.raises(UserError, match="path"):
        parse("evaluate", ["--checkpoint", "C", "--tables", "T", "--path", "quick"])
