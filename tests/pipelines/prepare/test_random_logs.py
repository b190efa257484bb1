"""Random logs by random settings: the events are those of the rows, slow and obvious code
(the audit) proves the other tables, and a log that is appended file by file, or prepared
on Ray, has the same tables as the whole log in one process.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st

from core.errors import UserError
from core.tables import read_manifest
from tests.fixtures.audited_tables import find_violations
from tests.fixtures.commands import merge, prepare_log, read_rows
from tests.fixtures.random_logs import (
    ACTIONS,
    BEGIN,
    HOUR,
    ITEMS_CSV,
    ROWS,
    SEARCH,
    STEADY,
    USERS_CSV,
    Row,
    make_mapping,
)

NUM_FILES = 3
FIRST_HOURS = (8, 12)
"""Hours at which the second and the third file of a log begin."""
REJECTED_ROW = {"user": None, "item": "a", "ms": BEGIN}
TIERS = {"u": "one", "steady": "two"}

LAST_HOURS = {"by": "temporal", "val_days": 2 / 24, "test_days": 2 / 24}
SHARES = {"by": "temporal", "val_fraction": 0.1, "test_fraction": 0.25}
MOMENTS = {
    "by": "temporal",
    "val_start": BEGIN + 5 * HOUR,
    "test_start": BEGIN + 7 * HOUR,
}
LAST_OUT = {"by": "leave_last_out"}
SETTINGS = {
    "retrieval": st.fixed_dictionaries(
        {
            "core": st.integers(0, 3),
            "ties": st.sampled_from(["strict", "log_order"]),
            "behaviour": st.sampled_from([None, "click"]),
            "max_events": st.sampled_from([12, 100]),
            "split": st.sampled_from([LAST_HOURS, SHARES, LAST_OUT]),
            "duplicates": st.sampled_from(["drop", "keep"]),
            "core_window": st.sampled_from(["all", "train"]),
        }
    ),
    "search": st.fixed_dictionaries(
        {
            "core": st.just(0),
            "behaviour": st.just("click"),
            "max_events": st.sampled_from([2, 5, 100]),
            "split": st.sampled_from([LAST_HOURS, SHARES, LAST_OUT]),
            "search": st.just(SEARCH),
        }
    ),
    "actions": st.fixed_dictionaries(
        {
            "core": st.just(0),
            "max_events": st.sampled_from([12, 100]),
            "split": st.sampled_from([LAST_HOURS, SHARES, MOMENTS]),
            "actions": st.just(ACTIONS),
        }
    ),
}
LOGS = st.lists(st.tuples(ROWS, st.integers(0, 2)), min_size=1, max_size=3)
"""Lists of rows, each with the earliest file that may hold them."""


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


def write_file(folder: Path, number: int, rows: list[Row]) -> None:
    """Write a file of the log, and with the first the files of items and users."""
    if number == 0:
        (folder / "items.csv").write_text(ITEMS_CSV)
        (folder / "users.csv").write_text(USERS_CSV)
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / f"log_{number}.jsonl").write_text("".join(lines))


def make_events(rows: list[Row], mapping: Row) -> tuple[list[Row], int]:
    """Return the events of rows, unordered, and the number of rows that repeat others."""
    events: list[Row] = []
    for row in rows:
        if row["user"] is None:
            continue
        dwell = row["dwell"]
        event = {
            "user_id": row["user"],
            "request_id": row["request"] if "request" in mapping else "",
            "timestamp_ms": row["ms"],
            "item_id": row["item"],
            "query": row["query"],
            "position": row["position"] if "position" in mapping else 0,
            "label_click": row["click"],
            "label_like": row["like"],
            "label_dwell": None if dwell is None else float(np.float32(dwell)),
            "num_price": row["price"],
            "cat_city": row["city"],
            "cat_tier": TIERS.get(row["user"]),
        }
        if "time" in mapping["labels"]["click"]:
            known = row["ms"] + row["late"] * HOUR // 2
            event["known_click"] = known if row["click"] else None
        events.append(event)
    unique = list({str(event): event for event in events}.values())
    repeated = len(events) - len(unique)
    if mapping["prepare"].get("duplicates") != "keep":
        events = unique
    if mapping["prepare"].get("ties") == "log_order":
        counts: Counter[tuple] = Counter()
        for number, event in enumerate(events):
            key = event["user_id"], event["timestamp_ms"]
            events[number] = event | {"position": counts[key]}
            counts[key] += 1
    return events, repeated


def check_events(tables: Path, rows: list[Row], mapping: Row) -> None:
    """Check the events, the counts of the statistics and cut times by shares."""
    events, repeated = make_events(rows, mapping)
    read = read_rows(tables, "events")
    assert Counter(str(sorted(event.items())) for event in read) == Counter(
        str(sorted(event.items())) for event in events
    )
    raw = json.loads((tables / "statistics.json").read_text())["raw"]
    assert raw["rows_read"] == len(rows)
    assert raw["rejects"] == rows.count(REJECTED_ROW)
    if mapping["prepare"].get("duplicates") != "keep":
        assert raw["duplicates"] == repeated
    info = read_manifest(str(tables / "sequences")).info
    if mapping["prepare"]["split"] == SHARES:
        if mapping["prepare"]["kind"] == "retrieval" and info["behaviour"]:
            events = [event for event in events if event["label_click"]]
        times = sorted(event["timestamp_ms"] for event in events)
        assert info["split"] == {
            "by": "temporal",
            "val_start_ms": times[int(len(times) * 0.65)],
            "test_start_ms": times[int(len(times) * 0.75)],
        }


def read_content(tables: Path) -> Row:
    """Return rows, infos and statistics of tables, with item ids in place of indices.

    Left out are hashes, which depend on the order of the items, and the record of the
    files that were appended.
    """
    names = ("events", "rejects", "items", "queries", "sequences")
    names = tuple(name for name in names if read_manifest(str(tables / name)))
    rows = {name: read_rows(tables, name) for name in names}
    ids = [row["item_id"] for row in rows["items"]]
    assert [row["item_index"] for row in rows["items"]] == [*range(len(ids))]
    for row in rows["sequences"]:
        row["item_index"] = [ids[item] for item in row["item_index"]]
        for request in row.get("requests", ()):
            request["candidates"] = [ids[item] for item in request["candidates"]]
    for row in rows["items"]:
        row["item_index"] = 0
    for name in ("items", "rejects", "sequences", "events"):
        rows[name].sort(key=lambda row: str(row.get("user_id", row)))
    infos = {name: read_manifest(str(tables / name)).info for name in names}
    for info in infos.values():
        for key in ("split_made_from", "items_hash", "old_files"):
            info.pop(key, None)
    statistics = json.loads((tables / "statistics.json").read_text())
    return {"rows": rows, "infos": infos, "statistics": {**statistics, "hashes": None}}


def check_log(
    folder: Path, files: list[list[Row]], mapping: Row, **options: Any
) -> None:
    """Check the tables of a log, and of the same log appended file by file.

    Args:
        folder: An empty folder.
        files: Rows of each file.
        mapping: Mapping of the log.
        options: Options of jobs.prepare.
    """
    ids: list[str] = []
    for number, rows in enumerate(files):
        write_file(folder, number, rows)
        prepare_log(mapping, folder, folder / "grown", append=True, **options)
        earlier, ids = (
            ids,
            [row["item_id"] for row in read_rows(folder / "grown", "items")],
        )
        assert ids[: len(earlier)] == earlier  # items keep their indices
    prepare_log(mapping, folder, folder / "whole", append=True, **options)

    assert find_violations(str(folder / "whole")) == {}
    assert find_violations(str(folder / "grown")) == {}
    check_events(folder / "whole", [row for rows in files for row in rows], mapping)
    contents = read_content(folder / "grown"), read_content(folder / "whole")
    for grown_content, content in zip(*map(dict.values, contents), strict=True):
        assert grown_content == content


def make_random_mapping(
    kind: str,
    config: Row,
    keep: str = "used",
    named_requests: bool = False,
    late_clicks: bool = False,
) -> Row:
    """Return a mapping with settings that fit each other and the log."""
    settings = {"kind": kind, "min_matched": 0, "max_rejects": 1, **config}
    strict = config.get("ties") != "log_order"
    if not config.get("behaviour") or not strict:
        late_clicks = False
    if config["split"] == LAST_OUT:
        settings["core_window"] = "all"
    mapping = make_mapping(named_requests and strict, late_clicks)
    mapping |= {"prepare": settings}
    position = {} if strict else {"position": None}
    return merge(mapping, {"items": {"keep": keep}, **position})


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", SETTINGS)
# Each run draws other examples.
@settings(max_examples=5, phases=[Phase.generate])
@given(data=st.data())
def test_tables_of_random_logs(tmp_path_factory, kind, data):
    config = data.draw(SETTINGS[kind])
    keep = data.draw(st.sampled_from(["all", "used"]))
    named_requests, late_clicks = data.draw(st.booleans()), data.draw(st.booleans())
    files = split_into_files(data.draw(LOGS), data.draw(st.integers(0, 9)))
    mapping = make_random_mapping(kind, config, keep, named_requests, late_clicks)

    try:
        check_log(tmp_path_factory.mktemp("log"), files, mapping)
    except UserError as error:
        # a log may have too few times for a split by shares, or too short histories
        if re.search("a split without events|no training request", str(error)):
            reject()
        raise


def draw_days(count: int = NUM_FILES, seed: int = 0) -> list[list[Row]]:
    """Draw the rows of some days, of many users and items.

    Each day begins with a rejected row, a quarter of its rows are of the day before,
    and it repeats 8 rows of the file before.
    """
    draw = random.Random(seed)
    files: list[list[Row]] = []
    for day in range(count):
        rows: list[Row] = [REJECTED_ROW]
        for _ in range(150):
            user = int(draw.paretovariate(0.7)) % 60
            item = int(draw.paretovariate(0.7)) % (20 + 5 * day)
            day_of_row = max(0, day - draw.choice([0, 0, 0, 1]))
            ms = BEGIN + 24 * HOUR * day_of_row + draw.randrange(24 * HOUR)
            row = {"user": f"u{user}", "item": f"i{item}", "ms": ms}
            row |= {"position": 0, "click": draw.random() < 0.7}
            rows.append(STEADY[-1] | row)
        if files:
            rows += files[-1][1:9]
        files.append(rows)
    return files


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("retrieval", {"core": 2, "split": SHARES, "core_window": "train"}),
        (
            "search",
            {"core": 0, "behaviour": "click", "split": SHARES, "search": SEARCH},
        ),
        ("actions", {"core": 0, "split": SHARES, "actions": ACTIONS}),
    ],
)
def test_tables_that_grow_on_ray_in_partitions_equal_those_of_one_process(
    tmp_path, kind, config
):
    mapping = make_random_mapping(kind, config)

    check_log(tmp_path, draw_days(), mapping, partitions=3)

    prepare_log(mapping, tmp_path, tmp_path / "alone", append=True)
    rows = read_content(tmp_path / "whole")["rows"]
    assert rows == read_content(tmp_path / "alone")["rows"]
    assert len(read_manifest(str(tmp_path / "grown/events")).files) == 3
