"""The whole of `prepare` on small CSV logs, on a real Ray."""

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
from tests.fixtures.audited import broken

by_ray = pytest.mark.usefixtures("ray_local")

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


def described(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metadata of all items of a log."""
    return [
        {"item": item, "title": "one", "kind": "k"}
        for item in sorted({row["item"] for row in rows} - {None})
    ]


def make_log(
    folder: Path, rows: list[dict[str, Any]], items: list[dict[str, Any]] | None = None
) -> str:
    """Two event files and one item file; returns the folder."""
    folder.mkdir(exist_ok=True)
    half = len(rows) // 2
    pl.DataFrame(rows[:half]).write_csv(folder / "log_1.csv")
    pl.DataFrame(rows[half:]).write_csv(folder / "log_2.csv")
    items = items or [*described(rows), {"item": "unseen", "title": "none", "kind": ""}]
    pl.DataFrame(items).write_csv(folder / "items.csv")
    return str(folder)


def make_source(folder: Path, **changes: Any) -> Log:
    path = folder / "source.yaml"
    path.write_text(yaml.safe_dump(SOURCE | changes))
    return load_source(str(path))[0]


def random_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
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


def as_events(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
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


def hashes(output: Path) -> dict[str, str]:
    return {
        name: read_manifest(str(output / name)).hash
        for name in ("events", "rejects", "items", "sequences")
    }


@by_ray
def test_a_log_becomes_the_same_proved_tables_in_any_order_of_rows(
    tmp_path: Path,
) -> None:
    rows = random_rows(900)
    rows += rows[:40]
    source, out = make_source(tmp_path), str(tmp_path / "out")
    config = PrepareConfig(
        core=3,
        core_window="train",
        partitions=4,
        split=SplitConfig("temporal", 0.2, 0.2),
    )
    statistics = prepare(
        source, make_log(tmp_path / "raw", rows), out, config, report=lambda line: None
    )
    assert broken(out) == {}

    unique = list({str(event): event for event in as_events(rows)}.values())
    events = read_table(join(out, "events"), "events")
    assert sorted(events.to_pylist(), key=str) == sorted(unique, key=str)
    assert len(read_manifest(join(out, "events")).files) > 1
    items = read_table(join(out, "items"), "items").to_pylist()
    assert {item["text_title"] for item in items} == {"one"}
    info = read_manifest(join(out, "items")).info
    outside = len({row["item"] for row in rows}) - len(items) + 1
    assert (info["items_without_metadata"], info["metadata_outside_catalogue"]) == (
        0,
        outside,
    )
    times = sorted(event["timestamp_ms"] for event in unique)
    val, test = (times[int(len(times) * share)] for share in (0.6, 0.8))
    split = {"kind": "temporal", "val_start_ms": val, "test_start_ms": test}
    assert read_manifest(join(out, "sequences")).info["split"] == split

    assert statistics == json.loads((tmp_path / "out" / "statistics.json").read_text())
    sequences = read_table(join(out, "sequences"), "sequences").to_pylist()
    lengths = [len(row["item_index"]) for row in sequences]
    pairs = sum(len(set(row["item_index"])) for row in sequences)
    assert pairs < sum(lengths)
    assert statistics["sparsity"] == pytest.approx(
        1 - pairs / len(sequences) / len(items), abs=1e-6
    )
    assert statistics["mean_length"] == pytest.approx(
        sum(lengths) / len(sequences), abs=1e-4
    )
    assert statistics["raw"]["duplicates"] == len(rows) - len(unique)
    assert statistics["raw"]["rows_read"] == len(rows)

    random.Random(1).shuffle(rows)
    prepare(
        source,
        make_log(tmp_path / "raw2", rows),
        str(tmp_path / "out2"),
        config,
        report=lambda line: None,
    )
    assert hashes(tmp_path / "out2") == hashes(tmp_path / "out")


@by_ray
def test_running_again_does_nothing_and_overwrite_replaces(tmp_path: Path) -> None:
    raw = make_log(tmp_path / "raw", random_rows(300))
    source, out = make_source(tmp_path), tmp_path / "out"
    lines: list[str] = []
    first = prepare(
        source,
        raw,
        str(out),
        PrepareConfig(core=2, partitions=2),
        report=lambda line: None,
    )
    stats = read_manifest(str(out / "events")).timings["ray_data"]
    assert (
        "HashShuffleReduce(keys=('__partition',), partitions=3)->MapBatches(PartitionWriter)"
        in stats
    )
    before = hashes(out)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    assert (
        prepare(
            source,
            raw,
            str(out),
            PrepareConfig(core=2, partitions=2),
            report=lines.append,
        )
        == first
    )
    assert [line.split(",")[0] for line in lines if "up to date" in line] == [
        f"{name}: up to date" for name in ("events", "rejects", "items", "sequences")
    ]
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}

    def refused(core: int) -> None:
        with pytest.raises(
            UserError, match="made from other inputs or settings; add --overwrite"
        ):
            prepare(
                source,
                raw,
                str(out),
                PrepareConfig(core=core, partitions=2),
                report=lambda line: None,
            )

    refused(core=3)
    for name in (
        "log_2.csv",
        "items.csv",
    ):  # a file with another size or time is another file
        file = tmp_path / "raw" / name
        content, known = file.read_bytes(), file.stat()
        file.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + b"\n")  # as long
        refused(core=2)
        file.write_bytes(content)
        os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
        assert (
            prepare(
                source,
                raw,
                str(out),
                PrepareConfig(core=2, partitions=2),
                report=lambda line: None,
            )
            == first
        )
    assert hashes(out) == before

    # What is missing is made again, the same: here the sequences, with cut times that
    # the items' manifest has.
    (out / "sequences" / MANIFEST).unlink()
    left_over = out / "sequences" / f"part-{'0' * 20}.parquet"
    left_over.write_bytes(b"half")
    prepare(
        source,
        raw,
        str(out),
        PrepareConfig(core=2, partitions=2),
        report=lambda line: None,
    )
    assert hashes(out) == before
    assert not left_over.exists()

    other = prepare(
        source,
        raw,
        str(out),
        PrepareConfig(core=3, partitions=2),
        existing="overwrite",
        report=lambda line: None,
    )
    assert other["core"] == 3
    assert {path.name for path in (out / "items").glob("*.parquet")} == {
        part.path for part in read_manifest(str(out / "items")).files
    }


@by_ray
def test_what_an_unfinished_run_made_is_kept_or_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A first run that fails at its items: corrected, it goes on without --overwrite.
    Its one error is fetched whole, so that Ray says nothing of the other returns of the
    failed task."""
    raw, out = make_log(tmp_path / "raw", random_rows(200)), str(tmp_path / "out")
    config = PrepareConfig(core=0, partitions=2)
    broken = {**SOURCE["items"], "attributes": {"kind": "knd"}}
    logger = logging.getLogger("ray._private.worker")
    logger.addHandler(caplog.handler)
    with pytest.raises(UserError, match="has a column 'knd'; the nearest is 'kind'"):
        prepare(
            make_source(tmp_path, items=broken),
            raw,
            out,
            config,
            report=lambda line: None,
        )
    gc.collect()
    logger.removeHandler(caplog.handler)
    assert "Unhandled error" not in caplog.text

    lines: list[str] = []
    prepare(
        make_source(tmp_path), raw, out, config, report=lines.append
    )  # another section: the events stay
    assert any(line.startswith("events: up to date") for line in lines)
    assert not any("replaced" in line for line in lines)

    changed = make_source(tmp_path, labels={})
    with pytest.raises(
        UserError, match="made from other inputs or settings; add --overwrite"
    ):
        prepare(changed, raw, out, config, report=lambda line: None)
    Path(out, "statistics.json").unlink()  # as if that run had been stopped
    prepare(changed, raw, out, config, report=lines.append)
    assert (
        "events: replaced, because it was made from other inputs or settings by a run that did not finish"
        in lines
    )
    assert "label_click" not in read_table(join(out, "events"), "events").column_names


def test_a_log_may_lie_where_its_tables_go(tmp_path: Path) -> None:
    """The output is within the input folder, so the pattern matches our own parts; the
    input itself is refused.
    """
    rows, config = random_rows(300), PrepareConfig(core=0)
    raw = tmp_path / "raw"
    (raw / "events").mkdir(parents=True)
    pl.DataFrame(rows).write_parquet(raw / "events" / "day1.parquet")
    pl.DataFrame(described(rows)).write_csv(raw / "items.csv")
    source = make_source(tmp_path, files="*.parquet")
    with pytest.raises(
        UserError,
        match=r"raw/events holds 'day1.parquet', which is not part of a table",
    ):
        prepare(source, str(raw), str(raw), config, report=lambda line: None)
    out = raw / "tables"
    first = prepare(source, str(raw), str(out), config, report=lambda line: None)
    lines: list[str] = []
    assert prepare(source, str(raw), str(out), config, report=lines.append) == first
    assert len([line for line in lines if "up to date" in line]) == 4
    assert (
        pl.read_parquet(raw / "events" / "day1.parquet").height
        == first["raw"]["rows_read"]
        == len(rows)
    )
    kept = out / "events" / "notes.txt"  # a user's file beside finished parts
    kept.write_text("mine")
    pl.DataFrame(rows).with_columns(ms=-1).write_parquet(
        raw / "events" / "day2.parquet"
    )
    with pytest.raises(UserError, match="over the limit max_rejects"):
        prepare(
            source,
            str(raw),
            str(out),
            config,
            existing="overwrite",
            report=lambda line: None,
        )
    assert kept.read_text() == "mine"


def test_an_output_that_another_job_writes_is_left_alone(tmp_path: Path) -> None:
    raw, source, out = (
        make_log(tmp_path / "raw", random_rows(50)),
        make_source(tmp_path),
        tmp_path / "out",
    )
    with (
        writing(str(out)),
        pytest.raises(
            UserError, match="out is being written by another process; wait for it or"
        ),
    ):
        prepare(source, raw, str(out), PrepareConfig(core=0), report=lambda line: None)
    assert not list(out.rglob("*.parquet"))


def test_rejects_are_kept_and_too_many_leave_nothing(tmp_path: Path) -> None:
    rows = random_rows(200)
    rows[3]["ms"] = -5
    rows[150]["item"] = None
    raw = make_log(tmp_path / "raw", rows)
    source, lines = make_source(tmp_path), []
    with pytest.raises(
        UserError,
        match=r"2 of 200 rows \(1.00%\) break the schema, over the limit max_rejects 0.50%",
    ):
        prepare(
            source,
            raw,
            str(tmp_path / "out"),
            PrepareConfig(core=0, max_rejects=0.005),
            report=lines.append,
        )
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert any(
        "rejects: 1 row, ms: before 1980" in line
        and "log_1.csv row 3 (from 0, " in line
        for line in lines
    )

    statistics = prepare(
        source,
        raw,
        str(tmp_path / "out"),
        PrepareConfig(core=0),
        report=lambda line: None,
    )
    assert statistics["raw"]["rejects"] == 2
    assert sum(statistics["raw"]["reject_reasons"].values()) == 2
    rejects = read_table(str(tmp_path / "out" / "rejects"), "rejects").to_pylist()
    assert [(row["file"], row["row"]) for row in rejects] == [
        ("log_1.csv", 3),
        ("log_2.csv", 50),
    ]
    assert statistics["raw"]["events"] + statistics["raw"]["duplicates"] == 198


LINES = {
    "items.jsonl": ('{"item": "i1", "title": "one"}', "item files"),
    "users.jsonl": ('{"user": "u1", "age": "7"}', "user files"),
}


@pytest.mark.parametrize("name", LINES)
def test_what_item_and_user_files_lose_is_said_and_limited(
    tmp_path: Path, name: str
) -> None:
    raw, out = make_log(tmp_path / "raw", random_rows(60)), tmp_path / "out"
    for other, (line, _) in LINES.items():
        (tmp_path / "raw" / other).write_text(f"{line}\n")
    good, of = LINES[name]
    source = make_source(
        tmp_path,
        items={"files": "items.jsonl", "item": "item", "texts": ["title"]},
        users={"files": "users.jsonl", "user": "user", "attributes": ["age"]},
    )
    lines: list[str] = []
    config = PrepareConfig(core=0, max_rejects=0.4, min_matched=0)
    (tmp_path / "raw" / name).write_text(f"{good}\noops\n{good}\n")
    prepare(source, raw, str(out), config, report=lines.append)
    [said] = [
        line
        for line in lines
        if line.startswith(f"rejects of the {of}: 1 row, row: no JSON object")
    ]
    assert said.endswith(
        f"such as {name} row 1 (from 0, without header and blank lines): "
        + '{"line": "oops"}'
    )
    items, events = (
        read_manifest(str(out / table)).info for table in ("items", "events")
    )
    counts = (
        items["metadata_rejects"],
        items["metadata_rows"],
        events["user_rejects"],
        events["user_rows"],
    )
    assert counts == ((1, 3, 0, 1) if name == "items.jsonl" else (0, 1, 1, 3))
    limit = rf"1 of 3 rows of the {of} \(33.33%\) break the schema, over the limit max_rejects 1.00%"
    strict = PrepareConfig(core=0, min_matched=0)
    with pytest.raises(UserError, match=limit):
        prepare(source, raw, str(tmp_path / "strict"), strict, report=lambda line: None)

    (tmp_path / "raw" / name).write_text(f"{good}\n" + "oops\n" * 5 + f"{good}\n")
    with pytest.raises(
        UserError, match=rf"5 of 7 rows of the {of} \(71.43%\) break the schema.*; fix"
    ) as caught:
        prepare(source, raw, str(tmp_path / "out2"), config, report=lambda line: None)
    assert "\n" not in str(caught.value)


def test_user_files_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = make_log(tmp_path / "raw", random_rows(60))
    users = tmp_path / "raw" / "users.csv"
    users.write_text("user,age\nu1,70\n")
    source = make_source(
        tmp_path, users={"files": "users.csv", "user": "user", "attributes": ["age"]}
    )

    def read_and_remove(self: Log, *given: Any) -> Block | None:
        found = read_users(self, *given)
        users.unlink()
        return found

    read_users = Log.read_users
    monkeypatch.setattr(Log, "read_users", read_and_remove)
    prepare(
        source,
        raw,
        str(tmp_path / "out"),
        PrepareConfig(core=0, min_matched=0),
        report=lambda line: None,
    )
    for event in read_table(str(tmp_path / "out" / "events")).to_pylist():
        assert event["cat_age"] == ("70" if event["user_id"] == "u1" else None)


@pytest.mark.parametrize(
    ("changes", "config", "words"),
    [
        (
            {"time": {"column": "ms", "unit": "order"}},
            {"split": {"kind": "temporal"}},
            "no clock times",
        ),
        (
            {},
            {"core_window": "train", "split": {"kind": "leave_last_out"}},
            "needs a temporal split",
        ),
        (
            {},
            {"behaviour": "like"},
            "not a bool label of the log; its bool labels are: click",
        ),
        ({}, {"core": 99}, "set a lower --core"),
        ({"files": "nothing*.csv"}, {}, "nothing"),
    ],
)
def test_settings_that_do_not_fit_the_log(
    tmp_path: Path, changes: dict, config: dict, words: str
) -> None:
    raw = make_log(tmp_path / "raw", random_rows(60))
    with pytest.raises(UserError, match=words):
        prepare(
            make_source(tmp_path, **changes),
            raw,
            str(tmp_path / "out"),
            read_config(config),
            report=lambda line: None,
        )


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([{"coer": 5}], "unknown key 'prepare.coer'; the nearest key is 'core'"),
        (
            [{"split": {"kid": "temporal"}}],
            "unknown key 'prepare.split.kid'; the nearest key is 'prepare.split.kind'",
        ),
        ([{"split": "temporal"}], "it must be a mapping"),
        ([{"core": -1}], "core is -1"),
        ([{"core": "five"}], "'prepare.core' is 'five'"),
        ([{"core": 5.5}], "'prepare.core' is 5.5"),
        ([{"max_rejects": "viel"}], "'prepare.max_rejects' is 'viel'"),
        (
            [{"split": {"val_fraction": "a tenth"}}],
            "'prepare.split.val_fraction' is 'a tenth'",
        ),
        ([{"ties": "loose"}], "prepare.ties' is 'loose'"),
        ([{"max_events": 0}], "max_events is 0"),
        ([{"partitions": 0}], "partitions is 0"),
        ([{"max_rejects": 2.0}], "max_rejects is 2.0"),
        ([{"min_matched": 1.5}], "min_matched is 1.5"),
        ([{"duplicates": "maybe"}], "prepare.duplicates' is 'maybe'"),
        ([{"ray_data": {"compression": "gzip"}}], "ray_data.compression' is 'gzip'"),
        (
            [{"ray_data": {"read_mb": 0}}],
            "ray_data.read_mb is 0, it must be at least 1",
        ),
        (
            [{"ray_data": {"shuffle_mb": 1}}],
            "key 'prepare.ray_data.shuffle_mb'; the nearest key is 'prepare.ray_data.shuffle_",
        ),
        (
            [{"duplicates": "keep", "kind": "search"}],
            "duplicates is keep, which only kind retrieval supports",
        ),
    ],
)
def test_settings_that_are_refused(layers: list[dict], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_config(*layers)


def test_later_settings_win_and_none_means_not_given() -> None:
    config = read_config(
        {"core": 3, "split": {"kind": "temporal", "val_fraction": 0.2}},
        {"core": None, "split": {"val_fraction": 0.3}},
    )
    assert (config.core, config.split.kind, config.split.val_fraction) == (
        3,
        "temporal",
        0.3,
    )


@by_ray
def test_a_log_of_one_partition_starts_no_ray_and_gives_the_same_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, source = make_log(tmp_path / "raw", random_rows(900)), make_source(tmp_path)
    started: list[str] = []
    for name, partitions in (("by_ray", 1), ("alone", None)):
        config = PrepareConfig(
            core=3, partitions=partitions, split=SplitConfig("temporal", 0.2, 0.2)
        )
        if name == "alone":
            monkeypatch.setattr("ray.put", lambda value: pytest.fail("Ray was asked"))
            monkeypatch.setattr(
                "ray.data.from_items",
                lambda *given, **options: pytest.fail("Ray Data was asked"),
            )
        prepare(
            source,
            raw,
            str(tmp_path / name),
            config,
            report=lambda line: None,
            start=partial(started.append, name),
        )
    assert started == ["by_ray"]
    assert hashes(tmp_path / "alone") == hashes(tmp_path / "by_ray")
    assert (
        read_manifest(str(tmp_path / "alone/events")).timings["ray_data"]
        == "made by the driver alone"
    )


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"request": "ask"},
        {"explode": {"shown": "string_to_array(items, ' ')"}, "item": "shown"},
    ],
    ids=["rows", "asks", "lists"],
)
def test_behaviours_of_one_time_stay_in_the_order_of_the_log(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    """Whatever their requests are called, and lists within their rows. The audit knows
    the same order.
    """
    rng, day = random.Random(7), "2023-05-01"
    lists = (
        [["a", "b"], ["c"], ["d", "e", "f"], ["b"], ["e", "a"]]
        if "explode" in keys
        else [[i] for i in "edcbabc"]
    )
    rows = [
        (user, items, rng.randrange(100)) for items in lists for user in ("u1", "u2")
    ]
    (tmp_path / "raw").mkdir()
    for number, some in enumerate((rows[:5], rows[5:])):
        lines = [f"{user},{' '.join(items)},{day},{ask}\n" for user, items, ask in some]
        (tmp_path / f"raw/log_{number}.csv").write_text(
            "user,items,day,ask\n" + "".join(lines)
        )
    keys = {
        "files": "log_*.csv",
        "user": "user",
        "item": "items",
        "time": {"column": "day", "unit": "iso"},
        **keys,
    }
    source = parse_log(keys)
    config = PrepareConfig(
        core=0, ties="log_order", duplicates="keep", split=SplitConfig("leave_last_out")
    )
    prepare(source, str(tmp_path / "raw"), str(tmp_path / "tables"), config)
    names = read_table(str(tmp_path / "tables/items"), "items")["item_id"].to_pylist()
    table = read_table(str(tmp_path / "tables/sequences"), "sequences").to_pylist()
    expected = [item for items in lists for item in items]
    assert {row["user_id"]: [names[i] for i in row["item_index"]] for row in table} == {
        "u1": expected,
        "u2": expected,
    }
    for row in table:
        assert [request["history_end"] for request in row["requests"]] == [
            *range(len(expected))
        ]
        assert [
            names[request["candidates"][0]] for request in row["requests"]
        ] == expected
    assert broken(str(tmp_path / "tables")) == {}
