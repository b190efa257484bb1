"""Raw files that are not quite what they seem: stray quotes, keys that come late, ids that are none, odd bytes."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pipelines.data.dataflow import Engine
from pipelines.data.ingest import ingest, pieces_of
from pipelines.data.sources import readers
from pipelines.data.sources.base import Block
from pipelines.data.sources.mapping import Items, Mapping, Users
from pipelines.data.sources.pieces import cuts, piece_at
from pipelines.data.sources.readers import Reading, format_of, read_frames, whole_only

from models.tables import UserError, join
from pipelines.data.survey import Gathering

QUERY = {"query": "q"}
CLICK = {"labels": {"click": {"column": "click"}}}
ALL = ("u", "i", "t", "q")


def plain(**changes: Any) -> Mapping:
    return Mapping(**{"files": "log.*", "user": "u", "item": "i", "time": {"column": "t", "unit": "order"}, **changes})


def write(folder: Path, name: str, rows: list[tuple], header: tuple[str, ...] = ALL) -> None:
    delimiter = "\t" if name.endswith(".tsv") else ","
    (folder / name).write_text("".join(delimiter.join(map(str, row)) + "\n" for row in [header, *rows]))


def log(count: int = 2000, **at: tuple) -> list[tuple]:
    """Rows; those named `row_N` are as given."""
    return [at.get(f"row_{n}", (f"u{n % 50}", f"i{n % 70}", n, "lamp")) for n in range(count)]


def counts(source: Mapping, folder: Path) -> tuple[int, int]:
    """Rows read and rejected."""
    blocks = [b for f in source.event_files(str(folder)) for b in source.read_events(str(folder), f)]
    return sum(b.rows_read for b in blocks), sum(b.rejects.num_rows for b in blocks)


def fails(source: Mapping, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        counts(source, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["log.csv", "log.tsv"])
def test_a_column_that_is_there_twice_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, log(20), header=("u", "i", "t", "u"))
    said = fails(plain(), tmp_path)
    assert said.endswith(f"{name} has 2 columns 'u'; give them names of their own")
    write(tmp_path, name, log(20), header=("u", "q", "t", "q"))  # nobody reads them
    assert counts(plain(item="t"), tmp_path) == (20, 0)


@pytest.mark.parametrize("name", ["log.csv", "log.tsv"])
@pytest.mark.parametrize("wanted", [QUERY, {}], ids=["wanted", "unwanted"])
@pytest.mark.parametrize("stray", [("u", "i", 1, '"red lamp'), ('"u', "i", 1, "lamp")], ids=["last", "first"])
def test_a_stray_quote_swallows_no_rows(tmp_path: Path, name: str, wanted: dict, stray: tuple) -> None:
    write(tmp_path, name, log(row_600=stray))
    text = fails(plain(**wanted), tmp_path)
    breaks = "1,400" if stray[0] == "u" else "1,399"  # a value that is never closed holds the last line break too
    assert f"{name}: {breaks} of its 2,001 lines end within quoted values, {breaks} of them near row 600;" in text
    assert "'quote: false'" in text
    assert "'quote: true'" in text
    assert counts(plain(quote=False, **wanted), tmp_path) == (2000, 0)
    assert counts(plain(quote=True, **wanted), tmp_path) == (601, int(stray[0] != "u"))


def test_two_stray_quotes_far_apart_in_a_long_file(tmp_path: Path) -> None:
    stray = ("u", "i", 1, '"lamp')
    write(tmp_path, "log.csv", log(60_000, row_30000=stray, row_30300=stray))  # half a percent of the lines
    assert "300 of its 60,001 lines end within quoted values, 300 of them near row 30,000;" in fails(plain(), tmp_path)


def test_quotes_are_plain_characters_without_quoting(tmp_path: Path) -> None:
    write(tmp_path, "log.csv", [("u", "i", 1, '"a"'), ("u", "i", 2, '"')], header=("u", "i", "t", '"q'))
    (block,) = plain(query='"q', quote=False).read_events(str(tmp_path), "log.csv")
    assert block.events["query"].to_pylist() == ['"a"', '"']


@pytest.mark.parametrize("breaks", ["\n", "\r\n", "\n\n\n"])
def test_values_that_span_lines_and_empty_lines_are_read(tmp_path: Path, breaks: str) -> None:
    rows = log(3000, **{f"row_{n}": ("u", "i", n, f'"red{breaks}lamp"') for n in range(0, 600, 30)})
    text = "".join(",".join(map(str, row)) + breaks for row in [ALL, *rows])
    (tmp_path / "log.csv").write_bytes(text.encode())
    assert counts(plain(**QUERY), tmp_path) == (3000, 0)
    many = [("u", "i", n, '"red\nlamp"') for n in range(3000)]
    write(tmp_path, "log.csv", many)
    assert "3,000 of its 6,001 lines" in fails(plain(**QUERY), tmp_path)
    assert counts(plain(quote=True, **QUERY), tmp_path) == (3000, 0)


def test_texts_of_items_and_users_may_span_lines(tmp_path: Path) -> None:
    long = '"' + "bright\n" * 300 + '"'
    described = [(-1, long)] + [
        (n, f'"{"warm" + chr(10) * 3}{"light. " + chr(10)}{"x" + chr(10)}"') for n in range(200)
    ]
    write(tmp_path, "items.csv", described, header=("id", "text"))
    items = Items(files="items.*", item="id", texts=["text"])
    users = Users(files="items.*", user="id", attributes=["text"])
    assert sum(len(f.rows) for f in read_frames(str(tmp_path), "items.csv", items.reading)) == 201
    assert users.read(str(tmp_path)).rows.num_rows == 201
    for before, after in ((3000, 1200), (1, 60)):  # a small part of the file, and more than half of a small file
        rows = [*[(1, "a")] * before, (2, '"b'), *[(3, "c")] * after]
        write(tmp_path, "items.csv", rows, header=("id", "text"))
        with pytest.raises(UserError, match="'quote: false' beside its 'files'"):
            list(read_frames(str(tmp_path), "items.csv", items.reading))
        with pytest.raises(UserError, match="'quote: false' beside its 'files'"):
            users.read(str(tmp_path))


@pytest.mark.parametrize(
    ("quote", "remedy"), [("auto", "'quote: false'"), (True, "'quote: false'"), (False, "shorten")]
)
def test_a_row_over_the_limit_is_named(
    tmp_path: Path, quote: str | bool, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = '"lamp' if quote is not False else "lamp" * (1 << 19)
    write(tmp_path, "log.csv", log(200_000, row_3=("u", "i", 1, long)))
    monkeypatch.setattr(readers, "TEXT_BLOCK", 1 << 20)
    text = fails(plain(quote=quote), tmp_path)
    assert "row 3 is longer than the 1 MiB that can be read" in text
    assert remedy in text


def test_quote_is_checked_and_left_out_of_fingerprints_when_unset() -> None:
    parts = {
        "items": {"files": "i", "item": "id"},
        "users": {"files": "u", "user": "id", "attributes": ["age"]},
    }
    assert "quote" not in json.dumps(plain(**parts).config)
    chosen = {key: {**part, "quote": False} for key, part in parts.items()}
    assert json.dumps(plain(quote=True, **chosen).config).count('"quote"') == 3
    for bad, name in [({"quote": "no"}, "'quote'"), ({"items": {**parts["items"], "quote": "off"}}, "'items.quote'")]:
        with pytest.raises(ValueError, match=f"{name} is .* auto, true or false"):
            plain(**bad)


def jsonl(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_keys_may_come_late_or_in_one_file_only(
    tmp_path: Path, ray_local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"u": "a", "i": "x", "t": n} for n in range(100)]
    jsonl(tmp_path, "log.1.jsonl", rows)
    jsonl(tmp_path, "log.2.jsonl", [*rows, {"u": "b", "i": "x", "t": 1, "click": 1}])
    jsonl(tmp_path, "log.3.jsonl", rows)

    def run(source: Mapping) -> int:
        files, out = source.event_files(str(tmp_path)), str(tmp_path / "out")
        (tmp_path / "out").mkdir(exist_ok=True)
        found = ingest(source, str(tmp_path), files, out, out, 1, False, Engine(), Gathering(None, False))
        return found.rejected.rows_read

    assert run(plain(**CLICK)) == 301
    with pytest.raises(
        UserError, match=r"no event file of .* has a column 'clicks'; the nearest is 'click' of click, i, t, u; correct"
    ):
        run(plain(files="log.2.*", labels={"click": {"column": "clicks"}}))
    monkeypatch.setattr(readers, "TEXT_BLOCK", 300)
    blocks = list(plain(**CLICK).read_events(str(tmp_path), "log.2.jsonl"))
    assert len(blocks) > 5
    assert [list(block.missing) for block in blocks] == [["click"]] * (len(blocks) - 1) + [[]]
    assert pa.concat_tables(b.events for b in blocks)["label_click"].to_pylist() == [None] * 100 + [True]


def test_each_file_has_users_items_and_times(tmp_path: Path) -> None:
    jsonl(tmp_path, "log.jsonl", [{"u": "a", "shown": ["x"], "t": 1, "click": []}])
    listed = {"item": "shown", "labels": {"click": {"member_of": "clicked"}}}
    assert counts(plain(explode={"columns": ["shown"]}, **listed), tmp_path) == (1, 0)
    assert "no column 'dwell'" in fails(plain(explode={"columns": ["shown", "dwell"]}, **listed), tmp_path)
    assert "no column 'item'; the nearest is 't" in fails(plain(item="item"), tmp_path)


def test_texts_of_items_may_begin_late_but_not_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path, "items.jsonl", [*({"id": n} for n in range(100)), {"id": 100, "títle": "lamp"}])
    monkeypatch.setattr(readers, "TEXT_BLOCK", 100)
    frames = list(read_frames(str(tmp_path), "items.jsonl", Items("items.*", "id", texts={"t": "títle"}).reading))
    assert pl.concat(f.rows for f in frames)["títle"].to_list() == [None] * 100 + ["lamp"]
    with pytest.raises(UserError, match="no column 'name'"):
        list(read_frames(str(tmp_path), "items.jsonl", Items("items.*", "id", texts=["name"]).reading))


def test_half_a_character_in_json_is_a_reject_and_no_other_id(tmp_path: Path) -> None:
    halves = [r"a\ud800b", r"\uDBFFb", r"\udc00b", r"a\ud83d\\ude00"]
    whole = {r"a\u0000b": "a\0b", r"\ud83d\uDE00": "😀", r"a\\ud800b": r"a\ud800b", r"\\\ud83d\ude00": "\\😀"}
    lines = [f'{{"u": "u", "i": "{text}", "t": 1}}' for text in [*halves, *whole]]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    blocks = list(plain(**QUERY).read_events(str(tmp_path), "log.jsonl"))
    assert pa.concat_tables(b.events for b in blocks)["item_id"].to_pylist() == list(whole.values())
    rejects = pa.concat_tables(b.rejects for b in blocks).to_pylist()
    assert [reject["row"] for reject in rejects] == [0, 1, 2, 3]
    assert r"\ud800 is half of a character" in rejects[0]["reason"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"i": ["x", "y"]}, "i: a list in the place of an id; for lists of items set explode"),
        ({"i": []}, "i: a list in the place of an id; for lists of items set explode"),
        ({"u": {"id": 1}}, "u: an object in the place of an id; name a field, u.FIELD"),
        ({"u": "[x]", "i": '{"id": 1}'}, None),
        ({"q": ["red", "lamp"]}, None),
    ],
)
def test_a_list_or_an_object_is_no_id(tmp_path: Path, row: dict, reason: str | None) -> None:
    good = {"u": "[a", "i": "{x", "t": 1}
    (tmp_path / "log.jsonl").write_text("\n".join([json.dumps(good), "oops", "", json.dumps(good | row), ""]))
    blocks = list(plain(**QUERY).read_events(str(tmp_path), "log.jsonl"))
    rejects = pa.concat_tables(b.rejects for b in blocks).to_pylist()
    assert [(r["row"], r["reason"]) for r in rejects[1:]] == ([(2, reason)] if reason else [])
    events = pa.concat_tables(b.events for b in blocks)
    assert events["item_id"].to_pylist()[1:] == ([] if reason else [row.get("i", "{x")])


def test_lists_are_of_ids(tmp_path: Path) -> None:
    rows = [{"u": "a", "t": 1, "shown": shown} for shown in (["[x]", "{y"], [{"id": 1}], ["x", ["y"]])]
    jsonl(tmp_path, "log.jsonl", rows)
    (block,) = plain(item="shown", explode={"columns": ["shown"]}).read_events(str(tmp_path), "log.jsonl")
    assert block.events["item_id"].to_pylist() == ["[x]", "{y"]
    assert block.rejects["reason"].to_pylist() == [
        "shown: an object in the place of an id; name a field, shown.FIELD",
        "shown: a list in the place of an id; for lists of items set explode",
    ]


def test_frames_of_parquet_are_bounded_in_elements_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "TEXT_BLOCK", 80_000)
    short = pa.table({"i": [["a"]] * 3000, "t": range(3000), "unwanted": ["x" * 1000] * 3000})
    long = pa.table({"i": [["a"] * 500] * 300, "t": range(300), "unwanted": ["x"] * 300})
    with pq.ParquetWriter(tmp_path / "log.parquet", short.schema) as writer:
        for table in (short, long, short):
            writer.write_table(table, row_group_size=1500)
    frames = list(read_frames(str(tmp_path), "log.parquet", Reading(columns=("i", "t"))))
    elements = [frame.rows["i"].list.len().sum() for frame in frames]
    assert max(elements) <= 80_000 // 8
    rows = [len(frame.rows) for frame in frames]
    assert rows == [3000, *[16] * 18, 12, 3000]  # short rows stay together, across row groups too
    assert pl.concat(frame.rows for frame in frames)[readers.ROW].to_list() == list(range(6300))


LATIN = "café".encode("latin-1")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("log.csv", b"u,i,t\na,x,1\nb," + LATIN + b",2\n", "not UTF-8 in line 3; set 'encoding: "),
        ("log.csv", b"\nu,i,t\na,x,1\n" + LATIN + b",2\n", "not UTF-8 in line 4; set 'encoding: "),
        ("log.csv", b"u,i,t\ra,x,1\rb,y,2\r", "carriage returns alone; convert it to line feeds"),
        ("log.csv", b"\xef\xbb\xbf\r\n\n\n", "is empty"),
        ("log.csv", b"\n\r\nu,i,t\na,x,1\nb,y,2\n", None),
        ("log.csv", b"\xef\xbb\xbf\nu,i,t\na,x,1\nb,y,2\n", None),
        ("log.csv", b"u,i,t," + LATIN + b"\na,x,1,\nb,y,2," + LATIN + b"\n", None),
        ("log.jsonl", b'\xef\xbb\xbf{"u": "a", "i": "x", "t": 1}\n{"u": "b", "i": "y", "t": 2}\n', None),
        ("log.jsonl", b"\xef\xbb\xbf\n", "is empty"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Arrow's, of text it cannot decode
def test_odd_bytes_are_named_or_skipped(tmp_path: Path, name: str, content: bytes, expected: str | None) -> None:
    (tmp_path / name).write_bytes(content)
    if expected is None:
        assert counts(plain(), tmp_path) == (2, 0)
    else:
        assert expected in fails(plain(), tmp_path)


def whole_and_in_pieces(folder: Path, source: Mapping, size: int) -> tuple[pl.DataFrame, pl.DataFrame, int]:
    """Events and rejects of a file as they are read whole and in pieces of about `size` bytes; and how many pieces."""
    (file,) = source.event_files(str(folder))
    uri, kind, first_row, pieces = join(str(folder), file), format_of(file), 0, []
    for cut in cuts(uri, kind, size):
        piece, rows, _ = piece_at(uri, kind, kind == "csv", cut)
        pieces += [replace(piece, first_row=first_row)] if piece.start < piece.end else []
        first_row += rows
    whole = list(source.read_events(str(folder), file))
    parts = [block for piece in pieces for block in source.read_events(str(folder), file, None, piece)]

    def frame(blocks: list[Block]) -> pl.DataFrame:
        events = [pl.DataFrame(pl.from_arrow(block.events)).drop("log_row") for block in blocks]
        rejects = [pl.DataFrame(pl.from_arrow(block.rejects)) for block in blocks]
        return pl.concat([pl.concat(events).with_row_index(), pl.concat(rejects).with_row_index()], how="diagonal")

    return frame(whole), frame(parts), len(pieces)


@pytest.mark.parametrize("size", [1, 60, 700])
@pytest.mark.parametrize("name", ["log.jsonl", "log.csv", "log.tsv", "log.parquet"])
@pytest.mark.parametrize("end", ["\n", "\r\n\n"])
def test_a_file_in_pieces_is_the_file(tmp_path: Path, name: str, size: int, end: str) -> None:
    """Events, and numbers of rejected rows, whatever the place of a cut, with empty lines and no break at the end."""
    rows = [{"u": f"user {i % 7}", "i": "é" * (i % 5) + str(i), "t": "x" if i % 11 == 0 else i} for i in range(150)]
    if name.endswith("jsonl"):
        text = end.join(json.dumps(row, ensure_ascii=False) for row in rows)
    else:
        delimiter = "\t" if name.endswith("tsv") else ","
        text = end.join([delimiter.join("uit"), *(delimiter.join(map(str, row.values())) for row in rows)])
    if name.endswith("parquet"):
        table = pa.table({key: [str(row[key]) for row in rows] for key in "uit"})
        pq.write_table(table, tmp_path / name, row_group_size=20, compression=None)
    else:
        (tmp_path / name).write_bytes(text.encode())
    whole, parts, pieces = whole_and_in_pieces(tmp_path, plain(), size)
    assert parts.equals(whole)
    assert whole["reason"].count() == 14
    assert pieces > 1


def test_what_cannot_be_cut_is_read_whole(tmp_path: Path) -> None:
    reading = plain().reading
    assert whole_only("log.csv.gz", reading)
    assert whole_only("log.csv", replace(reading, encoding="cp1252"))
    assert whole_only("log.jsonl", replace(reading, required=None))
    assert not whole_only("log.csv", reading)
    (tmp_path / "log.csv").write_bytes(b"u,i,t\n" * 100)
    assert cuts(str(tmp_path / "log.csv"), "csv", 1000) == []
    assert len(cuts(str(tmp_path / "log.csv"), "csv", 100)) == 6


@pytest.mark.usefixtures("ray_local")
def test_files_are_cut_where_no_value_is_quoted(tmp_path: Path) -> None:
    """All pieces of a log in their order, with the numbers of their first rows."""
    line = "a,x,1\n" * 200
    for name, text in (("log.1.csv", line), ("log.2.csv", line + 'a,"x",1\n'), ("log.3.csv", "a,x,1\n")):
        (tmp_path / name).write_text("u,i,t\n" + text)
    source = plain()
    files = source.event_files(str(tmp_path))
    found = pieces_of(source, str(tmp_path), files, 700, Engine())
    assert [file for file, _ in found] == ["log.1.csv", "log.1.csv", "log.2.csv", "log.3.csv"]
    assert [piece and piece.first_row for _, piece in found] == [0, 116, None, None]
    unquoted = pieces_of(plain(quote=False), str(tmp_path), files, 700, Engine())
    assert [file for file, _ in unquoted] == ["log.1.csv", "log.1.csv", "log.2.csv", "log.2.csv", "log.3.csv"]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("log.csv", {}),
        ("log.csv.gz", {}),
        ("log.tsv", {}),
        ("log.csv", {"header": ["u", "i", "t", "q"]}),
        ("log.csv", {"delimiter": "::"}),
        ("log.csv", {"delimiter": ";", "quote": False}),
        ("log.csv", {"encoding": "utf-16"}),
        ("log.jsonl", {}),
        ("log.csv", {"encoding": "utf-8-sig"}),
        ("log.csv", {"encoding": "utf-8-sig", "header": ["u", "i", "t", "q"]}),
        ("log.jsonl", {"encoding": "utf-8-sig"}),
    ],
)
def test_a_rejected_row_is_named_by_its_line(tmp_path: Path, name: str, keys: dict[str, Any]) -> None:
    """Empty lines, header and line breaks within quotes are lines, and no rows: each bad row says its own line."""
    by = keys.get("delimiter", "\t" if ".tsv" in name else ",")
    quoted = ".jsonl" not in name and keys.get("quote") is not False and len(by) == 1
    lines = ["", *([] if "header" in keys or "jsonl" in name else [by.join(ALL)])]
    for n in range(300):
        lines += [""] * (n % 7 == 0)
        query = f'"red\n\n{n}"' if quoted and n % 5 == 0 else "a lamp"
        time = f"line {len(lines) + 1}" if n % 11 == 3 else str(n)
        if "jsonl" in name:
            lines.append(json.dumps({"u": f"u{n}", "i": "i", "t": time, "q": query}))
        else:
            lines += by.join([f"u{n}", 'i"2', time, query]).split("\n")
    content = "\r\n".join(lines).encode(keys.get("encoding", "utf-8"))
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    source = plain(query="q", **({"quote": True} if quoted else {}), **keys)
    (file,) = source.event_files(str(tmp_path))
    found = [row for block in source.read_events(str(tmp_path), file) for row in block.rejects.to_pylist()]
    assert len(found) == 27
    for row in found:
        said = readers.place_of(f"{tmp_path}/{file}", source, row["row"])
        assert said == json.loads(row["source"])["t"]


def test_a_row_of_parquet_or_far_from_the_beginning_says_what_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LINES_READ", 10)
    write(tmp_path, "log.csv", log(20))
    uri = str(tmp_path / "log.csv")
    assert readers.place_of(uri, plain(), 9) == "line 11"
    assert readers.place_of(uri, plain(), 10) == "row 10 (counted from 0, without header and empty lines)"
    assert readers.place_of("log.parquet", plain(), 3) == "row 3 (counted from 0)"
