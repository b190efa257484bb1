"""Ctrl-C and SIGTERM on real commands: one line, an exit code that says which, and the
same command continues.
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

import psutil
import pytest
import safetensors.torch
import torch

from pipelines import tracking
from tuning.grid import flatten_sections

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

ROOT = Path(__file__).parents[2]
STOPPED = "stopped; the same command again continues from what is finished\n"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
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


def catches(process: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def send(
    words: list[str], number: signal.Signals, until: str, environment: dict[str, str]
) -> tuple[str, int]:
    """What the command prints, errors too, and its exit code, where the signal comes as
    soon as it has printed `until` (at its very start where that is empty). SIGINT goes
    to all of its processes, as from a terminal."""
    line = [sys.executable, "-m", *words]
    process = subprocess.Popen(
        line,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    printed = ""
    while not until and not catches(
        process.pid
    ):  # Python has started, and the imports go on
        assert process.poll() is None
        time.sleep(0.01)
    while until and until not in printed:
        printed += (read := process.stdout.readline())
        assert read, printed
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(
        number
    )
    rest, _ = process.communicate()
    return printed + rest, process.returncode


def status(store: str) -> dict[str, str]:
    """Of each of the store's runs."""
    client = tracking.connect(store)
    found = client.search_runs(
        [experiment.experiment_id for experiment in client.search_experiments()]
    )
    return {str(run.info.run_name): run.info.status for run in found}


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


@pytest.mark.parametrize("number", CODES)
def test_a_signal_at_the_very_start_ends_a_command(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])

    printed, code = send(["sleeper"], number, "", {**os.environ, "PYTHONPATH": paths})

    assert (printed, code) == (STOPPED, CODES[number])


@pytest.mark.parametrize("number", CODES)
def test_while_a_local_ray_starts(number: signal.Signals, tmp_path: Path) -> None:
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    raw = [
        "--output",
        f"{tmp_path}/raw",
        "--users",
        "20",
        "--items",
        "20",
        "--events",
        "200",
    ]
    subprocess.run(
        [sys.executable, "-m", "jobs.simulate", *raw],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    words = [
        "jobs.prepare",
        "--source",
        "jobs/configs/sources/simulated.yaml",
        "--input",
        f"{tmp_path}/raw",
    ]
    words += ["--output", f"{tmp_path}/tables", "--partitions", "2"]
    line = [sys.executable, "-m", *words]
    job = subprocess.Popen(
        line,
        cwd=ROOT,
        env=alone,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while not psutil.Process(job.pid).children():  # the first of Ray's
        time.sleep(0.01)
    os.killpg(job.pid, number) if number == signal.SIGINT else job.send_signal(number)
    printed, _ = job.communicate()
    assert (printed[printed.rindex("\n", 0, -1) + 1 :], job.returncode) == (
        STOPPED,
        CODES[number],
    )
    assert "Traceback" not in printed
    assert not (tmp_path / "tables/events/manifest.json").exists()
    subprocess.run(line, cwd=ROOT, env=alone, check=True, capture_output=True)


@pytest.mark.parametrize("number", CODES)
def test_a_training(
    number: signal.Signals,
    small: tuple[str, str],
    new_store: Callable[[Path], str],
    tmp_path: Path,
) -> None:
    """Stopped in its epochs; then continued, and stopped when all is done."""
    store = new_store(tmp_path)
    words = [
        "jobs.train",
        "--tables",
        small[0],
        "--storage",
        str(tmp_path),
        "--name",
        "one",
        "--fit.batch_size",
        "8",
    ]
    words += [
        word for key, value in MODEL.items() for word in (f"--model.{key}", str(value))
    ]
    words += ["--fit.patience", "0", "--fit.lr", "0.01", "--log_model", "false"]
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # an epoch's line is printed before its checkpoint is saved
    printed, code = send(
        [*words, "--fit.max_epochs", "2000"], number, " 2/2000 ", alone
    )
    assert (printed[printed.rindex("\n", 0, -1) + 1 :], code) == (
        STOPPED,
        CODES[number],
    )
    assert "Traceback" not in printed
    assert status(store) == {"one": "KILLED"}
    (one,) = [json.loads(path.read_text()) for path in tmp_path.glob("one/run.json")]
    assert one["status"] == "running"
    printed, code = send(
        [*words, "--fit.max_epochs", "2000"], number, "continuing ", alone
    )
    assert code == CODES[number]


LONG_STEPS = [
    *("--model.name", "sasrec", "--model.dim", "256", "--model.num_layers", "4"),
    *("--model.num_heads", "4", "--model.max_history", "12", "--fit.batch_size", "2"),
    *("--fit.patience", "0", "--fit.max_epochs", "4", "--log_model", "false"),
]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stopped_training_goes_on_within_the_epoch_to_the_same_weights(
    workers: int,
    small: tuple[str, str],
    new_store: Callable[[Path], str],
    tmp_path: Path,
) -> None:
    new_store(tmp_path)
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    words = ["jobs.train", "--tables", small[0], "--storage", str(tmp_path)]
    words += [*LONG_STEPS, "--ray.num_workers", str(workers), "--name"]
    whole = subprocess.run(
        [sys.executable, "-m", *words, "whole"], cwd=ROOT, env=alone, check=False
    )
    assert whole.returncode == 0

    printed, code = send([*words, "cut"], signal.SIGTERM, " 1/4 ", alone)
    # the signal comes between two epochs' ends, or in the moment of one
    saved = re.search(r"stopping: saving a checkpoint of step (\d+)", printed)
    again = subprocess.run(
        [sys.executable, "-m", *words, "cut"],
        cwd=ROOT,
        env=alone,
        capture_output=True,
        text=True,
    )

    assert code == CODES[signal.SIGTERM]
    assert saved, printed
    assert again.returncode == 0, again.stderr
    assert f", step {saved[1]}\n" in again.stdout
    weights = [
        path.read_bytes()
        for name in ("whole", "cut")
        for path in (tmp_path / name).glob("step-00000120*/model.safetensors")
    ]
    assert weights[0] == weights[1] or workers > 1
    if workers > 1:  # sums of two workers differ by rounding from run to run
        first, second = map(safetensors.torch.load, weights)
        for name, value in first.items():
            torch.testing.assert_close(second[name], value, rtol=1e-3, atol=1e-4)


def test_models_train_continues_within_the_epoch_to_the_same_weights(
    small: tuple[str, str], tmp_path: Path
) -> None:
    model = {"name": "sasrec", "dim": 256, "num_layers": 4, "max_history": 12}
    fit = {"batch_size": 2, "patience": 0, "max_epochs": 4}
    (tmp_path / "model.json").write_text(json.dumps({"model": model, "fit": fit}))
    words = ["models.train", "--config", f"{tmp_path}/model.json", "--tables", small[0]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def train(folder: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", *words, "--output", str(tmp_path / folder)],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    train("whole")
    printed, code = send(
        [*words, "--output", str(tmp_path / "cut")],
        signal.SIGTERM,
        " 1/4 ",
        environment,
    )
    again = train("cut")

    assert code == CODES[signal.SIGTERM]
    stopped = re.search(r"stopped at step (\d+); the same command again", printed)
    assert stopped, printed
    assert f", step {stopped[1]}\n" in again
    whole, cut = (
        safetensors.torch.load_file(tmp_path / name / "best/model.safetensors")
        for name in ("whole", "cut")
    )
    assert all(torch.equal(cut[key], value) for key, value in whole.items())


@pytest.mark.parametrize("number", CODES)
def test_a_sweep(
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
    printed, code = send(words, number, "2 trials of rates, 0 done before", in_ray)
    assert (printed[printed.rindex("\n", 0, -1) + 1 :], code) == (
        STOPPED,
        CODES[number],
    )
    assert "trials that were running continue from their last checkpoint" in printed
    assert set(status(store).values()) <= {"KILLED", "FINISHED"}
    again = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=in_ray,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    assert "Swept 2 trials of rates" in again.stdout
    assert set(status(store).values()) == {"FINISHED"}


def test_after_all_is_done(tmp_path: Path) -> None:
    words = [
        "jobs.simulate",
        "--output",
        f"{tmp_path}/raw",
        "--users",
        "20",
        "--items",
        "20",
        "--events",
        "100",
    ]
    printed, code = send(words, signal.SIGINT, "next:", dict(os.environ))
    assert code in (0, 130)  # the last line is printed before the job ends
    assert "Traceback" not in printed
