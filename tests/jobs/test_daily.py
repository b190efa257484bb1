"""Test jobs.daily, which turns each day's new files into a registered model.

The command can be killed at any time and repeated.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.errors import UserError
from core.tables import read_manifest
from jobs import cli, daily
from jobs.daily import run
from models.training import checkpoint
from pipelines import tracking
from pipelines.comparison.verdicts import BELOW
from pipelines.prepare.kinds.simulation import draw_interactions, write_log
from pipelines.prepare.settings.simulation import Settings
from pipelines.serving.registered_model import find_versions

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "jobs/configs/retrieval"
DAYS = 4


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the config of a daily job that trains a small TIGER; return its path."""
    content: dict[str, Any] = {
        "output": str(folder / "out"),
        "prepare": {
            "source": str(ROOT / "jobs/configs/sources/simulated.yaml"),
            "input": str(folder / "raw"),
            "split": {"val_fraction": 0.1, "test_fraction": 0.15},
        },
        "tokenize": {
            "tokenizer": {"name": "rqkmeans", "codebook_size": 8},
            "encoder": "tfidf",
        },
        "train": {
            "config": f"{CONFIGS}/tiger_small.yaml",
            "model": {"d_model": 16, "d_ff": 16, "num_heads": 2, "d_kv": 8},
            "fit": {"max_epochs": 2},
        },
        "continue_training": {"fit": {"replay_fraction": 0.2, "max_epochs": 1}},
        "max_drop": {"recall@10": 1.0},
        "register": "simulated",
    }
    (folder / "daily.yaml").write_text(yaml.safe_dump(content | changes))
    return folder / "daily.yaml"


def add_days(folder: Path, days: int) -> None:
    """Add the first days of a simulated log, a file each, to the raw files."""
    if not (folder / "all").exists():
        settings = Settings(200, 60, 2000, files=DAYS)
        write_log(str(folder / "all"), "retrieval", settings, draw_interactions)
        (folder / "raw").mkdir()
    for name in ["items.parquet", *(f"events-{i:05}.parquet" for i in range(days))]:
        # A file that was read is known by its time of change, so it is not rewritten.
        if not (folder / "raw" / name).exists():
            shutil.copy(folder / "all" / name, folder / "raw" / name)


def run_daily(config: Path) -> None:
    """Run the daily job in this process."""
    run(cli.config_from_words(daily, ["--config", str(config)]))


def read_days(folder: Path) -> list[dict[str, Any]]:
    """Return the job's records of the days."""
    return json.loads((folder / "out/days.json").read_text())


def read_results(folder: Path) -> dict[str, Any]:
    """Return the hashes of tables, codes and models, and the records of the days."""
    tables = ["tables/events", "tables/items", "tables/sequences", "sids/trie"]
    days = read_days(folder)
    return {
        "tables": [read_manifest(str(folder / "out" / name)).hash for name in tables],
        "models": [checkpoint.weights_hash(day.pop("checkpoint")) for day in days],
        "days": days,
    }


def run_all_days(folder: Path, draw: random.Random, kill_s: float) -> float:
    """Run the job for each day of a simulated log, first killed within `kill_s`, if any.

    Return the duration of the longest day.
    """
    longest_s = 0.0
    folder.mkdir()
    command = [sys.executable, "-m", "jobs.daily", "--config"]
    command.append(str(write_config(folder)))
    for days in range(2, DAYS):
        add_days(folder, days)
        if kill_s:
            driver = subprocess.Popen(command, cwd=ROOT)
            time.sleep(draw.uniform(0, kill_s))
            driver.kill()
            driver.wait()
        start_time = time.monotonic()
        subprocess.run(command, cwd=ROOT, check=True)
        longest_s = max(longest_s, time.monotonic() - start_time)
    return longest_s


@pytest.mark.exhaustive
def test_days_whose_jobs_are_killed_have_the_undisturbed_results(tmp_path, capsys):
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"

    longest_s = run_all_days(undisturbed, draw, kill_s=0)
    run_all_days(killed, draw, kill_s=longest_s)

    results = read_results(undisturbed)
    assert results == read_results(killed), seed
    days = results["days"]
    assert [day["accepted"] for day in days] == [True, True]
    previous_days = ["", *(day["name"] for day in days[:-1])]
    assert [day["running"] for day in days] == previous_days
    run_daily(killed / "daily.yaml")
    assert "nothing to do until there are new files" in capsys.readouterr().out

    client = tracking.connect(f"sqlite:///{killed}/out/runs/mlflow.db")
    versions = [int(version.version) for version in find_versions(client, "simulated")]
    assert sorted(versions) == [1, 2]


def test_a_worse_model_does_not_replace_the_running_one(tmp_path, capsys):
    """A model without gradients is computed anew each day."""
    for days, model in ((2, "ease"), (3, "popularity"), (4, "ease")):
        add_days(tmp_path, days)
        config = write_config(
            tmp_path,
            train={"config": f"{CONFIGS}/{model}.yaml"},
            tokenize={},
            register=None,
            max_drop={"ndcg@10": 0.3},
        )
        run_daily(config)

    first, second, third = read_days(tmp_path)
    accepted = [day["accepted"] for day in (first, second, third)]
    assert accepted == [True, False, True]
    assert "not accepted: ndcg@10 dropped" in capsys.readouterr().out
    assert second["running"] == third["running"] == first["name"]
    hashes = {
        checkpoint.read(day["checkpoint"]).hashes["sequences"] for day in (first, third)
    }
    assert len(hashes) == 2


@pytest.mark.exhaustive
def test_the_best_baseline_is_registered_in_place_of_a_model_below_it(tmp_path, capsys):
    """A learning rate of nearly 0 leaves SASRec random."""
    settings = Settings(800, 60, 6000)
    write_log(str(tmp_path / "raw"), "retrieval", settings, draw_interactions)
    untrained = {
        "config": f"{CONFIGS}/sasrec.yaml",
        "fit": {"max_epochs": 1, "lr": 1e-9},
    }
    config = write_config(tmp_path, train=untrained, tokenize={})

    run_daily(config)

    output = capsys.readouterr().out
    assert "known items left out: ndcg@10" in output
    (day,) = read_days(tmp_path)
    assert day["accepted"]
    assert [verdict["verdict"] for verdict in day["baselines"]] == [BELOW, BELOW]
    client = tracking.connect(f"sqlite:///{tmp_path}/out/runs/mlflow.db")
    (version,) = find_versions(client, "simulated")
    best = day["baselines"][0]["baseline_model"]
    assert f"the model is below {best}" in output
    assert version.tags["model"] == best


def test_wrong_options_of_a_step_are_refused_before_any_work(tmp_path):
    tiger = f"{CONFIGS}/tiger_small.yaml"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"train": {"config": tiger, "model": {"dims": 2}}}, "'train.model.dims'"),
        ({"tokenize": {"tokenizer": "rqkmean"}}, "rqkmean"),
        ({"max_drop": {"ndgc@10": 0.1}}, "the nearest is 'ndcg@10'"),
        ({"max_drop": {"ndcg@10": 2}}, "max_drop.ndcg@10"),
        ({"continue_training": {"fit": {"lr": -1}}}, "continue_training.fit.lr"),
        (
            {"train": {"config": tiger, "fit": {"metric": "ndgc@10"}}},
            "train.fit.metric",
        ),
        ({"train": {"config": tiger, "init": "nowhere"}}, "nowhere"),
        ({"tokenize": {}}, "'tiger' needs the section tokenize"),
        ({"train": {"config": tiger, "text": "x"}}, "train.text is 'x'"),
    ]
    for changes, message in wrong:
        with pytest.raises(UserError, match=message):
            run_daily(write_config(tmp_path, **changes))
    assert not (tmp_path / "out").exists()
