"""Test that a command line is parsed before PyTorch, Ray and MLflow are imported.

Importing them takes half a minute on a busy machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SLOW_PACKAGES = ("torch", "ray", "mlflow", "polars", "pyarrow")
PRINT_IMPORTED = (
    f"import sys; print([name for name in {SLOW_PACKAGES} if name in sys.modules])"
)
JOBS = ["audit", "train", "evaluate", "compare", "sweep", "quickstart", "tokenize"]
JOBS += ["encode", "daily", "simulate", "prepare"]


def run_code(code: str) -> list[str]:
    """Run Python code, then print the imported slow packages; return the lines."""
    process = subprocess.run(
        [sys.executable, "-c", f"{code}\n{PRINT_IMPORTED}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_a_finished_run_needs_neither_ray_nor_mlflow():
    code = "import pipelines.training.run; from pipelines import tracking"
    imported = "['torch', 'pyarrow']"
    assert run_code(f"{code}; tracking.resolve_uri(None, 'x')") == [imported]


def test_an_unknown_model_is_refused_without_slow_packages():
    message, imported = run_code(
        "from jobs import cli, train\n"
        "try:\n"
        "    cli.config_from_words(train, ['--model.name', 'tigre'])\n"
        "except cli.UserError as error:\n"
        "    print(error)"
    )

    assert message.startswith("unknown 'tigre' in model.name")
    assert imported == "[]"


def test_a_misspelt_key_is_refused_without_slow_packages():
    *messages, imported = run_code(
        "import importlib, sys; sys.argv[1:] = ['--trackin_uri', 'x']\n"
        "from jobs import cli\n"
        f"for name in {JOBS}:\n"
        "    try:\n"
        "        job = importlib.import_module(f'jobs.{name}')\n"
        "        cli.config_from_words(job, sys.argv[1:])\n"
        "    except cli.UserError as error:\n"
        "        print(error)"
    )

    assert len(messages) == len(JOBS)
    assert all("unknown key 'trackin_uri'" in message for message in messages)
    assert imported == "[]"
