"""Raw files as streams of bounded frames: CSV, JSON lines and Parquet, compressed or not.

Text formats are read as text throughout, so that no number passes through a float on its way; what a
value must be is decided once, in `normalise.py`.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from models.tables import UserError, join, open_uri

ROW = "__row"
"""Column with the row's number in the raw file, from 0; added by the readers."""

SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
FORMATS = ("csv", "jsonl", "parquet")
COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")
TEXT_BLOCK = 8 << 20  # bytes of text per frame; also the longest row that can be read
PARQUET_BLOCK = 1 << 17  # rows per frame
LONGEST_QUOTE = 2000  # characters of an unreadable line that a reject keeps


@dataclass(frozen=True)
class Reading:
    """How a raw file is read."""

    columns: tuple[str, ...]
    """Columns wanted."""
    lists: frozenset[str] = frozenset()
    """Those of them that hold lists; in CSV they cannot be told from text and stay text."""
    integers: frozenset[str] = frozenset()
    """Those of them that must be integers: a number such as 1.5 or 1e9 keeps its spelling, to be refused."""
    format: str | None = None
    """One of FORMATS; None: by the file's suffix."""
    delimiter: str | None = None
    """CSV: the column separator; None: a tab for `.tsv`, else a comma."""
    header: tuple[str, ...] | None = None
    """CSV without a header line: its column names."""


@dataclass(frozen=True)
class Frame:
    """Some rows of a raw file."""

    rows: pl.DataFrame
    """The wanted columns and ROW."""
    broken: list[tuple[int, str, str]] = field(default_factory=list)
    """Lines that are no rows at all: number in the file, reason, text."""


def format_of(file: str, chosen: str | None = None) -> str:
    """The format of a raw file: as chosen, or by its suffix beneath that of a compression."""
    if chosen is not None:
        return chosen
    suffixes = [s.lower() for s in PurePosixPath(file).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in SUFFIXES:
        raise UserError(f"the format of {file} cannot be told from its name; set 'format' to {', '.join(FORMATS)}")
    return SUFFIXES[suffixes[-1]]


def read_frames(input_uri: str, file: str, reading: Reading) -> Iterator[Frame]:
    """Streams the file. UserError names the file for one that is empty, damaged or of another format, and
    the column and its nearest neighbour for a column that it does not have."""
    kind = format_of(file, reading.format)
    reader = {"csv": _read_csv, "jsonl": _read_jsonl, "parquet": _read_parquet}[kind]
    uri = join(input_uri, file)
    try:
        yield from reader(uri, reading)
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{uri} cannot be read as {kind} ({reason[:300]}); it may be truncated, damaged or of another format: "
            f"copy it again or set 'format'"
        ) from error


def require_columns(uri: str, wanted: Iterable[str], present: Collection[str]) -> None:
    """UserError if a wanted column is not there, with the nearest one that is."""
    for column in wanted:
        if column not in present:
            near = difflib.get_close_matches(column, sorted(present), n=1, cutoff=0.0)
            hint = f"the nearest is '{near[0]}'" if near else "it has none"
            raise UserError(f"{uri} has no column '{column}'; {hint}; correct the source file or the log")


def _empty(uri: str) -> UserError:
    return UserError(f"{uri} is empty; copy it again or take it out of the input folder")


def _numbers(start: int, count: int, skipped: Iterable[int]) -> np.ndarray:
    """Numbers of the next `count` rows from `start`, leaving out those in `skipped` (sorted)."""
    numbers = np.arange(start, start + count, dtype=np.int64)
    for number in skipped:
        numbers[numbers >= number] += 1
    return numbers


def _read_csv(uri: str, reading: Reading) -> Iterator[Frame]:
    filesystem, path = open_uri(uri)
    delimiter = reading.delimiter or ("\t" if ".tsv" in PurePosixPath(path).suffixes else ",")
    header = list(reading.header or ())
    if not header:
        with filesystem.open_input_stream(path) as stream:
            first = stream.read(1 << 16).split(b"\n", 1)[0].decode("utf-8-sig", errors="replace").strip("\r")
        header = next(csv.reader([first], delimiter=delimiter), [])
        if not header:
            raise _empty(uri)
    require_columns(uri, reading.columns, header)

    broken: list[tuple[int, str, str]] = []

    def skip(row: Any) -> str:
        number = row.number - (1 if reading.header else 2)  # counted from 1, the header among them
        reason = f"row: {row.actual_columns} columns, not {row.expected_columns}"
        broken.append((number, reason, (row.text or "")[:LONGEST_QUOTE]))
        return "skip"

    with filesystem.open_input_stream(path) as stream:
        if reading.header and not stream.read(1):
            raise _empty(uri)
    with filesystem.open_input_stream(path) as stream:
        # One thread: rows are numbered only then; files are read side by side by Ray tasks.
        batches = pa.csv.open_csv(
            stream,
            read_options=pa.csv.ReadOptions(
                use_threads=False, block_size=TEXT_BLOCK, column_names=header if reading.header else None
            ),
            parse_options=pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip),
            convert_options=pa.csv.ConvertOptions(
                include_columns=list(reading.columns), column_types=dict.fromkeys(reading.columns, pa.string())
            ),
        )
        reported = start = 0
        for batch in batches:
            numbers = _numbers(start, batch.num_rows, sorted(n for n, _, _ in broken if n >= start))
            start = int(numbers[-1]) + 1 if len(numbers) else start
            rows = pl.DataFrame(pl.from_arrow(batch)).with_columns(pl.Series(ROW, numbers))
            yield Frame(rows, broken[reported:])
            reported = len(broken)
        if reported < len(broken):
            yield Frame(rows.clear() if start else _no_rows(reading), broken[reported:])


def _no_rows(reading: Reading) -> pl.DataFrame:
    return pl.DataFrame(schema={**dict.fromkeys(reading.columns, pl.String), ROW: pl.Int64})


def _read_jsonl(uri: str, reading: Reading) -> Iterator[Frame]:
    schema = {name: pl.List(pl.String) if name in reading.lists else pl.String for name in reading.columns}
    spelled = [re.compile(rb'("%s"\s*:\s*)(-?\d+[.eE][\d.eE+-]*)' % re.escape(n).encode()) for n in reading.integers]
    start = 0
    for chunk in _line_chunks(uri):
        for pattern in spelled:  # quoted, a number such as 1e9 keeps its spelling
            chunk = pattern.sub(rb'\1"\2"', chunk)
        if start == 0:
            _check_keys(uri, reading, chunk)
        rows, broken = _parse_lines(chunk, schema)
        if start == 0 and broken and not len(rows):
            raise UserError(
                f"{uri} is not JSON lines ({broken[0][1]}); write one JSON object per line, or set 'format'"
            )
        if broken and not chunk.endswith(b"\n") and broken[-1][0] == len(rows) + len(broken) - 1:
            raise UserError(f"{uri} ends within a JSON object: it is truncated; copy it again")
        numbers = _numbers(start, len(rows), [start + n for n, _, _ in broken])
        yield Frame(rows.with_columns(pl.Series(ROW, numbers)), [(start + n, why, text) for n, why, text in broken])
        start += len(rows) + len(broken)
    if start == 0:
        raise _empty(uri)


def _line_chunks(uri: str) -> Iterator[bytes]:
    """The file's text in chunks of whole lines."""
    filesystem, path = open_uri(uri)
    with filesystem.open_input_stream(path) as stream:
        rest = b""
        while block := stream.read(TEXT_BLOCK):
            end = block.rfind(b"\n") + 1
            if end == 0:
                rest += block
                if len(rest) > 16 * TEXT_BLOCK:
                    raise UserError(
                        f"{uri} has a line of more than {16 * TEXT_BLOCK >> 20} MiB; write one JSON object per line"
                    )
                continue
            yield rest + block[:end]
            rest = block[end:]
        if rest.strip():
            yield rest


def _check_keys(uri: str, reading: Reading, chunk: bytes) -> None:
    """A key that no row has is a mistake in the mapping; one that some rows lack is a null there."""
    keys = re.findall(rb'"((?:[^"\\]|\\.)*)"\s*:', chunk[: 1 << 16])
    present = {key.decode(errors="replace") for key in keys}
    present |= {c for c in reading.columns if f'"{c}"'.encode() in chunk}
    require_columns(uri, reading.columns, present)


def _parse_lines(chunk: bytes, schema: dict[str, Any]) -> tuple[pl.DataFrame, list[tuple[int, str, str]]]:
    """The lines as rows; lines that are not are found by halving, which costs nothing where all are good."""
    try:
        return pl.read_ndjson(chunk, schema=schema), []
    except pl.exceptions.PolarsError:
        lines = [line for line in chunk.split(b"\n") if line.strip()]
    frames: list[pl.DataFrame] = []
    broken: list[tuple[int, str, str]] = []

    def parse(first: int, last: int) -> None:
        try:
            frames.append(pl.read_ndjson(b"\n".join(lines[first:last]), schema=schema))
        except pl.exceptions.PolarsError as error:
            if last - first == 1:
                reason = f"row: not a JSON object of the mapping's types: {' '.join(str(error).split())[:120]}"
                broken.append((first, reason, lines[first].decode(errors="replace")[:LONGEST_QUOTE]))
                return
            middle = (first + last) // 2
            parse(first, middle)
            parse(middle, last)

    parse(0, len(lines))
    return (pl.concat(frames) if frames else pl.DataFrame(schema=schema)), broken


def _read_parquet(uri: str, reading: Reading) -> Iterator[Frame]:
    filesystem, path = open_uri(uri)
    if filesystem.get_file_info(path).size == 0:
        raise _empty(uri)
    with filesystem.open_input_file(path) as file:
        parquet = pq.ParquetFile(file)
        require_columns(uri, reading.columns, parquet.schema_arrow.names)
        start = 0
        for batch in parquet.iter_batches(PARQUET_BLOCK, columns=list(reading.columns)):
            rows = pl.DataFrame(pl.from_arrow(batch))
            numbers = np.arange(start, start + len(rows), dtype=np.int64)
            yield Frame(rows.with_columns(pl.Series(ROW, numbers)))
            start += len(rows)
