"""Raw files are read as Python's csv and json modules read them, whole and in pieces."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.ids import NULL_WORDS, clean_id
from pipelines.prepare.reading import read
from pipelines.prepare.reading.read import ROW, Files, read_frames, split_file
from tests.fixtures.commands import prepare_log, read_rows

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
        for frame in read_frames(str(path), files, columns, piece):
            assert not frame.missing or size
            numbers.extend(frame.rows[ROW])
            numbers.extend(number for number, *_ in frame.broken)
            rows += frame.with_missing.select(columns).rows()
            broken += frame.broken
        assert sorted(numbers) == list(range(len(numbers)))
    return rows, broken


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
    tmp_path, table, delimiter, quoting, line_end, escape, block
):
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
    tmp_path, table, line_end, size
):
    table = [row for row in table if not is_like_rows(row, delimiter=",")]
    text = format_csv([HEADER, *table], lineterminator=line_end)
    path = tmp_path / "log.csv"
    path.write_bytes(text.encode())

    rows, broken = read_all(path, Files(), HEADER, size)

    assert rows == replace_empty(table)
    assert not broken


@pytest.mark.parametrize("compression", ["gzip", "bz2", "zstd"])
def test_compression_is_recognized_whatever_the_name_of_the_file(tmp_path, compression):
    path = tmp_path / "log.csv"
    raw = "a,b\n" + "".join(f"{n},ü{n}\n" for n in range(500))
    with pa.output_stream(path, compression=compression) as stream:
        stream.write(raw.encode())

    rows, _ = read_all(path, Files(), ["b", "a"])

    assert rows == [(f"ü{n}", str(n)) for n in range(500)]
    assert split_file(str(path), Files(), 10) == [None]


def test_a_stray_quote_among_quoted_values_breaks_its_line_alone(tmp_path):
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


def write_json_lines(
    path: Path, rows: Sequence[dict[str, Any]], ascii: bool = True
) -> None:
    """Write an object per line; other characters than ASCII as escapes if `ascii`."""
    path.write_text("".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows))


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
FLOATS = st.floats(-1e15, 1e15)
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
    tmp_path, objects, ascii, size, block
):
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
def test_json_values_of_several_types_become_text(tmp_path, values):
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


@pytest.mark.parametrize("size", [None, 300, 1000])
def test_every_type_of_parquet_is_read(tmp_path, size):
    path = tmp_path / "log.parquet"
    arrays = {
        name: pa.array(values, type_)
        for name, (type_, values) in PARQUET_COLUMNS.items()
    }
    pq.write_table(
        pa.table(arrays), path, use_deprecated_int96_timestamps=True, row_group_size=7
    )

    with set_block_bytes(size or 1 << 20):
        rows, _ = read_all(path, Files(), list(PARQUET_COLUMNS), size)

    assert size is None or len(split_file(str(path), Files(), size)) > 2

    columns = dict(zip(PARQUET_COLUMNS, zip(*rows, strict=True), strict=True))
    for name, (_, values) in PARQUET_COLUMNS.items():
        expected = values
        if name == "binary":
            expected = [value.decode() for value in values]
        read_values = list(columns[name])
        if name == "time":
            read_values = [value.replace(tzinfo=UTC) for value in read_values]
        assert read_values == expected, name


def test_the_ids_of_a_log_are_those_of_a_served_request(tmp_path):
    """A served request cleans its ids by `clean_id`."""
    draw = random.Random(0)
    parts = ["a", "0", "1", "5", ".0", "e3", "-", "+", " ", "\xa0", "\u200b", "é", "Å"]
    texts = ["".join(draw.choices(parts, k=draw.randrange(1, 6))) for _ in range(3000)]
    texts += [*NULL_WORDS, " NaN ", "1e400", "\ufeff", "ﬁ", "NUL\x00", "7", "8"]
    rows = [{"u": text, "i": text, "t": n} for n, text in enumerate(texts)]
    write_json_lines(tmp_path / "log.jsonl", rows)
    mapping = {
        "files": "log.jsonl",
        "user": "'u'",
        "item": "i",
        "time": {"column": "t", "unit": "order"},
        "prepare": {"core": 0, "max_rejects": 1},
    }

    prepare_log(mapping, tmp_path, tmp_path / "tables")

    events = read_rows(tmp_path / "tables", "events")
    ids = {row["timestamp_ms"]: row["item_id"] for row in events}
    for number, text in enumerate(texts):
        assert ids.get(number) == clean_id(text), text
