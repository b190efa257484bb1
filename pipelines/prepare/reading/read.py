"""Read raw files as frames of rows: CSV, JSON lines, Parquet and plain lines.

    columns = ["user", "cast(price as double)"]
    files = Files(delimiter=";")
    for frame in read_frames("s3://bucket/log.csv", files, columns):
        frame.rows, frame.broken

Files may be compressed. A large uncompressed file is split
into pieces (`split_file`): text from line start to line start, Parquet by row groups.
Values of CSV are text, or null if they are empty. Values of JSON and Parquet have the
types of the file. Lines that cannot be parsed are in `ParsedRows.broken`, so every line
of a file is counted as header, blank line, row or broken line.
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
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, get_args

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from pyarrow import fs
from pydantic import AfterValidator, Field

from core.errors import UserError, did_you_mean, one_line
from core.files import open_uri
from core.tables import JOB_FILES, check_plain_types

ROW = "__row"
"""Column with the index of the row in its piece, which counts broken rows, too."""

SUFFIXES = {
    "csv": "csv",
    "tsv": "csv",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "parquet": "parquet",
}
Format = Literal["csv", "jsonl", "parquet", "lines", "keyed"]
COMPRESSION_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
COMPRESSED_SUFFIXES = ("gz", "bz2", "zst", "lz4")
BLOCK_BYTES = 8 << 20
"""Approximate bytes of text per frame."""
MAX_ROW_BYTES = 64 << 20
MAX_FRAME_ROWS = 1 << 17
"""Maximum number of rows per frame of Parquet, and of files with one JSON value."""
MAX_QUOTED_CHARS = 2000
"""Maximum number of characters of a broken line in its reject."""
QUOTE_MARK = b"\x0e\x0f"
"""Bytes that replace an escaped quote during parsing, because no parser supports both
escaped and doubled quotes."""
DELIMITER_MARK = b"\x1f"
"""Byte that replaces a delimiter of several characters: the ASCII unit separator."""
NO_DELIMITER = "\x1e"
"""Delimiter of plain lines, which should not occur: the ASCII record separator."""
BLANK_LINE = re.compile(rb"(?m)^[ \t]+(?=\r?\n)")
UNCLOSED_QUOTES = "its quotes are not closed"
"""Reason of a broken line with a value that ends in the wrong place, or not at all."""
ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
"""Byte that is not UTF-8, as Python decodes it with `surrogateescape`."""
LONE_SURROGATE = re.compile(
    rb"(?<!\\)((?:\\\\)*)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
)
"""Escaped high surrogate in JSON without the low surrogate of its pair."""
csv.field_size_limit(MAX_ROW_BYTES)

Broken = list[tuple[int, str, str]]
"""Lines that cannot be parsed: index in the piece, reason and text."""


def check_encoding(encoding: str) -> str:
    """Raise a ValueError for a codec that is none of text."""
    try:
        "".encode(encoding)
    except LookupError as error:
        raise ValueError(
            f"'encoding' is '{encoding}', which is not a text encoding of Python"
        ) from error
    return encoding


@dataclass(frozen=True, kw_only=True)
class Files:
    """Format of the files of a section."""

    format: Format | None = None
    """csv, jsonl, parquet; `lines` (each line is a row with the column `line`) or
    `keyed` (one JSON object with a value by id, read as the columns `key` and `value`).
    By default the suffix of the file determines the format."""
    delimiter: Annotated[str, Field(pattern=r"^[[:ascii:]&&[^\n]]{1,8}$")] | None = None
    """CSV: separator of columns, such as `;` or `::`; by default a tab for `.tsv`,
    otherwise a comma."""
    header: list[str] | None = None
    """CSV without a header line: names of the columns."""
    quote: Annotated[str, Field(pattern="^[[:ascii:]]?$")] = '"'
    """CSV: quote character around values; empty if quotes are plain characters."""
    escape: Annotated[str, Field(pattern="^[[:ascii:]]?$")] = ""
    """CSV: escape character before a quote within a value, such as a backslash; by
    default quotes are doubled."""
    encoding: Annotated[str, AfterValidator(check_encoding)] = "utf-8"
    """Python codec of text files, such as cp1252."""
    where: str | None = None
    """SQL condition of the rows of a file to take, such as `invoice not like 'C%' and
    customer is not null`; the other rows are left out and counted apart from
    rejects."""

    @property
    def needs_decoding(self) -> bool:
        """Whether text must be converted because it is not UTF-8 or ASCII."""
        return codecs.lookup(self.encoding).name not in ("utf-8", "utf-8-sig", "ascii")

    def detect_format(self, uri: str) -> str:
        """Return the configured format, or else that of the file.

        Files that begin like Parquet are Parquet, whatever their suffix. The suffix of
        a compression is ignored.
        """
        if self.format:
            return self.format
        if is_parquet(uri):
            return "parquet"
        suffixes = [s[1:].lower() for s in PurePosixPath(uri).suffixes]
        known = [SUFFIXES.get(s) for s in suffixes if s not in COMPRESSED_SUFFIXES]
        if not known or known[-1] is None:
            raise UserError(
                f"'format' is not set, and the name of {uri} indicates none of "
                f"{', '.join(get_args(Format))}"
            )
        return known[-1]

    def detect_delimiter(self, file: str) -> str:
        """Return the configured delimiter, by default that of the file's suffix."""
        suffixes = [suffix.lower() for suffix in PurePosixPath(file).suffixes]
        return self.delimiter or ("\t" if ".tsv" in suffixes else ",")


@dataclass(frozen=True)
class FilePart:
    """A part of an uncompressed file: the rows that begin from `start` to before `end`.

    Positions are bytes of text, or row groups of Parquet.
    """

    start: int
    end: int


@dataclass(frozen=True)
class ParsedRows:
    """A frame of rows of a raw file."""

    rows: pl.DataFrame
    """The existing columns that were asked for, and the column ROW."""
    broken: Broken = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Columns that do not exist, each with a hint at a similar name."""
    left_out: int = 0
    """Number of rows that `where` leaves out."""

    @property
    def with_missing(self) -> pl.DataFrame:
        """Rows that also have the missing columns, filled with nulls."""
        return self.rows.with_columns(
            pl.lit(None, pl.Null).alias(name) for name in self.missing
        )


def list_files(
    input_uri: str,
    pattern: str,
    *,
    required: bool,
    what: str,
    exclude: Collection[str] = (),
) -> list[str]:
    """List the files of a folder and its subfolders that match a pattern, sorted.

    Hidden files are skipped, and so are parts and manifests of this project's tables in
    subfolders.

    Args:
        input_uri: Folder.
        pattern: Pattern with shell wildcards for paths relative to the folder.
        required: Whether at least one file must match.
        what: Kind of file, for the message.
        exclude: Patterns of files to exclude.
    """
    filesystem, root = open_uri(input_uri)
    try:
        infos = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"the input folder {input_uri} cannot be read") from error
    names = (
        info.path[len(root) :].lstrip("/")
        for info in infos
        if info.type == fs.FileType.File
    )
    files = sorted(
        name
        for name in names
        if fnmatchcase(name, pattern)
        and not any(fnmatchcase(name, other) for other in exclude)
        and not any(part.startswith((".", "_")) for part in name.split("/"))
        and not ("/" in name and JOB_FILES.fullmatch(name.rsplit("/", 1)[1]))
    )
    if required and not files:
        raise UserError(f"{input_uri} has no {what} like '{pattern}'")
    return files


def split_file(uri: str, files: Files, size: int) -> list[FilePart | None]:
    """Split a file into pieces of about `size` bytes.

    Returns:
        The pieces, or [None] for a file that is read as a whole: one that is small,
        compressed, in another encoding than UTF-8, or a single JSON value.
    """
    filesystem, path = open_uri(uri)
    length, kind = filesystem.get_file_info(path).size, files.detect_format(uri)
    if length <= size:
        return [None]
    with filesystem.open_input_file(path) as stream:
        if kind == "parquet":
            groups = pq.read_metadata(stream).num_row_groups
            step = max(1, groups * size // length)
            starts = range(0, groups, step)
            return [FilePart(start, min(start + step, groups)) for start in starts]
        head = stream.read(1 << 12)
    is_json_array = kind == "jsonl" and _is_array(head)
    is_plain = not files.needs_decoding and not _detect_compression(head)
    if kind == "keyed" or is_json_array or not is_plain:
        return [None]
    return [
        FilePart(start, min(start + size, length)) for start in range(0, length, size)
    ]


def _detect_compression(head: bytes) -> str | None:
    """Return the compression that the first bytes of a file indicate, or None."""
    for magic, name in COMPRESSION_MAGIC.items():
        if head.startswith(magic):
            return name
    return None


def _is_array(head: bytes) -> bool:
    """Return whether a text begins with a JSON array."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def is_parquet(uri: str) -> bool:
    """Return whether a file begins like Parquet; false if it cannot be read."""
    filesystem, path = open_uri(uri)
    with suppress(OSError), filesystem.open_input_file(path) as stream:
        return stream.read(4) == b"PAR1"
    return False


def read_frames(
    uri: str,
    files: Files,
    expressions: Iterable[str],
    piece: FilePart | None = None,
) -> Iterator[ParsedRows]:
    """Yield the rows of a file, or of a piece of it, in frames.

    Args:
        uri: File.
        files: Format of the file.
        expressions: SQL expressions whose columns are read.
        piece: Part of the file; None for the whole file.
    """
    kind, expressions = files.detect_format(uri), list(dict.fromkeys(expressions))
    reader = {
        "csv": _read_csv,
        "lines": _read_csv,
        "parquet": _read_parquet,
        "keyed": _read_json_value,
        "jsonl": _read_json_lines,
    }[kind]
    if kind == "lines":
        text = {"delimiter": NO_DELIMITER, "quote": "", "encoding": files.encoding}
        files = Files(format="lines", header=["line"], **text)
    try:
        yield from reader(uri, files, expressions, piece)
    except (pa.ArrowException, UnicodeError, OSError, EOFError) as error:
        raise UserError(
            f"{uri} cannot be read as {kind} in {files.encoding} ({one_line(error)})"
        ) from error


def select_columns(
    expressions: Iterable[str], present: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Determine the columns that expressions read.

    Args:
        expressions: Names of columns, or SQL expressions.
        present: Columns of the file.

    Returns:
        Existing columns, and hints by missing column.
    """
    names: list[str] = []
    for text in expressions:
        names += root_columns(text, present)
    columns = dict.fromkeys(names)
    missing = {
        name: hint_at_column(name, present) for name in columns if name not in present
    }
    return [name for name in columns if name in present], missing


def parse_sql(text: str) -> pl.Expr:
    """Parse a SQL expression of columns.

    Raises:
        ValueError: If it names a function that opens files or addresses, or one whose
            result can be longer than the row by any factor.
    """
    opens = re.search(r"(?i)\bread_(csv|ndjson|json|ipc|parquet)\b", text)
    if opens:
        raise ValueError(f"'{text}' calls {opens[0]}; an expression reads columns only")
    expression = pl.sql_expr(text)
    # the names of polars, which SQL calls lpad, rpad, generate_series and range
    if re.search(
        r"\.pad_(start|end)\(\[(?!dyn int: \d{1,3}\])|_ranges\(\[", str(expression)
    ):
        raise ValueError(
            f"'{text}' makes values of unlimited length: lpad and rpad "
            f"take a width below 1,000, and series are not available"
        )
    return expression


def check_sql(expressions: Iterable[str]) -> None:
    """Raise a ValueError for text that is neither a column nor a SQL row expression.

    A row expression has one value per row, unlike aggregates and window functions.
    """
    for text in expressions:
        try:
            meta = parse_sql(text).meta
        except pl.exceptions.PolarsError as error:
            if re.fullmatch(r"[^()'\"|]+", text):  # a column named like an SQL keyword
                continue
            raise ValueError(
                f"'{text}' is not a SQL expression ({one_line(error)})"
            ) from error
        try:
            is_per_row = meta.is_length_preserving() or meta.is_literal()
        except pl.exceptions.PolarsError:  # `in` needs columns
            is_per_row = True
        if not is_per_row or re.search(r"(?i)\bover\s*\(", text):
            raise ValueError(f"'{text}' is not an expression of one row")


def check_condition(condition: str | None) -> None:
    """Raise a ValueError for a condition of rows that names no column."""
    if condition is not None:
        check_sql([condition])
        if not root_columns(condition, ()):
            raise ValueError(f"where is '{condition}', which names no column")


def root_columns(text: str, present: Collection[str]) -> list[str]:
    """Return the columns that an expression reads.

    Args:
        text: Name of a column, or a SQL expression.
        present: Existing columns, whose names take precedence over SQL.
    """
    if text in present:
        return [text]
    try:
        return parse_sql(text).meta.root_names()
    except pl.exceptions.PolarsError:
        return [text]  # a name that is a keyword of SQL


def hint_at_column(column: str, present: Collection[str]) -> str:
    """Return the part of a message that names the most similar and all columns."""
    names = f" of {', '.join(list(present)[:40])}" if present else ""
    return did_you_mean(column, sorted(present)) + names


def _read_blocks(
    uri: str, files: Files, piece: FilePart | None, size: int | None = None
) -> Generator[bytes, None, None]:
    """Yield UTF-8 text in blocks of about `size` bytes, which can split lines."""
    size = size or BLOCK_BYTES
    decoder = None
    if files.needs_decoding:
        decoder = codecs.getincrementaldecoder(files.encoding)()
    remaining, is_first = 1 << 62, True
    with ExitStack() as stack:
        filesystem, path = open_uri(uri)
        stream = stack.enter_context(filesystem.open_input_file(path))
        if piece is None:  # decompressed, whatever the suffix of the file
            kind = _detect_compression(stream.read(4))
            stream = filesystem.open_input_stream(path, compression=kind)
            stream = stack.enter_context(stream)
        else:
            start = _find_row_start(stream, uri, files, piece.start)
            end = _find_row_start(stream, uri, files, piece.end)
            stream.seek(start)
            remaining, is_first = end - start, start == 0
        while remaining and (block := stream.read(min(size, remaining))):
            remaining -= len(block)
            text = decoder.decode(block).encode() if decoder else block
            yield text.removeprefix(codecs.BOM_UTF8) if is_first else text
            is_first = False
        if decoder and (remainder := decoder.decode(b"", True)):
            yield remainder.encode()


def _read_head(uri: str, files: Files) -> bytes:
    """Return the first block of the text that is not blank."""
    with closing(_read_blocks(uri, files, None, 1 << 18)) as blocks:
        head = next((block for block in blocks if block.strip()), b"")
    if not head:
        raise UserError(f"{uri} is empty")
    return head


def _find_row_start(stream: Any, uri: str, files: Files, byte: int) -> int:
    """Return the first position from `byte` on at which a row begins."""
    if byte == 0:
        return 0
    stream.seek(byte - 1)
    text = bytes(stream.read(1 << 20))
    at_end = byte - 1 + len(text) == stream.size()
    line_start = text.find(b"\n") + 1
    if not line_start:
        if at_end:
            return stream.size()
        return _find_row_start(stream, uri, files, byte - 1 + len(text))
    start = byte - 1 + line_start
    quote = files.quote.encode()
    has_quotes = bool(quote) and quote in text[line_start:]
    if files.detect_format(uri) != "csv" or not has_quotes:
        return start
    delimiter = files.detect_delimiter(uri).encode()
    mark = delimiter if len(delimiter) == 1 else DELIMITER_MARK
    width = len(_read_header(uri, files, delimiter, mark)[0])
    lines = [line + b"\n" for line in text[line_start:].split(b"\n")]
    if not at_end:
        lines = lines[:-1]
    texts = [
        _mark_escapes(line.replace(delimiter, mark), files).decode(errors="replace")
        for line in lines
    ]
    for first in range(len(lines)):
        if texts[first].count(files.quote) % 2:
            continue  # a value that spans lines begins or ends here
        with suppress(csv.Error):
            reader = csv.reader(
                islice(texts, first, None),
                delimiter=mark.decode(),
                **_quote_options(files),
            )
            if all(len(row) in (0, width) for row in islice(reader, 20)):
                bytes_before = sum(map(len, lines[:first]))
                return min(start + bytes_before, stream.size())
    return start


def _quote_options(files: Files) -> dict[str, Any]:
    """Return the options of Python's CSV reader for quotes."""
    if files.quote:
        return {"quotechar": files.quote, "strict": True}
    return {"quoting": csv.QUOTE_NONE}


def _mark_escapes(text: bytes, files: Files) -> bytes:
    """Replace escaped quotes by QUOTE_MARK, which has the same length."""
    if not files.escape or not files.quote or files.escape.encode() not in text:
        return text
    escape, quote = files.escape.encode(), files.quote.encode()
    # an escape character followed by itself or by a quote
    pairs = re.compile(
        b"%b(%b|%b)" % (re.escape(escape), re.escape(escape), re.escape(quote))
    )
    return pairs.sub(lambda pair: QUOTE_MARK if pair[1] == quote else pair[0], text)


def _unescape(
    rows: pl.DataFrame, files: Files, mark: str, delimiter: str
) -> pl.DataFrame:
    r"""Restore delimiters, quotes and escaped characters in values."""
    value = text = pl.col(pl.String)
    if mark != delimiter:
        text = text.str.replace_all(mark, delimiter, literal=True)
    if files.escape and files.quote:
        quote_mark = QUOTE_MARK.decode()
        text = text.str.replace_all(quote_mark, files.quote, literal=True)
    if files.escape:
        text = text.str.replace_all(2 * files.escape, files.escape, literal=True)
        text = pl.when(value != files.escape + "N").then(text)
    return rows.with_columns(text.name.keep())


def _read_csv(
    uri: str, files: Files, expressions: list[str], piece: FilePart | None
) -> Iterator[ParsedRows]:
    """Yield the rows of a CSV file; arguments as in `read_frames`."""
    delimiter = files.detect_delimiter(uri).encode()
    mark = delimiter if len(delimiter) == 1 else DELIMITER_MARK
    names, header_lines = _read_header(uri, files, delimiter, mark)
    columns, missing = select_columns(expressions, names)
    lines_to_skip = header_lines if piece is None or piece.start == 0 else 0
    unparsed = b""
    first_row = 0
    for block in chain(_read_blocks(uri, files, piece), [None]):
        unparsed = (unparsed + (block or b"")).replace(delimiter, mark)
        if files.format == "lines":
            unparsed = BLANK_LINE.sub(b"", unparsed)
        while lines_to_skip and (line_end := unparsed.find(b"\n") + 1):
            unparsed = unparsed[line_end:]
            lines_to_skip -= 1
        if lines_to_skip or not unparsed:
            continue
        rows, broken, num_bytes = _parse_csv(
            unparsed, files, mark.decode(), names, columns, last=block is None
        )
        unparsed = unparsed[num_bytes:]
        if len(unparsed) > MAX_ROW_BYTES:
            raise UserError(
                f"{uri}: row {first_row:,} is longer than {MAX_ROW_BYTES >> 20} MiB"
            )
        numbers = first_row + _row_numbers(len(rows), broken)
        rows = _unescape(rows, files, mark.decode(), delimiter.decode())
        rows = rows.with_columns(pl.Series(ROW, numbers, pl.Int64))
        broken = [
            (
                first_row + number,
                reason,
                line.replace(mark.decode(), delimiter.decode()),
            )
            for number, reason, line in broken
        ]
        yield ParsedRows(rows, broken, missing)
        first_row += len(rows) + len(broken)


def _read_header(
    uri: str, files: Files, delimiter: bytes, mark: bytes
) -> tuple[list[str], int]:
    """Read the header of a CSV file."""
    head = _read_head(uri, files)
    if head[:400].count(0) * 4 > len(head[:400]):
        raise UserError(f"{uri} is not {files.encoding}: it has NUL bytes")
    if b"\r" in head and b"\n" not in head:
        raise UserError(f"{uri} has carriage returns as line ends")
    if files.header:
        return files.header, 0
    marked = _mark_escapes(head.replace(delimiter, mark), files)
    lines = marked.decode(errors="replace").split("\n")
    reader = csv.reader(
        (line + "\n" for line in lines),
        delimiter=mark.decode(),
        **_quote_options(files),
    )
    try:
        names = next(cells for cells in reader if cells)
    except csv.Error as error:
        raise UserError(f"the header of {uri} cannot be parsed ({error})") from error
    repetitions: Counter[str] = Counter()
    unique = []
    for name in names:
        number = repetitions[name]
        repetitions[name] += 1
        numbered = f"{name}.{number}" if number else name
        unique.append(numbered.replace(QUOTE_MARK.decode(), files.quote))
    return unique, reader.line_num


def _parse_csv(
    text: bytes,
    files: Files,
    delimiter: str,
    names: list[str],
    columns: list[str],
    last: bool,
) -> tuple[pl.DataFrame, Broken, int]:
    """Parse a text that begins with a row.

    Returns:
        Valid rows, broken lines with their indices among all rows of the text, and the
        number of parsed bytes.
    """
    text = _mark_escapes(text, files)
    end = len(text) if last else text.rfind(b"\n") + 1
    if _is_regular(text[:end], files, delimiter):
        with suppress(UnicodeDecodeError):
            text[:end].decode()  # Arrow cannot pass other text to `skip`
            return *_parse_with_arrow(text[:end], files, delimiter, names, columns), end
    return _parse_line_by_line(text, files, delimiter, names, columns, last)


def _is_regular(text: bytes, files: Files, delimiter: str) -> bool:
    """Return whether all quotes enclose whole values of one line, or are doubled."""
    if not files.quote or files.quote.encode() not in text:
        return True
    # line feeds at both ends, so that each quote has a byte before and after it
    codes = np.frombuffer(b"\n%b\n" % text, np.uint8)
    quotes = np.flatnonzero(codes == ord(files.quote))
    if len(quotes) % 2:
        return False
    opening, closing_quotes = quotes[::2], quotes[1::2]
    separators = [ord(delimiter), ord("\n"), ord(files.quote)]
    line_ends = np.flatnonzero(codes == ord("\n"))
    opening_line = np.searchsorted(line_ends, opening)
    closing_line = np.searchsorted(line_ends, closing_quotes)
    return bool(
        np.isin(codes[opening - 1], separators).all()
        and np.isin(codes[closing_quotes + 1], [*separators, ord("\r")]).all()
        and (opening_line == closing_line).all()
    )


def _parse_with_arrow(
    text: bytes, files: Files, delimiter: str, names: list[str], columns: list[str]
) -> tuple[pl.DataFrame, Broken]:
    """Parse rows of one line each with Arrow; arguments as in `_parse_csv`."""
    if not text.strip(b"\r\n"):
        return pl.DataFrame(schema=dict.fromkeys(columns, pl.String)), []
    broken: Broken = []

    def skip(row: Any) -> str:
        reason = f"row: {row.actual_columns} columns, not {row.expected_columns}"
        line = _restore_quotes(row.text or "", files)
        broken.append((row.number - 1, reason, line[:MAX_QUOTED_CHARS]))
        return "skip"

    table = pa.csv.read_csv(
        pa.BufferReader(text),
        # Rows are numbered only with one thread. Ray's tasks read files in parallel.
        pa.csv.ReadOptions(
            use_threads=False, block_size=len(text) + 1, column_names=names
        ),
        pa.csv.ParseOptions(
            delimiter=delimiter,
            quote_char=files.quote or False,
            invalid_row_handler=skip,
        ),
        pa.csv.ConvertOptions(
            include_columns=columns,
            column_types=dict.fromkeys(columns, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    return pl.DataFrame(table), broken


def _restore_quotes(line: str, files: Files) -> str:
    """Replace each QUOTE_MARK by the escaped quote of the file."""
    return line.replace(QUOTE_MARK.decode(), f"{files.escape}{files.quote}")


def _row_numbers(num_rows: int, broken: Broken) -> np.ndarray:
    """Return the (rows,) indices of valid rows among all rows of a text."""
    is_row = np.ones(num_rows + len(broken), bool)
    is_row[[number for number, *_ in broken]] = False
    return np.flatnonzero(is_row)


def _parse_line_by_line(
    text: bytes,
    files: Files,
    delimiter: str,
    names: list[str],
    columns: list[str],
    last: bool,
) -> tuple[pl.DataFrame, Broken, int]:
    """Parse a text with Python's strict reader; see `_parse_csv`.

    A line is broken if a value that begins in it is not closed correctly, or spans
    lines that look like rows. Reading then continues with the next line, so a stray
    quote only affects its own line.
    """
    complete = text if last else text[: text.rfind(b"\n") + 1]
    lines = re.findall(r"[^\n]*\n|[^\n]+", complete.decode(errors="surrogateescape"))
    width, indices = len(names), [names.index(name) for name in columns]
    rows: list[list[str | None]] = []
    broken: Broken = []
    position, last_spanned_line = 0, -1
    reader, reader_start = None, 0
    while position < len(lines):
        start, cells, reason = position, list[str](), ""
        if reader is None:
            reader_start = start
            rest = map(lines.__getitem__, range(start, len(lines)))
            reader = csv.reader(rest, delimiter=delimiter, **_quote_options(files))
        try:
            cells = next(reader)
        except csv.Error as error:
            is_incomplete = "end of data" in str(error) and not last
            if is_incomplete and len(text) < MAX_ROW_BYTES // 2:
                break  # the record ends in the next block
            reason = UNCLOSED_QUOTES
        position = reader_start + reader.line_num
        spanned = lines[start:position]
        values = [cells[index] or None for index in indices if index < len(cells)]
        if reason:
            pass
        elif len(spanned) > 1 and (
            len(cells) != width or _look_like_rows(spanned, delimiter, width)
        ):
            last_spanned_line, reason = position - 1, UNCLOSED_QUOTES
        elif cells and len(cells) != width:
            reason = f"{len(cells)} columns, not {width}"
        elif start == last_spanned_line and lines[start].count(files.quote) % 2:
            reason = "a quote closes what none has opened"
        elif ESCAPED_BYTE.search("".join(filter(None, values))):
            reason = "not UTF-8"
        if reason == UNCLOSED_QUOTES:  # reading continues with the next line
            position, reader = start + 1, None
        if reason:
            record = "".join(lines[start:position]).rstrip("\r\n")
            record = record.encode(errors="surrogateescape").decode(errors="replace")
            record = _restore_quotes(record, files)
            number = len(rows) + len(broken)
            broken.append((number, f"row: {reason}", record[:MAX_QUOTED_CHARS]))
        elif cells:
            rows.append(values)
    num_bytes = len("".join(lines[:position]).encode(errors="surrogateescape"))
    frame = pl.DataFrame(rows, dict.fromkeys(columns, pl.String), orient="row")
    return frame, broken, num_bytes


def _look_like_rows(lines: list[str], delimiter: str, width: int) -> bool:
    """Return whether all lines of a value look like rows."""

    def are_numbers(line: str) -> list[bool]:
        return [
            re.fullmatch(r"[\d.:+-]+", cell.strip('"\r\n ')) is not None
            for cell in line.split(delimiter)
        ]

    first = are_numbers(lines[0])
    return (
        width > 1
        and len(first) == width
        and all(are_numbers(line) == first for line in lines[1:])
    )


def _read_json_lines(
    uri: str, files: Files, expressions: list[str], piece: FilePart | None
) -> Iterator[ParsedRows]:
    """Yield the rows of JSON lines; arguments as in `read_frames`."""
    if piece is None and _is_array(_read_head(uri, files)):
        yield from _read_json_value(uri, files, expressions, piece)
        return
    text = b""
    num_rows = 0
    for block in chain(_read_blocks(uri, files, piece), [None]):
        text += block or b""
        end = len(text) if block is None else text.rfind(b"\n") + 1
        lines, text = text[:end], text[end:]
        if len(text) > MAX_ROW_BYTES:
            raise UserError(f"{uri} has a line of more than {MAX_ROW_BYTES >> 20} MiB")
        if not lines.strip():
            continue
        frame = _parse_json_lines(lines, uri, expressions, num_rows)
        num_rows += len(frame.rows) + len(frame.broken)
        is_last_broken = frame.broken and frame.broken[-1][0] == num_rows - 1
        if block is None and is_last_broken:
            raise UserError(f"{uri} ends within a JSON object, so it is truncated")
        yield frame
    if not num_rows and piece is None:
        raise UserError(f"{uri} is empty")


def _parse_json_lines(
    text: bytes, uri: str, expressions: list[str], row: int
) -> ParsedRows:
    """Parse whole JSON lines; a column of mixed types becomes text."""
    broken: Broken = []
    if b"\\ud" in text or b"\\uD" in text:
        text = LONE_SURROGATE.sub(rb"\1\\ufffd", text)
    try:
        rows = _read_ndjson(text)
        columns, _ = select_columns(expressions, rows.columns)
        for values in rows.select(columns):
            # polars may convert objects and lists to text, and round large integers
            inner = values.explode() if isinstance(values.dtype, pl.List) else values
            is_text, is_float = inner.dtype == pl.String, inner.dtype == pl.Float64
            if (is_text and inner.str.contains(r"^[\[{]").any()) or (
                is_float and (inner.abs() >= 2**53).any()
            ):
                raise pl.exceptions.ComputeError(
                    "text and objects, or large integers and floats, in one column"
                )
    except pl.exceptions.PolarsError:
        lines = [line for line in text.split(b"\n") if line.strip()]
        valid, broken = _parse_objects(lines, expressions)
        if not valid and not row:
            raise UserError(f"{uri} is not JSON lines ({broken[0][1]})") from None
        rows = _read_ndjson("\n".join(valid).encode())
    columns, missing = select_columns(expressions, rows.columns)
    numbers = _row_numbers(len(rows), broken) + row
    rows = rows.with_columns(pl.Series(ROW, numbers, pl.Int64)).select(*columns, ROW)
    broken = [(number + row, reason, line) for number, reason, line in broken]
    return ParsedRows(rows, broken, missing)


def _read_ndjson(text: bytes) -> pl.DataFrame:
    """Parse JSON lines with polars; blank text gives an empty frame."""
    if not text.strip():
        return pl.DataFrame()
    return pl.read_ndjson(text, infer_schema_length=None)


def _parse_float(text: str) -> str | float:
    """Parse a JSON number; integers written as decimals, which may be ids, stay text.

    Integers below 2^53 are exact as floats.
    """
    return text if re.fullmatch(r"-?\d{16,}\.0+", text) else float(text)


def _json_kind(value: Any) -> str:
    """Return the kind of a JSON value; all values of a column have the same kind."""
    if isinstance(value, dict):
        return "an object"
    if not isinstance(value, list):
        return "a value"
    objects = {isinstance(inner, dict | list) for inner in value if inner is not None}
    if len(objects) > 1:
        return "a list of values and objects"
    return "a list of objects" if True in objects else "a list"


def _parse_objects(
    lines: list[bytes], expressions: list[str]
) -> tuple[list[str], Broken]:
    """Parse JSON lines one by one."""
    objects: dict[int, dict[str, Any]] = {}
    reasons: dict[int, str] = {}
    for line_index, line in enumerate(lines):
        try:
            value = json.loads(line, strict=False, parse_float=_parse_float)
            if not isinstance(value, dict):
                raise ValueError(f"it is a JSON {type(value).__name__}")
            objects[line_index] = value
        except (ValueError, RecursionError) as error:
            reasons[line_index] = f"row: no JSON object ({error})"
    present = {key for row in objects.values() for key in row}
    columns, _ = select_columns(expressions, present)
    for name in columns:
        # null and an empty list fit every kind, also a list of objects
        kinds = {
            line_index: _json_kind(row[name])
            for line_index, row in objects.items()
            if row.get(name) is not None and row[name] != []
        }
        for common_kind, _ in Counter(kinds.values()).most_common(1):
            for line_index, kind in kinds.items():
                if kind != common_kind:
                    reason = f"{name}: {kind}, where most rows have {common_kind}"
                    reasons[line_index] = reason
        types = {type(row.get(name)) for row in objects.values()}
        if len(types - {type(None), list, dict}) > 1:  # mixed values become text
            for row in objects.values():
                if isinstance(row.get(name), bool | int | float):
                    row[name] = json.dumps(row[name])
    valid = [
        json.dumps({name: row.get(name) for name in columns})
        for line_index, row in objects.items()
        if line_index not in reasons
    ]
    broken = []
    for line_index in sorted(reasons):
        text = lines[line_index].decode(errors="replace")[:MAX_QUOTED_CHARS]
        broken.append((line_index, reasons[line_index], text))
    return valid, broken


def _read_json_value(
    uri: str, files: Files, expressions: list[str], piece: FilePart | None
) -> Iterator[ParsedRows]:
    """Yield the rows of a file with one JSON value; arguments as in `read_frames`."""

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) < len(pairs):
            [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise UserError(f"{uri} has the key '{key}' twice")
        return built

    try:
        content = json.loads(
            b"".join(_read_blocks(uri, files, None)),
            object_pairs_hook=build_object,
            parse_float=_parse_float,
            strict=False,
        )
    except ValueError as error:
        raise UserError(f"{uri} is not valid JSON ({error})") from error
    if isinstance(content, dict):
        content = [{"key": key, "value": value} for key, value in content.items()]
    elif files.detect_format(uri) == "keyed" or not isinstance(content, list):
        raise UserError(
            f"{uri} is a JSON {type(content).__name__}, not an object {{id: ...}}"
        )
    if not content:
        raise UserError(f"{uri} is empty")
    for first_row in range(0, len(content), MAX_FRAME_ROWS):
        values = content[first_row : first_row + MAX_FRAME_ROWS]
        lines = "\n".join(json.dumps(value) for value in values)
        yield _parse_json_lines(lines.encode(), uri, expressions, first_row)


def _read_parquet(
    uri: str, files: Files, expressions: list[str], piece: FilePart | None
) -> Iterator[ParsedRows]:
    """Yield the rows of a Parquet file; arguments as in `read_frames`."""
    filesystem, path = open_uri(uri)
    with filesystem.open_input_file(path) as file:
        parquet = pq.ParquetFile(file)
        check_plain_types(parquet.schema_arrow, uri)
        columns, missing = select_columns(expressions, parquet.schema_arrow.names)
        groups = range(parquet.num_row_groups)
        if piece:
            groups = range(piece.start, piece.end)
        row = 0
        for group in groups:
            metadata = parquet.metadata.row_group(group)
            size = 0  # bytes in memory
            for i in range(metadata.num_columns):
                column = metadata.column(i)
                if column.path_in_schema.split(".")[0] in columns:
                    # dictionary-encoded values take less in the file than in memory
                    size += max(column.total_uncompressed_size, 8 * column.num_values)
            num_rows = BLOCK_BYTES * metadata.num_rows // max(size, 1)
            batches = parquet.iter_batches(
                max(1, min(MAX_FRAME_ROWS, num_rows)),
                row_groups=[group],
                columns=columns,
                use_threads=False,
            )
            for batch in batches:
                frame = pl.DataFrame({name: _to_text(batch[name]) for name in columns})
                numbers = pl.Series(ROW, np.arange(row, row + len(frame)), pl.Int64)
                rows = frame.select(columns).with_columns(numbers)
                yield ParsedRows(rows, missing=missing)
                row += len(frame)


def _to_text(column: pa.Array) -> Any:
    """Convert a column for polars: bytes and 256-bit decimals become text."""
    kind = column.type
    if pa.types.is_decimal256(kind):
        return pl.from_arrow(column.cast(pa.string()))
    values = pl.Series(column)
    if values.dtype != pl.Binary:
        return values
    with suppress(pl.exceptions.ComputeError):
        return values.cast(pl.String)
    # values that are not UTF-8 are missing
    texts = [text and text.decode(errors="ignore") for text in values]
    valid = [
        text if text is None or text.encode() == value else None
        for text, value in zip(texts, values, strict=True)
    ]
    return pl.Series(valid, dtype=pl.String)
