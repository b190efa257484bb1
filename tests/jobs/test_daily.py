"""jobs.daily: a log by days, from files to a registered model, in one line that can be
stopped anywhere.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import cli, simulate
from jobs.daily import Config, lowest_accepted, run
from jobs.options import to_words
from models.storage import checkpoint
from models.storage.tables import read_manifest
from pipelines import tracking
from pipelines.comparison.floors import BELOW
from pipelines.data.suggestion.suggest import suggest
from pipelines.serving.registered_model import find_versions

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
DAYS = 4


def write_parts(folder: Path) -> None:
    """A simulated log in parts of equally many events."""
    simulate.run(
        simulate.Config(
            output=str(folder / "all"), users=200, items=60, events=2000, files=DAYS
        )
    )


def config_of(folder: Path, **more: Any) -> Path:
    source = {
        **yaml.safe_load((ROOT / "jobs/configs/sources/simulated.yaml").read_text())
    }
    (folder / "source.yaml").write_text(yaml.safe_dump(source))
    content: dict[str, Any] = {
        "output": str(folder / "out"),
        "prepare": {
            "source": str(folder / "source.yaml"),
            "input": str(folder / "raw"),
            "split": {"val_fraction": 0.1, "test_fraction": 0.15},
        },
        "tokenize": {
            "tokenizer": "rqkmeans",
            "encoder": "tfidf",
            "rqkmeans": {"codebook_size": 8},
        },
        "train": {
            "config": str(ROOT / "jobs/configs/tiger_small.yaml"),
            "model": {"d_model": 16, "d_ff": 16, "num_heads": 2, "d_kv": 8},
            "fit": {"max_epochs": 2},
        },
        "continue_training": {"fit": {"replay_fraction": 0.2, "max_epochs": 1}},
        "max_drop": {"recall@10": 1.0},
        "register": "simulated",
    }
    (folder / "daily.yaml").write_text(yaml.safe_dump(content | more))
    return folder / "daily.yaml"


def add(folder: Path, *numbers: int) -> None:
    (folder / "raw").mkdir(exist_ok=True)
    for name in (
        "items.parquet",
        *(f"events-{number:05}.parquet" for number in numbers),
    ):
        if not (
            folder / "raw" / name
        ).exists():  # its time of change is what tells a file that was read
            (folder / "raw" / name).write_bytes((folder / "all" / name).read_bytes())


def daily(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.daily", "--config", str(config)],
        cwd=ROOT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def done(config: Path) -> str:
    process = daily(config)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    return said


def results(folder: Path) -> dict[str, Any]:
    """Hashes of the tables, codes and models, and what is noted of the days."""
    out = folder / "out"
    days = json.loads((out / "days.json").read_text())
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
    of_day = [
        {key: value for key, value in day.items() if key != "checkpoint"}
        for day in days
    ]
    return {"tables": tables, "codes": codes, "models": models, "days": of_day}


@pytest.mark.exhaustive
def test_a_week_whose_jobs_are_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    draw, found, took, said = random.Random(seed), [], 2.0, ""
    for name, kills in (
        ("undisturbed", 0),
        ("killed", int(os.environ.get("KILLS", "1"))),
    ):
        folder = tmp_path / name
        folder.mkdir()
        write_parts(folder)
        config = config_of(folder)
        for number in range(1, DAYS):
            add(folder, *range(number + 1))
            began = time.monotonic()
            for _ in range(kills):
                process = daily(config)
                time.sleep(draw.uniform(0, took))
                process.send_signal(signal.SIGKILL)
                process.communicate()
            ended = done(config)
            said = said if kills else ended
            took = took if kills else max(took, time.monotonic() - began)
        assert "nothing to do until there are new files" in done(config)
        found.append(results(folder))
    assert found[0] == found[1], seed

    days = found[0]["days"]
    assert [day["accepted"] for day in days] == [True] * (DAYS - 1)
    assert [day.get("running") for day in days] == [
        None,
        *(day["name"] for day in days[:-1]),
    ]
    assert "weights of" in said
    assert "extends the tables of the training" in said
    assert "recall@10" in said
    uri = f"sqlite:///{tmp_path}/killed/out/runs/mlflow.db"
    client = tracking.connect(uri)
    assert sorted(
        int(version.version) for version in find_versions(client, "simulated")
    ) == [*range(1, DAYS)]
    run = client.get_run(
        checkpoint.read(str(folder / "out/runs" / days[-1]["name"] / "best")).tracking[
            "run_id"
        ]
    )
    assert run.data.tags["accepted"] == "true"
    assert tracking.to_mlflow_name("running/recall@10") in run.data.metrics


@pytest.mark.exhaustive
def test_a_model_that_falls_does_not_take_the_place_of_the_running_one(
    tmp_path: Path,
) -> None:
    write_parts(tmp_path)
    good = config_of(tmp_path)
    add(tmp_path, 0, 1)
    done(good)
    add(tmp_path, 2)
    low = config_of(
        tmp_path,
        max_drop={"ndcg@10": 0.0},
        continue_training={"fit": {"lr": 1.0, "max_epochs": 1, "warmup_share": 0}},
    )
    said = done(low)
    first, second = json.loads((tmp_path / "out/days.json").read_text())
    assert (first["accepted"], second["accepted"]) == (
        True,
        second["after"]["ndcg@10"] >= second["before"]["ndcg@10"],
    )
    assert ("not accepted: ndcg@10 dropped" in said) is not second["accepted"]
    add(tmp_path, 3)
    done(good)
    *_, third = json.loads((tmp_path / "out/days.json").read_text())
    assert third["running"] == (second if second["accepted"] else first)["name"]


def write_sales(folder: Path, day: int) -> None:
    """Write a day of sales as a file of its own."""
    rows = [
        f"u{n % 41},a{n * n % 23},{1_700_000_000 + 60 * (1000 * day + n)}\n"
        for n in range(1000)
    ]
    folder.mkdir(exist_ok=True)
    (folder / f"sales-{day}.csv").write_text("customer,article,at\n" + "".join(rows))


@pytest.mark.exhaustive
def test_days_follow_a_mapping_that_was_guessed_from_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, source = tmp_path / "raw", tmp_path / "shop.yaml"
    write_sales(raw, 1)
    guess = suggest(str(raw)).text
    assert "files: sales-*.csv" in guess
    source.write_text(guess.replace("sales-*", "sales-1"))  # as a user may write it
    split = {"val_days": 0.2, "test_days": 0.2}
    popularity = str(ROOT / "jobs/configs/popularity.yaml")
    config = Config(
        output=str(tmp_path / "out"),
        prepare={"source": str(source), "input": str(raw), "split": split},
        train={"config": popularity},
    )
    run(config)
    write_sales(raw, 2)
    capsys.readouterr()
    run(config)
    *_, done, ignored = capsys.readouterr().out.splitlines()
    assert done.endswith(
        "nothing to do until there are new files that match 'sales-1.csv'"
    )
    assert ignored.startswith("warning: sales-2.csv in ")
    assert "'files: sales-*.csv'" in ignored
    source.write_text(guess)
    run(config)
    assert len(json.loads((tmp_path / "out/days.json").read_text())) == 2
    assert read_manifest(str(tmp_path / "out/tables/events")).info["rows_read"] == 2000


def test_a_model_without_gradients_is_computed_anew_each_day(tmp_path: Path) -> None:
    write_parts(tmp_path)
    config = config_of(
        tmp_path,
        train={"config": str(ROOT / "jobs/configs/ease.yaml")},
        tokenize={},
        register=None,
        max_drop={"recall@10": 1.0},
    )
    for number in (1, 2):
        add(tmp_path, *range(number + 1))
        run(cli.parse(Config, ["--config", str(config)]))
    first, second = json.loads((tmp_path / "out/days.json").read_text())
    assert (first["accepted"], second["accepted"]) == (True, True)
    assert second["running"] == first["name"]
    models = [checkpoint.read(day["checkpoint"]) for day in (first, second)]
    assert models[0].hashes["sequences"] != models[1].hashes["sequences"]


@pytest.mark.exhaustive
def test_a_model_below_the_best_without_training_is_not_registered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate of nearly 0 leaves SASRec at random."""
    log = simulate.Config(
        output=str(tmp_path / "all"), users=800, items=60, events=6000
    )
    simulate.run(log)
    untrained = {
        "config": str(ROOT / "jobs/configs/sasrec.yaml"),
        "fit": {"max_epochs": 1, "lr": 1e-9},
    }
    prepare = {
        "source": str(tmp_path / "source.yaml"),
        "input": str(tmp_path / "raw"),
        "split": {"val_fraction": 0.1, "test_fraction": 0.3},
    }
    config = config_of(tmp_path, train=untrained, tokenize={}, prepare=prepare)
    (tmp_path / "raw").symlink_to(tmp_path / "all")

    run(cli.parse(Config, ["--config", str(config)]))

    printed = capsys.readouterr().out
    assert "all items: ndcg@10" in printed
    assert "known items left out: ndcg@10" in printed
    assert "not registered: the model is below" in printed
    (day,) = json.loads((tmp_path / "out/days.json").read_text())
    assert day["accepted"]
    assert [verdict["verdict"] for verdict in day["floors"]] == [BELOW, BELOW]
    client = tracking.connect(f"sqlite:///{tmp_path}/out/runs/mlflow.db")
    assert not find_versions(client, "simulated")


def test_a_metric_of_either_sign_falls_by_a_share() -> None:
    assert lowest_accepted(0.5, 0.1) == 0.45
    assert lowest_accepted(-0.5, 0.1) == -0.55


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            {
                "train": {
                    "config": "jobs/configs/tiger_small.yaml",
                    "fit": {"epochs": 2},
                }
            },
            "fit.epochs",
        ),
        ({"tokenize": {"tokenizer": "rqkmean"}}, "rqkmean"),
        ({"max_drop": {"ndcg@10": 2}}, "max_drop.ndcg@10"),
        ({"tokenise": {}}, "the nearest key is 'tokenize'"),
    ],
)
def test_what_is_wrong_with_a_step_is_said_before_any_work(
    tmp_path: Path, more: dict[str, Any], why: str
) -> None:
    process = daily(config_of(tmp_path, **more))
    said = process.communicate()[0]
    assert process.returncode != 0
    assert why in said
    assert len(said.splitlines()) == 1, said
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_after_tables_were_made_anew_a_model_begins_anew_and_goes_on(
    tmp_path: Path,
) -> None:
    write_parts(tmp_path)
    config = config_of(tmp_path)
    add(tmp_path, 0, 1)
    done(config)
    (tmp_path / "raw/events-00000.parquet").unlink()
    add(tmp_path, 2)
    options = yaml.safe_load(config.read_text())["prepare"]
    options |= {"output": str(tmp_path / "out/tables"), "overwrite": True}
    subprocess.run(
        [sys.executable, "-m", "jobs.prepare", *to_words(options)],
        cwd=ROOT,
        check=True,
    )

    said = done(config)

    assert "cannot be trained further, so a new model is trained from scratch" in said
    add(tmp_path, 3)
    assert "weights of" in done(config)
    days = json.loads((tmp_path / "out/days.json").read_text())
    assert [day.get("running") for day in days] == [None, None, days[1]["name"]]
