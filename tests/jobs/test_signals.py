"""Test Ctrl-C and SIGTERM on real commands.

A stopped command prints one line, exits with the signal's code, and continues when it is
repeated.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import tracking

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]
STOPPED = "stopped; the same command again keeps the finished work and continues\n"
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
GRID = {
    "name": "rates",
    "source": "a test",
    "fixed": {
        "model.name": "sasrec",
        "model.dim": 16,
        "model.num_layers": 1,
        "model.dropout": 0.0,
        "model.max_history": 12,
        "fit.batch_size": 8,
        "fit.patience": 0,
    },
    "axes": {"fit.lr": [0.01, 0.001]},
}


def stop_command(
    words: list[str], number: signal.Signals, until: str, environment: dict[str, str]
) -> tuple[str, int]:
    """Start a command and send it a signal.

    Args:
        words: Arguments of `python -m`.
        number: The signal; SIGINT goes to all of its processes, as from a terminal.
        until: Text after whose output the signal is sent.
        environment: Environment variables of the command.

    Returns:
        All output, including errors, and the exit code.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    output = ""
    while until not in output:
        line = process.stdout.readline()
        output += line
        assert line, output
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    rest, _ = process.communicate()
    return output + rest, process.returncode


def run_command(
    words: list[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `python -m` with these words to its end, and capture its output."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def last_line(output: str) -> str:
    """Return the last line of the output, with its line break."""
    return output.splitlines(keepends=True)[-1]


def read_run_statuses(store: str) -> dict[str, str]:
    """Return the status of each MLflow run in the store, by the run's name."""
    client = tracking.connect(store)
    experiments = [
        experiment.experiment_id for experiment in client.search_experiments()
    ]
    runs = client.search_runs(experiments)
    return {str(run.info.run_name): run.info.status for run in runs}


LONG_STEPS = [
    *("--model.name", "sasrec", "--model.dim", "256", "--model.num_layers", "4"),
    *("--model.num_heads", "4", "--model.max_history", "12", "--fit.batch_size", "2"),
    *("--fit.patience", "0", "--fit.max_epochs", "4", "--log_model", "false"),
]


def test_a_training_stopped_within_an_epoch_continues_to_the_same_weights(
    small, new_store, tmp_path
):
    new_store(tmp_path)
    environment = {**os.environ}
    environment.pop("RAY_ADDRESS", None)
    words = ["jobs.train", "--tables", small[0], "--storage", str(tmp_path)]
    words += [*LONG_STEPS, "--name"]
    undisturbed = run_command([*words, "whole"], environment)
    assert undisturbed.returncode == 0, undisturbed.stderr

    output, code = stop_command([*words, "cut"], signal.SIGTERM, " 1/4 ", environment)
    continued = run_command([*words, "cut"], environment)

    assert code == EXIT_CODES[signal.SIGTERM]
    saved = re.search(r"stopping: saving a checkpoint of step (\d+)", output)
    assert saved, output
    assert continued.returncode == 0, continued.stderr
    assert f", step {saved[1]}\n" in continued.stdout
    whole, cut = (
        next((tmp_path / name).glob("step-00000120*/model.safetensors")).read_bytes()
        for name in ("whole", "cut")
    )
    assert whole == cut


def test_a_sweep_stopped_by_ctrl_c_continues_to_its_end(
    small, new_store, in_ray, tmp_path
):
    store = new_store(tmp_path)
    (tmp_path / "grid.json").write_text(json.dumps(GRID))
    words = [
        "jobs.sweep",
        "--grid",
        f"{tmp_path}/grid.json",
        "--tables",
        small[0],
        "--storage",
        str(tmp_path),
    ]
    words += ["--name", "swept", "--fit.max_epochs", "3"]

    output, code = stop_command(
        words, signal.SIGINT, "2 trials of rates, 0 done before", in_ray
    )

    assert (last_line(output), code) == (STOPPED, EXIT_CODES[signal.SIGINT])
    assert "trials that were running continue from their last checkpoint" in output
    assert set(read_run_statuses(store).values()) <= {"KILLED", "FINISHED"}

    continued = run_command(words, in_ray)
    assert continued.returncode == 0, continued.stderr
    assert "Swept 2 trials of rates" in continued.stdout
    assert set(read_run_statuses(store).values()) == {"FINISHED"}


def test_a_killed_sweep_continues_to_the_results_of_an_undisturbed_one(
    small, new_store, in_ray, tmp_path
):
    store = new_store(tmp_path)
    (tmp_path / "grid.json").write_text(json.dumps(GRID))
    words = ["jobs.sweep", "--grid", f"{tmp_path}/grid.json", "--tables", small[0]]
    words += ["--storage", str(tmp_path), "--concurrency", "1"]
    words += ["--fit.max_epochs", "4", "--name"]
    undisturbed = run_command([*words, "quiet"], in_ray)
    assert undisturbed.returncode == 0, undisturbed.stderr

    _, code = stop_command([*words, "killed"], signal.SIGKILL, "[1/2] ", in_ray)
    continued = run_command([*words, "killed"], in_ray)

    assert code == -signal.SIGKILL
    assert continued.returncode == 0, continued.stderr
    assert "1 done before" in continued.stdout
    assert set(read_run_statuses(store).values()) == {"FINISHED"}
    for trial in (tmp_path / "quiet").glob("lr-*"):
        expected = (trial / "best/model.safetensors").read_bytes()
        same = tmp_path / "killed" / trial.name / "best/model.safetensors"
        assert same.read_bytes() == expected
