"""A wrong line and --help are answered before what takes seconds to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "mlflow", "pandas", "matplotlib")
BY_TORCH = ("train", "evaluate", "sweep", "tokenize")
"""Commands whose options are those of models and tokenizers, which import PyTorch."""

JOBS = (
    "quickstart", "simulate", "prepare", "audit", "tokenize", "encode", "train", "sweep", "evaluate", "compare",
    "benchmark",
)  # fmt: skip

CODE = """
import runpy, sys
sys.argv = [sys.argv[1], sys.argv[2]]
try:
    runpy.run_module("jobs." + sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print("imported:", *sys.modules)
"""


@pytest.mark.long
@pytest.mark.parametrize("word", ["--wrong=1", "--help"])
@pytest.mark.parametrize("job", JOBS)
def test_it_is_answered_before_what_takes_seconds_to_import(job: str, word: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, job, word], capture_output=True, text=True)
    assert done.returncode == (word != "--help"), done.stderr
    assert done.stderr.count("\n") == (word != "--help")
    imported = done.stdout.split("imported:")[1].split()
    assert "jobs.cli" in imported
    assert not set(HEAVY[job in BY_TORCH :]) & set(imported)
