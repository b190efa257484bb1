"""A log that grows by files: tables that are appended to are those of all files at
once, up to the items' numbers.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.storage.tables import (
    UserError,
    has_manifest,
    read_manifest,
    read_table,
    replace_tables,
)
from pipelines.data import run
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import parse_log
from pipelines.data.settings import read_config
from tests.fixtures.audited import broken
from tests.pipelines.data.test_random_logs import (
    ACTIONS,
    BEGIN,
    HOUR,
    ROWS,
    SEARCH,
    SOURCE,
    STEADY,
)

Row = dict[str, Any]
DAYS = (8, 12, 17)
"""Hours at which the files of a log end."""
LAST = {"kind": "temporal", "val_days": 2 / 24, "test_days": 2 / 24}
"""Cuts that move with the log."""
USERS = {"files": "users.csv", "user": "user", "attributes": {"tier": "tier"}}
ROOT = Path(__file__).parents[3]
NOTHING = {"user": None, "item": "a", "ms": BEGIN}

logs = st.lists(st.tuples(ROWS, st.integers(0, 2)), min_size=1, max_size=3)
"""Rows, and the file that they come with at the earliest."""
few = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def files_of(log: list[tuple[list[Row], int]], twice: int) -> list[list[Row]]:
    """The rows of each file, some of which come late, and `twice` of the first file
    once more in the last.
    """
    every = [
        *((row, 0) for row in STEADY),
        *((row, late) for rows, late in log for row in rows),
    ]
    hour = [(row["ms"] - BEGIN) // HOUR for row, _ in every]
    at = [
        max(late, sum(h >= end for end in DAYS))
        for (_, late), h in zip(every, hour, strict=True)
    ]
    files = [
        [
            NOTHING,
            *(row for (row, _), day in zip(every, at, strict=True) if day == number),
        ]
        for number in range(3)
    ]
    return [*files[:2], [*files[2], *files[0][:twice]]]


def source_of(requests: bool, late: bool, **items: Any) -> Any:
    labels = SOURCE["labels"] | (
        {
            "click": {
                "column": "click",
                "time": {"column": f"ms + late * {HOUR // 2}", "unit": "ms"},
            }
        }
        if late
        else {}
    )
    source = SOURCE | {
        "files": "log_*.jsonl",
        "labels": labels,
        "items": SOURCE["items"] | items,
    }
    return parse_log(source | ({"request": "request"} if requests else {}))


def write(folder: Path, number: int, rows: list[Row]) -> None:
    (folder / "items.csv").write_text("item,author\na,x\nb,x\nc,y\nd,\nnever,z\n")
    (folder / f"log_{number}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )


def make(source: Any, folder: Path, out: str, config: Row, append: bool) -> list[str]:
    lines: list[str] = []
    made = read_config({"min_matched": 0, "max_rejects": 1, **config})
    prepare(
        source,
        str(folder),
        str(folder / out),
        made,
        report=lines.append,
        existing="append" if append else "continue",
    )
    return lines


def content(tables: Path) -> Row:
    """All that tables say, with items by their ids."""
    names = [
        name
        for name in ("events", "rejects", "items", "queries", "sequences")
        if has_manifest(str(tables / name))
    ]
    manifests = {name: read_manifest(str(tables / name)) for name in names}
    rows = {
        name: read_table(str(tables / name)).to_pylist() if made.rows else []
        for name, made in manifests.items()
    }
    ids = [row["item_id"] for row in rows["items"]]
    assert [row["item_index"] for row in rows["items"]] == [*range(len(ids))]
    for row in rows["sequences"]:
        row["item_index"] = [ids[item] for item in row["item_index"]]
        for request in row.get("requests", ()):
            request["candidates"] = [ids[item] for item in request["candidates"]]
    rows["items"] = sorted(
        ({**row, "item_index": 0} for row in rows["items"]),
        key=lambda row: row["item_id"],
    )
    rows["rejects"].sort(key=str)
    infos = {name: made.info for name, made in manifests.items()}
    for info in infos.values():
        info.pop("split_made_from", None)
        info.pop("items_hash", None)
        info.pop("old_files", None)
    statistics = json.loads((tables / "statistics.json").read_text())
    return {"rows": rows, "infos": infos, "statistics": {**statistics, "hashes": None}}


def check(folder: Path, files: list[list[Row]], source: Any, config: Row) -> None:
    """Appends one file after the other and compares with all at once, to which more may
    be appended too.
    """
    known: list[str] = []
    for number, rows in enumerate(files):
        write(folder, number, rows)
        make(source, folder, "grown", config, append=True)
        ids = read_table(str(folder / "grown/items"))["item_id"].to_pylist()
        assert ids[: len(known)] == known
        known = ids
    make(source, folder, "whole", config, append=True)
    grown, whole = content(folder / "grown"), content(folder / "whole")
    assert grown["rows"] == whole["rows"]
    assert grown["infos"] == whole["infos"]
    assert grown["statistics"] == whole["statistics"]
    assert broken(str(folder / "grown")) == {}


RETRIEVAL = st.fixed_dictionaries(
    {
        "kind": st.just("retrieval"),
        "core": st.integers(0, 3),
        "ties": st.sampled_from(["strict", "log_order"]),
        "behaviour": st.sampled_from([None, "click"]),
        "max_events": st.sampled_from([12, 100]),
        "split": st.sampled_from([LAST, {"kind": "leave_last_out"}]),
        "duplicates": st.sampled_from(["drop", "keep"]),
        "core_window": st.sampled_from(["all", "train"]),
    }
).filter(lambda given: given["core_window"] == "all" or given["split"] == LAST)


@pytest.mark.long
@few
@given(logs, st.integers(0, 9), RETRIEVAL, st.booleans(), st.booleans(), st.booleans())
def test_retrieval(
    tmp_path_factory: pytest.TempPathFactory,
    log: Any,
    twice: int,
    config: Row,
    requests: bool,
    late: bool,
    every: bool,
) -> None:
    late = late and config["behaviour"] is not None and config["ties"] == "strict"
    source = source_of(requests, late, keep="all" if every else "used")
    if config["ties"] == "log_order":
        source = parse_log(
            {key: value for key, value in source.config.items() if key != "position"}
        )
    check(tmp_path_factory.mktemp("log"), files_of(log, twice), source, config)


@pytest.mark.long
@few
@given(logs, st.sampled_from([12, 100]), st.booleans(), st.booleans())
@pytest.mark.exhaustive
def test_search(
    tmp_path_factory: pytest.TempPathFactory,
    log: Any,
    most: int,
    requests: bool,
    late: bool,
) -> None:
    config = {
        "kind": "search",
        "core": 0,
        "behaviour": "click",
        "max_events": most,
        "split": LAST,
        "search": SEARCH,
    }
    folder = tmp_path_factory.mktemp("log")
    source = source_of(requests, late)
    check(folder, files_of(log, 0), source, config)


def test_results_that_nothing_orders_stay_as_the_log_has_them(tmp_path: Path) -> None:
    config = {
        "kind": "search",
        "core": 0,
        "behaviour": "click",
        "split": LAST,
        "search": SEARCH,
    }
    row = {
        **STEADY[-1],
        "user": "u",
        "item": "a",
        "ms": BEGIN,
        "position": 0,
        "request": "r1",
    }
    same = [
        {**row, "price": float(number % 7), "city": "tvw"[number % 3]}
        for number in range(60)
    ]
    check(tmp_path, files_of([(same, 0)], 0), source_of(False, False), config)


@pytest.mark.long
@few
@given(logs, st.sampled_from([12, 100]), st.integers(0, 9))
@pytest.mark.exhaustive
def test_actions(
    tmp_path_factory: pytest.TempPathFactory, log: Any, most: int, twice: int
) -> None:
    config = {
        "kind": "actions",
        "core": 0,
        "max_events": most,
        "split": LAST,
        "actions": ACTIONS,
    }
    folder = tmp_path_factory.mktemp("log")
    (folder / "users.csv").write_text("user,tier\nu,one\nsteady,two\n")
    source = parse_log({**source_of(False, False).config, "users": USERS})
    check(folder, files_of(log, twice), source, config)


def days(count: int = 3, seed: int = 0) -> list[list[Row]]:
    """The rows of some days, of many users and items, with late ones and some of the
    day before.
    """
    draw = random.Random(seed)
    files: list[list[Row]] = []
    for day in range(count):
        rows = [
            {
                **STEADY[-1],
                "user": f"u{int(draw.paretovariate(0.7)) % 60}",
                "item": f"i{int(draw.paretovariate(0.7)) % (20 + 5 * day)}",
                "ms": BEGIN
                + 24 * HOUR * max(0, day - draw.choice([0, 0, 0, 1]))
                + draw.randrange(24 * HOUR),
                "click": draw.random() < 0.7,
            }
            for _ in range(150)
        ]
        files.append([NOTHING, *rows, *(files[-1][1:9] if files else [])])
    return files


SMALL = {"kind": "retrieval", "core": 2, "split": {"kind": "temporal"}}


@pytest.mark.usefixtures("ray_local")
@pytest.mark.exhaustive
def test_several_partitions(tmp_path: Path) -> None:
    check(tmp_path, days(), source_of(False, False), SMALL | {"partitions": 3})
    assert len(read_manifest(str(tmp_path / "grown/events")).files) == 3


@pytest.mark.usefixtures("ray_local")
@pytest.mark.exhaustive
def test_only_partitions_that_get_rows_are_written(tmp_path: Path) -> None:
    source, events = source_of(False, False), str(tmp_path / "grown/events")
    write(tmp_path, 0, days(1)[0])
    make(
        source, tmp_path, "grown", SMALL | {"partitions": 5}, append=True
    )  # no tables are there: as without
    first = read_manifest(events)
    write(tmp_path, 1, [{**STEADY[-1], "user": "u1", "item": "new"}])
    make(source, tmp_path, "grown", SMALL, append=True)
    second = read_manifest(events)
    assert second.extends == [first.hash]
    assert (
        sum(part in second.files for part in first.files) == len(first.files) - 1 == 4
    )
    assert {path.name for path in (tmp_path / "grown/events").glob("*.parquet")} == {
        p.path for p in second.files
    }


def test_a_file_that_was_appended_is_not_appended_again(tmp_path: Path) -> None:
    source = source_of(False, False)
    for number, rows in enumerate(days(2)):
        write(tmp_path, number, rows)
        make(source, tmp_path, "grown", SMALL, append=True)
    (tmp_path / "log_0.jsonl").unlink()  # what was read is not asked for again
    (tmp_path / "log_1.jsonl").touch()  # copied once more
    before = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "grown").rglob("*.parquet")
    }
    lines = make(source, tmp_path, "grown", SMALL, append=True)
    assert [line.split(",")[0] for line in lines if "up to date" in line] == [
        f"{name}: up to date" for name in ("events", "items", "sequences")
    ]
    assert {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "grown").rglob("*.parquet")
    } == before


def with_files(pattern: str, **changes: Any) -> Any:
    return parse_log({**source_of(False, False).config, "files": pattern, **changes})


def test_a_pattern_may_be_widened_to_new_files(tmp_path: Path) -> None:
    first, second = days(2)
    write(tmp_path, 0, first)
    make(with_files("log_0.jsonl"), tmp_path, "grown", SMALL, append=True)
    write(tmp_path, 1, second)
    lines = make(with_files("log_0.jsonl"), tmp_path, "grown", SMALL, append=True)
    assert any("warning: log_1.jsonl in " in line for line in lines)
    make(with_files("log_*.jsonl"), tmp_path, "grown", SMALL, append=True)
    make(with_files("log_*.jsonl"), tmp_path, "whole", SMALL, append=False)
    assert content(tmp_path / "grown") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            with_files("log_1.jsonl"),
            "log_0.jsonl, whose events the table has, does not match",
        ),
        (with_files("log_*", user="item"), "the table was made with another source"),
    ],
)
def test_a_pattern_without_the_old_files_or_other_keys_are_another_source(
    tmp_path: Path, source: Any, said: str
) -> None:
    for number, rows in enumerate(days(2)):
        write(tmp_path, number, rows)
    make(with_files("log_0.jsonl"), tmp_path, "grown", SMALL, append=True)
    before = content(tmp_path / "grown")
    with pytest.raises(UserError, match=said):
        make(source, tmp_path, "grown", SMALL, append=True)
    assert content(tmp_path / "grown") == before


def test_a_fresh_log_takes_items_that_were_appended(tmp_path: Path) -> None:
    source = source_of(False, False)
    for number, rows in enumerate(days(2)):
        write(tmp_path, number, rows)
        make(source, tmp_path, "grown", SMALL, append=True)
    make(
        source,
        tmp_path,
        "fresh",
        {"core": 0, "catalogue": str(tmp_path / "grown")},
        append=False,
    )
    ids = read_table(str(tmp_path / "fresh/items"))["item_id"].to_pylist()
    assert ids != sorted(ids)
    assert broken(str(tmp_path / "fresh")) == {}


KILLED = """
import os, sys
from pathlib import Path
from tests.pipelines.data.test_append import SMALL, source_of
from pipelines.data.prepare import prepare
from pipelines.data.settings import read_config

folder, line = Path(sys.argv[1]), int(sys.argv[2])
said = []
def say(text):
    said.append(text)
    if len(said) == line:
        os.kill(os.getpid(), 9)
config = read_config({"min_matched": 0, "max_rejects": 1, **SMALL})
prepare(source_of(False, False), str(folder), str(folder / "grown"), config, report=say, existing="append")
"""


@pytest.mark.long
@pytest.mark.exhaustive
def test_killed_it_leaves_the_version_before(tmp_path: Path) -> None:
    source, files = source_of(False, False), days(2)
    write(tmp_path, 0, files[0])
    make(source, tmp_path, "grown", SMALL, append=True)
    before = content(tmp_path / "grown")
    write(tmp_path, 1, files[1])
    make(source, tmp_path, "whole", SMALL, append=False)
    after = content(tmp_path / "whole")
    for line in itertools.count(1):
        subprocess.run(
            [sys.executable, "-c", KILLED, str(tmp_path), str(line)], cwd=ROOT
        )
        assert broken(str(tmp_path / "grown")) == {}
        if (found := content(tmp_path / "grown")) != before:
            break
    assert line > 5  # after all that is read, made and written
    assert found == after


@pytest.mark.parametrize("switched", range(1, 5))
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.exhaustive
def test_stopped_between_two_manifests_the_same_line_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool, switched: int
) -> None:
    """Of the first day each table is switched to by itself. There is a reject in each
    file.
    """
    source, files, left = source_of(False, False), days(2), [switched]

    def some(made: dict[str, Any]) -> None:
        tables = list(made.items())[: left[0]]
        left[0] -= len(tables)
        replace_tables(dict(tables))
        if not left[0]:
            raise KeyboardInterrupt

    write(tmp_path, 0, files[0])
    if not first:
        make(source, tmp_path, "grown", SMALL, append=True)
        write(tmp_path, 1, files[1])
    make(source, tmp_path, "whole", SMALL, append=False)
    with monkeypatch.context() as patched:
        patched.setattr(run, "replace_tables", some)
        with pytest.raises(KeyboardInterrupt):
            make(source, tmp_path, "grown", SMALL, append=True)
    make(source, tmp_path, "grown", SMALL, append=True)
    assert content(tmp_path / "grown") == content(tmp_path / "whole")
    assert read_manifest(str(tmp_path / "grown/rejects")).rows == (1 if first else 2)


def test_a_day_may_have_no_rows_or_lack_a_column(tmp_path: Path) -> None:
    keys = {
        "user": "u",
        "item": "i",
        "time": {"column": "t", "unit": "s"},
        "labels": {"click": {"column": "c"}},
    }
    source = parse_log({"files": "log_*.csv", **keys})
    rows = [f"u{k % 9},i{k * k % 7},{1_700_000_000 + 3600 * k}" for k in range(90)]
    for number, lines in enumerate(
        (
            ["u,i,t,c", *(f"{row},1" for row in rows[:60])],
            ["u,i,t,c"],
            ["u,i,t", *rows[60:]],
        )
    ):
        (tmp_path / f"log_{number}.csv").write_text("\n".join(lines) + "\n")
        said = make(source, tmp_path, "grown", SMALL, append=True)
    assert any(
        "warning: no new file has a column 'c', so its values are missing; " in line
        for line in said
    )
    make(source, tmp_path, "whole", SMALL, append=False)
    assert content(tmp_path / "grown") == content(tmp_path / "whole")


POSITIONS = "ties is log_order and the log has positions"


@pytest.mark.parametrize(
    ("second", "changes", "said"),
    [
        ({}, {"duplicates": "keep"}, "the table was made with another duplicates"),
        ({}, {"partitions": 2}, "the table was made with another partitions"),
        (
            {"log_0.jsonl": '{"user": "u", "item": "a", "ms": 1600000000000}\n'},
            {},
            "log_0.jsonl has changed since",
        ),
        (
            {"log_9.jsonl": "[]\n"},
            {"source": {"position": "position"}, "ties": "log_order"},
            POSITIONS,
        ),
        (
            {"log_-.jsonl": "{}\n"},
            {"ties": "log_order"},
            "log_-.jsonl sorts before a file that the table already has",
        ),
        (
            {"users.csv": "user,tier\nu,two\n"},
            {"source": {"users": USERS}},
            "users.csv has changed since",
        ),
        (
            {"items.csv": "item,author\na,x\n", "log_1.jsonl": json.dumps(STEADY[-1])},
            {"items": {"keep": "all"}},
            "items, such as .b., are no longer in the catalogue",
        ),
    ],
)
def test_refused_in_one_line(
    tmp_path: Path, second: dict[str, str], changes: Row, said: str
) -> None:
    later = {"duplicates", "partitions"} & changes.keys()
    own, items = changes.pop("source", {}), changes.pop("items", {})
    (tmp_path / "users.csv").write_text("user,tier\nu,one\n")
    plain = {
        key: value
        for key, value in source_of(False, False, **items).config.items()
        if key != "position"
    }
    source, config = parse_log(plain | own), {**SMALL, "core": 0}
    write(tmp_path, 0, days(1)[0])
    make(source, tmp_path, "grown", config | ({} if later else changes), append=True)
    before = content(tmp_path / "grown")
    for name, text in second.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        make(source, tmp_path, "grown", config | changes, append=True)
    assert content(tmp_path / "grown") == before
