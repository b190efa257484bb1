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
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from pipelines import tracking
from tuning.grid import flatten_sections

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]
STOPPED = "stopped; the same command again keeps the finished work and continues\n"
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
MODEL = {
    "name": "sasrec",
    "dim": 16,
    "num_layers": 1,
    "dropout": 0.0,
    "max_history": 12,
}
GRID = {
    "name": "rates",
    "source": "a test",
    "fixed": flatten_sections(
        {"model": MODEL, "fit": {"batch_size": 8, "patience": 0}}
    ),
    "axes": {"fit.lr": [0.01, 0.001]},
}


def handles_sigterm(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def start_command(
    words: list[str], environment: dict[str, str]
) -> subprocess.Popen[str]:
    """Start `python -m` with these words in its own process group."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def send_signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send SIGTERM to a process, or SIGINT to its group, as a terminal does."""
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)


def stop_command(
    words: list[str], number: signal.Signals, until: str, environment: dict[str, str]
) -> tuple[str, int]:
    """Start a command and send it a signal.

    Args:
        words: Arguments of `python -m`.
        number: The signal.
        until: Text after whose output the signal is sent; if empty, the signal is sent
            while the command's modules are imported.
        environment: Environment variables of the command.

    Returns:
        All output, including errors, and the exit code.
    """
    process = start_command(words, environment)
    assert process.stdout
    output = ""
    while not until and not handles_sigterm(process.pid):
        assert process.poll() is None
        time.sleep(0.01)
    while until and until not in output:
        line = process.stdout.readline()
        output += line
        assert line, output
    send_signal(process, number)
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


def environment_without_ray() -> dict[str, str]:
    """Return this process's environment without the address of a running Ray."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def read_run_statuses(store: str) -> dict[str, str]:
    """Return the status of each MLflow run in the store, by the run's name."""
    client = tracking.connect(store)
    experiments = [
        experiment.experiment_id for experiment in client.search_experiments()
    ]
    runs = client.search_runs(experiments)
    return {str(run.info.run_name): run.info.status for run in runs}


def read_loss_curve(store: str, storage: Path, name: str) -> dict[int, float]:
    """Return the training loss by step that a training logged to MLflow."""
    record = json.loads((storage / name / "run.json").read_text())
    history = tracking.connect(store).get_metric_history(
        record["tracking"]["run_id"], "train/loss"
    )
    return {point.step: point.value for point in history}


SLEEPER = '''
import time
from dataclasses import dataclass

from jobs import cli


@dataclass
class Config:
    """Options."""

    seconds: float = 60
    """Seconds to sleep."""


if __name__ == "__main__":
    cli.main(lambda config: time.sleep(config.seconds), Config)
'''


@pytest.mark.parametrize("number", EXIT_CODES)
def test_a_signal_during_the_imports_stops_a_command(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])

    output, code = stop_command(
        ["sleeper"], number, "", {**os.environ, "PYTHONPATH": paths}
    )

    assert (output, code) == (STOPPED, EXIT_CODES[number])


LONG_STEPS = [
    *("--model.name", "sasrec", "--model.dim", "256", "--model.num_layers", "4"),
    *("--model.num_heads", "4", "--model.max_history", "12", "--fit.batch_size", "2"),
    *("--fit.patience", "0", "--fit.max_epochs", "4", "--log_model", "false"),
]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_training_stopped_within_an_epoch_continues_to_the_same_weights_and_curve(
    workers: int,
    small: tuple[str, str],
    new_store: Callable[[Path], str],
    tmp_path: Path,
) -> None:
    store = new_store(tmp_path)
    environment = environment_without_ray()
    words = ["jobs.train", "--tables", small[0], "--storage", str(tmp_path)]
    words += [*LONG_STEPS, "--ray.num_workers", str(workers), "--name"]
    undisturbed = run_command([*words, "whole"], environment)
    assert undisturbed.returncode == 0, undisturbed.stderr

    output, code = stop_command([*words, "cut"], signal.SIGTERM, " 1/4 ", environment)
    continued = run_command([*words, "cut"], environment)

    assert code == EXIT_CODES[signal.SIGTERM]
    saved = re.search(r"stopping: saving a checkpoint of step (\d+)", output)
    assert saved, output
    assert continued.returncode == 0, continued.stderr
    assert f", step {saved[1]}\n" in continued.stdout
    curve = read_loss_curve(store, tmp_path, "cut")
    expected_curve = read_loss_curve(store, tmp_path, "whole")
    assert curve == pytest.approx(expected_curve, rel=1e-6 if workers == 1 else 1e-3)
    whole, cut = (
        next((tmp_path / name).glob("step-00000120*/model.safetensors")).read_bytes()
        for name in ("whole", "cut")
    )
    if workers == 1:
        assert whole == cut
    else:  # sums of two workers differ by rounding from run to run
        cut_tensors = safetensors.torch.load(cut)
        for name, value in safetensors.torch.load(whole).items():
            torch.testing.assert_close(cut_tensors[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("number", EXIT_CODES)
def test_a_stopped_sweep_continues_to_its_end(
    number: signal.Signals,
    small: tuple[str, str],
    new_store: Callable[[Path], str],
    in_ray: dict[str, str],
    tmp_path: Path,
) -> None:
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
        words, number, "2 trials of rates, 0 done before", in_ray
    )

    assert (last_line(output), code) == (STOPPED, EXIT_CODES[number])
    assert "trials that were running continue from their last checkpoint" in output
    assert set(read_run_statuses(store).values()) <= {"KILLED", "FINISHED"}

    continued = run_command(words, in_ray)
    assert continued.returncode == 0, continued.stderr
    assert "Swept 2 trials of rates" in continued.stdout
    assert set(read_run_statuses(store).values()) == {"FINISHED"}
