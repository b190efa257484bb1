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
SLOW_PACKAGES = ("torch", "ray", "mlflow")
PRINT_IMPORTED = (
    f"import sys; print([name for name in {SLOW_PACKAGES} if name in sys.modules])"
)
JOBS = ["audit", "train", "evaluate", "compare", "daily", "sweep"]
JOBS += ["quickstart", "simulate", "prepare", "tokenize", "encode"]


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


@pytest.mark.parametrize("job", ["cli", *JOBS])
def test_importing_a_command_imports_no_slow_package(job: str) -> None:
    assert run_code(f"import jobs.{job}") == ["[]"]


def test_an_unknown_model_is_refused_without_slow_packages() -> None:
    message, imported = run_code(
        "from jobs import cli, train\n"
        "try:\n"
        "    cli.config_from_words(train, ['--model.name', 'tigre'])\n"
        "except cli.UserError as error:\n"
        "    print(error)"
    )

    assert message.startswith("unknown model 'tigre'; the nearest is 'tiger'")
    assert imported == "[]"


@pytest.mark.parametrize("job", JOBS)
def test_a_misspelt_key_is_refused_without_slow_packages(job: str) -> None:
    message, imported = run_code(
        "import sys; sys.argv[1:] = ['--trackin_uri', 'x']\n"
        f"from jobs import cli, {job} as job\n"
        "try:\n"
        "    cli.config_from_words(job, sys.argv[1:])\n"
        "except cli.UserError as error:\n"
        "    print(error)"
    )

    assert message.startswith("unknown key 'trackin_uri'")
    assert imported == "[]"
