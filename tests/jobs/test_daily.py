"""Test jobs.daily, which turns each day's new files into a registered model.

The command can be killed at any time and repeated.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from core.errors import UserError
from core.tables import read_manifest
from jobs import cli, daily
from jobs.daily import lowest_accepted, run
from models.training import checkpoint
from pipelines import tracking
from pipelines.comparison.verdicts import BELOW
from pipelines.data.simulation import Settings, draw_interactions, write_log
from pipelines.serving.registered_model import find_versions

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
DAYS = 4


def simulate_days(folder: Path) -> None:
    """Write a simulated log to `folder / "all"`, with a file of events per day."""
    settings = Settings(200, 60, 2000, files=DAYS)
    write_log(str(folder / "all"), "retrieval", settings, draw_interactions)


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the config of a daily job that trains a small TIGER; return its path."""
    source = (ROOT / "jobs/configs/sources/simulated.yaml").read_text()
    (folder / "source.yaml").write_text(source)
    content: dict[str, Any] = {
        "output": str(folder / "out"),
        "prepare": {
            "source": str(folder / "source.yaml"),
            "input": str(folder / "raw"),
            "split": {"val_fraction": 0.1, "test_fraction": 0.15},
        },
        "tokenize": {
            "tokenizer": {"name": "rqkmeans", "codebook_size": 8},
            "encoder": "tfidf",
        },
        "train": {
            "config": str(ROOT / "jobs/configs/retrieval/tiger_small.yaml"),
            "model": {"d_model": 16, "d_ff": 16, "num_heads": 2, "d_kv": 8},
            "fit": {"max_epochs": 2},
        },
        "continue_training": {"fit": {"replay_fraction": 0.2, "max_epochs": 1}},
        "max_drop": {"recall@10": 1.0},
        "register": "simulated",
        "register_below_baseline": True,
    }
    (folder / "daily.yaml").write_text(yaml.safe_dump(content | changes))
    return folder / "daily.yaml"


def add_days(folder: Path, *numbers: int) -> None:
    """Copy days of the simulated log to the folder of raw files."""
    raw = folder / "raw"
    raw.mkdir(exist_ok=True)
    events = [f"events-{number:05}.parquet" for number in numbers]
    for name in ("items.parquet", *events):
        # A file that was read is known by its time of change, so it is not rewritten.
        if not (raw / name).exists():
            (raw / name).write_bytes((folder / "all" / name).read_bytes())


def start_daily(config: Path) -> subprocess.Popen[str]:
    """Start the daily job."""
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.daily", "--config", str(config)],
        cwd=ROOT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_daily(config: Path) -> str:
    """Run the daily job to its end; return its output."""
    process = start_daily(config)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def read_days(folder: Path) -> list[dict[str, Any]]:
    """Return the job's records of the days."""
    return json.loads((folder / "out/days.json").read_text())


def read_results(folder: Path) -> dict[str, Any]:
    """Return the hashes of tables, codes and models, and the records of the days."""
    out = folder / "out"
    days = read_days(folder)
    tables = {
        name: read_manifest(str(out / "tables" / name)).hash
        for name in ("events", "items", "sequences")
    }
    codes = {
        name: read_manifest(str(out / "sids" / name)).hash for name in ("sids", "trie")
    }
    models = {
        day["name"]: checkpoint.weights_hash(str(out / "runs" / day["name"] / "best"))
        for day in days
    }
    records = [
        {key: value for key, value in day.items() if key != "checkpoint"}
        for day in days
    ]
    return {"tables": tables, "codes": codes, "models": models, "days": records}


def kill_driver_or_worker(driver: subprocess.Popen[str], draw: random.Random) -> None:
    """Kill the job's driver, or one of its Ray workers if it has one."""
    target = driver.pid
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(driver.pid).children(recursive=True)
        workers = [child.pid for child in children if "ray::" in child.name()]
        target = draw.choice([driver.pid, *workers[:1]])
    with contextlib.suppress(ProcessLookupError):
        os.kill(target, signal.SIGKILL)
    driver.communicate()


def run_all_days(folder: Path, draw: random.Random, kill_s: float) -> tuple[str, float]:
    """Run the job for each day of a simulated log, first killed within `kill_s`, if any.

    Returns:
        The output of the last day's job, and the duration of the longest day.
    """
    longest_s = 0.0
    folder.mkdir()
    simulate_days(folder)
    config = write_config(folder)
    for number in range(1, DAYS):
        add_days(folder, *range(number + 1))
        if kill_s:
            process = start_daily(config)
            time.sleep(draw.uniform(0, kill_s))
            kill_driver_or_worker(process, draw)
        start_time = time.monotonic()
        output = run_daily(config)
        longest_s = max(longest_s, time.monotonic() - start_time)
    assert "nothing to do until there are new files" in run_daily(config)
    return output, longest_s


@pytest.mark.exhaustive
def test_days_whose_jobs_are_killed_have_the_undisturbed_results(
    tmp_path: Path,
) -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"

    output, longest_s = run_all_days(undisturbed, draw, kill_s=0)
    run_all_days(killed, draw, kill_s=longest_s)

    results = read_results(undisturbed)
    assert results == read_results(killed), seed
    days = results["days"]
    assert [day["accepted"] for day in days] == [True] * (DAYS - 1)
    previous_days = ["", *(day["name"] for day in days[:-1])]
    assert [day["running"] for day in days] == previous_days
    assert "weights of" in output
    assert "recall@10" in output

    client = tracking.connect(f"sqlite:///{killed}/out/runs/mlflow.db")
    versions = [int(version.version) for version in find_versions(client, "simulated")]
    assert sorted(versions) == [*range(1, DAYS)]
    last_best = killed / "out/runs" / days[-1]["name"] / "best"
    run_id = checkpoint.read(str(last_best)).tracking["run_id"]
    run = client.get_run(run_id)
    assert run.data.tags["accepted"] == "true"
    assert tracking.to_mlflow_name("running/recall@10") in run.data.metrics


@pytest.mark.exhaustive
def test_a_worse_model_does_not_replace_the_running_one(tmp_path: Path) -> None:
    simulate_days(tmp_path)
    config = write_config(tmp_path)
    add_days(tmp_path, 0, 1)
    run_daily(config)
    add_days(tmp_path, 2)
    harmful_config = write_config(
        tmp_path,
        max_drop={"ndcg@10": 0.0},
        continue_training={"fit": {"lr": 1.0, "max_epochs": 1, "warmup_share": 0}},
    )

    output = run_daily(harmful_config)

    first, second = read_days(tmp_path)
    is_better = second["after"]["ndcg@10"] >= second["before"]["ndcg@10"]
    assert first["accepted"]
    assert second["accepted"] == is_better
    assert ("not accepted: ndcg@10 dropped" in output) is not is_better

    add_days(tmp_path, 3)
    run_daily(config)
    *_, third = read_days(tmp_path)
    running = second if is_better else first
    assert third["running"] == running["name"]


def test_a_model_without_gradients_is_recomputed_each_day(tmp_path: Path) -> None:
    simulate_days(tmp_path)
    config = write_config(
        tmp_path,
        train={"config": str(ROOT / "jobs/configs/retrieval/ease.yaml")},
        tokenize={},
        register=None,
        max_drop={"recall@10": 1.0},
    )

    for number in (1, 2):
        add_days(tmp_path, *range(number + 1))
        run(cli.config_from_words(daily, ["--config", str(config)]))

    first, second = read_days(tmp_path)
    assert (first["accepted"], second["accepted"]) == (True, True)
    assert second["running"] == first["name"]
    first_model, second_model = (
        checkpoint.read(day["checkpoint"]) for day in (first, second)
    )
    assert first_model.hashes["sequences"] != second_model.hashes["sequences"]


@pytest.mark.exhaustive
def test_a_model_below_the_untrained_baselines_is_not_registered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate of nearly 0 leaves SASRec random."""
    settings = Settings(800, 60, 6000)
    write_log(str(tmp_path / "all"), "retrieval", settings, draw_interactions)
    untrained = {
        "config": str(ROOT / "jobs/configs/retrieval/sasrec.yaml"),
        "fit": {"max_epochs": 1, "lr": 1e-9},
    }
    prepare = {
        "source": str(tmp_path / "source.yaml"),
        "input": str(tmp_path / "raw"),
        "split": {"val_fraction": 0.1, "test_fraction": 0.3},
    }
    config = write_config(
        tmp_path,
        train=untrained,
        tokenize={},
        prepare=prepare,
        register_below_baseline=False,
    )
    (tmp_path / "raw").symlink_to(tmp_path / "all")

    run(cli.config_from_words(daily, ["--config", str(config)]))

    output = capsys.readouterr().out
    assert "all items: ndcg@10" in output
    assert "known items left out: ndcg@10" in output
    assert "not registered: the model is below" in output
    (day,) = read_days(tmp_path)
    assert day["accepted"]
    assert [verdict["verdict"] for verdict in day["baselines"]] == [BELOW, BELOW]
    client = tracking.connect(f"sqlite:///{tmp_path}/out/runs/mlflow.db")
    assert not find_versions(client, "simulated")


def test_the_accepted_drop_is_a_share_of_a_metric_of_either_sign() -> None:
    assert lowest_accepted(0.5, 0.1) == 0.45
    assert lowest_accepted(-0.5, 0.1) == -0.55


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "train": {
                    "config": "jobs/configs/retrieval/tiger_small.yaml",
                    "fit": {"epochs": 2},
                }
            },
            "fit.epochs",
        ),
        ({"tokenize": {"tokenizer": "rqkmean"}}, "rqkmean"),
        ({"max_drop": {"ndcg@10": 2}}, "max_drop.ndcg@10"),
        ({"tokenise": {}}, "the nearest is 'tokenize'"),
    ],
)
def test_wrong_options_of_a_step_are_refused_before_any_work(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = write_config(tmp_path, **changes)

    with pytest.raises(UserError, match=message):
        run(cli.config_from_words(daily, ["--config", str(config)]))

    assert not (tmp_path / "out").exists()
