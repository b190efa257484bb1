"""Raw files as streams of bounded frames: CSV, JSON lines and Parquet, compressed or not.

Text formats are read as text throughout, so that no number passes through a float on its way; what a
value must be is decided once, in `normalise.py`.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import groupby, islice
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from models.config import hint
from models.tables import UserError, join, open_uri
from pipelines.data.sources.encodings import check_encoding, not_encoded, open_text, wide
from pipelines.data.sources.nested import (
    Path,
    Places,
    arrow_path,
    arrow_paths,
    column_at,
    has,
    json_paths,
    names_of,
    objects,
    parse,
    places_of,
    value_at,
)
from pipelines.data.sources.pieces import Piece, open_piece

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
LONE_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])")
"""Half of a character in JSON, which polars reads as NUL; the other half alone it refuses."""
COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")
TEXT_BLOCK = 8 << 20  # bytes of text per frame; also the longest row that can be read
PARQUET_BLOCK = 1 << 17  # rows per frame, at most: fewer where they are long
LONGEST_QUOTE = 2000  # characters of an unreadable line that a reject keeps
BOM = b"\xef\xbb\xbf"
MOST_NAMED = 40  # columns of a file that an error lists
LONGEST_DELIMITER = 8  # characters
LINES_READ = 200_000  # rows of a text file within which the line of a row is looked for
UNIT = "\x1f"  # stands for a delimiter of several characters

# A stray quote makes one value of all lines up to the next one. With `quote: auto` a CSV file is refused if its values
# hold at least FEW_BREAKS line breaks, and
FEW_BREAKS = 10
LONGEST_VALUE, MOST_BREAKS = 100, 0.01  # of events: more than these in one row, or in all than this share of the lines
LONGEST_PROSE, MOST_OF_PROSE = 1000, 0.5  # of items and users, whose texts span lines: more than either in one row
PLAIN_QUOTES = "if quotes are plain characters in this log, set 'quote: false' beside its 'files' in the source file"


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How the files of one section are written."""

    format: str | None = None
    """csv, jsonl or parquet; None: by the suffix before .gz, .bz2, .zst or .lz4."""
    delimiter: str | None = None
    """CSV: the column separator, such as `;`, or several characters, such as `::`; None: a tab for `.tsv`, else a
    comma."""
    header: list[str] | None = None
    """CSV without a header line: its column names."""
    quote: str | bool = "auto"
    """CSV: true: quotes enclose values; false: quotes are plain characters; auto: true, but a file is refused if more
    than 1% of its lines end within quotes, or 100 lines of one row; a file of items or users if one row has more than
    1000 lines, or half of them."""
    encoding: str | None = None
    """CSV and JSON lines: a Python codec, such as cp1252; None: UTF-8."""

    def check_format(self, where: str = "") -> None:
        """ValueError for what no file can be; where: what stands before the keys in errors."""
        if self.format is not None and self.format not in FORMATS:
            raise ValueError(f"'{where}format' is '{self.format}'; it must be one of {', '.join(FORMATS)}")
        if self.quote not in ("auto", True, False):
            raise ValueError(f"'{where}quote' is '{self.quote}'; it must be auto, true or false")
        object.__setattr__(self, "encoding", check_encoding(self.encoding, where))
        given = self.delimiter
        if given is None or (len(given) == 1 and given.isascii()):
            return
        if not given or len(given) > LONGEST_DELIMITER or not given.isascii():
            raise ValueError(
                f'\'{where}delimiter\' is {given!r}; it is one ASCII character, such as "\\t", or some, such as "::", '
                f"at most {LONGEST_DELIMITER}"
            )
        if self.quote is True:
            raise ValueError(f"'{where}quote' is true, but a delimiter such as {given!r} knows no quotes; false")
        object.__setattr__(self, "quote", False)

    def read_as(self, columns: tuple[str, ...], **more: Any) -> Reading:
        """How these columns of such a file are read; more: further fields of `Reading`."""
        return Reading(columns, **{f.name: getattr(self, f.name) for f in fields(TextFormat)}, **more)


@dataclass(frozen=True)
class Reading(TextFormat):
    """How a raw file is read."""

    columns: tuple[str, ...]
    """Columns wanted; in JSON and Parquet also fields of objects (`nested.py`)."""
    lists: frozenset[str] = frozenset()
    """Those of them that hold lists; in CSV they cannot be told from text and stay text."""
    integers: frozenset[str] = frozenset()
    """Those of them that must be integers: a number such as 1.5 or 1e9 keeps its spelling, to be refused."""
    prose: bool = False
    """CSV: whether values may well span lines, as descriptions of items do."""
    required: tuple[str, ...] | None = None
    """JSON: the columns that each file must have from its beginning; others may begin later, or be in other files
    only (`Frame.missing`). Parquet: the columns that each file must have. None: each file must have all columns,
    anywhere."""
    ids: tuple[str, ...] = ()
    """JSON: the columns of ids, where a row with a list or an object in the place of one is broken."""


@dataclass(frozen=True)
class Frame:
    """Some rows of a raw file."""

    rows: pl.DataFrame
    """The wanted columns and ROW."""
    broken: list[tuple[int, str, str]] = field(default_factory=list)
    """Lines that are no rows, or not of ids: number in the file, reason, text."""
    missing: dict[str, str] = field(default_factory=dict)
    """JSON and Parquet: the wanted columns that no row here has, each with a hint at the nearest that there is."""


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


def read_frames(input_uri: str, file: str, reading: Reading, piece: Piece | None = None) -> Iterator[Frame]:
    """Streams the file, or a piece of it. UserError names the file for one that is empty, damaged or of another format,
    and the column and its nearest neighbour for a column that it does not have."""
    kind = format_of(file, reading.format)
    reader = {"csv": _read_csv, "jsonl": _read_jsonl, "parquet": _read_parquet}[kind]
    uri = join(input_uri, file)
    if kind == "parquet" and reading.encoding:
        raise UserError(f"{uri} is Parquet, whose text is UTF-8; take 'encoding' out of the source file")
    try:
        yield from reader(uri, reading, piece)
    except UnicodeError as error:  # UTF-16 without its mark is no UnicodeDecodeError
        raise not_encoded(uri, reading.encoding or "utf-8") from error
    except csv.Error as error:
        raise UserError(f"{uri} cannot be read as csv ({error}); it may be damaged or of another format") from error
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{uri} cannot be read as {kind} ({reason[:300]}); it may be truncated, damaged or of another format: "
            f"copy it again or set 'format'"
        ) from error


def place_of(uri: str, written: TextFormat | None, row: int) -> str:
    """Where a row of this ROW is in its file: `line 902` of CSV and JSON lines, which are read again from their
    beginning up to it. It is `row 900` where there are no lines, or more than LINES_READ."""
    kind = format_of(uri, written.format) if written else "parquet"
    line = None
    if written and kind != "parquet" and row < LINES_READ:
        with io.TextIOWrapper(open_text(uri, written.encoding), "utf-8-sig", errors="replace", newline="") as text:
            header = kind == "csv" and written.header is None
            line = next(islice(_row_starts(text, uri, written, kind), row + header, None), None)
    counted = "from 0, without header and empty lines" if kind != "parquet" else "from 0"
    return f"row {row:,} (counted {counted})" if line is None else f"line {line:,}"


def _row_starts(text: Iterable[str], uri: str, written: TextFormat, kind: str) -> Iterator[int]:
    """The line, from 1, at which each row begins, a header among them."""
    if kind == "jsonl" or written.quote is False:
        blank = "\r\n" if kind == "csv" else None  # white space alone is a row of CSV
        yield from (number for number, line in enumerate(text, 1) if line.strip(blank))
        return
    before, reader = 0, csv.reader(text, delimiter=_delimiter(uri, written))
    with suppress(csv.Error):  # a value that is too long for it: the lines from there on are not known
        for cells in reader:
            if cells:
                yield before + 1
            before = reader.line_num


def _delimiter(uri: str, written: TextFormat) -> str:
    return written.delimiter or ("\t" if ".tsv" in PurePosixPath(uri).suffixes else ",")


def whole_only(file: str, reading: Reading) -> bool:
    """Whether the file is to be read by one task whatever its size: compressed, of another encoding than UTF-8, or JSON
    of which only the whole tells what columns it lacks."""
    other = file.lower().endswith(COMPRESSIONS) or reading.encoding is not None
    return other or (format_of(file, reading.format) == "jsonl" and reading.required is None)


def require_columns(uri: str, wanted: Iterable[str], present: Collection[str]) -> None:
    """UserError if a wanted column is not there, with the nearest one that is."""
    for column in wanted:
        if column not in present:
            raise _no_column(uri, column, present_hint(column, present))


def present_hint(column: str, present: Collection[str]) -> str:
    """Half a sentence that names the column nearest to one that is not there, and those that are; of many the nearest
    ones."""
    if not present:
        return "it has none"
    named, more = list(present), ""
    if len(named) > MOST_NAMED:
        named = difflib.get_close_matches(column, named, MOST_NAMED, 0)
        more = f" and {len(present) - MOST_NAMED:,} more"
    return f"{hint(column, sorted(present))} of {', '.join(named)}{more}"


def _no_column(uri: str, column: str, hint: str) -> UserError:
    return UserError(f"{uri} has no column '{column}'; {hint}; correct the source file or the log")


def _empty(uri: str) -> UserError:
    return UserError(f"{uri} is empty; copy it again or take it out of the input folder")


def _numbers(start: int, count: int, skipped: Iterable[int]) -> np.ndarray:
    """Numbers of the next `count` rows from `start`, leaving out those in `skipped` (sorted)."""
    numbers = np.arange(start, start + count, dtype=np.int64)
    for number in skipped:
        numbers[numbers >= number] += 1
    return numbers


class _Joined:
    """A stream of text in which a delimiter of several characters is one, as Arrow needs it. No text has it: it is
    the ASCII character that stands between units."""

    def __init__(self, stream: Any, delimiter: str) -> None:
        self.stream, self.delimiter, self.rest = stream, delimiter.encode(), b""

    @property
    def closed(self) -> bool:
        return bool(self.stream.closed)

    def read_buffer(self, size: int) -> pa.Buffer:
        text = b""
        while not text and (block := bytes(self.stream.read(size))):  # no bytes would end the stream
            parts = (self.rest + block).split(self.delimiter)
            text, last = UNIT.encode().join(parts), parts[-1]
            self.rest = last[max(len(last) - len(self.delimiter) + 1, 0) :]  # it may begin a delimiter
            text = text[: len(text) - len(self.rest)]
        if not text:
            text, self.rest = self.rest, b""
        return pa.py_buffer(text)


class _Lines:
    """A stream that counts the line breaks read through it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.count = 0

    @property
    def closed(self) -> bool:
        return bool(self.stream.closed)

    def read(self, size: int) -> pa.Buffer:
        block = self.stream.read_buffer(size)
        self.count += int(np.count_nonzero(np.frombuffer(block, np.uint8) == ord("\n")))
        return block


def _csv_header(uri: str, reading: Reading, delimiter: str) -> list[str]:
    """The names of all columns. Arrow, too, skips a byte order mark and empty lines at the beginning."""
    with open_text(uri, reading.encoding) as stream:
        head = stream.read(1 << 16).removeprefix(BOM).lstrip(b"\r\n")
    if not head:
        raise _empty(uri)
    if wide(head) and reading.encoding is None:
        raise not_encoded(uri, "utf-8")
    if b"\r" in head and b"\n" not in head:
        raise UserError(f"{uri} ends its lines with carriage returns alone; convert it to line feeds (tr '\\r' '\\n')")
    if reading.header:
        return reading.header
    first = re.split(rb"[\r\n]", head, maxsplit=1)[0].decode(errors="replace")
    return first.split(delimiter) if reading.quote is False else next(csv.reader([first], delimiter=delimiter))


def _csv_batches(
    stream: Any,
    reading: Reading,
    delimiter: str,
    names: list[str] | None,
    types: dict[str, pa.DataType],
    skip: Callable[[Any], str],
) -> Iterator[pa.RecordBatch]:
    """The columns of `types`; `names` are those of all columns if the file has no header."""
    quoted = reading.quote is not False
    # One thread: rows are numbered only then; files are read side by side by Ray tasks.
    with pa.csv.open_csv(
        stream,
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=TEXT_BLOCK, column_names=names),
        parse_options=pa.csv.ParseOptions(
            delimiter=delimiter,
            quote_char='"' if quoted else False,
            newlines_in_values=quoted,
            invalid_row_handler=skip,
        ),
        convert_options=pa.csv.ConvertOptions(include_columns=list(types), column_types=types),
    ) as reader:  # closed at once where no more is read: its thread would abort a process that ends
        yield from reader


def _check_delimiter(uri: str, wanted: Iterable[str], header: list[str], delimiter: str) -> None:
    """UserError for a header that is one column, but several by another delimiter."""
    absent = [column for column in wanted if column not in header]
    for other in ("\t", ";", "::", "|", ",", " ") if len(header) == 1 and absent else ():
        if other in header[0]:
            raise UserError(
                f"{uri} has no column '{absent[0]}': by the delimiter {json.dumps(delimiter)} its header is one "
                f"column, '{header[0][:80]}'; set 'delimiter: {json.dumps(other)}' in the source file"
            )


def _read_csv(uri: str, reading: Reading, piece: Piece | None) -> Iterator[Frame]:
    delimiter = _delimiter(uri, reading)
    header = _csv_header(uri, reading, delimiter)
    _check_delimiter(uri, reading.columns, header, delimiter)
    require_columns(uri, reading.columns, header)
    if twice := [name for name in reading.columns if header.count(name) > 1]:
        raise UserError(f"{uri} has {header.count(twice[0])} columns '{twice[0]}'; give them names of their own")
    headless = reading.header is not None or (piece is not None and piece.start > 0)
    first_row = piece.first_row if piece else 0
    before = (1 if headless else 2) - first_row  # Arrow counts rows from 1, the header among them
    broken: list[tuple[int, str, str]] = []

    def skip(row: Any) -> str:
        reason = f"row: {row.actual_columns} columns, not {row.expected_columns}"
        text = (row.text or "").replace(UNIT, delimiter) if by == UNIT else row.text or ""
        broken.append((row.number - before, reason, text[:LONGEST_QUOTE]))
        return "skip"

    by = delimiter if len(delimiter) == 1 else UNIT
    names, types = header if headless else None, dict.fromkeys(reading.columns, pa.string())
    with open_piece(uri, reading.encoding, piece) as stream:
        lines = _Lines(stream if by == delimiter else _Joined(stream, delimiter))
        rows, reported, start = 0, 0, first_row
        try:
            for batch in _csv_batches(lines, reading, by, names, types, skip):
                numbers = _numbers(start, batch.num_rows, sorted(n for n, _, _ in broken if n >= start))
                rows += len(numbers)
                start = int(numbers[-1]) + 1 if len(numbers) else start
                yield Frame(pl.DataFrame(pl.from_arrow(batch)).with_columns(pl.Series(ROW, numbers)), broken[reported:])
                reported = len(broken)
        except pa.ArrowInvalid as error:
            if known := _csv_error(uri, reading, str(error), first_row + rows + len(broken), before):
                raise known from error
            raise
    if reported < len(broken):
        yield Frame(_no_rows(reading), broken[reported:])
    if reading.quote == "auto" and lines.count - rows - len(broken) >= FEW_BREAKS:
        _check_quotes(uri, reading, delimiter, len(header), lines.count)


def _csv_error(uri: str, reading: Reading, reason: str, rows: int, before: int) -> UserError | None:
    """What is known of an error of Arrow's after `rows` rows."""
    if "straddl" in reason:
        remedy = "shorten it" if reading.quote is False else f"{PLAIN_QUOTES}, else shorten the row"
        return UserError(f"{uri}: row {rows:,} is longer than the {TEXT_BLOCK >> 20} MiB that can be read; {remedy}")
    # A row of too few columns that cannot be decoded never comes to the handler: Arrow then says what it expected.
    if number := re.search(r"Row #(\d+): (?:.*invalid UTF8|Expected)", reason):
        return not_encoded(uri, "utf-8", int(number[1]) - before)
    return None


def _check_quotes(uri: str, reading: Reading, delimiter: str, width: int, lines: int) -> None:
    """UserError if quotes seem to swallow rows: for a file of more lines than rows. Some of them may be empty, so it
    reads the file again, now all of its columns, and counts the line breaks within values."""
    first = 0 if reading.header else -1  # the header is read as a row
    breaks = 0
    worst = [(0, 0)]  # line breaks of a row, and its number

    def skip(row: Any) -> str:
        nonlocal breaks
        within = (row.text or "").count("\n")
        breaks += within
        worst.append((within, row.number - (1 if reading.header else 2)))
        return "skip"

    names = [str(number) for number in range(width)]
    with open_text(uri, reading.encoding) as stream:
        for batch in _csv_batches(stream, reading, delimiter, names, dict.fromkeys(names, pa.binary()), skip):
            within = sum(pc.count_substring(column, b"\n").to_numpy() for column in batch.columns)
            if batch.num_rows:
                breaks += int(within.sum())
                worst.append((int(within.max()), first + int(within.argmax())))
            first += batch.num_rows
    longest, row = max(worst)
    if reading.prose:
        many = longest > min(LONGEST_PROSE, MOST_OF_PROSE * lines)
    else:
        many = longest > LONGEST_VALUE or breaks > MOST_BREAKS * lines
    if many and breaks >= FEW_BREAKS:
        raise UserError(
            f"{uri}: {breaks:,} of its {lines:,} lines end within quoted values, {longest:,} of them near row {row:,}; "
            f"{PLAIN_QUOTES}; if values really span lines, 'quote: true'"
        )


def _no_rows(reading: Reading) -> pl.DataFrame:
    return pl.DataFrame(schema={**dict.fromkeys(reading.columns, pl.String), ROW: pl.Int64})


def _read_jsonl(uri: str, reading: Reading, piece: Piece | None) -> Iterator[Frame]:
    keys = {key for name in reading.integers for key in (name, name.split(".")[-1])}
    spelled = [re.compile(rb'("%s"\s*:\s*)(-?\d+[.eE][\d.eE+-]*)' % re.escape(key).encode()) for key in keys]
    start = piece.first_row if piece else 0
    absent: dict[str, str] = {}
    for chunk in _line_chunks(uri, reading.encoding, piece):
        for pattern in spelled:  # quoted, a number such as 1e9 keeps its spelling
            chunk = pattern.sub(rb'\1"\2"', chunk)
        places = {name: places_of(name, name in reading.lists, chunk) for name in reading.columns}
        rows, broken = _parse_lines(chunk, places)
        count = len(rows) + len(broken)
        if not count:
            continue
        if start == 0 and not len(rows):
            raise UserError(
                f"{uri} is not JSON lines ({broken[0][1]}); write one JSON object per line, or set 'format'"
            )
        if broken and not chunk.endswith(b"\n") and broken[-1][0] == count - 1:
            raise UserError(f"{uri} ends within a JSON object: it is truncated; copy it again")
        missing = _missing(rows, chunk, places)
        absent = {name: hint for name, hint in (absent if start else missing).items() if name in missing}
        for name in (reading.required or ()) if start == 0 else ():
            if name in missing:
                raise _no_column(uri, name, missing[name])
        numbers = _numbers(0, len(rows), [number for number, _, _ in broken])
        strange = _no_ids(rows, numbers, chunk, reading, places)
        rows = rows.with_columns(pl.Series(ROW, start + numbers))
        if strange:
            rows = rows.filter(~pl.col(ROW).is_in([start + number for number, _, _ in strange]))
        yield Frame(rows, [(start + n, why, text) for n, why, text in sorted([*broken, *strange])], missing)
        start += count
    if start == 0:
        raise _empty(uri)
    if reading.required is None and absent:
        raise _no_column(uri, *next(iter(absent.items())))


def _line_chunks(uri: str, encoding: str | None, piece: Piece | None) -> Iterator[bytes]:
    """The file's text, or that of a piece of it, in chunks of whole lines."""
    with open_piece(uri, encoding, piece) as stream:
        rest = stream.read(len(BOM)).removeprefix(BOM)
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


def _missing(rows: pl.DataFrame, chunk: bytes, places: Places) -> dict[str, str]:
    """The columns that no line has, each with a hint at the nearest that there is."""
    values = {name: rows[name].explode() if rows[name].dtype == pl.List else rows[name] for name in rows.columns}
    missing = [name for name, column in values.items() if column.null_count() == len(column)]
    maybe = {name for name in missing if any(_quoted_in(chunk, key) for key in (name, name.split(".")[-1]))}
    for row in objects(chunk) if maybe else ():
        found = {name for name in maybe if any(has(row, path) for path in places[name])}
        missing, maybe = [name for name in missing if name not in found], maybe - found
        if not maybe:
            break
    end = chunk.find(b"\n", 1 << 16)
    head = objects(chunk if end < 0 else chunk[:end]) if missing else ()
    present = names_of(path for row in head for path in json_paths(row))
    return {name: _hint(name, present, places[name]) for name in missing}


def _quoted_in(chunk: bytes, key: str) -> bool:
    return f'"{key}"'.encode() in chunk or json.dumps(key).encode() in chunk


def _hint(name: str, present: dict[str, Path], places: list[Path]) -> str:
    """As `present_hint`; where it is there, it is missing for what is or is no list on its way."""
    if name not in present:
        return present_hint(name, sorted(present))
    if None in places[-1]:
        return "its values are in no lists; take it out of 'explode' or 'lists'"
    return "its values are in lists; name it in 'explode', or in 'lists' of the item files"


def _no_ids(
    rows: pl.DataFrame, numbers: np.ndarray, chunk: bytes, reading: Reading, places: Places
) -> list[tuple[int, str, str]]:
    """The rows with a list or an object in the place of an id: number, reason, text. Both are read as their text,
    and only the line tells them from real text that begins with a bracket."""
    found: dict[int, tuple[int, str, str]] = {}
    lines: list[bytes] = []
    for name in reading.ids:
        values = rows[name].explode() if name in reading.lists else rows[name]
        if not (values.str.starts_with("[") | values.str.starts_with("{")).any():
            continue
        text = pl.col(name).list.join("\n", ignore_nulls=True) if name in reading.lists else pl.col(name)
        lines = lines or [line for line in chunk.split(b"\n") if line.strip()]
        for number in numbers[rows.select(text.str.contains(r"(?m)^[\[{]").fill_null(False)).to_series().to_numpy()]:
            row = json.loads(lines[number], strict=False)
            value = next(said for path in places[name] if (said := value_at(row, path)) is not None)
            kinds = {type(each) for each in (value if name in reading.lists else [value])}
            if kinds & {list, dict}:
                kind = "a list" if list in kinds else "an object"
                remedy = f"name a field, {name}.FIELD" if dict in kinds else "for lists of items set explode"
                reason = f"{name}: {kind} in the place of an id; {remedy}"
                found[int(number)] = int(number), reason, lines[number].decode()[:LONGEST_QUOTE]
    return list(found.values())


def _parse_lines(chunk: bytes, places: Places) -> tuple[pl.DataFrame, list[tuple[int, str, str]]]:
    """The lines as rows; lines that are not are found by halving, which costs nothing where all are good."""
    lone = (b"\\ud" in chunk or b"\\uD" in chunk) and LONE_SURROGATE.search(chunk)
    try:
        if not lone:
            return parse(chunk, places), []
    except pl.exceptions.PolarsError:
        pass
    lines = [line for line in chunk.split(b"\n") if line.strip()]
    frames: list[pl.DataFrame] = []
    broken: list[tuple[int, str, str]] = []

    def halve(first: int, last: int) -> None:
        text = b"\n".join(lines[first:last])
        try:
            if lone and (found := LONE_SURROGATE.search(text)):
                raise pl.exceptions.ComputeError(f"{found[1].decode()} is half of a character")
            frames.append(parse(text, places))
        except pl.exceptions.PolarsError as error:
            if last - first == 1:
                reason = f"row: not a JSON object of the mapping's types: {' '.join(str(error).split())[:120]}"
                broken.append((first, reason, lines[first].decode(errors="replace")[:LONGEST_QUOTE]))
                return
            middle = (first + last) // 2
            halve(first, middle)
            halve(middle, last)

    halve(0, len(lines))
    kinds = {name: pl.List(pl.String) if None in paths[0] else pl.String() for name, paths in places.items()}
    return (pl.concat(frames) if frames else pl.DataFrame(schema=kinds)), broken


def _read_parquet(uri: str, reading: Reading, piece: Piece | None) -> Iterator[Frame]:
    filesystem, path = open_uri(uri)
    if filesystem.get_file_info(path).size == 0:
        raise _empty(uri)
    with filesystem.open_input_file(path) as file:
        parquet = pq.ParquetFile(file)
        schema, paths, missing = parquet.schema_arrow, dict[str, Path](), dict[str, str]()
        for name in reading.columns:
            if found := arrow_path(schema, name):
                paths[name] = found
                continue
            missing[name] = present_hint(name, list(names_of(arrow_paths(pa.struct(list(schema))))))
            if reading.required is None or name in reading.required:
                raise _no_column(uri, name, missing[name])
        leaves = _leaves(parquet, paths.values())
        made = [(column_at(paths[name]) if name in paths else pl.lit(None)).alias(name) for name in reading.columns]
        wanted = range(piece.start, piece.end) if piece else range(parquet.num_row_groups)
        sizes = {group: _parquet_rows(parquet.metadata.row_group(group), leaves) for group in wanted}
        start = piece.first_row if piece else 0
        for size, groups in groupby(wanted, key=sizes.__getitem__):
            for batch in parquet.iter_batches(size, row_groups=list(groups), columns=list(leaves)):
                rows = pl.DataFrame(pl.from_arrow(batch)).select(made)
                numbers = np.arange(start, start + len(rows), dtype=np.int64)
                yield Frame(rows.with_columns(pl.Series(ROW, numbers)), missing=missing)
                start += len(rows)


def _leaves(parquet: pq.ParquetFile, paths: Iterable[Path]) -> list[str]:
    """The columns of the file in which the values at these paths are; a list adds one or two names to their paths."""
    wanted = [r"\.".join(r"[^.]+(\.[^.]+)?" if key is None else re.escape(key) for key in path) for path in paths]
    every = (parquet.schema.column(number).path for number in range(len(parquet.schema)))
    return [leaf for leaf in every if any(re.fullmatch(rf"{path}(\..+)?", leaf) for path in wanted)]


def _parquet_rows(group: pq.RowGroupMetaData, leaves: list[str]) -> int:
    """Rows per frame so that it holds about TEXT_BLOCK bytes: a power of two, so that groups are read together."""
    chunks = [group.column(index) for index in range(group.num_columns)]
    wanted = [chunk for chunk in chunks if chunk.path_in_schema in leaves]
    # Coded by a dictionary, a value takes less in the file than the 8 bytes or more that it takes in memory.
    size = sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in wanted)
    rows = min(PARQUET_BLOCK, TEXT_BLOCK * group.num_rows // max(size, 1))
    return 1 << max(rows.bit_length() - 1, 0)
