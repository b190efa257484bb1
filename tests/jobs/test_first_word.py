"""A command line is parsed before PyTorch, Ray and MLflow are imported, which takes a
busy machine half a minute.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SLOW = ("torch", "ray", "mlflow")
IMPORTED = f"; import sys; print([name for name in {SLOW} if name in sys.modules])"
LIGHT = ["cli", "audit", "train", "evaluate", "compare", "daily", "sweep"]
LIGHT += ["quickstart", "simulate", "prepare", "tokenize", "encode"]


@pytest.mark.parametrize("job", LIGHT)
def test_importing_a_command_imports_no_slow_package(job: str) -> None:
    code = f"import jobs.{job}{IMPORTED}"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert process.stdout == "[]\n", process.stderr


def test_an_unknown_model_is_answered_without_slow_packages() -> None:
    code = (
        "from jobs import cli, train\n"
        "try:\n"
        "    cli.config_from_words(train, ['--model.name', 'tigre'])\n"
        "except cli.UserError as error:\n"
        f"    print(error)\n{IMPORTED[2:]}"
    )

    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )

    message, imported = process.stdout.splitlines()
    assert message.startswith("unknown model 'tigre'; the nearest is 'tiger'")
    assert imported == "[]"


@pytest.mark.parametrize("job", LIGHT[1:])
def test_a_misspelt_key_is_answered_without_slow_packages(job: str) -> None:
    code = (
        "import sys; sys.argv[1:] = ['--trackin_uri', 'x']\n"
        f"from jobs import cli, {job} as job\n"
        "try:\n"
        "    cli.config_from_words(job, sys.argv[1:])\n"
        "except cli.UserError as error:\n"
        f"    print(error)\n{IMPORTED[2:]}"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    message, imported = process.stdout.splitlines()
    assert message.startswith("unknown key 'trackin_uri'")
    assert imported == "[]"
