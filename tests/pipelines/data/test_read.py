"""Raw files are read as Python's csv and json modules read them: whole, in pieces,
compressed and in every encoding. Lines that cannot be parsed are returned one by one.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
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

BrokenLine = tuple[int, str, str]
"""The row number, the reason and the text of a line that cannot be parsed."""

many_examples = settings(
    max_examples=60,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.filter_too_much,
    ],
)


@contextmanager
def set_block_bytes(size: int) -> Iterator[None]:
    """Set the number of bytes that are parsed at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "BLOCK_BYTES", size)
        yield


def read_all(
    path: Path, files: Files, columns: Sequence[str], size: int | None = None
) -> tuple[list[tuple], list[BrokenLine]]:
    """Read all rows and broken lines, in pieces of `size` bytes if set.

    Checks that the row numbers of each piece have no gap.
    """
    rows: list[tuple] = []
    broken: list[BrokenLine] = []
    for piece in split_file(str(path), files, size) if size else [None]:
        numbers: list[int] = []
        for frame in read_frames(str(path), files, columns, None, piece):
            assert not frame.missing or size
            numbers.extend(frame.rows[ROW])
            numbers.extend(number for number, *_ in frame.broken)
            rows += frame.with_missing.select(columns).rows()
            broken += frame.broken
        assert sorted(numbers) == list(range(len(numbers)))
    return rows, broken


def read_error(path: Path, files: Files, columns: Sequence[str] = ("a", "b")) -> str:
    """Return the message of the UserError that reading a file raises, one line."""
    with pytest.raises(UserError) as caught:
        list(read_frames(str(path), files, columns))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def format_csv(rows: Sequence[Sequence[str]], **dialect: Any) -> str:
    """Return rows as text that Python's csv module writes."""
    text = io.StringIO()
    csv.writer(text, **dialect).writerows(rows)
    return text.getvalue()


def replace_empty(rows: Sequence[Sequence[str]]) -> list[tuple]:
    """Return rows with None for empty text."""
    return [tuple(value or None for value in row) for row in rows]


# The name of the first column fills the first hundred bytes of the file.
HEADER = [
    "the whole name of the first column of this table, so long that the first hundred bytes of the file are it alone",
    "b",
    "c",
]
ANY_VALUE = st.text(
    st.sampled_from("\",;\t| 'ab0\\\n\r\x00ü🙂\u2028\xa0"), max_size=6
) | st.just("line\r\nline")
TABLES = st.integers(2, 3).flatmap(
    lambda width: st.lists(st.tuples(*[ANY_VALUE] * width), min_size=1, max_size=12)
)


def is_like_rows(row: Sequence[str], **dialect: Any) -> bool:
    """Return whether each line of a row has as many columns as the row."""
    lines = format_csv([row], **dialect).rstrip("\r\n").split("\n")
    delimiters = [line.count(dialect["delimiter"]) for line in lines]
    return len(lines) > 1 and all(count == len(row) - 1 for count in delimiters)


@many_examples
@given(
    table=TABLES,
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    line_end=st.sampled_from(["\n", "\r\n"]),
    escape=st.sampled_from(["", "\\"]),
    block=st.sampled_from([7, 50, 1 << 20]),
)
def test_csv_is_read_as_python_reads_it(
    tmp_path: Path,
    table: list[tuple],
    delimiter: str,
    quoting: int,
    line_end: str,
    escape: str,
    block: int,
) -> None:
    # csv.writer does not quote a carriage return within a value by itself
    has_carriage_return = any("\r" in value for row in table for value in row)
    dialect: dict[str, Any] = {
        "delimiter": delimiter,
        "quoting": csv.QUOTE_ALL if has_carriage_return else quoting,
        "lineterminator": line_end,
    }
    if escape:
        dialect |= {"escapechar": "\\", "doublequote": False}
    table = [row for row in table if not is_like_rows(row, **dialect)]
    header = HEADER[: len(table[0])] if table else HEADER
    text = format_csv([header, *table], **dialect)
    path = tmp_path / "log.csv"
    path.write_bytes(text.encode())
    reader = csv.reader(
        [line + "\n" for line in text.split("\n")[:-1]],
        delimiter=delimiter,
        escapechar=escape or None,
        doublequote=not escape,
        strict=True,
    )
    expected = replace_empty(list(reader)[1:])
    assert expected == replace_empty(table)

    with set_block_bytes(block):
        rows, broken = read_all(path, Files(delimiter=delimiter, escape=escape), header)

    assert rows == expected
    assert not broken


def test_escaped_quotes_are_read_in_and_out_of_quotes(tmp_path: Path) -> None:
    lines = ["u,v", 'x,\\"', 'x,ab\\"c', '\\"x,y', '"a\\"b",x\\"']
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines))

    rows, broken = read_all(path, Files(delimiter=",", escape="\\"), ["u", "v"])

    assert rows == [("x", '"'), ("x", 'ab"c'), ('"x', "y"), ('a"b', 'x"')]
    assert not broken


# Values without a quote that looks like the end of another quoted value.
ONE_LINE = st.text("\"'ab0 ü🙂", max_size=6) | st.just("a, b")
# A value with line breaks may have no delimiter or quote if a file is read in pieces.
SEVERAL_LINES = st.text(st.sampled_from("abü\n"), max_size=6)


@many_examples
@given(
    table=st.lists(
        st.tuples(ONE_LINE, ONE_LINE | SEVERAL_LINES, ONE_LINE | SEVERAL_LINES),
        min_size=1,
        max_size=40,
    ),
    line_end=st.sampled_from(["\n", "\r\n"]),
    size=st.integers(3, 300) | st.just(4000),
)
def test_the_pieces_of_a_csv_file_have_all_its_rows_in_order(
    tmp_path: Path, table: list[tuple], line_end: str, size: int
) -> None:
    table = [row for row in table if not is_like_rows(row, delimiter=",")]
    text = format_csv([HEADER, *table], lineterminator=line_end)
    path = tmp_path / "log.csv"
    path.write_bytes(text.encode())

    rows, broken = read_all(path, Files(), HEADER, size)

    assert rows == replace_empty(table)
    assert not broken


@many_examples
@given(
    table=st.lists(
        st.tuples(*[st.text("ab:\"'\\ ü", max_size=5)] * 3), min_size=1, max_size=30
    ),
    size=st.none() | st.integers(3, 200),
)
def test_a_delimiter_may_have_several_characters(
    tmp_path: Path, table: list[tuple], size: int | None
) -> None:
    lines = ["::".join(row) for row in table]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["a::b::c", *lines]) + "\n")
    values = [line.split("::") for line in lines]  # a value may have the delimiter

    files = Files(delimiter="::", quote="")
    rows, broken = read_all(path, files, ["a", "b", "c"], size)

    assert rows == replace_empty([row for row in values if len(row) == 3])
    other_lines = [line for line in lines if len(line.split("::")) != 3]
    assert [text for _, _, text in broken] == other_lines


def compress_zstd(data: bytes) -> bytes:
    """Return data compressed by Zstandard."""
    return pa.compress(data, "zstd", asbytes=True)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, compress_zstd])
@pytest.mark.parametrize(
    "name", ["log.csv", "log.csv.gz", "log.CSV.bz2", "log.csv.zst"]
)
def test_compression_is_recognized_whatever_the_name_of_the_file(
    tmp_path: Path, compress: Callable[[bytes], bytes], name: str
) -> None:
    path = tmp_path / name
    content = "a,b\n" + "".join(f"{n},ü{n}\n" for n in range(500))
    raw = content.encode()
    for data in (raw, compress(raw)):
        path.write_bytes(data)
        digest = hashlib.sha256()
        rows: list[tuple] = []
        for frame in read_frames(str(path), Files(), ["b", "a"], digest):
            rows += frame.rows.rows()
        assert rows == [(f"ü{n}", str(n), n) for n in range(500)]
        assert digest.hexdigest() == hashlib.sha256(raw).hexdigest()

    assert split_file(str(path), Files(), 10) == [None]


@many_examples
@given(
    num_rows=st.integers(1, 60),
    stray_quotes=st.lists(
        st.tuples(st.integers(0, 59), st.integers(0, 2), st.booleans()), max_size=6
    ),
    size=st.none() | st.integers(50, 500),
    block=st.sampled_from([40, 1 << 20]),
)
def test_a_stray_quote_breaks_its_line_alone(
    tmp_path: Path, num_rows: int, stray_quotes: list, size: int | None, block: int
) -> None:
    original = [
        [f"u{number}", f"i{number % 7}", "two words" if number % 3 else ""]
        for number in range(num_rows)
    ]
    table = [list(row) for row in original]
    changed_rows = set()
    for number, column, at_end in stray_quotes:
        if number < num_rows:
            value = table[number][column]
            table[number][column] = value + '"' if at_end else '"' + value
            changed_rows.add(number)
    lines = [",".join(row) for row in table]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["a,b,c", *lines, ""]))

    with set_block_bytes(block):
        rows, broken = read_all(path, Files(), ["a", "b", "c"], size)

    assert len(rows) + len(broken) == num_rows
    unchanged = [row for n, row in enumerate(original) if n not in changed_rows]
    assert set(replace_empty(unchanged)) <= set(rows)
    broken_lines = {text for _, _, text in broken}
    assert broken_lines <= {lines[number] for number in changed_rows}


def test_a_stray_quote_among_quoted_values_breaks_its_line_alone(
    tmp_path: Path,
) -> None:
    generator = random.Random(0)
    values = ["plain", "a, b", 'say "x"', ""]
    table = [
        [f"u{number}", f"i{number % 7}", generator.choice(values)]
        for number in range(6000)
    ]
    lines = format_csv(table, lineterminator="\n").splitlines()
    changed_rows = generator.sample(range(6000), 40)
    for number in changed_rows:
        item = f"i{number % 7}"
        with_quote = generator.choice([f',"{item},', f',{item}",'])
        lines[number] = lines[number].replace(f",{item},", with_quote)
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["a,b,c", *lines, ""]))

    unchanged = [row for n, row in enumerate(table) if n not in changed_rows]
    for size in (None, 20_000):
        rows, broken = read_all(path, Files(), ["a", "b", "c"], size)
        assert len(rows) + len(broken) == 6000
        assert set(replace_empty(unchanged)) <= set(rows)
        broken_lines = {text for _, _, text in broken}
        assert broken_lines <= {lines[number] for number in changed_rows}


@many_examples
@given(
    st.lists(
        st.tuples(st.just("u"), *[st.text('"a ', max_size=5) | st.just('a, "b"')] * 2),
        min_size=1,
        max_size=9,
    )
)
def test_escaped_quotes_without_the_setting_break_lines_but_change_no_value(
    tmp_path: Path, table: list[tuple]
) -> None:
    text = format_csv(
        table,
        doublequote=False,
        escapechar="\\",
        quoting=csv.QUOTE_ALL,
        lineterminator="\n",
    )
    path = tmp_path / "log.csv"
    path.write_text("a,b,c\n" + text)
    expected = replace_empty(table)

    rows, broken = read_all(path, Files(), ["a", "b", "c"])
    assert set(rows) <= set(expected)
    num_broken_lines = sum(text.count("\n") + 1 for _, _, text in broken)
    assert len(rows) + num_broken_lines == len(table)
    if len(rows) < len(table):
        assert any("set escape: '\\'" in reason for _, reason, _ in broken)

    rows, broken = read_all(path, Files(escape="\\"), ["a", "b", "c"])
    assert rows == expected
    assert not broken


def write_json_lines(
    path: Path, rows: Sequence[dict[str, Any]], ascii: bool = True
) -> None:
    """Write an object per line; other characters than ASCII as escapes if `ascii`."""
    path.write_text("".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows))


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES: list[st.SearchStrategy] = [
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
    a = draw(st.sampled_from(VALUES))
    b = draw(st.sampled_from(VALUES))
    object_ = st.fixed_dictionaries({"a": st.none() | a, "b": st.none() | b})
    return draw(st.lists(object_, min_size=1))


@many_examples
@given(
    objects=objects(),
    ascii=st.booleans(),
    size=st.none() | st.integers(10, 300),
    block=st.sampled_from([16, 1 << 20]),
)
def test_json_lines_are_read_as_python_reads_them(
    tmp_path: Path, objects: list[dict], ascii: bool, size: int | None, block: int
) -> None:
    path = tmp_path / "log.jsonl"
    write_json_lines(path, objects, ascii)

    with set_block_bytes(block):
        rows, broken = read_all(path, Files(), ["a", "b"], size)

    assert rows == [(object_["a"], object_["b"]) for object_ in objects]
    assert not broken


@many_examples
@given(
    st.lists(WORDS | FLOATS | st.integers(-(2**70), 2**70), min_size=1, max_size=9)
    | st.lists(WORDS | st.booleans(), min_size=1, max_size=9)
)
def test_json_values_of_several_types_become_text(
    tmp_path: Path, values: list[Any]
) -> None:
    path = tmp_path / "log.jsonl"
    write_json_lines(path, [{"a": value} for value in values])

    (frame,) = read_frames(str(path), Files(), ["a"])

    assert not frame.broken
    for value, read_value in zip(values, frame.rows["a"], strict=True):
        if isinstance(read_value, str) and not isinstance(value, str):
            read_value = json.loads(read_value)
        if isinstance(value, float):
            assert read_value == pytest.approx(value)
        else:
            assert read_value == value


def test_lines_that_are_not_json_objects_are_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
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
    path.write_text("\r\n".join(lines) + "\r\n")
    expected = {
        1: "ok",
        2: "half \ufffd",
        3: "\U0001f600 \\ud83d",
        5: "tab\there",
        8: None,
    }
    broken_lines = ["not json", "[1]", "{'a': 4}", lines[8], lines[9], lines[10], "7"]

    rows, broken = read_all(path, Files(), ["a", "b"])
    assert {a: b for a, b in rows if a in expected} == expected
    assert [text.rstrip("\r") for _, _, text in broken] == broken_lines
    assert len(rows) + len(broken) == len(lines) - 1  # less the blank line

    # In a piece whose other rows have no text in "b", a list is no broken line.
    rows, broken = read_all(path, Files(), ["a", "b"], 60)
    assert {a: b for a, b in rows if a in expected} == expected
    assert len(broken) >= len(broken_lines) - 1
    assert len(rows) + len(broken) == len(lines) - 1


def test_a_json_array_is_read_whole_as_one_row_per_object(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    objects = [{"a": n, "b": {"c": [n]}} for n in range(300)]
    path.write_text("\ufeff\n " + json.dumps(objects, indent=1))

    rows, _ = read_all(path, Files(), ["a", "b"])

    assert rows == [(n, {"c": [n]}) for n in range(300)]
    assert split_file(str(path), Files(), 100) == [None]


def test_a_keyed_json_file_gives_a_row_per_key(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    content = {"u1": ["x", "y"], "ü 2": [], "u3": ["z"]}
    path.write_text(json.dumps(content))

    rows, _ = read_all(path, Files(format="keyed"), ["key", "value"])

    assert rows == list(content.items())


@pytest.mark.parametrize("size", [None, 3, 8])
def test_a_text_file_gives_a_row_per_line_that_is_not_blank(
    tmp_path: Path, size: int | None
) -> None:
    path = tmp_path / "log.txt"
    path.write_text("\r\n".join(['u1 "x", y', "", "  ", "u2\tü", " u3 "]))

    rows, broken = read_all(path, Files(format="lines"), ["line"], size)

    assert rows == [('u1 "x", y',), ("u2\tü",), (" u3 ",)]
    assert not broken


NUM_ROWS = 60
PARQUET_COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "decimal": (pa.decimal128(20, 2), [Decimal(f"{n}.25") for n in range(NUM_ROWS)]),
    "uint64": (pa.uint64(), [2**64 - 1 - n for n in range(NUM_ROWS)]),
    "float": (pa.float32(), [n / 4 for n in range(NUM_ROWS)]),
    "binary": (pa.binary(), [f"ü{n}".encode() for n in range(NUM_ROWS)]),
    "category": (
        pa.dictionary(pa.int8(), pa.string()),
        [f"c{n % 3}" for n in range(NUM_ROWS)],
    ),
    "structs": (
        pa.list_(pa.struct({"x": pa.int32()})),
        [[{"x": n}] * (n % 3) for n in range(NUM_ROWS)],
    ),
    "none": (pa.null(), [None] * NUM_ROWS),
    "time": (
        pa.timestamp("ns", "UTC"),
        [
            datetime(2023, 11, 14, 22, 13, 20 + n % 40, 123000, UTC)
            for n in range(NUM_ROWS)
        ],
    ),
}


def write_parquet_of_all_types(path: Path) -> None:
    """Write `PARQUET_COLUMNS` in row groups of 7 rows, with times as int96."""
    arrays = {
        name: pa.array(values, type_)
        for name, (type_, values) in PARQUET_COLUMNS.items()
    }
    pq.write_table(
        pa.table(arrays), path, use_deprecated_int96_timestamps=True, row_group_size=7
    )


@pytest.mark.parametrize("size", [None, 300, 1000])
def test_every_type_of_parquet_is_read(tmp_path: Path, size: int | None) -> None:
    path = tmp_path / "log.parquet"
    write_parquet_of_all_types(path)

    rows, _ = read_all(path, Files(), list(PARQUET_COLUMNS), size)

    columns = dict(zip(PARQUET_COLUMNS, zip(*rows, strict=True), strict=True))
    for name, (_, values) in PARQUET_COLUMNS.items():
        expected = values
        if name == "binary":
            expected = [value.decode() for value in values]
        read_values = list(columns[name])
        if name == "time":
            read_values = [value.replace(tzinfo=UTC) for value in read_values]
        assert read_values == expected, name


def test_a_parquet_file_is_split_and_read_in_bounded_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    write_parquet_of_all_types(path)

    pieces = [piece for piece in split_file(str(path), Files(), 300) if piece]
    assert len(pieces) > 2
    ends = [piece.end for piece in pieces]
    assert [piece.start for piece in pieces] == [0, *ends[:-1]]

    with set_block_bytes(200):
        frames = list(read_frames(str(path), Files(), ["uint64"]))
    assert len(frames) >= 9
    values = [value for frame in frames for value in frame.rows["uint64"]]
    assert values == PARQUET_COLUMNS["uint64"][1]


def read_digest(path: Path, size: int | None = None) -> str:
    """Return the digest of what is parsed of the columns `a` and `b`."""
    digest = hashlib.sha256()
    for piece in split_file(str(path), Files(), size) if size else [None]:
        list(read_frames(str(path), Files(), ["a", "b"], digest, piece))
    return digest.hexdigest()


def write_table(table: pl.DataFrame, path: Path) -> None:
    """Write a table in the format of the path's suffix."""
    if path.suffix == ".csv":
        table.write_csv(path)
    elif path.suffix == ".jsonl":
        table.write_ndjson(path)
    else:
        table.write_parquet(path, row_group_size=90)


TABLE_OF_DIGESTS = pl.DataFrame(
    {"a": [f"u{n}" for n in range(400)], "b": range(400), "c": ["unused"] * 400}
)


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
def test_the_digest_of_a_text_file_is_that_of_its_bytes_in_any_pieces(
    tmp_path: Path, name: str
) -> None:
    write_table(TABLE_OF_DIGESTS, tmp_path / name)
    expected = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()

    for size in (None, 100, 1000, 1 << 20):
        assert read_digest(tmp_path / name, size) == expected


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_the_digest_changes_with_the_content_and_not_with_the_name(
    tmp_path: Path, suffix: str
) -> None:
    path, copy = tmp_path / f"log.{suffix}", tmp_path / f"copy.{suffix}"
    write_table(TABLE_OF_DIGESTS, path)
    copy.write_bytes(path.read_bytes())
    assert read_digest(copy) == read_digest(path)

    changed = TABLE_OF_DIGESTS.with_columns(pl.col("a").replace("u33", "u34x"))
    write_table(changed, copy)
    assert read_digest(copy) != read_digest(path)


@pytest.mark.parametrize(
    "encoding", ["cp1252", "utf-16", "utf-16-le", "gb18030", "utf-8-sig"]
)
def test_text_is_read_in_the_encoding_of_the_settings(
    tmp_path: Path, encoding: str
) -> None:
    value = "一" if encoding == "gb18030" else "é"
    header = [value, "b"]
    expected = [(f"u{n}{value}", f'"{n}"\n{value}; x') for n in range(50)]
    path = tmp_path / "log.csv"
    path.write_bytes(format_csv([header, *expected]).encode(encoding))

    for block in (9, 1 << 20):
        with set_block_bytes(block):
            rows, broken = read_all(path, Files(encoding=encoding), header)
        assert rows == expected
        assert not broken


# The name of a file, its content, keys of its mapping, and words of the error.
UNREADABLE: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
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
    "CSV named as Parquet": (
        "log.parquet",
        b"a,b\nx,1\n" * 9,
        {},
        "cannot be read as parquet",
    ),
    "CSV named as JSON lines": ("log.jsonl", b"a,b\nx,1\n", {}, "not JSON lines"),
    "truncated JSON": ("log.jsonl", b'{"a": 1, "b": 2}\n{"a": 1, ', {}, "truncated"),
    "Python literals": (
        "log.jsonl",
        b"{u'a': u'x', u'b': False}\n" * 3,
        {},
        "double quotes",
    ),
    "truncated array": ("log.json", b'[{"a": 1, "b": 2}, {"a"', {}, "truncated"),
    "repeated key": (
        "log.json",
        b'{"a": [1], "a": [2]}',
        {"format": "keyed"},
        "has the key 'a' twice",
    ),
    "no keys": ("log.json", b"[1, 2]", {"format": "keyed"}, "set another 'format'"),
    "header without end": (
        "log.csv",
        b'"a,b\nx,1\n',
        {},
        "list the columns in 'header'",
    ),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_a_file_that_cannot_be_read_is_named_in_one_line(
    tmp_path: Path, fault: str
) -> None:
    name, content, files, words = UNREADABLE[fault]
    (tmp_path / name).write_bytes(content)

    error = read_error(tmp_path / name, Files(**files))

    assert words in error
    assert name in error


def test_a_missing_column_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,item,\nu,i,j,\n")
    (tmp_path / "log.jsonl").write_text('{"user": 1, "item": 2}\n')
    pl.DataFrame({"user": [1], "item": [2]}).write_parquet(tmp_path / "log.parquet")
    columns = ["usr", "item", "cast(item as double)"]

    for name in ("log.csv", "log.jsonl", "log.parquet"):
        (frame,) = read_frames(str(tmp_path / name), Files(), columns)
        assert list(frame.missing) == ["usr"]
        assert "'user'" in frame.missing["usr"]
        assert frame.with_missing["usr"].to_list() == [None]


def test_columns_of_the_same_name_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,item,\nu,i,j,\n")

    rows, broken = read_all(tmp_path / "log.csv", Files(), ["item.1", "item"])

    assert rows == [("j", "i")]
    assert not broken
