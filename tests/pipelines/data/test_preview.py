"""A dry run reads the first rows of a log, prints what they become, and names the
mistakes of the mapping.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.storage.tables import UserError
from pipelines.data.reading.log import Log, parse_log
from pipelines.data.reading.unread import describe_unread
from pipelines.data.suggestion.preview import lines, preview, warnings

LOG = "u,i,t\na,x,1700000000.5\nb,y,1700000001\n"


def make_log(**keys: Any) -> Log:
    """Parse the mapping of the files `log*` with further keys."""
    mapping = {
        "files": "log*",
        "user": "u",
        "item": "i",
        "time": {"column": "t", "unit": "s"},
    }
    return parse_log(mapping | keys)


def print_preview(log: Log, folder: Path) -> list[str]:
    """Return the lines of a dry run with a space between the columns."""
    return [" ".join(line.split()) for line in lines(preview(log, str(folder), 0.4))]


def read_error(log: Log, folder: Path) -> str:
    """Return the message of the UserError that a dry run raises, one line."""
    with pytest.raises(UserError) as caught:
        preview(log, str(folder), 0.01)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_dry_run_prints_a_line_per_file_and_column_with_its_values(
    tmp_path: Path,
) -> None:
    (tmp_path / "log.csv").write_text(LOG)
    (tmp_path / "items.csv").write_text("id,name\nx,Tea\n")
    (tmp_path / "users.csv").write_text("id,age\na,30\n")
    (tmp_path / "stock.csv").write_text("id,at,left\nx,1700000000,2.5\n")
    stock = {
        "files": "stock.csv",
        "item": "id",
        "time": {"column": "at", "unit": "s"},
        "numbers": ["left"],
    }
    log = make_log(
        items={"files": "items.csv", "item": "id", "texts": {"title": "name"}},
        users={"files": "users.csv", "user": "id", "attributes": ["age"]},
        as_of={"stock": stock},
        labels={"late": {"column": "1", "delay_minutes": 1}},
    )

    printed = print_preview(log, tmp_path)

    assert {
        "events: log.csv, the only file: 2 rows read, 0 rejected",
        "cat_age age of the users string 30",
        "timestamp_ms t, s int64 2023-11-14T22:13:20.500Z | 2023-11-14T22:13:21.000Z",
        "known_late 1 minutes after its event int64 2023-11-14T22:14:20.500Z | 2023-11-14T22:14:21.000Z",
        "items: items.csv, the only file: 1 row read, 0 rejected",
        "num_left left float 2.5",
    } <= set(printed)


def test_a_dry_run_prints_rejects_by_reason_with_an_example(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        LOG + "c,z,soon\nd,z,soon,5\n" + "a,x,1700000000\n" * 6
    )

    printed = print_preview(make_log(), tmp_path)

    assert "events: log.csv, the only file: 10 rows read, 2 rejected" in printed
    no_time = "rejected: 1 row, t: not a number of s; such as log.csv row 2"
    assert any(no_time in line for line in printed)
    [ragged] = [line for line in printed if "row: 4 columns, not 3" in line]
    assert "rejected: 1 row, " in ragged
    assert "d,z,soon,5" in ragged


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"user": "usr"}, "no column 'usr'; the nearest is 'u'"),
        ({"labels": {"click": "clikc"}}, "no event file of"),
        (
            {"items": {"files": "items.csv", "item": "id", "texts": ["nme"]}},
            "'nme'; the nearest is 'name'",
        ),
        (
            {"users": {"files": "items.csv", "user": "id", "attributes": ["naem"]}},
            "'naem'; the nearest is 'name'",
        ),
        (
            {"time": {"column": "t", "unit": "ms"}},
            "most often t: before 1980, check time.unit",
        ),
        ({"delimiter": ";"}, "set 'delimiter: \",\"'"),
    ],
)
def test_a_mistake_in_the_mapping_is_named(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    (tmp_path / "log.csv").write_text(LOG)
    (tmp_path / "items.csv").write_text("id,name\nx,Tea\n")

    assert words in read_error(make_log(**keys), tmp_path)


def test_a_column_that_the_first_rows_lack_is_a_warning_as_others_may_have_it(
    tmp_path: Path,
) -> None:
    log = make_log(labels={"click": "clikc"})
    row = {"u": "a", "i": "x", "t": 1_700_000_000, "click": 1}
    for number in range(5):
        (tmp_path / f"log-{number}.jsonl").write_text(json.dumps(row) + "\n")

    [line] = warnings(preview(log, str(tmp_path), 0.01))
    reason = "no row of the first 3 of log-0.jsonl, log-4.jsonl, log-2.jsonl has 'clikc'; the nearest is 'click'"
    assert reason in line
    printed = print_preview(log, tmp_path)
    assert any("nothing in these rows" in line for line in printed)

    (tmp_path / "log-4.jsonl").write_text(json.dumps({**row, "clikc": 1}) + "\n")
    assert not warnings(preview(log, str(tmp_path), 0.01))


def test_a_dry_run_reads_the_first_the_last_and_the_middle_file(
    tmp_path: Path,
) -> None:
    valid = [f"a,x{n},{1_700_000_000 + n}\n" for n in range(80)]
    with_rejects = ["a,x,soon\n"] * 20 + valid[20:]
    for number in range(9):
        rows = with_rejects if number == 8 else valid
        (tmp_path / f"log-{number}.csv").write_text("u,i,t\n" + "".join(rows))

    printed = print_preview(make_log(), tmp_path)

    files = "log-0.csv, log-8.csv, log-4.csv, 3 of 9 files"
    assert f"events: {files}: 240 rows read, 20 rejected" in printed


def test_a_log_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("u,i,t\n")

    assert "has no rows" in read_error(make_log(files="empty.csv"), tmp_path)


def test_a_dry_run_says_that_it_read_only_the_first_rows_of_a_file(
    tmp_path: Path,
) -> None:
    row = "a,x,1700000000," + "y" * 4000 + "\n"
    (tmp_path / "log.csv").write_text("u,i,t,note\n" + row * 5000)

    (line, *_) = print_preview(make_log(), tmp_path)

    assert line.startswith("events: log.csv, the only file: the first ")
    assert line.endswith(" rows read, and not yet the rest, 0 rejected")


def test_files_that_no_key_reads_are_named(tmp_path: Path) -> None:
    for name in ("log-1.csv", "log-2.csv", "notes-1.txt", "notes-2.txt", "items.csv"):
        (tmp_path / name).write_text(LOG)
    items = {"files": "items.csv", "item": "i", "texts": {"t": "t"}}
    log = make_log(files="log-1.csv", items=items)

    warning, note = describe_unread(log, str(tmp_path))

    assert warning.startswith("warning: log-2.csv in ")
    assert "'files: log-*.csv'" in warning
    assert note == "note: no key of the mapping reads notes-*.txt (2 files)"
    assert describe_unread(make_log(files="*"), str(tmp_path)) == []
