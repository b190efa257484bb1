"""jobs.prepare as a command: what it prints, how it fails, and that SIGKILL at any
moment loses nothing.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml

from jobs.prepare import parse, run
from models.retrieval.data import RetrievalDataset
from models.storage.tables import UserError, read_manifest
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import load_source
from pipelines.data.settings import read_config

SOURCE = {
    "files": "log*.csv",
    "user": "user",
    "item": "item",
    "time": {"column": "ms", "unit": "ms"},
    "prepare": {"core": 2, "split": {"kind": "temporal", "val_fraction": 0.2}},
}
TABLES = ("events", "rejects", "items", "sequences")


def write_log(folder: Path, events: int = 4000) -> Path:
    folder.mkdir()
    generator = random.Random(3)
    rows = [
        {
            "user": f"u{generator.randrange(80)}",
            "item": f"i{generator.randrange(40)}",
            "ms": 1_600_000_000_000 + generator.randrange(10**9),
        }
        for _ in range(events)
    ]
    rows[7]["ms"] = -1
    pl.DataFrame(rows).write_csv(folder / "log.csv")
    (folder / "source.yaml").write_text(yaml.safe_dump(SOURCE))
    return folder


def arguments(raw: Path, output: Path, *more: str) -> list[str]:
    return [
        "--source",
        str(raw / "source.yaml"),
        "--input",
        str(raw),
        "--output",
        str(output),
        *more,
    ]


def start(
    raw: Path, output: Path, *more: str, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "jobs.prepare", *arguments(raw, output, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


KILLED = """
import json, os, random, signal, sys, time

import pipelines.data.prepare, ray.data
from jobs import cli, prepare

moments, words = json.loads(sys.argv[1])
for moment in moments:  # each start is a process of its own, forked to spare the imports
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        sys.stdout.reconfigure(line_buffering=True)
        prepare.run(prepare.parse(words))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        any(line.startswith(moment) for line in said)
        time.sleep(random.uniform(0, 2 if moment.startswith("events") else 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""
"""Starts it and kills it, some part of a second after it said each of the lines."""


def hashes(output: Path) -> dict[str, str]:
    return {name: read_manifest(str(output / name), name).hash for name in TABLES}


@pytest.mark.exhaustive
def test_killed_at_any_moment_it_ends_as_an_undisturbed_run(
    in_ray: dict[str, str], tmp_path: Path
) -> None:
    raw, output, undisturbed = (
        write_log(tmp_path / "raw"),
        tmp_path / "out",
        tmp_path / "undisturbed",
    )
    source, defaults = load_source(str(raw / "source.yaml"))
    prepare(
        source,
        str(raw),
        str(undisturbed),
        read_config(defaults, {"partitions": 6}),
        report=lambda line: None,
    )

    words = [
        ["events: reading", "events: reading", "items:"],
        arguments(raw, output, "--partitions", "6"),
    ]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(words)],
        capture_output=True,
        text=True,
        env=in_ray,
    )
    assert killed.returncode == 0, killed.stderr

    process = start(raw, output, "--partitions", "6", env=in_ray)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert hashes(output) == hashes(undisturbed)
    assert (output / "statistics.json").read_bytes() == (
        undisturbed / "statistics.json"
    ).read_bytes()
    for name in TABLES:  # nothing is left of the killed runs
        listed = {part.path for part in read_manifest(str(output / name)).files} | {
            "manifest.json"
        }
        assert {path.name for path in (output / name).iterdir()} == listed
    for part in read_manifest(str(output / "events")).files:
        assert (output / "events" / part.path).read_bytes() == (
            undisturbed / "events" / part.path
        ).read_bytes()
    assert f"next: python -m jobs.audit --tables {output}" in out.splitlines()[-1]
    assert "rejects: 1 row, ms: before 1980" in out or "events: up to date" in out


def test_options_win_over_the_source_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = write_log(tmp_path / "raw", events=300)
    options = (
        "--core",
        "0",
        "--split.test_fraction",
        "0.3",
        "--max_events",
        "5",
        "--overwrite",
    )
    statistics = run(parse(arguments(raw, tmp_path / "out", *options)))
    assert statistics["core"] == 0
    assert statistics["max_length"] == 5
    config = read_manifest(str(tmp_path / "out" / "sequences")).config
    assert config["split"] == {
        "kind": "temporal",
        "val_fraction": 0.2,
        "test_fraction": 0.3,
    }
    text = capsys.readouterr().out
    assert "1 reject)" in text
    assert text.splitlines()[-1].startswith("next: python -m jobs.audit")

    without = {}
    for split, requests in statistics[
        "requests"
    ].items():  # what prepare says is left out is what a training lacks
        examples = RetrievalDataset.load(str(tmp_path / "out" / "sequences"), split)
        assert examples.request_unit == "requests with a history"
        without[split] = requests - examples.num_requests
    said = ", ".join(f"{rows} {split}" for split, rows in without.items())
    assert (
        f"\nrequests without history (each user's first): {said}; skipped in training "
        f"and evaluation\n" in text
    )
    assert without["train"] > 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("user,item,ms\n", "log.csv"),
        ("", "log.csv"),
        ("user,thing,ms\na,b,1\n", "item"),
        ("user,item,ms\na,b,x\n", "break the schema|ms"),
    ],
)
def test_bad_files_leave_nothing(tmp_path: Path, content: str, words: str) -> None:
    raw = write_log(tmp_path / "raw", events=20)
    (raw / "log.csv").write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        run(parse(arguments(raw, tmp_path / "out")))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").rglob("*.*"))


def test_append_joins_a_new_file_and_keeps_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = write_log(tmp_path / "raw", events=400)
    run(parse(arguments(raw, tmp_path / "out", "--append")))
    rows = read_manifest(str(tmp_path / "out/events")).rows
    (raw / "log_2.csv").write_text("user,item,ms\nu1,i1,1600000000001\n")
    run(parse(arguments(raw, tmp_path / "out", "--append")))
    assert read_manifest(str(tmp_path / "out/events")).rows == rows + 1
    assert "events: reading 1 file" in capsys.readouterr().out
    with pytest.raises(UserError, match="--append and --overwrite are both given"):
        run(parse(arguments(raw, tmp_path / "out", "--append", "--overwrite")))


def test_a_missing_column_is_said_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write_log(tmp_path / "raw", events=500)
    monkeypatch.setattr("jobs.cli.start_ray", lambda: pytest.fail("Ray was started"))
    (raw / "source.yaml").write_text(yaml.safe_dump({**SOURCE, "item": "itm"}))
    with pytest.raises(UserError) as caught:
        run(parse(arguments(raw, tmp_path / "out")))
    said = f"{raw}/log.csv has no column 'itm'; the nearest is 'item' of user, item, ms; correct the source file or the"
    assert str(caught.value) == f"{said} log"
    assert not (tmp_path / "out/events").exists()
