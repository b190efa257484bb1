"""Raw files equal the output of Python's readers, whole, in pieces and compressed."""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.storage.tables import UserError
from pipelines.data.reading import read
from pipelines.data.reading.read import ROW, Files, read_frames, split_file

Found = tuple[list[tuple], list[tuple[int, str, str]]]

many = settings(
    max_examples=60,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.filter_too_much,
    ],
)


@contextmanager
def blocks(size: int) -> Iterator[None]:
    """Set the number of bytes per block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "BLOCK_BYTES", size)
        yield


def frames(
    path: Path, files: Files, columns: Sequence[str], size: int | None = None
) -> Found:
    """Read all rows and broken lines, in pieces of `size` bytes if given.

    Checks that the numbers of rows have no gap.
    """
    rows, broken = [], []
    for piece in split_file(str(path), files, size) if size else [None]:
        numbers = []
        for frame in read_frames(str(path), files, columns, None, piece):
            assert not frame.missing or size
            numbers += [*frame.rows[ROW], *(number for number, *_ in frame.broken)]
            rows += frame.with_missing.select(columns).rows()
            broken += frame.broken
        assert sorted(numbers) == list(range(len(numbers)))
    return rows, broken


def fails(path: Path, files: Files, columns: Sequence[str] = ("a", "b")) -> str:
    with pytest.raises(UserError) as caught:
        list(read_frames(str(path), files, columns))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def written(rows: Sequence[Sequence[str]], **dialect: Any) -> str:
    text = io.StringIO()
    csv.writer(text, **dialect).writerows(rows)
    return text.getvalue()


def nulled(rows: Sequence[Sequence[str]]) -> list[tuple]:
    return [tuple(value or None for value in row) for row in rows]


HEADER = [
    "the whole name of the first column of this table, so long that the first hundred bytes of the file are it alone",
    "b",
    "c",
]
ODD = st.text(
    st.sampled_from("\",;\t| 'ab0\\\n\r\x00ü🙂\u2028\xa0"), max_size=6
) | st.just("line\r\nline")
TABLES = st.integers(2, 3).flatmap(
    lambda width: st.lists(st.tuples(*[ODD] * width), min_size=1, max_size=12)
)


def is_like_rows(row: Sequence[str], **dialect: Any) -> bool:
    """Return whether each line of a row has as many columns as the row."""
    lines = written([row], **dialect).rstrip("\r\n").split("\n")
    return len(lines) > 1 and all(
        line.count(dialect["delimiter"]) == len(row) - 1 for line in lines
    )


@many
@given(
    table=TABLES,
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    ends=st.sampled_from(["\n", "\r\n"]),
    escape=st.sampled_from(["", "\\"]),
    block=st.sampled_from([7, 50, 1 << 20]),
)
def test_csv_as_python_reads_it(
    tmp_path: Path,
    table: list[tuple],
    delimiter: str,
    quoting: int,
    ends: str,
    escape: str,
    block: int,
) -> None:
    dialect: dict[str, Any] = {
        "delimiter": delimiter,
        "quoting": quoting,
        "lineterminator": ends,
    }
    if any(
        "\r" in value for row in table for value in row
    ):  # a line break that the writer does not quote by itself
        dialect["quoting"] = csv.QUOTE_ALL
    dialect |= {"escapechar": "\\", "doublequote": False} if escape else {}
    table = [row for row in table if not is_like_rows(row, **dialect)]
    header = HEADER[: len(table[0])] if table else HEADER
    text = written([header, *table], **dialect)
    (path := tmp_path / "log.csv").write_bytes(text.encode())
    lines = [line + "\n" for line in text.split("\n")[:-1]]
    reader = csv.reader(
        lines,
        delimiter=delimiter,
        escapechar=escape or None,
        doublequote=not escape,
        strict=True,
    )
    expected = nulled(list(reader)[1:])
    assert expected == nulled(table)
    with blocks(block):
        assert frames(path, Files(delimiter=delimiter, escape=escape), header) == (
            expected,
            [],
        )


def test_escaped_quotes_are_read_in_and_out_of_quotes(tmp_path: Path) -> None:
    lines = ["u,v", 'x,\\"', 'x,ab\\"c', '\\"x,y', '"a\\"b",x\\"']
    (path := tmp_path / "log.csv").write_text("\n".join(lines))
    expected = [("x", '"'), ("x", 'ab"c'), ('"x', "y"), ('a"b', 'x"')]
    assert frames(path, Files(delimiter=",", escape="\\"), ["u", "v"]) == (expected, [])


PLAIN = st.text("\"'ab0 ü🙂", max_size=6) | st.just(
    "a, b"
)  # no quote that looks like another's end
BROKEN_UP = st.text(
    st.sampled_from("abü\n"), max_size=6
)  # in pieces what has line breaks has nothing else of CSV


@many
@given(
    table=st.lists(
        st.tuples(PLAIN, PLAIN | BROKEN_UP, PLAIN | BROKEN_UP), min_size=1, max_size=40
    ),
    ends=st.sampled_from(["\n", "\r\n"]),
    size=st.integers(3, 300) | st.just(4000),
)
def test_pieces_are_the_whole(
    tmp_path: Path, table: list[tuple], ends: str, size: int
) -> None:
    table = [row for row in table if not is_like_rows(row, delimiter=",")]
    (path := tmp_path / "log.csv").write_bytes(
        written([HEADER, *table], lineterminator=ends).encode()
    )
    assert frames(path, Files(), HEADER, size) == (nulled(table), [])


@many
@given(
    table=st.lists(
        st.tuples(*[st.text("ab:\"'\\ ü", max_size=5)] * 3), min_size=1, max_size=30
    ),
    size=st.none() | st.integers(3, 200),
)
def test_a_delimiter_of_several_characters(
    tmp_path: Path, table: list[tuple], size: int | None
) -> None:
    lines = ["::".join(row) for row in table]
    (path := tmp_path / "log.csv").write_text("\n".join(["a::b::c", *lines]) + "\n")
    right = [line.split("::") for line in lines]
    rows, broken = frames(path, Files(delimiter="::", quote=""), ["a", "b", "c"], size)
    assert rows == nulled([row for row in right if len(row) == 3])
    assert [text for _, _, text in broken] == [
        line for line, row in zip(lines, right, strict=True) if len(row) != 3
    ]


@pytest.mark.parametrize(
    "packed",
    [gzip.compress, bz2.compress, lambda data: pa.compress(data, "zstd", asbytes=True)],
)
@pytest.mark.parametrize(
    "name", ["log.csv", "log.csv.gz", "log.CSV.bz2", "log.csv.zst"]
)
def test_a_compressed_file_whatever_its_name(
    tmp_path: Path, packed: Any, name: str
) -> None:
    content = "a,b\n" + "".join(f"{n},ü{n}\n" for n in range(500))
    digests, path = [], tmp_path / name
    for data in (content.encode(), packed(content.encode())):
        path.write_bytes(data)
        digest = hashlib.sha256()
        found = [
            row
            for frame in read_frames(str(path), Files(), ["b", "a"], digest)
            for row in frame.rows.rows()
        ]
        assert found == [(f"ü{n}", str(n), n) for n in range(500)]
        digests.append(digest.hexdigest())
    assert digests[0] == digests[1] == hashlib.sha256(content.encode()).hexdigest()
    assert split_file(str(tmp_path / name), Files(), 10) == [None]


@many
@given(
    n=st.integers(1, 60),
    strays=st.lists(
        st.tuples(st.integers(0, 59), st.integers(0, 2), st.booleans()), max_size=6
    ),
    size=st.none() | st.integers(50, 500),
    block=st.sampled_from([40, 1 << 20]),
)
def test_stray_quotes_cost_their_own_lines(
    tmp_path: Path, n: int, strays: list, size: int | None, block: int
) -> None:
    right = [
        [f"u{row}", f"i{row % 7}", "two words" if row % 3 else ""] for row in range(n)
    ]
    table, touched = [list(row) for row in right], set()
    for row, column, end in strays:
        if row < n:
            table[row][column] = (
                table[row][column] + '"' if end else '"' + table[row][column]
            )
            touched.add(row)
    lines = [",".join(row) for row in table]
    (path := tmp_path / "log.csv").write_text("\n".join(["a,b,c", *lines, ""]))
    with blocks(block):
        rows, broken = frames(path, Files(), ["a", "b", "c"], size)
    assert len(rows) + len(broken) == n
    assert set(
        nulled([row for number, row in enumerate(right) if number not in touched])
    ) <= set(rows)
    assert {text for _, _, text in broken} <= {lines[row] for row in touched}


def test_stray_quotes_among_quoted_values(tmp_path: Path) -> None:
    draw = random.Random(0)
    table = [
        [f"u{row}", f"i{row % 7}", draw.choice(["plain", "a, b", 'say "x"', ""])]
        for row in range(6000)
    ]
    lines = written(table, lineterminator="\n").splitlines()
    strays = draw.sample(range(6000), 40)
    for row in strays:
        lines[row] = lines[row].replace(
            f",i{row % 7},", draw.choice([f',"i{row % 7},', f',i{row % 7}",'])
        )
    (path := tmp_path / "log.csv").write_text("\n".join(["a,b,c", *lines, ""]))
    for size in (None, 20_000):
        rows, broken = frames(path, Files(), ["a", "b", "c"], size)
        assert len(rows) + len(broken) == 6000
        assert set(
            nulled([row for number, row in enumerate(table) if number not in strays])
        ) <= set(rows)
        assert {text for _, _, text in broken} <= {lines[row] for row in strays}


@many
@given(
    st.lists(
        st.tuples(st.just("u"), *[st.text('"a ', max_size=5) | st.just('a, "b"')] * 2),
        min_size=1,
        max_size=9,
    )
)
def test_backslashes_before_quotes_are_not_read_as_other_values(
    tmp_path: Path, table: list[tuple]
) -> None:
    text = written(
        table,
        doublequote=False,
        escapechar="\\",
        quoting=csv.QUOTE_ALL,
        lineterminator="\n",
    )
    (path := tmp_path / "log.csv").write_text("a,b,c\n" + text)
    rows, broken = frames(path, Files(), ["a", "b", "c"])
    assert set(rows) <= set(nulled(table))
    assert len(rows) + sum(text.count("\n") + 1 for _, _, text in broken) == len(table)
    assert frames(path, Files(escape="\\"), ["a", "b", "c"]) == (nulled(table), [])
    if len(rows) < len(table):
        assert any("set escape: '\\'" in reason for _, reason, _ in broken)


def json_lines(path: Path, rows: Sequence[dict[str, Any]], ascii: bool = True) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows))


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
KINDS: list[st.SearchStrategy] = [
    WORDS,
    st.integers(-(2**63), 2**63 - 1),
    FLOATS,
    st.booleans(),
    st.lists(st.integers(0, 9), min_size=1),
    st.fixed_dictionaries(
        {"x": st.integers(0, 9), "deep": st.fixed_dictionaries({"y": WORDS})}
    ),
]


@st.composite
def objects(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw objects whose values have one type per key, or are null."""
    kinds = draw(st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)))
    return draw(
        st.lists(
            st.fixed_dictionaries(
                {"a": st.none() | kinds[0], "b": st.none() | kinds[1]}
            ),
            min_size=1,
        )
    )


@many
@given(
    rows=objects(),
    ascii=st.booleans(),
    size=st.none() | st.integers(10, 300),
    block=st.sampled_from([16, 1 << 20]),
)
def test_json_lines_as_python_reads_them(
    tmp_path: Path, rows: list[dict], ascii: bool, size: int | None, block: int
) -> None:
    json_lines(tmp_path / "log.jsonl", rows, ascii)
    with blocks(block):
        found, broken = frames(tmp_path / "log.jsonl", Files(), ["a", "b"], size)
    assert found == [(row["a"], row["b"]) for row in rows]
    assert not broken


@many
@given(
    st.lists(WORDS | FLOATS | st.integers(-(2**70), 2**70), min_size=1, max_size=9)
    | st.lists(WORDS | st.booleans(), min_size=1, max_size=9)
)
def test_json_values_of_several_types_are_text(
    tmp_path: Path, values: list[Any]
) -> None:
    json_lines(tmp_path / "log.jsonl", [{"a": value} for value in values])
    (frame,) = read_frames(str(tmp_path / "log.jsonl"), Files(), ["a"])
    found = frame.rows["a"]
    assert not frame.broken
    for value, is_ in zip(values, found, strict=True):
        if isinstance(is_, str) and not isinstance(value, str):
            is_ = json.loads(is_)
        assert is_ == (
            value if isinstance(value, str | bool | int) else pytest.approx(value)
        )


def test_lines_that_are_no_json(tmp_path: Path) -> None:
    lines = [
        '{"a": 1, "b": "ok"}',
        "not json",
        '{"a": 2, "b": "half \\ud83d"}',
        '{"a": 3, "b": "\\ud83d\\ude00 \\\\ud83d"}',
        "",
        "[1]",
        "{'a': 4}",
        '{"a": 5, "b": "tab\there"}',
        '{"a": 6, "b": ["list"]}',
        '{"a": 7, "b": {"x": 1}}',
        '{"b": "x"',
        '{"a": 8, "c": [1]}',
        "7",
    ]
    (tmp_path / "log.jsonl").write_text("\r\n".join(lines) + "\r\n")
    right = {
        1: "ok",
        2: "half \ufffd",
        3: "\U0001f600 \\ud83d",
        5: "tab\there",
        8: None,
    }
    lost = ["not json", "[1]", "{'a': 4}", lines[8], lines[9], lines[10], "7"]
    for size in (None, 60):
        rows, broken = frames(tmp_path / "log.jsonl", Files(), ["a", "b"], size)
        alone = (
            0 if size is None else 1
        )  # without others that have text, a list is what most rows have
        assert {row[0]: row[1] for row in rows if row[0] in right} == right
        assert len(rows) + len(broken) == len(lines) - 1
        assert len(broken) >= len(lost) - alone
        if size is None:
            assert [text.rstrip("\r") for _, _, text in broken] == lost


def test_arrays_keyed_files_and_lines_of_text(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text(
        "\ufeff\n "
        + json.dumps([{"a": n, "b": {"c": [n]}} for n in range(300)], indent=1)
    )
    assert split_file(str(tmp_path / "log.json"), Files(), 100) == [None]
    assert frames(tmp_path / "log.json", Files(), ["a", "b"])[0] == [
        (n, {"c": [n]}) for n in range(300)
    ]
    content = {"u1": ["x", "y"], "ü 2": [], "u3": ["z"]}
    (tmp_path / "log.json").write_text(json.dumps(content))
    rows, _ = frames(tmp_path / "log.json", Files(format="keyed"), ["key", "value"])
    assert rows == list(content.items())
    lines = ['u1 "x", y', "", "  ", "u2\tü", " u3 "]
    (tmp_path / "log.txt").write_text("\r\n".join(lines))
    for size in (None, 3, 8):
        rows, broken = frames(
            tmp_path / "log.txt", Files(format="lines"), ["line"], size
        )
        assert [line for (line,) in rows] == [line for line in lines if line.strip()]
        assert not broken


def test_the_types_of_parquet(tmp_path: Path) -> None:
    moments = [
        datetime(2023, 11, 14, 22, 13, 20 + n % 40, 123000, UTC) for n in range(60)
    ]
    columns: dict[str, tuple[Any, list[Any]]] = {
        "decimal": (pa.decimal128(20, 2), [Decimal(f"{n}.25") for n in range(60)]),
        "uint64": (pa.uint64(), [2**64 - 1 - n for n in range(60)]),
        "float": (pa.float32(), [n / 4 for n in range(60)]),
        "binary": (pa.binary(), [f"ü{n}".encode() for n in range(60)]),  # read as text
        "category": (
            pa.dictionary(pa.int8(), pa.string()),
            [f"c{n % 3}" for n in range(60)],
        ),
        "structs": (
            pa.list_(pa.struct({"x": pa.int32()})),
            [[{"x": n}] * (n % 3) for n in range(60)],
        ),
        "none": (pa.null(), [None] * 60),
    }
    table = pa.table(
        {name: pa.array(values, kind) for name, (kind, values) in columns.items()}
    )
    table = table.append_column("time", pa.array(moments, pa.timestamp("ns", "UTC")))
    path = tmp_path / "log.parquet"
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, row_group_size=7)
    names = [*columns, "time"]
    right = list(zip(*(values for _, values in columns.values()), moments, strict=True))
    right = [
        tuple(value.decode() if isinstance(value, bytes) else value for value in row)
        for row in right
    ]
    parts = split_file(str(path), Files(), 300)
    assert [part.start for part in parts if part] == [
        0,
        *(part.end for part in parts[:-1] if part),
    ]
    assert len(parts) > 2
    for size in (None, 300, 1000):
        rows, _ = frames(path, Files(), names, size)
        assert [(*row[:-1], row[-1].replace(tzinfo=UTC)) for row in rows] == right
    with blocks(200):  # bounded frames, in order
        every = list(read_frames(str(path), Files(), ["uint64"]))
    assert len(every) >= 9
    assert [value for frame in every for value in frame.rows["uint64"]] == columns[
        "uint64"
    ][1]


def test_the_digest_is_of_what_is_parsed(tmp_path: Path) -> None:
    table = pl.DataFrame(
        {"a": [f"u{n}" for n in range(400)], "b": range(400), "c": ["unused"] * 400}
    )
    table.write_csv(tmp_path / "log.csv")
    table.write_ndjson(tmp_path / "log.jsonl")
    table.write_parquet(tmp_path / "log.parquet", row_group_size=90)

    def digest(path: Path, size: int | None = None) -> str:
        made = hashlib.sha256()
        for piece in split_file(str(path), Files(), size) if size else [None]:
            list(read_frames(str(path), Files(), ["a", "b"], made, piece))
        return made.hexdigest()

    for name in ("log.csv", "log.jsonl"):
        content = (tmp_path / name).read_bytes()
        for size in (None, 100, 1000, 1 << 20):  # pieces share the bytes among them
            assert digest(tmp_path / name, size) == hashlib.sha256(content).hexdigest()
    other = table.with_columns(pl.col("a").replace("u33", "u34x"))
    for name, write in (
        ("csv", other.write_csv),
        ("jsonl", other.write_ndjson),
        ("parquet", other.write_parquet),
    ):
        (copy := tmp_path / f"copy.{name}").write_bytes(
            (tmp_path / f"log.{name}").read_bytes()
        )
        assert digest(copy) == digest(tmp_path / f"log.{name}")
        write(copy)
        assert digest(copy) != digest(tmp_path / f"log.{name}")


@pytest.mark.parametrize(
    "encoding", ["cp1252", "utf-16", "utf-16-le", "gb18030", "utf-8-sig"]
)
def test_encodings(tmp_path: Path, encoding: str) -> None:
    value = "一" if encoding == "gb18030" else "é"
    names, rows = (
        [value, "b"],
        [(f"u{n}{value}", f'"{n}"\n{value}; x') for n in range(50)],
    )
    (path := tmp_path / "log.csv").write_bytes(written([names, *rows]).encode(encoding))
    for block in (9, 1 << 20):
        with blocks(block):
            assert frames(path, Files(encoding=encoding), names) == (rows, [])


DAMAGED: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "empty": ("log.csv", b"", {}, "is empty"),
    "blank": ("log.jsonl", b"\n \n", {}, "is empty"),
    "truncated gzip": (
        "log.csv",
        gzip.compress(b"a,b\n" + b"x,1\n" * 999)[:-20],
        {},
        "truncated",
    ),
    "another compression": (
        "log.csv.xz",
        b"\xfd7zXZ\0",
        {"format": "csv"},
        "use gzip, bz2 or zstd",
    ),
    "no format": ("log.data", b"a,b\n", {}, "set 'format'"),
    "wrong delimiter": ("log.csv", b"a;b\nx;1\n", {}, "set 'delimiter: \";\"'"),
    "wrong delimiter, ::": ("log.csv", b"a::b\nx::1\n", {}, "set 'delimiter: \"::\"'"),
    "wrong encoding": (
        "log.csv",
        "a,b\nx,1\né,2\n".encode("cp1252"),
        {},
        "not utf-8 in line 3; set 'encoding'",
    ),
    "wrong encoding, short row": (
        "log.csv",
        "a,b\nx,1\né\n".encode("cp1252"),
        {},
        "not utf-8 in line 3; set",
    ),
    "wrong encoding, JSON": (
        "log.jsonl",
        '{"a": "é", "b": 1}\n'.encode("cp1252"),
        {},
        "log.jsonl is not",
    ),
    "utf-16": ("log.csv", "a,b\nx,1\n".encode("utf-16"), {}, "such as utf-16"),
    "carriage returns": ("log.csv", b"a,b\rx,1\ry,2\r", {}, "carriage returns"),
    "Parquet that is none": (
        "log.parquet",
        b"a,b\nx,1\n" * 9,
        {},
        "cannot be read as parquet",
    ),
    "JSON that is none": ("log.jsonl", b"a,b\nx,1\n", {}, "not JSON lines"),
    "truncated JSON": ("log.jsonl", b'{"a": 1, "b": 2}\n{"a": 1, ', {}, "truncated"),
    "Python literals": (
        "log.jsonl",
        b"{u'a': u'x', u'b': False}\n" * 3,
        {},
        "double quotes",
    ),
    "truncated array": ("log.json", b'[{"a": 1, "b": 2}, {"a"', {}, "truncated"),
    "a key twice": (
        "log.json",
        b'{"a": [1], "a": [2]}',
        {"format": "keyed"},
        "has the key 'a' twice",
    ),
    "no keys": ("log.json", b"[1, 2]", {"format": "keyed"}, "set another 'format'"),
    "a header without end": (
        "log.csv",
        b'"a,b\nx,1\n',
        {},
        "list the columns in 'header'",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_file_that_cannot_be_read_is_named_in_one_line(
    tmp_path: Path, what: str
) -> None:
    name, content, files, words = DAMAGED[what]
    (tmp_path / name).write_bytes(content)
    said = fails(tmp_path / name, Files(**files))
    assert words in said
    assert name in said


def test_columns_that_are_missing_are_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,item,\nu,i,j,\n")
    (tmp_path / "log.jsonl").write_text('{"user": 1, "item": 2}\n')
    pl.DataFrame({"user": [1], "item": [2]}).write_parquet(tmp_path / "log.parquet")
    for name in ("log.csv", "log.jsonl", "log.parquet"):
        (frame,) = read_frames(
            str(tmp_path / name), Files(), ["usr", "item", "cast(item as double)"]
        )
        assert list(frame.missing) == ["usr"]
        assert "'user'" in frame.missing["usr"]
        assert frame.with_missing["usr"].to_list() == [None]
    assert frames(tmp_path / "log.csv", Files(), ["item.1", "item"]) == (
        [("j", "i")],
        [],
    )
