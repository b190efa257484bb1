"""What models and families declare is what they have, and nothing is found out by
probing.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from jobs.evaluate import RECOMMEND_NAMES, Config
from jobs.options import parse
from models import registry
from models.retrieval.model import RetrievalModel
from models.storage.tables import UserError

ROOT = Path(__file__).parents[1]
PROBES = {
    "pipelines/ray_inside.py": "what is private to Ray, and may not be there",
    "pipelines/faults.py": "exceptions of Ray and MLflow, whose causes have several names",
    "pipelines/data/sids/embed.py": "configs of Hugging Face",
    "models/text/text_encoder.py": "configs and modules of Hugging Face",
    "models/search/hllm.py": "configs of Hugging Face",
    "pipelines/serving/ray_serve.py": "versions registered before requests were checked",
    "pipelines/serving/served_model.py": "MLflow's wrapped functions, which mark themselves",
    "models/storage/uri.py": "named tuples, which have no class of their own",
    "jobs/cli.py": "jobs whose command line is more than their dataclass",
}
"""Where an object is asked what it has, and whose it is."""


def probes(source: str) -> bool:
    """Whether a module asks an object for what it may not have."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (
            node.func.id == "hasattr"
            or (node.func.id == "getattr" and len(node.args) == 3)
        )
        for node in ast.walk(ast.parse(source))
    )


def test_what_a_model_can_do_is_declared_and_not_probed() -> None:
    files = [
        path
        for package in ("models", "pipelines", "tuning", "benchmarks", "jobs")
        for path in (ROOT / package).rglob("*.py")
    ]
    found = {str(path.relative_to(ROOT)) for path in files if probes(path.read_text())}
    assert found <= set(PROBES)


def test_a_probe_is_seen() -> None:
    assert probes("hasattr(x, 'a')")
    assert probes("getattr(x, 'a', 1)")
    assert not probes("getattr(x, name)")


def test_the_command_line_has_the_options_of_all_models() -> None:
    assert set(RECOMMEND_NAMES) == {
        option
        for name in registry.MODELS
        for option in registry.find(name).recommend_options()
    }
    line = [
        "--checkpoint",
        "C",
        "--tables",
        "T",
        "--beam",
        "5",
        "--constrained",
        "false",
    ]
    assert parse(Config, line).recommend_options() == {"beam": 5, "constrained": False}
    with pytest.raises(
        UserError, match="--path is 'quick', it must be one of fast, plain"
    ):
        parse(Config, ["--checkpoint", "C", "--tables", "T", "--path", "quick"])


def test_a_family_says_what_it_does_not_read_of_a_log() -> None:
    info = {
        "numbers": ["price"],
        "categories": [],
        "labels": {"click": "bool", "like": "bool"},
        "behaviour": "click",
    }
    assert RetrievalModel.list_unread(info) == ["numbers price", "labels like"]
    assert RetrievalModel.list_unread({}) == []
