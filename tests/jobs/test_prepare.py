"""Test jobs.prepare as a command that is killed at any time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml

from core.tables import read_manifest
from pipelines.prepare.prepare import prepare
from pipelines.prepare.reading.log import load_source
from tests.fixtures.commands import read_config

SOURCE = {
    "files": "log*.csv",
    "user": "user",
    "item": "item",
    "time": {"column": "ms", "unit": "ms"},
    "prepare": {"core": 2, "split": {"by": "temporal", "val_fraction": 0.2}},
}
TABLES = ("events", "rejects", "items", "sequences")


def write_log(folder: Path, events: int = 4000) -> Path:
    """Write a log with one row that is rejected, and its mapping; return the folder."""
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


def build_words(raw: Path, output: Path, *more: str) -> list[str]:
    """Return the words of a command line."""
    words = ["--source", str(raw / "source.yaml"), "--input", str(raw)]
    return [*words, "--output", str(output), *more]


PREPARE_WITH_KILLS = """
import json, os, random, signal, sys, time

import pipelines.prepare.prepare, ray.data
from jobs import cli, prepare
from tests.fixtures.commands import load_split, read_config

lines, words = json.loads(sys.argv[1])
for kill_line in lines:  # each start is a fork, which saves the imports
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        sys.stdout.reconfigure(line_buffering=True)
        prepare.run(cli.config_from_words(prepare, words))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as output:
        any(line.startswith(kill_line) for line in output)
        time.sleep(random.uniform(0, 2 if kill_line.startswith("events") else 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""
"""A program that starts jobs.prepare once per line, and kills it a random time after the
line is printed."""


def read_hashes(output: Path) -> dict[str, str]:
    """Return the content hashes of the tables."""
    return {name: read_manifest(str(output / name)).hash for name in TABLES}


@pytest.mark.exhaustive
def test_a_killed_and_repeated_run_has_the_undisturbed_result(in_ray, tmp_path):
    raw = write_log(tmp_path / "raw")
    output, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    source, defaults = load_source(str(raw / "source.yaml"))
    prepare(
        source,
        str(raw),
        str(undisturbed),
        read_config(defaults, {"partitions": 6}),
        report=lambda line: None,
    )
    words = build_words(raw, output, "--partitions", "6")
    kill_lines = ["events: reading", "events: reading", "items:"]

    kills = subprocess.run(
        [sys.executable, "-c", PREPARE_WITH_KILLS, json.dumps([kill_lines, words])],
        capture_output=True,
        text=True,
        env=in_ray,
    )
    assert kills.returncode == 0, kills.stderr
    repeated = subprocess.run(
        [sys.executable, "-u", "-m", "jobs.prepare", *words],
        capture_output=True,
        text=True,
        env=in_ray,
    )

    assert repeated.returncode == 0, repeated.stderr
    assert read_hashes(output) == read_hashes(undisturbed)
    files = ["statistics.json"]
    for name in TABLES:
        parts = [part.path for part in read_manifest(str(output / name)).files]
        # No file of a killed run is left.
        present = {path.name for path in (output / name).iterdir()}
        assert present == {*parts, "manifest.json"}
        if name == "events":
            files += [f"events/{part}" for part in parts]
    for file in files:
        assert (output / file).read_bytes() == (undisturbed / file).read_bytes()
    last_line = repeated.stdout.splitlines()[-1]
    assert f"next: python -m jobs.audit --tables {output}" in last_line
    assert (
        "rejects: 1 row, ms: before 1980" in repeated.stdout
        or "events: up to date" in repeated.stdout
    )
