"""A training with a password in MLflow's address: it is in no file that is made, and in no line that is printed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.training.test_tracking import server
from tests.training_tables import write_tables

ROOT = Path(__file__).parents[2]
USER, PASSWORD = "me-the-user", "pa55%2Fw0rd-secret"


def job(name: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a job as a user does, with the address on the line or in the environment."""
    known = {key: value for key, value in os.environ.items() if key not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    return subprocess.run(
        [sys.executable, "-m", f"jobs.{name}", *words], cwd=ROOT, env={**known, **env}, capture_output=True, text=True
    )


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for Ray's own files: paths of sockets end at 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(900)  # starts a server and three commands
def test_no_file_and_no_line_holds_the_password(tmp_path: Path, short: Path) -> None:
    tables, _ = write_tables(tmp_path)
    with server(tmp_path) as plain:
        address = plain.replace("http://", f"http://{USER}:{PASSWORD}@")
        shown = plain.replace("http://", "http://***@")
        line = [
            "--config", "jobs/configs/sasrec.yaml", "--tables", tables, "--storage",
            str(tmp_path / "runs"), "--name", "one", "--fit.max_epochs", "1", "--experiment", "retrieval/x",
        ]  # fmt: skip
        first = job("train", *line, "--tracking_uri", address, RAY_TMPDIR=str(short))
        assert first.returncode == 0, first.stderr
        assert f"--tracking_uri {shown}" in first.stdout or f"look at it  {shown}" in first.stdout
        record = json.loads((tmp_path / "runs/one/run.json").read_text())
        assert record["tracking"]["uri"] == shown
        again = job("train", *line, MLFLOW_TRACKING_URI=address)
        assert again.returncode == 0, again.stderr
        assert "is finished" in again.stdout
        where = ["--checkpoint", str(tmp_path / "runs/one/best"), "--tables", tables]
        measured = job("evaluate", *where, "--tracking_uri", address)
        assert measured.returncode == 0, measured.stderr
    said = "".join(done.stdout + done.stderr for done in (first, again, measured))
    refused = job("train", *line[:-6], "--name", "two", "--tracking_uri", address)  # the server is gone
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert f"cannot reach MLflow at {shown}" in refused.stderr
    for secret in (USER, PASSWORD, "pa55/w0rd-secret", "w0rd-secret"):
        assert secret not in said + refused.stdout + refused.stderr
        found = [
            path
            for path in [*tmp_path.rglob("*"), *short.rglob("*")]
            if path.is_file() and not path.is_symlink() and secret.encode() in path.read_bytes()
        ]
        assert found == []
