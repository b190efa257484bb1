"""Tables are kept, continued, replaced or appended to, and never half written."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import count
from pathlib import Path

import polars as pl
import pytest

from core.errors import UserError
from core.tables import read_manifest, writing
from pipelines.prepare.executor import Executor
from tests.fixtures.audited_tables import find_violations
from tests.fixtures.commands import LOG, merge, prepare_log, read_rows, write_rows
from tests.fixtures.random_logs import BEGIN, HOUR, STEADY, Row, make_mapping
from tests.pipelines.prepare.test_random_logs import draw_days, read_content, write_file

MAPPING = make_mapping() | {
    "users": {"files": "users.csv", "user": "user", "attributes": {"tier": "tier"}},
    "prepare": {
        "kind": "retrieval",
        "core": 2,
        "min_matched": 0,
        "max_rejects": 1,
        "split": {"by": "temporal"},
    },
}
TABLES = ("events", "rejects", "items", "sequences")


def write_log(folder: Path, num_files: int = 2) -> Path:
    """Write a log to the folder `raw` and return it."""
    raw = folder / "raw"
    raw.mkdir()
    for number, rows in enumerate(draw_days(num_files)):
        write_file(raw, number, rows)
    return raw


def read_hashes(tables: Path) -> dict[str, str]:
    """Return the hash of each table."""
    return {name: read_manifest(f"{tables}/{name}").hash for name in TABLES}


def read_write_times(folder: Path) -> dict[Path, int]:
    """Return the time of the last write of each Parquet file below a folder."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}


def list_parts(tables: Path) -> set[str]:
    """Return the names of the Parquet files that the manifests list."""
    manifests = [read_manifest(f"{tables}/{name}") for name in TABLES]
    return {part.path for manifest in manifests for part in manifest.files}


def test_finished_tables_are_kept_until_overwritten(tmp_path):
    raw, out = write_log(tmp_path), tmp_path / "out"
    first = prepare_log(MAPPING, raw, out)
    hashes, write_times = read_hashes(out), read_write_times(out)

    assert prepare_log(MAPPING, raw, out) == first
    assert read_write_times(out) == write_times

    # Other settings are refused, and so are files with another content of equal size.
    with pytest.raises(UserError, match="was made with core 2, not 3"):
        prepare_log(MAPPING, raw, out, core=3)
    for name in ("log_1.jsonl", "items.csv", "users.csv"):
        content, stat = (raw / name).read_bytes(), (raw / name).stat()
        (raw / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.raises(UserError, match=f"was made with {name} "):
            prepare_log(MAPPING, raw, out)
        (raw / name).write_bytes(content)
        os.utime(raw / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert read_hashes(out) == hashes

    part = out / "items" / read_manifest(f"{out}/items").files[0].path
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    with pytest.raises(UserError, match="its manifest says"):
        prepare_log(MAPPING, raw, out)
    part.write_bytes(content)

    # A missing table is written again, and unfinished parts are removed.
    (out / "sequences/manifest.json").unlink()
    (out / f"sequences/part-{'0' * 20}.parquet").write_bytes(b"half")
    prepare_log(MAPPING, raw, out)
    assert read_hashes(out) == hashes
    assert {path.name for path in out.rglob("*.parquet")} == list_parts(out)

    assert prepare_log(MAPPING, raw, out, core=3, overwrite=True)["core"] == 3
    assert {path.name for path in out.rglob("*.parquet")} == list_parts(out)


def test_a_run_that_failed_is_continued_with_another_mapping(tmp_path):
    raw, out = write_log(tmp_path), tmp_path / "out"
    unmatched = merge(MAPPING, {"prepare": {"min_matched": 1}})
    with pytest.raises(UserError, match="min_matched"):
        prepare_log(unmatched, raw, out)
    prepare_log(MAPPING, raw, out)

    (out / "statistics.json").unlink()  # as if that run had been stopped
    prepare_log(merge(MAPPING, {"labels": {"like": None}}), raw, out)

    assert "label_like" not in read_rows(out, "events")[0]


def test_tables_beside_their_log_are_neither_read_nor_written_over(tmp_path):
    """The pattern of the event files also matches the Parquet files of the tables."""
    (tmp_path / "events").mkdir()
    rows = [{k: row[k] for k in ("user", "item", "ms")} for row in draw_days(1)[0][1:]]
    write_rows(tmp_path / "events/day1.parquet", rows)
    keys = ("user", "item", "time", "prepare")
    mapping = {key: MAPPING[key] for key in keys} | {"files": "*.parquet"}

    first = prepare_log(mapping, tmp_path, tmp_path / "tables")

    assert pl.read_parquet(tmp_path / "events/day1.parquet").height == len(rows)
    assert first["raw"]["rows_read"] == len(rows)
    assert prepare_log(mapping, tmp_path, tmp_path / "tables") == first


def test_a_failed_overwrite_and_a_second_writer_change_nothing(tmp_path):
    raw, out = write_log(tmp_path), tmp_path / "out"
    prepare_log(MAPPING, raw, out)
    (out / "events/notes.txt").write_text("mine")
    with writing(str(out)), pytest.raises(UserError, match="another process"):
        prepare_log(MAPPING, raw, out, overwrite=True)
    assert find_violations(str(out)) == {}

    with pytest.raises(UserError, match="max_rejects"):
        prepare_log(MAPPING, raw, out, overwrite=True, max_rejects=0)

    assert (out / "events/notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "change",
    [lambda results: results[:-1], lambda results: [*results, results[-1]]],
)
def test_a_partition_that_the_exchange_loses_or_repeats_is_an_error(
    tmp_path, monkeypatch, change
):
    exchange = Executor.exchange
    monkeypatch.setattr(
        Executor, "exchange", lambda *words: iter(change(list(exchange(*words))))
    )

    with pytest.raises(RuntimeError, match="the shuffle returned"):
        prepare_log(MAPPING, write_log(tmp_path), tmp_path / "out")


def test_files_that_were_appended_may_go_and_the_pattern_may_grow(tmp_path):
    raw, out = write_log(tmp_path), tmp_path / "out"
    narrow = MAPPING | {"files": "log_0.jsonl"}
    prepare_log(narrow, raw, out, append=True)
    prepare_log(MAPPING, raw, out, append=True)
    prepare_log(MAPPING, raw, tmp_path / "whole", append=True)
    assert read_content(out) == read_content(tmp_path / "whole")
    before = read_write_times(out)

    (raw / "log_0.jsonl").unlink()
    (raw / "log_1.jsonl").touch()  # as if copied once more
    prepare_log(MAPPING, raw, out, append=True)
    assert read_write_times(out) == before


STEADY_LINE = json.dumps(STEADY[-1]) + "\n"


@pytest.mark.parametrize(
    ("files", "changes", "words"),
    [
        ({}, {"prepare": {"duplicates": "keep"}}, "made with duplicates drop"),
        ({}, {"prepare": {"partitions": 2}}, "made with partitions 1"),
        ({}, {"user": "item"}, "made with source.user"),
        ({"log_0.jsonl": STEADY_LINE}, {}, "made with log_0.jsonl"),
        ({"users.csv": "user,tier\nu,two\n"}, {}, "made with users.csv"),
        ({"log_-.jsonl": STEADY_LINE}, {"position": None}, "does not continue"),
        ({"log_9.jsonl": STEADY_LINE}, {}, "does not continue"),
    ],
)
def test_a_log_that_cannot_be_appended_is_refused_and_leaves_the_tables(
    tmp_path, files, changes, words
):
    raw, out = write_log(tmp_path), tmp_path / "out"
    base = merge(MAPPING, {"prepare": {"core": 0, "ties": "log_order"}})
    if not {"user", "files", "prepare"} & changes.keys():
        base = merge(base, changes)
    prepare_log(base | {"files": "log_0.jsonl"}, raw, out, append=True)
    before = read_content(out)

    for name, text in files.items():
        (raw / name).write_text(text)
    with pytest.raises(UserError, match=words):
        prepare_log(merge(base, changes), raw, out, append=True)

    assert read_content(out) == before


def test_a_new_file_may_have_no_rows_or_lack_a_column(tmp_path):
    mapping = merge(LOG, {"labels": {"click": "c"}, "prepare": {"core": 2}})
    rows = [f"u{k % 9},i{k * k % 7},{BEGIN + HOUR * k}" for k in range(90)]
    head = "user,item,ms"
    full = [f"{head},c", *(f"{row},1" for row in rows[:60])]
    for number, lines in enumerate([full, full[:1], [head, *rows[60:]]]):
        (tmp_path / f"log_{number}.csv").write_text("\n".join(lines) + "\n")
        prepare_log(mapping, tmp_path, tmp_path / "grown", append=True)

    prepare_log(mapping, tmp_path, tmp_path / "whole", append=True)

    assert read_content(tmp_path / "grown") == read_content(tmp_path / "whole")


@pytest.mark.usefixtures("ray_local")
def test_pieces_of_large_files_on_ray_keep_the_order_of_the_log(tmp_path):
    draw, padding = random.Random(0), "x" * 4000
    for number in range(2):
        rows = [
            {
                "user": f"u{draw.randrange(20)}",
                "item": f"i{draw.randrange(9)}",
                "x": padding,
            }
            for _ in range(700)
        ]
        write_rows(tmp_path / f"log-{number}.csv", rows)
    settings = {"core": 0, "ties": "log_order"}
    mapping = LOG | {"time": {"unit": "order"}, "prepare": settings}
    prepare_log(mapping, tmp_path, tmp_path / "alone")

    # pieces of 1 MB
    assert min(path.stat().st_size for path in tmp_path.glob("*.csv")) > 2 << 20
    options: Row = {"ray_data.read_mb": 1, "ray_data.max_cpus": 1}
    prepare_log(mapping, tmp_path, tmp_path / "ray", partitions=3, **options)

    def read_order(tables: Path) -> list[tuple[str, list[int]]]:
        """Return each user's items in their order."""
        rows = read_content(tables)["rows"]["sequences"]
        return [(row["user_id"], row["item_index"]) for row in rows]

    assert find_violations(str(tmp_path / "ray")) == {}
    assert read_order(tmp_path / "ray") == read_order(tmp_path / "alone")


APPEND_AND_KILL = """
import builtins, itertools, os, sys
from pathlib import Path
lines = itertools.count(1)
def print_or_die(*words, **options):
    if next(lines) == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
builtins.print = print_or_die
from tests.fixtures.commands import prepare_log
from tests.pipelines.prepare.test_prepare_tables import MAPPING
folder = Path(sys.argv[1])
prepare_log(MAPPING, folder / "raw", folder / "grown", append=True)
"""


@pytest.mark.exhaustive
def test_a_killed_append_leaves_the_tables_before_or_after_it(tmp_path):
    raw, grown = write_log(tmp_path), tmp_path / "grown"
    prepare_log(MAPPING | {"files": "log_0.jsonl"}, raw, grown, append=True)
    before = content = read_content(grown)
    prepare_log(MAPPING, raw, tmp_path / "whole", append=True)

    for last_line in count(1):
        command = [sys.executable, "-c", APPEND_AND_KILL, str(tmp_path), str(last_line)]
        subprocess.run(command)
        assert find_violations(str(grown)) == {}
        content = read_content(grown)
        if content != before:
            break

    assert last_line > 5  # the tables are replaced after all are written
    assert content == read_content(tmp_path / "whole")


PREPARE_AND_KILL = """
import json, os, random, signal, sys, time

import pipelines.prepare.prepare, ray.data
from jobs import cli, prepare

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


@pytest.mark.exhaustive
def test_a_killed_and_repeated_run_on_ray_has_the_undisturbed_result(in_ray, tmp_path):
    raw, out = write_log(tmp_path, 9), tmp_path / "out"
    undisturbed = tmp_path / "undisturbed"
    prepare_log(MAPPING, raw, undisturbed, partitions=6)
    words = ["--source", f"{undisturbed}.yaml", "--input", str(raw)]
    words += ["--output", str(out), "--partitions", "6"]
    lines = ["events: reading", "events: reading", "items:"]

    kills = [sys.executable, "-c", PREPARE_AND_KILL, json.dumps([lines, words])]
    subprocess.run(kills, env=in_ray, check=True)
    prepare_log(MAPPING, raw, out, partitions=6)

    assert read_hashes(out) == read_hashes(undisturbed)
    # no file of a killed run is left
    present = {path.name for name in TABLES for path in (out / name).iterdir()}
    assert present == list_parts(out) | {"manifest.json"}
    for file in (out / "statistics.json", *out.glob("events/*.parquet")):
        expected = (undisturbed / file.relative_to(out)).read_bytes()
        assert file.read_bytes() == expected
