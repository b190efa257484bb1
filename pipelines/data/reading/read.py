"""Read raw files as frames: CSV, JSON lines, Parquet and plain lines, compressed or
not, each byte once.

    digest = hashlib.sha256()
    for frame in read_frames("s3://bucket/log.csv", Files(delimiter=";"), ["user",
        "cast(price as double)"], digest):
        frame.rows, frame.broken

Large uncompressed files are read in pieces (`pieces`): text at line starts, Parquet at
row groups. CSV values are text with null for empty values; JSON and Parquet values keep
the file's types. Lines that cannot be parsed are in `ParsedRows.broken`, so that every
line of a file is a header, blank, a row or broken.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from pyarrow import fs

from models.config import hint
from models.storage.tables import JOB_FILES, UserError, open_uri

ROW = "__row"
"""Column with the row's number in its piece, from 0, counting broken rows."""

SUFFIXES = {
    "csv": "csv",
    "tsv": "csv",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "parquet": "parquet",
}
FORMATS = ("csv", "jsonl", "parquet", "lines", "keyed")
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
PACKED = ("gz", "bz2", "zst", "lz4")
BLOCK = 8 << 20  # bytes of text per frame
LONGEST_ROW = 64 << 20  # bytes
PARQUET_ROWS = 1 << 17  # per frame, at most
LONGEST_QUOTE = 2000  # characters of a broken line that a reject keeps
ESCAPED = b"\x0e\x0f"
"""Placeholder of an escaped quote during parsing: no parser accepts both kinds of
quotes.
"""
JOINED = b"\x1f"  # stands for a delimiter of several characters: the ASCII separator of units
HALF = re.compile(
    rb"(?<!\\)((?:\\\\)*)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
)
"""Half of a surrogate pair in JSON."""
csv.field_size_limit(LONGEST_ROW)

Broken = list[tuple[int, str, str]]
"""Unparsable lines: number in the piece, reason, text."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Format of the files of one section."""

    format: str | None = None
    """csv, jsonl, parquet; `lines`, each one row with the column `line`; `keyed`, a JSON object by id, with the columns
    `key` and `value`. By default by the suffix."""
    delimiter: str | None = None
    """CSV: what separates columns, such as `;` or `::`; by default a tab for `.tsv`, else a comma."""
    header: list[str] | None = None
    """CSV without a header line: its column names."""
    quote: str = '"'
    """CSV: what encloses values; empty where quotes are plain characters."""
    escape: str = ""
    """CSV: what stands before a quote within a value, such as a backslash; by default quotes are doubled."""
    encoding: str = "utf-8"
    """A Python codec of text files, such as cp1252."""

    def check_files(self) -> None:
        """Raise ValueError for invalid options."""
        if self.format is not None and self.format not in FORMATS:
            raise ValueError(
                f"'format' is '{self.format}'; it must be one of {', '.join(FORMATS)}"
            )
        for key in ("quote", "escape"):
            if len(getattr(self, key).encode()) > 1:
                raise ValueError(
                    f"'{key}' is {getattr(self, key)!r}; it is one ASCII character, or ''"
                )
        given = self.delimiter
        if given is not None and not (
            given.isascii() and 1 <= len(given) <= 8 and "\n" not in given
        ):
            raise ValueError(
                f"'delimiter' is {given!r}; it is one to eight ASCII characters, such as ';'"
            )
        try:
            "".encode(self.encoding)
        except LookupError as error:
            raise ValueError(
                f"'encoding' is '{self.encoding}', which is no text encoding of Python's, such as cp1252"
            ) from error

    @property
    def needs_decoding(self) -> bool:
        return codecs.lookup(self.encoding).name not in ("utf-8", "utf-8-sig", "ascii")

    def detect_format(self, file: str) -> str:
        """Return the configured format, or the format of the file's suffix below a
        compression suffix.
        """
        suffixes = [s[1:].lower() for s in PurePosixPath(file).suffixes]
        if suffixes and suffixes[-1] in ("xz", "zip", "7z", "rar"):
            raise UserError(
                f"{file} is compressed as {suffixes[-1]}, which is not read; use gzip, bz2 or zstd"
            )
        suffixes = [s for s in suffixes if s not in PACKED]
        if self.format is None and (not suffixes or suffixes[-1] not in SUFFIXES):
            raise UserError(
                f"the format of {file} cannot be told from its name; set 'format' to {', '.join(FORMATS)}"
            )
        return self.format or SUFFIXES[suffixes[-1]]

    def detect_delimiter(self, file: str) -> str:
        return self.delimiter or (
            "\t" if ".tsv" in [s.lower() for s in PurePosixPath(file).suffixes] else ","
        )


@dataclass(frozen=True)
class FilePart:
    """A part of an uncompressed file that is read by itself.

    A row that begins at the end of a part belongs to the next one.
    """

    start: int
    """First byte, or first row group of a Parquet file."""
    end: int


@dataclass(frozen=True)
class ParsedRows:
    """Parsed rows of a raw file."""

    rows: pl.DataFrame
    """The required columns and ROW."""
    broken: Broken = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Missing columns, each with a hint at the nearest column."""

    @property
    def whole(self) -> pl.DataFrame:
        """The rows, with null columns for missing ones."""
        return self.rows.with_columns(
            pl.lit(None, pl.Null).alias(name) for name in self.missing
        )


def list_files(
    input_uri: str,
    pattern: str,
    *,
    required: bool,
    what: str,
    beside: Collection[str] = (),
) -> list[str]:
    """List files below a folder whose relative path matches the pattern, sorted.

    Hidden files, and parts and manifests of Trieline tables in subfolders, are skipped.

    Args:
        beside: Patterns of files to skip.
    """
    filesystem, root = open_uri(input_uri)
    try:
        infos = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"the input folder {input_uri} cannot be read; check --input"
        ) from error
    names = (
        info.path[len(root) :].lstrip("/")
        for info in infos
        if info.type == fs.FileType.File
    )
    files = sorted(
        name
        for name in names
        if fnmatchcase(name, pattern)
        and not any(fnmatchcase(name, other) for other in beside)
        and not any(part.startswith((".", "_")) for part in name.split("/"))
        and not ("/" in name and JOB_FILES.fullmatch(name.rsplit("/", 1)[1]))
    )
    if required and not files:
        raise UserError(
            f"{input_uri} holds no {what} like '{pattern}'; check --input and the source's file pattern"
        )
    return files


def pieces(uri: str, files: Files, size: int) -> list[FilePart | None]:
    """Split a file into parts of about `size` bytes.

    Return [None] for a file that is read as a whole: small, compressed, in another
    encoding, or a JSON array.
    """
    filesystem, path = open_uri(uri)
    length, kind = filesystem.get_file_info(path).size, files.detect_format(uri)
    if length <= size:
        return [None]
    with filesystem.open_input_file(path) as stream:
        if kind == "parquet":
            metadata = pq.read_metadata(stream)
            groups = [
                metadata.row_group(number) for number in range(metadata.num_row_groups)
            ]
            sizes = [
                sum(
                    group.column(i).total_compressed_size
                    for i in range(group.num_columns)
                )
                for group in groups
            ]
            edges = np.unique(np.cumsum([0, *sizes])[:-1] // size, return_index=True)[
                1
            ].tolist()
            return [
                FilePart(*edge)
                for edge in zip(edges, [*edges[1:], len(groups)], strict=True)
            ]
        head = stream.read(1 << 12)
    if (
        files.needs_decoding
        or kind == "keyed"
        or _compression(head)
        or (kind == "jsonl" and _is_array(head))
    ):
        return [None]
    return [
        FilePart(start, min(start + size, length)) for start in range(0, length, size)
    ]


def _compression(head: bytes) -> str | None:
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), None)


def _is_array(head: bytes) -> bool:
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _open(uri: str) -> Any:
    """Open the decompressed bytes of a file; the content decides the compression, not
    the name.
    """
    filesystem, path = open_uri(uri)
    with filesystem.open_input_file(path) as stream:
        head = stream.read(4)
    return filesystem.open_input_stream(path, compression=_compression(head))


def read_frames(
    uri: str,
    files: Files,
    expressions: Iterable[str],
    digest: Any = None,
    piece: FilePart | None = None,
) -> Iterator[ParsedRows]:
    """Stream a file, or a part of it, with the columns that the SQL expressions read.

    Args:
        digest: Hash that is updated with the bytes that are parsed.

    Raises:
        UserError: names an empty or damaged file, or one of another format.
    """
    kind, expressions = files.detect_format(uri), list(dict.fromkeys(expressions))
    reader = {"csv": _read_csv, "parquet": _read_parquet, "keyed": _read_whole}.get(
        kind, _read_lines
    )
    try:
        yield from reader(uri, files, expressions, digest, piece)
    except UnicodeError as error:
        raise _not_encoded(uri, files.encoding) from error
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if "invalid UTF8" in reason:
            raise _not_encoded(uri, files.encoding) from error
        raise UserError(
            f"{uri} cannot be read as {kind} ({reason[:300]}); it may be truncated, damaged or of another format: "
            f"copy it again or set 'format'"
        ) from error


def _not_encoded(uri: str, encoding: str) -> UserError:
    with _open(uri) as stream:
        head, where = stream.read(BLOCK), ""
    try:
        head.decode(encoding)
    except UnicodeDecodeError as error:
        where = f" in line {head.count(10, 0, error.start) + 1:,}"
    return UserError(
        f"{uri} is not {encoding}{where}; set 'encoding' beside its 'files' in the source file, such as utf-16, cp1252 "
        f"or gb18030, or convert it to UTF-8"
    )


def needed(
    expressions: Iterable[str], present: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the present columns that the expressions read, and a hint for each missing
    one.

    An expression that is the name of a column is that column; any other is SQL.
    """
    wanted = dict.fromkeys(
        name for text in expressions for name in roots(text, present)
    )
    missing = {
        name: present_hint(name, present) for name in wanted if name not in present
    }
    return [name for name in wanted if name in present], missing


def roots(text: str, present: Collection[str]) -> list[str]:
    """Return the columns that an expression reads."""
    if text in present:
        return [text]
    try:
        return pl.sql_expr(text).meta.root_names()
    except pl.exceptions.PolarsError:
        return [text]  # a name that is a word of SQL


def present_hint(column: str, present: Collection[str]) -> str:
    """Format a hint that names the nearest column and all columns."""
    named = f" of {', '.join(list(present)[:40])}" if present else ""
    return hint(column, sorted(present), "it has none") + named


def _blocks(
    uri: str, files: Files, digest: Any, piece: FilePart | None, size: int | None = None
) -> Generator[bytes, None, None]:
    """Yield the text as UTF-8 in blocks of about `size` bytes, split at any byte."""
    size = size or BLOCK
    decode = (
        codecs.getincrementaldecoder(files.encoding)() if files.needs_decoding else None
    )
    left, first = 1 << 62, True
    with ExitStack() as opened:
        if piece is None:
            stream = opened.enter_context(_open(uri))
        else:
            filesystem, path = open_uri(uri)
            stream = opened.enter_context(filesystem.open_input_file(path))
            start, end = (
                _row_start(stream, uri, files, byte)
                for byte in (piece.start, piece.end)
            )
            stream.seek(start)
            left, first = end - start, start == 0
        while left and (block := stream.read(min(size, left))):
            if digest is not None:
                digest.update(block)
            left -= len(block)
            text = decode.decode(block).encode() if decode else block
            yield text.removeprefix(codecs.BOM_UTF8) if first else text
            first = False
        if decode and (rest := decode.decode(b"", True)):
            yield rest.encode()


def _head(uri: str, files: Files) -> bytes:
    """Return the beginning of the text.

    Raises:
        UserError: for an empty file.
    """
    with closing(_blocks(uri, files, None, None, 1 << 18)) as blocks:
        head = next((block for block in blocks if block.strip()), b"")
    if not head:
        raise UserError(
            f"{uri} is empty; copy it again or take it out of the input folder"
        )
    return head


def _row_start(stream: Any, uri: str, files: Files, byte: int) -> int:
    """Return the first byte from `byte` on at which a row begins.

    A CSV line within quotes may look like a row, so it must begin 20 rows that are as
    wide as the header.
    """
    if byte == 0:
        return 0
    stream.seek(byte - 1)
    text = bytes(stream.read(1 << 20))
    whole = byte - 1 + len(text) == stream.size()
    at = text.find(b"\n") + 1
    if not at:
        return (
            stream.size()
            if whole
            else _row_start(stream, uri, files, byte - 1 + len(text))
        )
    if (
        files.detect_format(uri) != "csv"
        or not files.quote
        or files.quote.encode() not in text[at:]
    ):
        return byte - 1 + at
    delimiter = files.detect_delimiter(uri).encode()
    by = delimiter if len(delimiter) == 1 else JOINED
    width = len(_header(uri, files, delimiter, by)[0])
    lines = [line + b"\n" for line in text[at:].split(b"\n")[: None if whole else -1]]
    read = [
        _mark_escapes(line.replace(delimiter, by), files).decode(errors="replace")
        for line in lines
    ]
    for first in range(len(lines)):
        if (
            read[first].count(files.quote) % 2
        ):  # a value that spans lines begins or ends here
            continue
        with suppress(csv.Error):
            rows = islice(
                csv.reader(
                    islice(read, first, None), delimiter=by.decode(), **_quotes(files)
                ),
                20,
            )
            if all(len(row) in (0, width) for row in rows):
                return min(byte - 1 + at + sum(map(len, lines[:first])), stream.size())
    return byte - 1 + at


def _quotes(files: Files) -> dict[str, Any]:
    """Return the quoting options of Python's CSV reader."""
    return (
        {"quotechar": files.quote, "strict": True}
        if files.quote
        else {"quoting": csv.QUOTE_NONE}
    )


def _mark_escapes(text: bytes, files: Files) -> bytes:
    """Replace escaped quotes by ESCAPED, which has the same length."""
    if not files.escape or not files.quote or files.escape.encode() not in text:
        return text
    mark, quote = files.escape.encode(), files.quote.encode()
    pairs = re.compile(
        b"%b(%b|%b)" % (re.escape(mark), re.escape(mark), re.escape(quote))
    )
    return pairs.sub(lambda pair: ESCAPED if pair[1] == quote else pair[0], text)


def _restore_escapes(
    rows: pl.DataFrame, files: Files, by: str, delimiter: str
) -> pl.DataFrame:
    """Replace placeholders and escapes in values.

    A doubled backslash becomes one, and a backslash before N a null, as MySQL writes them.
    """
    value = pl.col(pl.String)
    if by != delimiter:
        rows = rows.with_columns(value.str.replace_all(by, delimiter, literal=True))
    if files.escape and files.quote:
        rows = rows.with_columns(
            value.str.replace_all(ESCAPED.decode(), files.quote, literal=True)
        )
    if files.escape:
        text = value.str.replace_all(2 * files.escape, files.escape, literal=True)
        rows = rows.with_columns(
            pl.when(value != files.escape + "N").then(text).name.keep()
        )
    return rows


def _read_csv(
    uri: str, files: Files, expressions: list[str], digest: Any, piece: FilePart | None
) -> Iterator[ParsedRows]:
    delimiter = files.detect_delimiter(uri).encode()
    by = delimiter if len(delimiter) == 1 else JOINED
    names, skip = _header(uri, files, delimiter, by)
    columns, missing = needed(expressions, names)
    if missing and len(names) == 1:
        _check_delimiter(uri, names[0], delimiter.decode(), min(missing))
    skip = skip if piece is None or piece.start == 0 else 0
    rest, row, last = b"", 0, False
    blocks = _blocks(uri, files, digest, piece)
    while not last:
        block = next(blocks, None)
        last = block is None
        rest = (rest + (block or b"")).replace(delimiter, by)
        while skip and (at := rest.find(b"\n") + 1):
            rest, skip = rest[at:], skip - 1
        if skip or not rest:
            continue
        table, numbers, broken, used = _csv_rows(
            rest, files, by.decode(), names, columns, last
        )
        rest = rest[used:]
        if len(rest) > LONGEST_ROW:
            raise UserError(
                f"{uri}: row {row:,} is longer than {LONGEST_ROW >> 20} MiB; set quote: '' where quotes are plain "
                f"characters"
            )
        rows = (
            pl.DataFrame(schema=dict.fromkeys(columns, pl.String))
            if table is None
            else pl.DataFrame(table)
        )
        rows = _restore_escapes(rows, files, by.decode(), delimiter.decode())
        rows = rows.with_columns(pl.Series(ROW, numbers + row, pl.Int64))
        broken = [
            (n + row, why, shown.replace(by.decode(), delimiter.decode()))
            for n, why, shown in broken
        ]
        yield ParsedRows(rows, broken, missing)
        row += len(numbers) + len(broken)


def _header(
    uri: str, files: Files, delimiter: bytes, by: bytes
) -> tuple[list[str], int]:
    """Return all column names and the number of header lines.

    Repeated names get a number, as in pandas.
    """
    head = _head(uri, files)
    if head[:400].count(0) * 4 > len(head[:400]):
        raise _not_encoded(uri, files.encoding)
    if b"\r" in head and b"\n" not in head:
        raise UserError(
            f"{uri} ends its lines with carriage returns alone; convert it to line feeds (tr '\\r' '\\n')"
        )
    if files.header:
        return files.header, 0
    text = (
        _mark_escapes(head.replace(delimiter, by), files)
        .decode(errors="replace")
        .split("\n")
    )
    lines = csv.reader(
        (line + "\n" for line in text), delimiter=by.decode(), **_quotes(files)
    )
    try:
        names = next(cells for cells in lines if cells)
    except csv.Error as error:
        raise UserError(
            f"{uri}: its header cannot be read ({error}); name the columns in 'header'"
        ) from error
    seen: dict[str, int] = {}
    for place, name in enumerate(names):
        seen[name] = seen.get(name, -1) + 1
        names[place] = (f"{name}.{seen[name]}" if seen[name] else name).replace(
            ESCAPED.decode(), files.quote
        )
    return names, lines.line_num


def _check_delimiter(uri: str, header: str, delimiter: str, wanted: str) -> None:
    """Raise UserError for a header that is one column, but several by another
    delimiter.
    """
    for other in ("\t", ";", "::", "|", ",", " "):
        if other in header:
            raise UserError(
                f"{uri} has no column '{wanted}': by the delimiter {json.dumps(delimiter)} its header is one column, "
                f"'{header[:80]}'; set 'delimiter: {json.dumps(other)}' in the source file"
            )


def _csv_rows(
    text: bytes,
    files: Files,
    delimiter: str,
    names: list[str],
    columns: list[str],
    last: bool,
) -> tuple[pa.Table | None, np.ndarray, Broken, int]:
    """Parse text that begins with a row.

    Arrow parses text whose quotes all enclose whole single-line values; Python's strict
    reader parses all other text line by line.

    Returns:
        The table, the row numbers, broken lines, and the number of bytes read.
    """
    text = _mark_escapes(text, files)
    used = len(text) if last else text.rfind(b"\n") + 1
    if _regular(text[:used], files, delimiter):
        return *_rows_of_arrow(text[:used], files, delimiter, names, columns), used
    return _rows_of_lines(text, files, delimiter, names, columns, last)


def _regular(text: bytes, files: Files, delimiter: str) -> bool:
    """Return whether quotes only enclose or are doubled within values, and no value has
    a line break.
    """
    if not files.quote or files.quote.encode() not in text:
        return True
    byte, quote = np.frombuffer(text, np.uint8), ord(files.quote)
    place, breaks = np.flatnonzero(byte == quote), np.flatnonzero(byte == 10)
    if len(place) % 2:
        return False
    opens, closes = place[::2], place[1::2]
    before = byte[opens - 1][opens > 0]  # the first byte begins a row
    after = byte[np.minimum(closes + 1, len(byte) - 1)][closes < len(byte) - 1]
    ends = [ord(delimiter), 10, quote]
    lines = np.searchsorted(breaks, opens) == np.searchsorted(breaks, closes)
    return bool(
        np.isin(before, ends).all()
        and np.isin(after, [*ends, 13]).all()
        and lines.all()
    )


def _rows_of_arrow(
    text: bytes, files: Files, delimiter: str, names: list[str], columns: list[str]
) -> tuple[pa.Table | None, np.ndarray, Broken]:
    if not text.strip(b"\r\n"):
        return None, np.zeros(0, np.int64), []
    broken: Broken = []
    wrong = None
    try:
        text.decode()
    except UnicodeDecodeError as error:  # Arrow cannot hand such a row to `skip`
        wrong = error

    def skip(row: Any) -> str:
        why = f"row: {row.actual_columns} columns, not {row.expected_columns}"
        shown = (row.text or "").replace(
            ESCAPED.decode(), f"{files.escape}{files.quote}"
        )
        broken.append((row.number - 1, why, shown[:LONGEST_QUOTE]))
        return "skip"

    try:
        table = pa.csv.read_csv(
            pa.BufferReader(text),
            # One thread: rows are numbered only then; files are read side by side by Ray's tasks.
            pa.csv.ReadOptions(
                use_threads=False, block_size=len(text) + 1, column_names=names
            ),
            pa.csv.ParseOptions(
                delimiter=delimiter,
                quote_char=files.quote or False,
                invalid_row_handler=None if wrong else skip,
            ),
            pa.csv.ConvertOptions(
                include_columns=columns,
                column_types=dict.fromkeys(columns, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid:
        if wrong:
            raise wrong from None
        raise
    return table, _numbers(table.num_rows, broken), broken


def _numbers(rows: int, broken: Broken) -> np.ndarray:
    """Return the (rows,) numbers of rows between broken ones."""
    every = np.ones(rows + len(broken), bool)
    every[[number for number, *_ in broken]] = False
    return np.flatnonzero(every)


def _rows_of_lines(
    text: bytes,
    files: Files,
    delimiter: str,
    names: list[str],
    columns: list[str],
    last: bool,
) -> tuple[pa.Table | None, np.ndarray, Broken, int]:
    """Parse text as `_csv_rows` does, with Python's reader.

    A line that begins an unclosed value, or a value that swallows rows, is broken, and
    parsing continues with the next line: a stray quote costs its own line.
    """
    whole = text if last else text[: text.rfind(b"\n") + 1]
    lines, quotes = re.findall(r"[^\n]*\n|[^\n]+", whole.decode()), _quotes(files)
    rows: list[list[str]] = []
    broken: Broken = []
    at, first, reader = 0, 0, None
    closes = -1  # the line that ends a value which swallowed others
    while at < len(lines):
        if reader is None:
            reader, first = (
                csv.reader(
                    map(lines.__getitem__, range(at, len(lines))),
                    delimiter=delimiter,
                    **quotes,
                ),
                at,
            )
        cells, why = list[str](), ""
        try:
            cells = next(reader)
            end = first + reader.line_num
            if end - at > 1 and (
                len(cells) != len(names)
                or _are_rows(lines[at:end], delimiter, len(names))
            ):
                closes, end, why, reader = (
                    end - 1,
                    at + 1,
                    "its quotes are not closed",
                    None,
                )
            elif cells and len(cells) != len(names):
                why = f"{len(cells)} columns, not {len(names)}"
            elif at == closes and lines[at].count(files.quote) % 2:
                why = "a quote closes what none has opened"
        except csv.Error as error:
            if (
                "end of data" in str(error)
                and not last
                and len(text) < LONGEST_ROW // 2
            ):
                break  # its end is in the next block
            end, why, reader = at + 1, "its quotes are not closed", None
        if why:
            shown = (
                "".join(lines[at:end])
                .rstrip("\r\n")
                .replace(ESCAPED.decode(), f"{files.escape}{files.quote}")
            )
            if f"\\{files.quote}" in shown and not files.escape:
                why += "; set escape: '\\'"
            elif "quote" in why:
                why += "; set quote: '' where quotes are plain"
            broken.append(
                (len(rows) + len(broken), f"row: {why}", shown[:LONGEST_QUOTE])
            )
        elif cells:
            rows.append(cells)
        at = end
    used = sum(len(line.encode()) for line in lines[:at])
    values = [[row[names.index(name)] or None for row in rows] for name in columns]
    table = pa.table([pa.array(each, pa.string()) for each in values], names=columns)
    return table if rows else None, _numbers(len(rows), broken), broken, used


def _are_rows(lines: list[str], delimiter: str, width: int) -> bool:
    """Return whether the lines of one value look like rows: equal width, numbers in the
    same columns.
    """

    def numbers(line: str) -> list[bool]:
        return [
            re.fullmatch(r"[\d.:+-]+", cell.strip('"\r\n ')) is not None
            for cell in line.split(delimiter)
        ]

    first = numbers(lines[0])
    return (
        width > 1
        and len(first) == width
        and all(numbers(line) == first for line in lines[1:])
    )


def _read_lines(
    uri: str, files: Files, expressions: list[str], digest: Any, piece: FilePart | None
) -> Iterator[ParsedRows]:
    """Read JSON lines or lines of text."""
    kind = files.detect_format(uri)
    if kind == "jsonl" and piece is None and _is_array(_head(uri, files)):
        yield from _read_whole(uri, files, expressions, digest, piece)
        return
    parse = _json_rows if kind == "jsonl" else _text_rows
    rest, row = b"", 0
    for block in _blocks(uri, files, digest, piece):
        end = block.rfind(b"\n") + 1
        if end:
            frame, rows = parse(rest + block[:end], uri, expressions, row)
            rest, row = block[end:], row + rows
            yield frame
            continue
        rest += block
        if len(rest) > LONGEST_ROW:
            raise UserError(
                f"{uri} has a line of more than {LONGEST_ROW >> 20} MiB; write one row per line"
            )
    if rest.strip():
        frame, rows = parse(rest, uri, expressions, row)
        if kind == "jsonl" and frame.broken and frame.broken[-1][0] == row + rows - 1:
            raise UserError(
                f"{uri} ends within a JSON object: it is truncated; copy it again"
            )
        row += rows
        yield frame
    if not row and piece is None:
        raise UserError(
            f"{uri} is empty; copy it again or take it out of the input folder"
        )


def _text_rows(
    text: bytes, uri: str, expressions: list[str], row: int
) -> tuple[ParsedRows, int]:
    lines = [
        line for line in text.decode().replace("\r\n", "\n").split("\n") if line.strip()
    ]
    rows = pl.DataFrame(
        {"line": lines, ROW: np.arange(row, row + len(lines))},
        {"line": pl.String, ROW: pl.Int64},
    )
    return ParsedRows(rows, missing=needed(expressions, ["line"])[1]), len(lines)


def _json_rows(
    text: bytes, uri: str, expressions: list[str], row: int
) -> tuple[ParsedRows, int]:
    """Parse whole JSON lines; a column of mixed types becomes text."""
    broken: Broken = []
    if b"\\ud" in text or b"\\uD" in text:
        text = HALF.sub(rb"\1\\ufffd", text)
    try:
        rows = (
            pl.read_ndjson(text, infer_schema_length=None)
            if text.strip()
            else pl.DataFrame()
        )
        read = rows.select(needed(expressions, rows.columns)[0])
        if any(map(_has_objects, read)) or any(map(_rounds, read)):
            raise pl.exceptions.ComputeError(
                "text and objects, or large integers and floats, in one column"
            )
    except pl.exceptions.PolarsError:
        good, broken = _objects(
            [line for line in text.split(b"\n") if line.strip()], expressions
        )
        if not good and not row:
            raise UserError(
                f"{uri} is not JSON lines ({broken[0][1]}); write one JSON object per line, or set 'format'"
            ) from None
        rows = (
            pl.read_ndjson("\n".join(good).encode(), infer_schema_length=None)
            if good
            else pl.DataFrame()
        )
    columns, missing = needed(expressions, rows.columns)
    numbers = _numbers(len(rows), broken) + row
    rows = rows.select(columns).with_columns(pl.Series(ROW, numbers, pl.Int64))
    broken = [(number + row, why, shown) for number, why, shown in broken]
    return ParsedRows(rows, broken, missing), len(numbers) + len(broken)


def _has_objects(values: pl.Series) -> bool:
    """Return whether text values may be objects and lists that polars wrote as JSON."""
    values = values.explode() if values.dtype == pl.List(pl.String) else values
    return values.dtype == pl.String and bool(values.str.contains(r"^[\[{]").any())


def _rounds(values: pl.Series) -> bool:
    """Return whether integers may have lost digits in a column of floats."""
    return values.dtype == pl.Float64 and bool((values.abs() >= 2**53).any())


def _kind(value: Any) -> str:
    """Return the kind of a JSON value; a column has one kind."""
    if isinstance(value, list):
        objects = {isinstance(each, dict | list) for each in value if each is not None}
        return (
            "a list of values and objects"
            if len(objects) > 1
            else "a list of objects"
            if True in objects
            else "a list"
        )
    return "an object" if isinstance(value, dict) else "a value"


def _objects(lines: list[bytes], expressions: list[str]) -> tuple[list[str], Broken]:
    """Split lines into JSON objects with the required columns, and broken lines.

    A line is broken if it is no JSON object, or has another kind of value in a column
    than most lines.
    """
    found: dict[int, dict[str, Any]] = {}
    why: dict[int, str] = {}
    for number, line in enumerate(lines):
        try:
            value = json.loads(line, strict=False)
            if not isinstance(value, dict):
                raise ValueError(f"it is a JSON {type(value).__name__}")
            found[number] = value
        except (ValueError, RecursionError) as error:
            why[number] = f"row: no JSON object ({error})"
    columns = needed(expressions, {key for row in found.values() for key in row})[0]
    for name in columns:
        kinds = {
            number: _kind(row[name])
            for number, row in found.items()
            if row.get(name) is not None
        }
        kinds = {
            number: kind for number, kind in kinds.items() if found[number][name] != []
        }
        most, _ = Counter(kinds.values()).most_common(1)[0] if kinds else ("", 0)
        for number, kind in kinds.items():
            if kind != most:
                why[number] = f"{name}: {kind}, where most rows have {most}"
        if (
            len(
                {type(row.get(name)) for row in found.values()}
                - {type(None), list, dict}
            )
            > 1
        ):  # mixed values are text
            for row in found.values():
                if isinstance(row.get(name), bool | int | float):
                    row[name] = json.dumps(row[name])
    good = [
        json.dumps({name: row.get(name) for name in columns})
        for n, row in found.items()
        if n not in why
    ]
    return good, [
        (n, why[n], lines[n].decode(errors="replace")[:LONGEST_QUOTE])
        for n in sorted(why)
    ]


def _read_whole(
    uri: str, files: Files, expressions: list[str], digest: Any, piece: FilePart | None
) -> Iterator[ParsedRows]:
    """Read a file with a single JSON value: an array of objects, or an object keyed by
    id.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(made := dict(pairs)) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise UserError(f"{uri}: the key '{twice}' comes twice; merge its entries")
        return made

    try:
        content = json.loads(
            b"".join(_blocks(uri, files, digest, None)),
            object_pairs_hook=unique,
            strict=False,
        )
    except ValueError as error:
        raise UserError(
            f"{uri} is not readable JSON ({error}); it may be truncated: copy it again"
        ) from error
    if isinstance(content, dict):
        content = [{"key": key, "value": value} for key, value in content.items()]
    elif files.detect_format(uri) == "keyed" or not isinstance(content, list):
        raise UserError(
            f"{uri} holds a JSON {type(content).__name__}, not {{id: ...}}; set another 'format'"
        )
    if not content:
        raise UserError(
            f"{uri} is empty; copy it again or take it out of the input folder"
        )
    for row in range(0, len(content), PARQUET_ROWS):
        lines = "\n".join(
            json.dumps(each) for each in content[row : row + PARQUET_ROWS]
        )
        yield _json_rows(lines.encode(), uri, expressions, row)[0]


class _Hashed:
    """A file whose bytes are hashed as they are read."""

    closed = False

    def __init__(self, file: Any, digest: Any) -> None:
        self.file, self.digest = file, digest
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int) -> bytes:
        content: bytes = self.file.read(size)
        if self.digest is not None:
            self.digest.update(content)
        return content


def _read_parquet(
    uri: str, files: Files, expressions: list[str], digest: Any, piece: FilePart | None
) -> Iterator[ParsedRows]:
    filesystem, path = open_uri(uri)
    with filesystem.open_input_file(path) as file:
        parquet = pq.ParquetFile(pa.PythonFile(_Hashed(file, digest), mode="r"))
        names = parquet.schema_arrow.names
        columns, missing = needed(expressions, names)
        groups = (
            range(piece.start, piece.end) if piece else range(parquet.num_row_groups)
        )
        row = 0
        for group in groups:
            metadata = parquet.metadata.row_group(group)
            wanted = [metadata.column(i) for i in range(metadata.num_columns)]
            wanted = [
                column
                for column in wanted
                if column.path_in_schema.split(".")[0] in columns
            ]
            # Coded by a dictionary, a value takes less in the file than the 8 bytes or more that it takes in memory.
            size = sum(
                max(column.total_uncompressed_size, 8 * column.num_values)
                for column in wanted
            )
            rows = max(1, min(PARQUET_ROWS, BLOCK * metadata.num_rows // max(size, 1)))
            for batch in parquet.iter_batches(
                rows, row_groups=[group], columns=columns, use_threads=False
            ):
                frame = pl.DataFrame({name: _text(batch[name]) for name in columns})
                numbers = pl.Series(ROW, np.arange(row, row + len(frame)), pl.Int64)
                yield ParsedRows(
                    frame.select(columns).with_columns(numbers), missing=missing
                )
                row += len(frame)


def _text(column: pa.Array) -> Any:
    """Convert bytes to text, invalid ones to null, and decimals that polars lacks."""
    kind = column.type
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    ):
        texts = (
            value and value.decode(errors="replace") for value in column.to_pylist()
        )
        return pl.Series(
            [text if text is None or "\ufffd" not in text else None for text in texts],
            dtype=pl.String,
        )
    return pl.from_arrow(
        column.cast(pa.string()) if pa.types.is_decimal256(kind) else column
    )
