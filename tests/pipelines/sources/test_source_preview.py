"""The beginning of a log, before Ray starts: what is wrong with its description, and what `--dry-run` shows."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pipelines.data.sources.amazon2023 import Amazon2023
from pipelines.data.sources.base import Source
from pipelines.data.sources.lcrec import LcRec
from pipelines.data.sources.load import load_source
from pipelines.data.sources.mapping import Mapping
from pipelines.data.sources.preview import lines, preview, warnings
from pipelines.data.sources.simulated import Simulated

from jobs import prepare
from models.tables import UserError

TIMES = "u,i,t\na,x,1700000000\nb,y,1700000001\n"


def plain(**keys: Any) -> Mapping:
    return Mapping(**{"files": "log*", "user": "u", "item": "i", "time": {"column": "t", "unit": "s"}, **keys})


def fails(source: Source, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        preview(source, str(folder), 0.01)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_a_dry_run_prints(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(TIMES)
    (tmp_path / "items.csv").write_text("id,name\nx,Tea\n")
    (tmp_path / "users.csv").write_text("id,age\na,30\n")
    items = {"files": "items.csv", "item": "id", "texts": {"title": "name"}}
    users = {"files": "users.csv", "user": "id", "attributes": ["age"]}
    said = [" ".join(line.split()) for line in lines(preview(plain(items=items, users=users), str(tmp_path), 0.01))]
    assert said == [
        "events: log.csv, the only file: 2 rows read, 0 rejected",
        "user_id u string a | b",
        "item_id i string x | y",
        "timestamp_ms t, s int64 2023-11-14T22:13:20.000Z | 2023-11-14T22:13:21.000Z",
        "cat_age age of the users string 30",
        "items: items.csv, the only file: 1 row read, 0 rejected",
        "item_id id string x",
        "text_title name string Tea",
        "users: users.csv, the only file: 1 row read, 0 rejected",
        "user: id string a",
        "user: age age string 30",
    ]


def test_a_dry_run_looks_into_the_last_file_and_refuses_more_rejects_than_the_log_may_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source.yaml"
    source.write_text("{layout: mapping, files: log*.csv, user: u, item: i, time: {column: t, unit: s}}")
    for number in range(9):
        rows = [f"a,x{row},{1_700_000_000 + row}" for row in range(80)]
        rows += [f"a,x{row},soon" for row in range(20)] if number == 8 else []
        (tmp_path / f"log-{number}.csv").write_text("u,i,t\n" + "\n".join(rows) + "\n")
    config = prepare.Config(str(source), str(tmp_path), str(tmp_path / "out"), dry_run=True)
    said = (
        r"20 of the first 260 rows of log-0.csv, log-8.csv, log-4.csv \(7.69%\) break the schema, over the limit "
        r"max_rejects 1.00%; most often t: not an integer, such as log-8.csv line 82: .*soon.*; fix the source file or "
        r"the log, or raise --max_rejects"
    )
    with pytest.raises(UserError, match=said):
        prepare.run(config)
    printed = capsys.readouterr().out
    assert "events: log-0.csv, log-8.csv, log-4.csv, 3 of 9 files: 260 rows read, 20 rejected" in printed
    assert "next:" not in printed
    prepare.run(replace(config, max_rejects=0.1))
    assert "next: the same command without --dry-run makes the tables" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out/events").exists()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"user": "usr"}, "log.csv has no column 'usr'; the nearest is 'u'"),
        ({"items": {"files": "items.csv", "item": "id", "texts": ["nme"]}}, "no column 'nme'; the nearest is 'name'"),
        ({"users": {"files": "items.csv", "user": "id", "attributes": ["agee"]}}, "items.csv has no column 'agee'"),
        ({"time": {"column": "t", "unit": "ms"}}, "2 of the first 2 rows of log.csv (100.00%) break the schema"),
        ({"time": {"column": "t", "unit": "ms"}}, "most often t: before 1980, check time.unit"),
        ({"delimiter": ";"}, "its header is one column, 'u,i,t'; set 'delimiter: \",\"'"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_description(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    (tmp_path / "log.csv").write_text(TIMES)
    (tmp_path / "items.csv").write_text("id,name\nx,Tea\n")
    assert words in fails(plain(**keys), tmp_path)


def test_only_the_beginning_is_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "log.csv.gz", "wb", compresslevel=1) as file:
        file.write(b"u,i,t\n" + b"a,x,1700000000\n" * (1 << 20) + b"\xe9\xe8,x,1700000000\n")
    [events] = preview(plain(), str(tmp_path), 0.01)
    assert 0 < events.rejected.rows_read < 1 << 20
    with pytest.raises(UserError, match="not UTF-8"):
        list(plain().read_events(str(tmp_path), "log.csv.gz"))


def test_an_optional_key_that_no_row_has(tmp_path: Path) -> None:
    source = plain(labels={"click": {"column": "clikc"}})
    row = {"u": "a", "i": "x", "t": 1_700_000_000, "click": 1}
    write_lines(tmp_path / "log-0.jsonl", [row])
    assert "no event file" in (text := fails(source, tmp_path))
    assert "'clikc'; the nearest is 'click'" in text

    for number in range(1, 5):  # not all are looked into: a later one may have it
        write_lines(tmp_path / f"log-{number}.jsonl", [row])
    [line] = warnings(preview(source, str(tmp_path), 0.01))
    assert "no row of the first 3 of log-0.jsonl, log-4.jsonl, log-2.jsonl has 'clikc'; the nearest is 'click'" in line

    write_lines(tmp_path / "log-4.jsonl", [{**row, "clikc": 1}])  # one that begins late in the log
    assert not warnings(preview(source, str(tmp_path), 0.01))


def test_every_layout(tmp_path: Path) -> None:
    for name in ("lcrec", "amazon", "simulated"):
        (tmp_path / name).mkdir()
    (tmp_path / "lcrec/a.inter.json").write_text('{"u1": ["i1", "i2"]}')
    (tmp_path / "lcrec/a.item.json").write_text('{"i1": {"title": "Tea"}}')
    review = {
        "user_id": "u",
        "parent_asin": "B1",
        "rating": 5.0,
        "timestamp": 1_600_000_000_000,
        "verified_purchase": True,
    }
    write_lines(tmp_path / "amazon/Toys.jsonl", [review])
    item: dict[str, Any] = dict.fromkeys(["parent_asin", "title", "store", "main_category"], "B1")
    item |= {key: ["x"] for key in ("categories", "features", "description")}
    write_lines(tmp_path / "amazon/meta_Toys.jsonl", [item])
    event = {"user_id": ["u"], "item_id": ["i"], "timestamp_ms": [1_600_000_000_000]}
    pq.write_table(pa.table(event), tmp_path / "simulated/events-0.parquet")
    pq.write_table(
        pa.table({n: ["i"] for n in ("item_id", "title", "description", "brand")}), tmp_path / "simulated/items.parquet"
    )
    for name, source in (("lcrec", LcRec()), ("amazon", Amazon2023()), ("simulated", Simulated())):
        found = preview(source, str(tmp_path / name), 0.01)
        assert [seen.kind for seen in found] == ["events", "items"]
        for seen in found:
            assert seen.rows.num_rows
            assert set(seen.origins) <= set(seen.rows.column_names)
        times = next(line for line in lines(found) if "timestamp_ms" in line)
        assert times.endswith("  0 | 1" if name == "lcrec" else "  2020-09-13T12:26:40.000Z")


@pytest.mark.parametrize("name", ["log.csv.gz", "log.jsonl.gz", "log.csv", "log.jsonl", "log.parquet", "log.csv.zst"])
@pytest.mark.parametrize("damage", ["cut", "plain", "empty"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    rows = b'{"u": "a", "i": "x", "t": 1700000000}\n' * 9999 if "json" in name else b"a,x,1700000000\n" * 9999
    content = b"" if "json" in name else b"u,i,t\n"
    content = {"cut": gzip.compress(content + rows)[:-200], "plain": b"\x01\x02" * 500, "empty": b""}[damage]
    (tmp_path / name).write_bytes(content)
    assert name in fails(plain(), tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("files: a.csv\nuser: u\nitem: i", "'time' is missing; add such as 'time: {column: time_ms, unit: ms}'"),
        ("user: u\ntime: {column: t, unit: s}", "'files' and 'item' are missing; add such as 'files: log_*.csv; item"),
        ("files: a.csv\nuser: u\nitem: i\ntime: {column: t}", "'time.unit' is missing; add such as 'unit: ms'"),
        ("files: a.csv\nuser: u\nitem: i\ntime: {column: t, uni: s}", "unknown key 'time.uni'; the nearest"),
        ("files: a.csv\nuser: u\nitem: i\ntime: {column: t, unit: [s]}", "'time.unit' is ['s'], not text"),
        ("files: a.csv\nuser: u\nitem: i\ntime: {column: 3, unit: s}", "'time.column' is 3, not text; write"),
        ("files: a.csv\nuser: u\nitem: [i]\ntime: {column: t, unit: s}", "'item' is ['i'], not text"),
        ("files: a.csv\nuser: u\nitem: i\ntime: {column: t, unit: s}\nheader: u", "'header' is 'u', not a list"),
        ("files: a.csv\nuser: u\nitem: i\ntime: {column: t, unit: s}\nitems: {files: b}", "'items.item' is missing"),
        ("files: a.csv\nuser: u\nitem: i\ntime: {column: t, unit: s}\ndelimiter: —", "'delimiter' is '—'; it is one"),
    ],
)  # fmt: skip
def test_keys_that_a_source_file_lacks_or_has_wrong(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "source.yaml").write_text(f"layout: mapping\n{text}\n")
    with pytest.raises(UserError) as caught:
        load_source(str(tmp_path / "source.yaml"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
