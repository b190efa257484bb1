"""The first rows of a log: errors of a mapping, and the output of `--dry-run`."""

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


def plain(**keys: Any) -> Log:
    return parse_log(
        {
            "files": "log*",
            "user": "u",
            "item": "i",
            "time": {"column": "t", "unit": "s"},
            **keys,
        }
    )


def said(log: Log, folder: Path) -> list[str]:
    return [" ".join(line.split()) for line in lines(preview(log, str(folder), 0.4))]


def fails(log: Log, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        preview(log, str(folder), 0.01)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_dry_run_shows(tmp_path: Path) -> None:
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
    log = plain(
        items={"files": "items.csv", "item": "id", "texts": {"title": "name"}},
        users={"files": "users.csv", "user": "id", "attributes": ["age"]},
        as_of={"stock": stock},
        labels={"late": {"column": "1", "delay_minutes": 1}},
    )
    found = said(log, tmp_path)
    for part in (
        "events: log.csv, the only file: 2 rows read, 0 rejected",
        "cat_age age of the users string 30",
        "timestamp_ms t, s int64 2023-11-14T22:13:20.500Z | 2023-11-14T22:13:21.000Z",
        "known_late 1 minutes after its event int64 2023-11-14T22:14:20.500Z | 2023-11-14T22:14:21.000Z",
        "items: items.csv, the only file: 1 row read, 0 rejected",
        "num_left left float 2.5",
    ):
        assert part in found


def test_rejects_are_shown_with_an_example(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        LOG + "c,z,soon\nd,z,soon,5\n" + "a,x,1700000000\n" * 6
    )
    found = said(plain(), tmp_path)
    assert "events: log.csv, the only file: 10 rows read, 2 rejected" in found
    assert any(
        "rejected: 1 row, t: not a number of s; such as log.csv row 2" in line
        for line in found
    )
    assert any(
        "rejected: 1 row, row: 4 columns, not 3" in line and "d,z,soon,5" in line
        for line in found
    )


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
def test_a_mistake_in_the_description(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    (tmp_path / "log.csv").write_text(LOG)
    (tmp_path / "items.csv").write_text("id,name\nx,Tea\n")
    assert words in fails(plain(**keys), tmp_path)


def test_a_column_that_no_row_of_the_beginning_has(tmp_path: Path) -> None:
    log, row = (
        plain(labels={"click": "clikc"}),
        {"u": "a", "i": "x", "t": 1_700_000_000, "click": 1},
    )
    for number in range(5):  # not all are looked into: a later one may have it
        (tmp_path / f"log-{number}.jsonl").write_text(json.dumps(row) + "\n")
    [line] = warnings(preview(log, str(tmp_path), 0.01))
    assert (
        "no row of the first 3 of log-0.jsonl, log-4.jsonl, log-2.jsonl has 'clikc'; the nearest is 'click'"
        in line
    )
    assert any("nothing in these rows" in each for each in said(log, tmp_path))
    (tmp_path / "log-4.jsonl").write_text(json.dumps({**row, "clikc": 1}) + "\n")
    assert not warnings(preview(log, str(tmp_path), 0.01))


def test_the_first_the_last_and_the_middle_file_are_looked_into(tmp_path: Path) -> None:
    for number in range(9):
        rows = "".join(
            f"a,x{n},{'soon' if number == 8 and n < 20 else 1_700_000_000 + n}\n"
            for n in range(80)
        )
        (tmp_path / f"log-{number}.csv").write_text("u,i,t\n" + rows)
    found = said(plain(), tmp_path)
    assert (
        "events: log-0.csv, log-8.csv, log-4.csv, 3 of 9 files: 240 rows read, 20 rejected"
        in found
    )
    (tmp_path / "empty.csv").write_text("u,i,t\n")
    assert "has no rows" in fails(plain(files="empty.csv"), tmp_path)


def test_a_file_that_is_not_read_to_its_end_is_said_to_be_begun(tmp_path: Path) -> None:
    row = "a,x,1700000000," + "y" * 4000 + "\n"
    (tmp_path / "log.csv").write_text("u,i,t,note\n" + row * 5000)
    (line, *_) = said(plain(), tmp_path)
    assert line.startswith("events: log.csv, the only file: the first ")
    assert line.endswith(" rows read, and not yet the rest, 0 rejected")


def test_files_that_no_key_reads_are_named(tmp_path: Path) -> None:
    for name in ("log-1.csv", "log-2.csv", "notes-1.txt", "notes-2.txt", "items.csv"):
        (tmp_path / name).write_text(LOG)
    items = {"files": "items.csv", "item": "i", "texts": {"t": "t"}}
    warning, note = describe_unread(
        plain(files="log-1.csv", items=items), str(tmp_path)
    )
    assert warning.startswith("warning: log-2.csv in ")
    assert "'files: log-*.csv'" in warning
    assert note == "note: no key of the mapping reads notes-*.txt (2 files)"
    assert describe_unread(plain(files="*"), str(tmp_path)) == []
