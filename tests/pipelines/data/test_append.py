"""Appending the new files of a growing log gives the same tables as preparing all files
at once, but for the order of the items.
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
from pipelines.data.reading.log import Log, parse_log
from pipelines.data.settings import read_config
from tests.fixtures.audited_tables import find_violations
from tests.fixtures.random_logs import (
    ACTIONS,
    BEGIN,
    HOUR,
    ITEMS_CSV,
    ROWS,
    SEARCH,
    SOURCE,
    STEADY,
    Row,
    make_source,
)

NUM_FILES = 3
FIRST_HOURS = (8, 12)
"""Hours at which the second and the third file of a log begin."""
MOVING_SPLIT = {"kind": "temporal", "val_days": 2 / 24, "test_days": 2 / 24}
"""A split whose cuts move with the end of the log."""
USERS = {"files": "users.csv", "user": "user", "attributes": {"tier": "tier"}}
ROOT = Path(__file__).parents[3]
REJECTED_ROW = {"user": None, "item": "a", "ms": BEGIN}

LOGS = st.lists(st.tuples(ROWS, st.integers(0, 2)), min_size=1, max_size=3)
"""Lists of rows, each with the earliest file that may hold them."""
few_examples = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def split_into_files(
    log: list[tuple[list[Row], int]], repeated: int = 0
) -> list[list[Row]]:
    """Return the rows of each file of a log, beside the rows of `STEADY`.

    Rows are in the file of their hour or, if later, in the earliest file that the log
    gives for them. Each file starts with a rejected row, and the last one repeats the
    first `repeated` rows of the first one.
    """
    files: list[list[Row]] = [[REJECTED_ROW] for _ in range(NUM_FILES)]
    for rows, earliest_file in [(STEADY, 0), *log]:
        for row in rows:
            hour = (row["ms"] - BEGIN) // HOUR
            file_of_hour = sum(hour >= first for first in FIRST_HOURS)
            files[max(earliest_file, file_of_hour)].append(row)
    files[-1] += files[0][:repeated]
    return files


def make_growing_source(
    named_requests: bool = False, late_clicks: bool = False, **items: Any
) -> Log:
    """Parse the mapping of a log in the files `log_*.jsonl`; `items` changes its keys
    of the item files.
    """
    return make_source(
        named_requests,
        late_clicks,
        files="log_*.jsonl",
        items=SOURCE["items"] | items,
    )


def write_file(folder: Path, number: int, rows: list[Row]) -> None:
    """Write a file of the log, and the item file."""
    (folder / "items.csv").write_text(ITEMS_CSV + "never,z\n")
    (folder / f"log_{number}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )


def prepare_tables(
    source: Log, folder: Path, out: str, config: Row, append: bool
) -> list[str]:
    """Prepare the tables `out` of the log in a folder and return the reported lines."""
    lines: list[str] = []
    prepare(
        source,
        str(folder),
        str(folder / out),
        read_config({"min_matched": 0, "max_rejects": 1, **config}),
        report=lines.append,
        existing="append" if append else "continue",
    )
    return lines


def read_content(tables: Path) -> Row:
    """Return rows, infos and statistics of tables, with item ids in place of indices.

    Left out are hashes, which depend on the order of the items, and the record of the
    files that were appended.
    """
    names = [
        name
        for name in ("events", "rejects", "items", "queries", "sequences")
        if has_manifest(str(tables / name))
    ]
    manifests = {name: read_manifest(str(tables / name)) for name in names}
    rows: dict[str, list[Row]] = {}
    for name, manifest in manifests.items():
        uri = str(tables / name)
        rows[name] = read_table(uri).to_pylist() if manifest.rows else []

    ids = [row["item_id"] for row in rows["items"]]
    assert [row["item_index"] for row in rows["items"]] == [*range(len(ids))]
    for row in rows["sequences"]:
        row["item_index"] = [ids[item] for item in row["item_index"]]
        for request in row.get("requests", ()):
            request["candidates"] = [ids[item] for item in request["candidates"]]
    for row in rows["items"]:
        row["item_index"] = 0
    rows["items"].sort(key=lambda row: row["item_id"])
    rows["rejects"].sort(key=str)

    infos = {name: manifest.info for name, manifest in manifests.items()}
    for info in infos.values():
        info.pop("split_made_from", None)
        info.pop("items_hash", None)
        info.pop("old_files", None)
    statistics = json.loads((tables / "statistics.json").read_text())
    return {"rows": rows, "infos": infos, "statistics": {**statistics, "hashes": None}}


def check_growing(
    folder: Path, files: list[list[Row]], source: Log, config: Row
) -> None:
    """Append one file after the other and compare with all files at once.

    Items keep their indices. The tables of all files at once are prepared as tables
    that may be appended to.
    """
    previous_ids: list[str] = []
    for number, rows in enumerate(files):
        write_file(folder, number, rows)
        prepare_tables(source, folder, "grown", config, append=True)
        ids = read_table(str(folder / "grown/items"))["item_id"].to_pylist()
        assert ids[: len(previous_ids)] == previous_ids
        previous_ids = ids
    prepare_tables(source, folder, "whole", config, append=True)

    grown, whole = read_content(folder / "grown"), read_content(folder / "whole")
    assert grown["rows"] == whole["rows"]
    assert grown["infos"] == whole["infos"]
    assert grown["statistics"] == whole["statistics"]
    assert find_violations(str(folder / "grown")) == {}


def has_valid_core_window(config: Row) -> bool:
    """Return whether the core window fits the split: `train` needs a temporal split."""
    return config["core_window"] == "all" or config["split"] == MOVING_SPLIT


RETRIEVAL_SETTINGS = st.fixed_dictionaries(
    {
        "kind": st.just("retrieval"),
        "core": st.integers(0, 3),
        "ties": st.sampled_from(["strict", "log_order"]),
        "behaviour": st.sampled_from([None, "click"]),
        "max_events": st.sampled_from([12, 100]),
        "split": st.sampled_from([MOVING_SPLIT, {"kind": "leave_last_out"}]),
        "duplicates": st.sampled_from(["drop", "keep"]),
        "core_window": st.sampled_from(["all", "train"]),
    }
).filter(has_valid_core_window)


def drop_position(source: Log) -> Log:
    """Return a log whose rows have no positions."""
    return parse_log(
        {key: value for key, value in source.config.items() if key != "position"}
    )


@pytest.mark.long
@few_examples
@given(
    LOGS,
    st.integers(0, 9),
    RETRIEVAL_SETTINGS,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["all", "used"]),
)
def test_appended_retrieval_tables_equal_those_of_all_files_at_once(
    tmp_path_factory: pytest.TempPathFactory,
    log: Any,
    repeated: int,
    config: Row,
    named_requests: bool,
    late_clicks: bool,
    keep: str,
) -> None:
    if config["behaviour"] is None or config["ties"] != "strict":
        late_clicks = False
    source = make_growing_source(named_requests, late_clicks, keep=keep)
    if config["ties"] == "log_order":
        source = drop_position(source)
    files = split_into_files(log, repeated)

    check_growing(tmp_path_factory.mktemp("log"), files, source, config)


@pytest.mark.long
@few_examples
@given(LOGS, st.sampled_from([12, 100]), st.booleans(), st.booleans())
@pytest.mark.exhaustive
def test_appended_search_tables_equal_those_of_all_files_at_once(
    tmp_path_factory: pytest.TempPathFactory,
    log: Any,
    max_events: int,
    named_requests: bool,
    late_clicks: bool,
) -> None:
    config = {
        "kind": "search",
        "core": 0,
        "behaviour": "click",
        "max_events": max_events,
        "split": MOVING_SPLIT,
        "search": SEARCH,
    }
    source = make_growing_source(named_requests, late_clicks)

    check_growing(tmp_path_factory.mktemp("log"), split_into_files(log), source, config)


def test_results_of_equal_time_and_position_stay_in_the_order_of_the_log(
    tmp_path: Path,
) -> None:
    config = {
        "kind": "search",
        "core": 0,
        "behaviour": "click",
        "split": MOVING_SPLIT,
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
    results = [
        {**row, "price": float(number % 7), "city": "tvw"[number % 3]}
        for number in range(60)
    ]

    check_growing(
        tmp_path, split_into_files([(results, 0)]), make_growing_source(), config
    )


@pytest.mark.long
@few_examples
@given(LOGS, st.sampled_from([12, 100]), st.integers(0, 9))
@pytest.mark.exhaustive
def test_appended_actions_tables_equal_those_of_all_files_at_once(
    tmp_path_factory: pytest.TempPathFactory, log: Any, max_events: int, repeated: int
) -> None:
    config = {
        "kind": "actions",
        "core": 0,
        "max_events": max_events,
        "split": MOVING_SPLIT,
        "actions": ACTIONS,
    }
    folder = tmp_path_factory.mktemp("log")
    (folder / "users.csv").write_text("user,tier\nu,one\nsteady,two\n")
    source = parse_log({**make_growing_source().config, "users": USERS})

    check_growing(folder, split_into_files(log, repeated), source, config)


def draw_days(count: int = 3, seed: int = 0) -> list[list[Row]]:
    """Draw the rows of some days, of many users and items.

    Each day begins with a rejected row, a quarter of its rows are of the day before,
    and it repeats 8 rows of the file before.
    """
    generator = random.Random(seed)
    files: list[list[Row]] = []
    for day in range(count):
        rows: list[Row] = [REJECTED_ROW]
        for _ in range(150):
            user = int(generator.paretovariate(0.7)) % 60
            item = int(generator.paretovariate(0.7)) % (20 + 5 * day)
            day_of_row = max(0, day - generator.choice([0, 0, 0, 1]))
            ms = BEGIN + 24 * HOUR * day_of_row + generator.randrange(24 * HOUR)
            row = {"user": f"u{user}", "item": f"i{item}", "ms": ms}
            rows.append({**STEADY[-1], **row, "click": generator.random() < 0.7})
        if files:
            rows += files[-1][1:9]
        files.append(rows)
    return files


SMALL = {"kind": "retrieval", "core": 2, "split": {"kind": "temporal"}}


@pytest.mark.usefixtures("ray_local")
@pytest.mark.exhaustive
def test_tables_of_several_partitions_grow_like_those_of_one(tmp_path: Path) -> None:
    config = SMALL | {"partitions": 3}

    check_growing(tmp_path, draw_days(), make_growing_source(), config)

    assert len(read_manifest(str(tmp_path / "grown/events")).files) == 3


@pytest.mark.usefixtures("ray_local")
@pytest.mark.exhaustive
def test_only_partitions_that_get_rows_are_written(tmp_path: Path) -> None:
    source, events = make_growing_source(), tmp_path / "grown/events"
    write_file(tmp_path, 0, draw_days(1)[0])
    prepare_tables(source, tmp_path, "grown", SMALL | {"partitions": 5}, append=True)
    first = read_manifest(str(events))

    write_file(tmp_path, 1, [{**STEADY[-1], "user": "u1", "item": "new"}])
    prepare_tables(source, tmp_path, "grown", SMALL, append=True)

    second = read_manifest(str(events))
    assert second.extends == [first.hash]
    unchanged = [part for part in first.files if part in second.files]
    assert len(unchanged) == len(first.files) - 1 == 4
    parquet_files = {path.name for path in events.glob("*.parquet")}
    assert parquet_files == {part.path for part in second.files}


def read_write_times(folder: Path) -> dict[Path, int]:
    """Return the time of the last write of each Parquet file below a folder."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}


def test_a_file_that_was_appended_is_not_appended_again(tmp_path: Path) -> None:
    source = make_growing_source()
    for number, rows in enumerate(draw_days(2)):
        write_file(tmp_path, number, rows)
        prepare_tables(source, tmp_path, "grown", SMALL, append=True)
    before = read_write_times(tmp_path / "grown")

    (tmp_path / "log_0.jsonl").unlink()  # files already read may go
    (tmp_path / "log_1.jsonl").touch()  # as if copied once more
    lines = prepare_tables(source, tmp_path, "grown", SMALL, append=True)

    up_to_date = [line.split(":")[0] for line in lines if ": up to date" in line]
    assert up_to_date == ["events", "items", "sequences"]
    assert read_write_times(tmp_path / "grown") == before


def make_source_of_files(pattern: str, **changes: Any) -> Log:
    """Parse the mapping of a log in the files that match a pattern."""
    keys = {**make_growing_source().config, "files": pattern, **changes}
    return parse_log(keys)


def test_a_pattern_may_be_widened_to_new_files(tmp_path: Path) -> None:
    first, second = draw_days(2)
    narrow, wide = make_source_of_files("log_0.jsonl"), make_growing_source()
    write_file(tmp_path, 0, first)
    prepare_tables(narrow, tmp_path, "grown", SMALL, append=True)

    write_file(tmp_path, 1, second)
    lines = prepare_tables(narrow, tmp_path, "grown", SMALL, append=True)
    assert any(line.endswith("reads log_1.jsonl") for line in lines)

    prepare_tables(wide, tmp_path, "grown", SMALL, append=True)
    prepare_tables(wide, tmp_path, "whole", SMALL, append=False)
    assert read_content(tmp_path / "grown") == read_content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            make_source_of_files("log_1.jsonl"),
            "log_0.jsonl, whose events the table has, does not match",
        ),
        (
            make_source_of_files("log_*", user="item"),
            "the table was made with another source",
        ),
    ],
)
def test_a_pattern_without_the_old_files_or_with_other_keys_is_refused(
    tmp_path: Path, source: Log, words: str
) -> None:
    for number, rows in enumerate(draw_days(2)):
        write_file(tmp_path, number, rows)
    first_file = make_source_of_files("log_0.jsonl")
    prepare_tables(first_file, tmp_path, "grown", SMALL, append=True)
    before = read_content(tmp_path / "grown")

    with pytest.raises(UserError, match=words):
        prepare_tables(source, tmp_path, "grown", SMALL, append=True)
    assert read_content(tmp_path / "grown") == before


def test_another_log_takes_a_catalogue_that_was_appended_to(tmp_path: Path) -> None:
    source = make_growing_source()
    for number, rows in enumerate(draw_days(2)):
        write_file(tmp_path, number, rows)
        prepare_tables(source, tmp_path, "grown", SMALL, append=True)
    config = {"core": 0, "catalogue": str(tmp_path / "grown")}

    prepare_tables(source, tmp_path, "fresh", config, append=False)

    ids = read_table(str(tmp_path / "fresh/items"))["item_id"].to_pylist()
    assert ids != sorted(ids)
    assert find_violations(str(tmp_path / "fresh")) == {}


APPEND_AND_KILL = """
import os, sys
from pathlib import Path
from tests.pipelines.data.test_append import SMALL, make_growing_source
from pipelines.data.prepare import prepare
from pipelines.data.settings import read_config

folder, last_line = Path(sys.argv[1]), int(sys.argv[2])
lines = []
def report(text):
    lines.append(text)
    if len(lines) == last_line:
        os.kill(os.getpid(), 9)
config = read_config({"min_matched": 0, "max_rejects": 1, **SMALL})
prepare(make_growing_source(), str(folder), str(folder / "grown"), config, report=report, existing="append")
"""


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_killed_append_leaves_the_tables_before_or_after_it(tmp_path: Path) -> None:
    source, files = make_growing_source(), draw_days(2)
    write_file(tmp_path, 0, files[0])
    prepare_tables(source, tmp_path, "grown", SMALL, append=True)
    before = read_content(tmp_path / "grown")
    write_file(tmp_path, 1, files[1])
    prepare_tables(source, tmp_path, "whole", SMALL, append=False)

    content = before
    for last_line in itertools.count(1):
        command = [sys.executable, "-c", APPEND_AND_KILL, str(tmp_path), str(last_line)]
        subprocess.run(command, cwd=ROOT)
        assert find_violations(str(tmp_path / "grown")) == {}
        content = read_content(tmp_path / "grown")
        if content != before:
            break

    assert last_line > 5  # the tables are replaced after all are written
    assert content == read_content(tmp_path / "whole")


@pytest.mark.parametrize("switched", range(1, 5))
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.exhaustive
def test_an_append_stopped_between_two_manifests_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool, switched: int
) -> None:
    """Stop after `switched` manifests. In the first append each manifest is replaced by
    itself. Each file has one reject.
    """
    source, files = make_growing_source(), draw_days(2)
    remaining = switched

    def replace_some(tables: dict[str, Any]) -> None:
        nonlocal remaining
        some = dict(itertools.islice(tables.items(), remaining))
        remaining -= len(some)
        replace_tables(some)
        if not remaining:
            raise KeyboardInterrupt

    write_file(tmp_path, 0, files[0])
    if not first:
        prepare_tables(source, tmp_path, "grown", SMALL, append=True)
        write_file(tmp_path, 1, files[1])
    prepare_tables(source, tmp_path, "whole", SMALL, append=False)

    with monkeypatch.context() as patched:
        patched.setattr(run, "replace_tables", replace_some)
        with pytest.raises(KeyboardInterrupt):
            prepare_tables(source, tmp_path, "grown", SMALL, append=True)
    prepare_tables(source, tmp_path, "grown", SMALL, append=True)

    assert read_content(tmp_path / "grown") == read_content(tmp_path / "whole")
    assert read_manifest(str(tmp_path / "grown/rejects")).rows == (1 if first else 2)


def test_a_new_file_may_have_no_rows_or_lack_a_column(tmp_path: Path) -> None:
    keys = {
        "user": "u",
        "item": "i",
        "time": {"column": "t", "unit": "s"},
        "labels": {"click": {"column": "c"}},
    }
    source = parse_log({"files": "log_*.csv", **keys})
    rows = [f"u{k % 9},i{k * k % 7},{1_700_000_000 + 3600 * k}" for k in range(90)]
    files = [
        ["u,i,t,c", *(f"{row},1" for row in rows[:60])],
        ["u,i,t,c"],
        ["u,i,t", *rows[60:]],
    ]
    for number, lines in enumerate(files):
        (tmp_path / f"log_{number}.csv").write_text("\n".join(lines) + "\n")
        reported = prepare_tables(source, tmp_path, "grown", SMALL, append=True)
    prepare_tables(source, tmp_path, "whole", SMALL, append=False)

    warning = "warning: no new file has a column 'c', so its values are missing; "
    assert any(warning in line for line in reported)
    assert read_content(tmp_path / "grown") == read_content(tmp_path / "whole")


POSITIONS = "ties is log_order and the log has positions"


@pytest.mark.parametrize(
    ("new_files", "changes", "words"),
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
def test_a_log_that_cannot_be_appended_is_refused_and_leaves_the_tables(
    tmp_path: Path, new_files: dict[str, str], changes: Row, words: str
) -> None:
    settings_of_run = dict(changes)
    source_keys = settings_of_run.pop("source", {})
    items = settings_of_run.pop("items", {})
    without_positions = drop_position(make_growing_source(**items))
    source = parse_log(without_positions.config | source_keys)
    first_config: Row = {**SMALL, "core": 0}
    second_config = first_config | settings_of_run
    if not {"duplicates", "partitions"} & changes.keys():
        first_config = second_config
    (tmp_path / "users.csv").write_text("user,tier\nu,one\n")
    write_file(tmp_path, 0, draw_days(1)[0])
    prepare_tables(source, tmp_path, "grown", first_config, append=True)
    before = read_content(tmp_path / "grown")

    for name, text in new_files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        prepare_tables(source, tmp_path, "grown", second_config, append=True)
    assert read_content(tmp_path / "grown") == before
