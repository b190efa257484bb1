"""Decoded columns: equal to the table, written once per node, removed when unused, and
clear errors.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from models.dataset import columns as module
from models.dataset.columns import MAX_UNUSED_S, cache_folder, open_columns
from models.storage.tables import UserError, commit, write_part

PARTS = ([1, 2], [300], [], [0.5, 4.0])
"""Values of each part, whose narrowest types differ."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def table(tmp_path: Path) -> str:
    schema = pa.schema([pa.field("value", pa.float32(), nullable=False)])
    uri = str(tmp_path / "table")
    parts = [
        write_part(uri, pa.table({"value": pa.array(values, pa.float32())}, schema))
        for values in PARTS
    ]
    commit(uri, "values", schema, parts, config={}, inputs={})
    return uri


def decode(table: pa.Table) -> dict[str, np.ndarray]:
    """The values in the narrowest type of the part, and pairs of them."""
    values = table["value"].to_numpy()
    narrow = values.astype(np.uint8)
    narrow = narrow if np.array_equal(narrow, values) else values.astype(np.float32)
    return {"value": narrow, "pair": np.stack([values, -values], 1)}


def test_columns_are_the_parts_end_to_end_in_a_type_that_holds_all(cache, table):
    expected = [value for part in PARTS for value in part]
    found = open_columns(table, "test", ["value"], decode)
    assert found["value"].tolist() == expected
    assert found["value"].dtype == np.float32
    assert found["pair"].tolist() == [[value, -value] for value in expected]
    with pytest.raises(ValueError, match="read-only"):
        found["value"][0] = 7


def test_a_table_is_decoded_once_and_again_for_other_settings(cache, table):
    calls = []

    def counting(part: pa.Table) -> dict[str, np.ndarray]:
        calls.append(part.num_rows)
        return decode(part)

    for _ in range(3):
        open_columns(table, "test", ["value"], counting)
    assert len(calls) == len(PARTS)
    open_columns(table, "test", ["value"], counting, settings={"labels": ["click"]})
    assert len(calls) == 2 * len(PARTS)
    assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == 2


def test_a_decode_that_fails_leaves_nothing_behind(cache, table):
    def failing(part: pa.Table) -> dict[str, np.ndarray]:
        if part.num_rows == 1:
            raise RuntimeError("broken part")
        return decode(part)

    with pytest.raises(RuntimeError, match="broken part"):
        open_columns(table, "test", ["value"], failing)
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]
    assert len(open_columns(table, "test", ["value"], decode)["value"]) == 5


def test_entries_that_nobody_opened_for_a_week_are_removed(cache, table):
    open_columns(table, "test", ["value"], decode)
    (old,) = (entry for entry in cache.iterdir() if entry.is_dir())
    long_ago = time.time() - MAX_UNUSED_S - 60
    os.utime(old / "columns.json", (long_ago, long_ago))
    killed = cache / "test-0123.abc"
    killed.mkdir()
    os.utime(killed, (long_ago, long_ago))
    open_columns(table, "test", ["value"], decode, settings="another")
    assert not old.exists()
    assert not killed.exists()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "the disk of the cache .* is full; free some space, or set"),
        (errno.EROFS, "the cache .* cannot be written; set TRIELINE_CACHE to a folder"),
    ],
)
def test_a_cache_that_cannot_be_written_is_one_line(
    cache, table, monkeypatch, number, message
):
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.tempfile, "mkdtemp", refuse)
    with pytest.raises(UserError, match=message):
        open_columns(table, "test", ["value"], decode)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="/dev/full is a device of Linux"
)
def test_a_disk_that_fills_up_while_columns_are_written_is_one_line(
    cache, table, monkeypatch
):
    full_disk = Path("/dev/full").open  # bound before the class is changed
    monkeypatch.setattr(Path, "open", lambda path, mode: full_disk(mode))
    with pytest.raises(UserError, match=r"the disk of the cache .* is full; free"):
        open_columns(table, "test", ["value"], decode)


def test_the_cache_is_below_the_user_cache_unless_named(monkeypatch, tmp_path):
    monkeypatch.delenv("TRIELINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "trieline"


@pytest.mark.long
def test_processes_that_start_together_decode_once(cache, table, tmp_path):
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from models.dataset.columns import open_columns
def decode(part):
    with open({str(tmp_path / "calls")!r}, "a") as calls:
        calls.write("x")
    time.sleep(0.1)
    return {{"value": part["value"].to_numpy()}}
print(open_columns({table!r}, "test", ["value"], decode)["value"].sum())
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    sums = {process.communicate()[0].strip() for process in processes}
    assert sums == {"307.5"}
    assert (tmp_path / "calls").read_text() == "x" * len(PARTS)
