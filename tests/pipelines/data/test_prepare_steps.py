"""`prepare` turns small CSV logs into tables, whole, by the driver alone or on Ray."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from models.storage.tables import (
    MANIFEST,
    UserError,
    join,
    read_manifest,
    read_table,
    writing,
)
from pipelines.data.prepare import prepare
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import Log, load_source, parse_log
from pipelines.data.reading.rows import Block
from pipelines.data.sequences.splits import SplitConfig
from pipelines.data.settings import read_config
from tests.fixtures.audited_tables import find_violations

by_ray = pytest.mark.usefixtures("ray_local")

Row = dict[str, Any]

START = 1_600_000_000_000
SOURCE = {
    "files": "log_*.csv",
    "user": "user",
    "item": "item",
    "time": {"column": "ms", "unit": "ms"},
    "labels": {"click": {"column": "click"}},
    "items": {
        "files": "items.csv",
        "item": "item",
        "texts": {"title": "title"},
        "attributes": {"kind": "kind"},
    },
}


def describe_items(rows: list[Row]) -> list[Row]:
    """Return metadata of all items of a log."""
    return [
        {"item": item, "title": "one", "kind": "k"}
        for item in sorted({row["item"] for row in rows} - {None})
    ]


def write_log(folder: Path, rows: list[Row]) -> str:
    """Write rows to two event files, and an item file with an item that no row has;
    return the folder.
    """
    folder.mkdir(exist_ok=True)
    half = len(rows) // 2
    pl.DataFrame(rows[:half]).write_csv(folder / "log_1.csv")
    pl.DataFrame(rows[half:]).write_csv(folder / "log_2.csv")
    items = [*describe_items(rows), {"item": "unseen", "title": "none", "kind": ""}]
    pl.DataFrame(items).write_csv(folder / "items.csv")
    return str(folder)


def make_source(folder: Path, **changes: Any) -> Log:
    """Load a mapping file with some keys of `SOURCE` changed."""
    path = folder / "source.yaml"
    path.write_text(yaml.safe_dump(SOURCE | changes))
    return load_source(str(path))[0]


def draw_rows(count: int, seed: int = 0) -> list[Row]:
    """Draw rows of at most 60 users and 25 items within half a second."""
    generator = random.Random(seed)
    return [
        {
            "user": f"u{int(generator.paretovariate(0.7)) % 60}",
            "item": f"i{int(generator.paretovariate(0.7)) % 25}",
            "ms": START + generator.randrange(500),
            "click": generator.randrange(2),
        }
        for _ in range(count)
    ]


def prepare_quietly(
    source: Log, raw: str, output: Path | str, config: PrepareConfig, **options: Any
) -> dict[str, Any]:
    """Prepare tables without progress lines and return their statistics."""
    return prepare(
        source, raw, str(output), config, report=lambda line: None, **options
    )


def to_events(rows: list[Row]) -> list[Row]:
    """Return the events that rows of the log become."""
    return [
        {
            "user_id": row["user"],
            "request_id": "",
            "timestamp_ms": row["ms"],
            "item_id": row["item"],
            "query": None,
            "position": 0,
            "label_click": bool(row["click"]),
        }
        for row in rows
    ]


def read_hashes(output: Path) -> dict[str, str]:
    """Return the hash of each table."""
    return {
        name: read_manifest(str(output / name)).hash
        for name in ("events", "rejects", "items", "sequences")
    }


@by_ray
def test_a_log_becomes_the_same_tables_in_any_order_of_rows(tmp_path: Path) -> None:
    rows = draw_rows(900)
    rows += rows[:40]
    source, out = make_source(tmp_path), str(tmp_path / "out")
    config = PrepareConfig(
        core=3,
        core_window="train",
        partitions=4,
        split=SplitConfig("temporal", 0.2, 0.2),
    )

    statistics = prepare_quietly(source, write_log(tmp_path / "raw", rows), out, config)

    assert find_violations(out) == {}
    check_events_and_items(rows, out)
    check_statistics(statistics, rows, out)
    random.Random(1).shuffle(rows)
    shuffled = write_log(tmp_path / "raw2", rows)
    prepare_quietly(source, shuffled, tmp_path / "out2", config)
    assert read_hashes(tmp_path / "out2") == read_hashes(tmp_path / "out")


def drop_duplicates(rows: list[Row]) -> list[Row]:
    """Return each event of the rows once."""
    return list({str(event): event for event in to_events(rows)}.values())


def check_events_and_items(rows: list[Row], tables: str) -> None:
    """Check the events, the items and the temporal cuts at 60% and 80% of the events."""
    unique = drop_duplicates(rows)
    events = read_table(join(tables, "events"), "events")
    assert sorted(events.to_pylist(), key=str) == sorted(unique, key=str)
    assert len(read_manifest(join(tables, "events")).files) > 1

    items = read_table(join(tables, "items"), "items").to_pylist()
    assert {item["text_title"] for item in items} == {"one"}
    info = read_manifest(join(tables, "items")).info
    below_core = len({row["item"] for row in rows}) - len(items)
    assert info["items_without_metadata"] == 0
    assert info["metadata_outside_catalogue"] == below_core + 1  # with "unseen"

    times = sorted(event["timestamp_ms"] for event in unique)
    assert read_manifest(join(tables, "sequences")).info["split"] == {
        "kind": "temporal",
        "val_start_ms": times[int(len(times) * 0.6)],
        "test_start_ms": times[int(len(times) * 0.8)],
    }


def check_statistics(statistics: dict[str, Any], rows: list[Row], tables: str) -> None:
    """Check the statistics against the rows and the sequences."""
    assert statistics == json.loads(Path(tables, "statistics.json").read_text())
    num_items = len(read_table(join(tables, "items"), "items"))
    sequences = read_table(join(tables, "sequences"), "sequences").to_pylist()
    lengths = [len(row["item_index"]) for row in sequences]
    pairs = sum(len(set(row["item_index"])) for row in sequences)
    sparsity = 1 - pairs / len(sequences) / num_items
    assert pairs < sum(lengths)
    assert statistics["sparsity"] == pytest.approx(sparsity, abs=1e-6)
    mean_length = sum(lengths) / len(sequences)
    assert statistics["mean_length"] == pytest.approx(mean_length, abs=1e-4)
    assert statistics["raw"]["duplicates"] == len(rows) - len(drop_duplicates(rows))
    assert statistics["raw"]["rows_read"] == len(rows)


def read_write_times(folder: Path) -> dict[Path, int]:
    """Return the time of the last write of each Parquet file below a folder."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}


OTHER_INPUTS = "made from other inputs or settings"


@by_ray
def test_finished_tables_are_kept_until_overwritten(tmp_path: Path) -> None:
    raw = write_log(tmp_path / "raw", draw_rows(300))
    source, out = make_source(tmp_path), tmp_path / "out"
    config = PrepareConfig(core=2, partitions=2)
    first = prepare_quietly(source, raw, out, config)
    hashes, write_times = read_hashes(out), read_write_times(out)

    # Ray Data shuffles and writes in one step.
    stats = read_manifest(str(out / "events")).timings["ray_data"]
    step = "HashShuffleReduce(keys=('__partition',), partitions=3)->MapBatches(PartitionWriter)"
    assert step in stats

    # The same settings write nothing.
    lines: list[str] = []
    assert prepare(source, raw, str(out), config, report=lines.append) == first
    up_to_date = [line.split(":")[0] for line in lines if ": up to date" in line]
    assert up_to_date == ["events", "rejects", "items", "sequences"]
    assert read_write_times(out) == write_times

    # Other settings are refused, and so are files with another size or time.
    other_config = PrepareConfig(core=3, partitions=2)
    with pytest.raises(UserError, match=OTHER_INPUTS):
        prepare_quietly(source, raw, out, other_config)
    for name in ("log_2.csv", "items.csv"):
        file = tmp_path / "raw" / name
        content, stat = file.read_bytes(), file.stat()
        same_size = content[:-2] + bytes([content[-2] ^ 1]) + b"\n"
        file.write_bytes(same_size)
        with pytest.raises(UserError, match=OTHER_INPUTS):
            prepare_quietly(source, raw, out, config)
        file.write_bytes(content)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert prepare_quietly(source, raw, out, config) == first
    assert read_hashes(out) == hashes

    # A missing table is written again, the same, with the cuts that the manifest of the
    # items has.
    (out / "sequences" / MANIFEST).unlink()
    unfinished_part = out / "sequences" / f"part-{'0' * 20}.parquet"
    unfinished_part.write_bytes(b"half")
    prepare_quietly(source, raw, out, config)
    assert read_hashes(out) == hashes
    assert not unfinished_part.exists()

    # Overwriting replaces the tables and removes their old parts.
    overwritten = prepare_quietly(source, raw, out, other_config, existing="overwrite")
    assert overwritten["core"] == 3
    parquet_files = {path.name for path in (out / "items").glob("*.parquet")}
    items = read_manifest(str(out / "items"))
    assert parquet_files == {part.path for part in items.files}


@by_ray
def test_tables_of_an_unfinished_run_are_kept_or_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that failed at its items, once corrected, continues without --overwrite.

    The driver fetches the error of the failed task, so Ray logs no unhandled error for
    the other returns of the task.
    """
    raw, out = write_log(tmp_path / "raw", draw_rows(200)), str(tmp_path / "out")
    config = PrepareConfig(core=0, partitions=2)
    misspelt = {**SOURCE["items"], "attributes": {"kind": "knd"}}
    logger = logging.getLogger("ray._private.worker")
    logger.addHandler(caplog.handler)
    with pytest.raises(UserError, match="has a column 'knd'; the nearest is 'kind'"):
        prepare_quietly(make_source(tmp_path, items=misspelt), raw, out, config)
    gc.collect()
    logger.removeHandler(caplog.handler)
    assert "Unhandled error" not in caplog.text

    # Events do not depend on the mapping of the items, so they are kept.
    lines: list[str] = []
    prepare(make_source(tmp_path), raw, out, config, report=lines.append)
    assert any(line.startswith("events: up to date") for line in lines)
    assert not any("replaced" in line for line in lines)

    # Finished tables of another mapping are kept, unfinished ones replaced.
    changed = make_source(tmp_path, labels={})
    with pytest.raises(UserError, match=OTHER_INPUTS):
        prepare_quietly(changed, raw, out, config)
    Path(out, "statistics.json").unlink()  # as if that run had been stopped
    prepare(changed, raw, out, config, report=lines.append)
    replaced = "events: replaced, because it was made from other inputs or settings by a run that did not finish"
    assert replaced in lines
    assert "label_click" not in read_table(join(out, "events"), "events").column_names


def write_log_in_events_folder(folder: Path) -> str:
    """Write a log to `events/day1.parquet`, where its table of events would go too."""
    rows = draw_rows(300)
    (folder / "events").mkdir(parents=True)
    pl.DataFrame(rows).write_parquet(folder / "events" / "day1.parquet")
    pl.DataFrame(describe_items(rows)).write_csv(folder / "items.csv")
    return str(folder)


def test_tables_are_not_written_over_their_log(tmp_path: Path) -> None:
    raw = write_log_in_events_folder(tmp_path / "raw")
    source = make_source(tmp_path, files="*.parquet")

    error = r"raw/events holds 'day1.parquet', which is not part of a table"
    with pytest.raises(UserError, match=error):
        prepare_quietly(source, raw, raw, PrepareConfig(core=0))

    assert pl.read_parquet(tmp_path / "raw/events/day1.parquet").height == 300


def test_tables_within_the_input_folder_are_not_read_as_log_files(
    tmp_path: Path,
) -> None:
    """The pattern of the event files also matches the Parquet files of the tables."""
    raw = write_log_in_events_folder(tmp_path / "raw")
    source, config = make_source(tmp_path, files="*.parquet"), PrepareConfig(core=0)
    out = tmp_path / "raw" / "tables"

    first = prepare_quietly(source, raw, out, config)
    assert first["raw"]["rows_read"] == 300

    lines: list[str] = []
    assert prepare(source, raw, str(out), config, report=lines.append) == first
    assert len([line for line in lines if "up to date" in line]) == 4


def test_a_users_file_among_the_parts_outlives_a_failed_overwrite(
    tmp_path: Path,
) -> None:
    raw = write_log(tmp_path / "raw", draw_rows(300))
    source, out = make_source(tmp_path), tmp_path / "out"
    prepare_quietly(source, raw, out, PrepareConfig(core=0))
    notes = out / "events" / "notes.txt"
    notes.write_text("mine")
    invalid = [{**row, "ms": -1} for row in draw_rows(300)]
    pl.DataFrame(invalid).write_csv(tmp_path / "raw" / "log_3.csv")

    with pytest.raises(UserError, match="over the limit max_rejects"):
        prepare_quietly(source, raw, out, PrepareConfig(core=0), existing="overwrite")

    assert notes.read_text() == "mine"


def test_an_output_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    raw, source = write_log(tmp_path / "raw", draw_rows(50)), make_source(tmp_path)
    out = tmp_path / "out"

    error = "out is being written by another process"
    with writing(str(out)), pytest.raises(UserError, match=error):
        prepare_quietly(source, raw, out, PrepareConfig(core=0))

    assert not list(out.rglob("*.parquet"))


def write_log_with_two_invalid_rows(folder: Path) -> str:
    """Write a log of 200 rows with an invalid row in each of its files."""
    rows = draw_rows(200)
    rows[3]["ms"] = -5
    rows[150]["item"] = None
    return write_log(folder, rows)


def test_too_many_rejected_rows_are_reported_and_leave_no_table(
    tmp_path: Path,
) -> None:
    raw, out = write_log_with_two_invalid_rows(tmp_path / "raw"), tmp_path / "out"
    config = PrepareConfig(core=0, max_rejects=0.005)
    lines: list[str] = []

    error = (
        r"2 of 200 rows \(1.00%\) break the schema, over the limit max_rejects 0.50%"
    )
    with pytest.raises(UserError, match=error):
        prepare(make_source(tmp_path), raw, str(out), config, report=lines.append)

    assert not [path for path in out.rglob("*") if path.is_file()]
    [reported] = [line for line in lines if "rejects: 1 row, ms: before 1980" in line]
    assert "log_1.csv row 3 (from 0, " in reported


def test_rejected_rows_are_a_table_and_counted_in_the_statistics(
    tmp_path: Path,
) -> None:
    raw, out = write_log_with_two_invalid_rows(tmp_path / "raw"), tmp_path / "out"

    statistics = prepare_quietly(make_source(tmp_path), raw, out, PrepareConfig(core=0))

    assert statistics["raw"]["rejects"] == 2
    assert sum(statistics["raw"]["reject_reasons"].values()) == 2
    assert statistics["raw"]["events"] + statistics["raw"]["duplicates"] == 198
    rejects = read_table(str(out / "rejects"), "rejects").to_pylist()
    assert [(row["file"], row["row"]) for row in rejects] == [
        ("log_1.csv", 3),
        ("log_2.csv", 50),
    ]


VALID_LINES = {
    "items.jsonl": '{"item": "i1", "title": "one"}',
    "users.jsonl": '{"user": "u1", "age": "7"}',
}
KINDS_OF_FILES = {"items.jsonl": "item files", "users.jsonl": "user files"}


@pytest.mark.parametrize("name", VALID_LINES)
def test_rejected_rows_of_item_and_user_files_are_reported_and_limited(
    tmp_path: Path, name: str
) -> None:
    raw, out = write_log(tmp_path / "raw", draw_rows(60)), tmp_path / "out"
    for file, line in VALID_LINES.items():
        (tmp_path / "raw" / file).write_text(f"{line}\n")
    valid, files = VALID_LINES[name], KINDS_OF_FILES[name]
    source = make_source(
        tmp_path,
        items={"files": "items.jsonl", "item": "item", "texts": ["title"]},
        users={"files": "users.jsonl", "user": "user", "attributes": ["age"]},
    )
    config = PrepareConfig(core=0, max_rejects=0.4, min_matched=0)

    # 1 of 3 rows is below the limit of 40%: it is reported and counted.
    (tmp_path / "raw" / name).write_text(f"{valid}\noops\n{valid}\n")
    lines: list[str] = []
    prepare(source, raw, str(out), config, report=lines.append)
    start = f"rejects of the {files}: 1 row, row: no JSON object"
    [reported] = [line for line in lines if line.startswith(start)]
    assert reported.endswith(
        f"such as {name} row 1 (from 0, without header and blank lines): "
        + '{"line": "oops"}'
    )
    items = read_manifest(str(out / "items")).info
    events = read_manifest(str(out / "events")).info
    num_items = (items["metadata_rejects"], items["metadata_rows"])
    num_users = (events["user_rejects"], events["user_rows"])
    if name == "items.jsonl":
        assert (num_items, num_users) == ((1, 3), (0, 1))
    else:
        assert (num_items, num_users) == ((0, 1), (1, 3))

    # 1 of 3 rows is over the default limit of 1%.
    strict = PrepareConfig(core=0, min_matched=0)
    error = rf"1 of 3 rows of the {files} \(33.33%\) break the schema, over the limit max_rejects 1.00%"
    with pytest.raises(UserError, match=error):
        prepare_quietly(source, raw, tmp_path / "strict", strict)

    # 5 of 7 rows are over the limit of 40%.
    (tmp_path / "raw" / name).write_text(f"{valid}\n" + "oops\n" * 5 + f"{valid}\n")
    error = rf"5 of 7 rows of the {files} \(71.43%\) break the schema.*"
    with pytest.raises(UserError, match=error) as caught:
        prepare_quietly(source, raw, tmp_path / "out2", config)
    assert "\n" not in str(caught.value)


def test_user_files_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write_log(tmp_path / "raw", draw_rows(60))
    users = tmp_path / "raw" / "users.csv"
    users.write_text("user,age\nu1,70\n")
    source = make_source(
        tmp_path, users={"files": "users.csv", "user": "user", "attributes": ["age"]}
    )
    config = PrepareConfig(core=0, min_matched=0)

    def read_and_remove(self: Log, *arguments: Any) -> Block | None:
        block = read_users(self, *arguments)
        users.unlink()
        return block

    read_users = Log.read_users
    monkeypatch.setattr(Log, "read_users", read_and_remove)

    prepare_quietly(source, raw, tmp_path / "out", config)

    for event in read_table(str(tmp_path / "out" / "events")).to_pylist():
        assert event["cat_age"] == ("70" if event["user_id"] == "u1" else None)


def test_later_settings_win_and_none_leaves_the_earlier_one() -> None:
    config = read_config(
        {"core": 3, "split": {"kind": "temporal", "val_fraction": 0.2}},
        {"core": None, "split": {"val_fraction": 0.3}},
    )

    assert config.core == 3
    assert (config.split.kind, config.split.val_fraction) == ("temporal", 0.3)


@by_ray
def test_a_small_log_starts_no_ray_and_gives_the_same_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, source = write_log(tmp_path / "raw", draw_rows(900)), make_source(tmp_path)
    split = SplitConfig("temporal", 0.2, 0.2)
    started: list[str] = []

    prepare_quietly(
        source,
        raw,
        tmp_path / "by_ray",
        PrepareConfig(core=3, partitions=1, split=split),
        start=partial(started.append, "by_ray"),
    )

    def fail(*arguments: Any, **options: Any) -> None:
        pytest.fail("Ray was called")

    monkeypatch.setattr("ray.put", fail)
    monkeypatch.setattr("ray.data.from_items", fail)
    prepare_quietly(
        source,
        raw,
        tmp_path / "alone",
        PrepareConfig(core=3, partitions=None, split=split),
        start=partial(started.append, "alone"),
    )

    assert started == ["by_ray"]
    assert read_hashes(tmp_path / "alone") == read_hashes(tmp_path / "by_ray")
    timings = read_manifest(str(tmp_path / "alone/events")).timings
    assert timings["ray_data"] == "made by the driver alone"


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"request": "request"},
        {"explode": {"shown": "string_to_array(items, ' ')"}, "item": "shown"},
    ],
    ids=["rows", "named requests", "lists"],
)
def test_behaviours_of_equal_time_stay_in_the_order_of_the_log(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    """The order does not depend on request ids, and lists stay together."""
    if "explode" in keys:
        lists = [["a", "b"], ["c"], ["d", "e", "f"], ["b"], ["e", "a"]]
    else:
        lists = [[item] for item in "edcbabc"]
    generator = random.Random(7)
    lines = [
        f"{user},{' '.join(items)},2023-05-01,{generator.randrange(100)}\n"
        for items in lists
        for user in ("u1", "u2")
    ]
    (tmp_path / "raw").mkdir()
    header = "user,items,day,request\n"
    (tmp_path / "raw/log_0.csv").write_text(header + "".join(lines[:5]))
    (tmp_path / "raw/log_1.csv").write_text(header + "".join(lines[5:]))
    mapping = {
        "files": "log_*.csv",
        "user": "user",
        "item": "items",
        "time": {"column": "day", "unit": "iso"},
    }
    config = PrepareConfig(
        core=0, ties="log_order", duplicates="keep", split=SplitConfig("leave_last_out")
    )
    tables = tmp_path / "tables"

    prepare(parse_log(mapping | keys), str(tmp_path / "raw"), str(tables), config)

    ids = read_table(str(tables / "items"), "items")["item_id"].to_pylist()
    sequences = read_table(str(tables / "sequences"), "sequences").to_pylist()
    expected = [item for items in lists for item in items]
    assert sorted(row["user_id"] for row in sequences) == ["u1", "u2"]
    for row in sequences:
        assert [ids[item] for item in row["item_index"]] == expected
        requests = row["requests"]
        history_ends = [request["history_end"] for request in requests]
        assert history_ends == list(range(len(expected)))
        targets = [ids[request["candidates"][0]] for request in requests]
        assert targets == expected
    assert find_violations(str(tables)) == {}
