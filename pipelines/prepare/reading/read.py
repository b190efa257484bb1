"""Read raw files as frames of rows: CSV, JSON lines, Parquet and plain lines.

    digest = hashlib.sha256()
    columns = ["user", "cast(price as double)"]
    files = Files(delimiter=";")
    for frame in read_frames("s3://bucket/log.csv", files, columns, digest):
        frame.rows, frame.broken

Files may be compressed, and each byte is read once. A large uncompressed file is split
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
from itertools import islice, pairwise
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from pyarrow import fs

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
FORMATS = ("csv", "jsonl", "parquet", "lines", "keyed")
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
UNCLOSED_QUOTES = "its quotes are not closed"
"""Reason of a broken line with a value that ends in the wrong place, or not at all."""
LONE_SURROGATE = re.compile(
    rb"(?<!\\)((?:\\\\)*)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
)
"""Escaped high surrogate in JSON without the low surrogate of its pair."""
csv.field_size_limit(MAX_ROW_BYTES)

Broken = list[tuple[int, str, str]]
"""Lines that cannot be parsed: index in the piece, reason and text."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Format of the files of a section."""

    format: str | None = None
    """csv, jsonl, parquet; `lines` (each line is a row with the column `line`) or
    `keyed` (one JSON object with a value by id, read as the columns `key` and `value`).
    By default the suffix of the file determines the format."""
    delimiter: str | None = None
    """CSV: separator of columns, such as `;` or `::`; by default a tab for `.tsv`,
    otherwise a comma."""
    header: list[str] | None = None
    """CSV without a header line: names of the columns."""
    quote: str = '"'
    """CSV: quote character around values; empty if quotes are plain characters."""
    escape: str = ""
    """CSV: escape character before a quote within a value, such as a backslash; by
    default quotes are doubled."""
    encoding: str = "utf-8"
    """Python codec of text files, such as cp1252."""

    def check_files(self) -> None:
        """Raise a ValueError for invalid settings."""
        if self.format is not None and self.format not in FORMATS:
            raise ValueError(
                f"'format' is '{self.format}'; it must be one of {', '.join(FORMATS)}"
            )
        for key in ("quote", "escape"):
            if len(getattr(self, key).encode()) > 1:
                raise ValueError(
                    f"'{key}' is {getattr(self, key)!r}; it must be one ASCII "
                    f"character, or ''"
                )
        delimiter = self.delimiter
        if delimiter is not None and not (
            delimiter.isascii() and 1 <= len(delimiter) <= 8 and "\n" not in delimiter
        ):
            raise ValueError(
                f"'delimiter' is {delimiter!r}; it must be one to eight ASCII "
                f"characters, such as ';'"
            )
        try:
            "".encode(self.encoding)
        except LookupError as error:
            raise ValueError(
                f"'encoding' is '{self.encoding}', which is not a text encoding of "
                f"Python; use a codec such as cp1252"
            ) from error

    @property
    def needs_decoding(self) -> bool:
        """Whether text must be converted because it is not UTF-8 or ASCII."""
        return codecs.lookup(self.encoding).name not in ("utf-8", "utf-8-sig", "ascii")

    def detect_format(self, uri: str) -> str:
        """Return the configured format, or else that of the file.

        Files that begin like Parquet are Parquet, whatever their suffix. The suffix of
        a compression is ignored.
        """
        if self.format is None and is_parquet(uri):
            return "parquet"
        suffixes = [s[1:].lower() for s in PurePosixPath(uri).suffixes]
        suffixes = [s for s in suffixes if s not in COMPRESSED_SUFFIXES]
        if self.format is None and (not suffixes or suffixes[-1] not in SUFFIXES):
            raise UserError(
                f"'format' is not set, and the name of {uri} indicates none of "
                f"{', '.join(FORMATS)}"
            )
        return self.format or SUFFIXES[suffixes[-1]]

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
            return list(_split_row_groups(pq.read_metadata(stream), size))
        head = stream.read(1 << 12)
    is_json_array = kind == "jsonl" and _is_array(head)
    is_plain = not files.needs_decoding and not _detect_compression(head)
    if kind == "keyed" or is_json_array or not is_plain:
        return [None]
    return [
        FilePart(start, min(start + size, length)) for start in range(0, length, size)
    ]


def _split_row_groups(metadata: Any, size: int) -> Iterator[FilePart]:
    """Yield parts of a Parquet file with about `size` bytes of row groups each."""
    sizes = []
    for group_index in range(metadata.num_row_groups):
        group = metadata.row_group(group_index)
        columns = [group.column(i) for i in range(group.num_columns)]
        sizes.append(sum(column.total_compressed_size for column in columns))
    offsets = np.cumsum([0, *sizes])[:-1]
    # index of the part of each row group, by the byte at which the group begins
    part = offsets // size
    _, first_groups = np.unique(part, return_index=True)
    for start, end in pairwise([*first_groups.tolist(), len(sizes)]):
        yield FilePart(start, end)


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


def _open(uri: str) -> Any:
    """Open a stream of the decompressed bytes of a file, whatever its suffix."""
    filesystem, path = open_uri(uri)
    with filesystem.open_input_file(path) as stream:
        head = stream.read(4)
    return filesystem.open_input_stream(path, compression=_detect_compression(head))


def read_frames(
    uri: str,
    files: Files,
    expressions: Iterable[str],
    digest: Any = None,
    piece: FilePart | None = None,
) -> Iterator[ParsedRows]:
    """Yield the rows of a file, or of a piece of it, in frames.

    Args:
        uri: File.
        files: Format of the file.
        expressions: SQL expressions whose columns are read.
        digest: Hash that is updated with the parsed bytes, or None.
        piece: Part of the file; None for the whole file.
    """
    kind, expressions = files.detect_format(uri), list(dict.fromkeys(expressions))
    readers = {"csv": _read_csv, "parquet": _read_parquet, "keyed": _read_json_value}
    reader = readers.get(kind, _read_lines)
    try:
        yield from reader(uri, files, expressions, digest, piece)
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
    uri: str, files: Files, digest: Any, piece: FilePart | None, size: int | None = None
) -> Generator[bytes, None, None]:
    """Yield UTF-8 text in blocks of about `size` bytes, which can split lines."""
    size = size or BLOCK_BYTES
    decoder = None
    if files.needs_decoding:
        decoder = codecs.getincrementaldecoder(files.encoding)()
    remaining, is_first = 1 << 62, True
    with ExitStack() as stack:
        if piece is None:
            stream = stack.enter_context(_open(uri))
        else:
            filesystem, path = open_uri(uri)
            stream = stack.enter_context(filesystem.open_input_file(path))
            start = _find_row_start(stream, uri, files, piece.start)
            end = _find_row_start(stream, uri, files, piece.end)
            stream.seek(start)
            remaining, is_first = end - start, start == 0
        while remaining and (block := stream.read(min(size, remaining))):
            if digest is not None:
                digest.update(block)
            remaining -= len(block)
            text = decoder.decode(block).encode() if decoder else block
            yield text.removeprefix(codecs.BOM_UTF8) if is_first else text
            is_first = False
        if decoder and (remainder := decoder.decode(b"", True)):
            yield remainder.encode()


def _read_head(uri: str, files: Files) -> bytes:
    """Return the first block of the text that is not blank."""
    with closing(_read_blocks(uri, files, None, None, 1 << 18)) as blocks:
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
    value = pl.col(pl.String)
    if mark != delimiter:
        rows = rows.with_columns(value.str.replace_all(mark, delimiter, literal=True))
    if files.escape and files.quote:
        quote_mark = QUOTE_MARK.decode()
        rows = rows.with_columns(
            value.str.replace_all(quote_mark, files.quote, literal=True)
        )
    if files.escape:
        text = value.str.replace_all(2 * files.escape, files.escape, literal=True)
        is_set = value != files.escape + "N"
        rows = rows.with_columns(pl.when(is_set).then(text).name.keep())
    return rows


def _read_csv(
    uri: str, files: Files, expressions: list[str], digest: Any, piece: FilePart | None
) -> Iterator[ParsedRows]:
    """Yield the rows of a CSV file; arguments as in `read_frames`."""
    delimiter = files.detect_delimiter(uri).encode()
    mark = delimiter if len(delimiter) == 1 else DELIMITER_MARK
    names, header_lines = _read_header(uri, files, delimiter, mark)
    columns, missing = select_columns(expressions, names)
    lines_to_skip = header_lines if piece is None or piece.start == 0 else 0
    unparsed = b""
    first_row = 0
    last = False
    blocks = _read_blocks(uri, files, digest, piece)
    while not last:
        block = next(blocks, None)
        last = block is None
        unparsed = (unparsed + (block or b"")).replace(delimiter, mark)
        unparsed, lines_to_skip = _skip_lines(unparsed, lines_to_skip)
        if lines_to_skip or not unparsed:
            continue
        parsed = _parse_csv(unparsed, files, mark.decode(), names, columns, last)
        unparsed = unparsed[parsed.num_bytes :]
        if len(unparsed) > MAX_ROW_BYTES:
            raise UserError(
                f"{uri}: row {first_row:,} is longer than {MAX_ROW_BYTES >> 20} MiB"
            )
        if parsed.table is None:
            rows = pl.DataFrame(schema=dict.fromkeys(columns, pl.String))
        else:
            rows = pl.DataFrame(parsed.table)
        rows = _unescape(rows, files, mark.decode(), delimiter.decode())
        row_numbers = first_row + parsed.numbers
        rows = rows.with_columns(pl.Series(ROW, row_numbers, pl.Int64))
        broken_lines = [
            (
                first_row + number,
                reason,
                line.replace(mark.decode(), delimiter.decode()),
            )
            for number, reason, line in parsed.broken
        ]
        yield ParsedRows(rows, broken_lines, missing)
        first_row += len(row_numbers) + len(broken_lines)


def _skip_lines(text: bytes, count: int) -> tuple[bytes, int]:
    """Remove up to `count` complete lines from the start of a text."""
    while count and (line_end := text.find(b"\n") + 1):
        text = text[line_end:]
        count -= 1
    return text, count


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


@dataclass(frozen=True)
class ParsedText:
    """Rows parsed from a text of a CSV file."""

    table: pa.Table | None
    """Valid rows, or None without valid rows."""
    numbers: np.ndarray
    """(rows,) indices of the valid rows among all rows of the text."""
    broken: Broken
    """Broken lines, with their indices among all rows of the text."""
    num_bytes: int
    """Number of parsed bytes."""


def _parse_csv(
    text: bytes,
    files: Files,
    delimiter: str,
    names: list[str],
    columns: list[str],
    last: bool,
) -> ParsedText:
    """Parse a text that begins with a row."""
    text = _mark_escapes(text, files)
    end = len(text) if last else text.rfind(b"\n") + 1
    if _is_regular(text[:end], files, delimiter):
        table, numbers, broken = _parse_with_arrow(
            text[:end], files, delimiter, names, columns
        )
        return ParsedText(table, numbers, broken, end)
    return _parse_line_by_line(text, files, delimiter, names, columns, last)


def _is_regular(text: bytes, files: Files, delimiter: str) -> bool:
    """Return whether all quotes enclose whole values of one line, or are doubled."""
    if not files.quote or files.quote.encode() not in text:
        return True
    quote_code, line_feed, carriage_return = ord(files.quote), 10, 13
    codes = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(codes == quote_code)
    if len(quotes) % 2:
        return False
    opening, closing_quotes = quotes[::2], quotes[1::2]
    # bytes next to the quotes, except where the text begins or ends
    before = codes[opening[opening > 0] - 1]
    after = codes[closing_quotes[closing_quotes < len(codes) - 1] + 1]
    separators = [ord(delimiter), line_feed, quote_code]
    if not np.isin(before, separators).all():
        return False
    if not np.isin(after, [*separators, carriage_return]).all():
        return False
    # index of the line of each quote
    line_ends = np.flatnonzero(codes == line_feed)
    opening_line = np.searchsorted(line_ends, opening)
    closing_line = np.searchsorted(line_ends, closing_quotes)
    return bool((opening_line == closing_line).all())


def _parse_with_arrow(
    text: bytes, files: Files, delimiter: str, names: list[str], columns: list[str]
) -> tuple[pa.Table | None, np.ndarray, Broken]:
    """Parse rows of one line each with Arrow; arguments as in `_parse_csv`."""
    if not text.strip(b"\r\n"):
        return None, np.zeros(0, np.int64), []
    broken: Broken = []
    decode_error = None
    try:
        text.decode()
    except UnicodeDecodeError as error:  # Arrow cannot pass such a row to `skip`
        decode_error = error

    def skip(row: Any) -> str:
        reason = f"row: {row.actual_columns} columns, not {row.expected_columns}"
        line = _restore_quotes(row.text or "", files)
        broken.append((row.number - 1, reason, line[:MAX_QUOTED_CHARS]))
        return "skip"

    try:
        table = pa.csv.read_csv(
            pa.BufferReader(text),
            # Rows are numbered only with one thread. Ray's tasks read files in
            # parallel.
            pa.csv.ReadOptions(
                use_threads=False, block_size=len(text) + 1, column_names=names
            ),
            pa.csv.ParseOptions(
                delimiter=delimiter,
                quote_char=files.quote or False,
                invalid_row_handler=None if decode_error else skip,
            ),
            pa.csv.ConvertOptions(
                include_columns=columns,
                column_types=dict.fromkeys(columns, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid:
        if decode_error:
            raise decode_error from None
        raise
    return table, _row_numbers(table.num_rows, broken), broken


def _restore_quotes(line: str, files: Files) -> str:
    """Replace each QUOTE_MARK by the escaped quote of the file."""
    return line.replace(QUOTE_MARK.decode(), f"{files.escape}{files.quote}")


def _row_numbers(num_rows: int, broken: Broken) -> np.ndarray:
    """Return the (rows,) indices of valid rows among all rows of a text."""
    is_row = np.ones(num_rows + len(broken), bool)
    is_row[[number for number, *_ in broken]] = False
    return np.flatnonzero(is_row)


class _RecordReader:
    """Reads records from lines of CSV with Python's strict reader.

    A line is broken if a value that begins in it is not closed correctly, or spans
    lines that look like rows. Reading then continues with the next line, so a stray
    quote only affects its own line.
    """

    def __init__(
        self, lines: list[str], files: Files, delimiter: str, width: int
    ) -> None:
        """Begin with the first line."""
        self.lines, self.files = lines, files
        self.delimiter, self.width = delimiter, width
        self.position = 0
        """Index of the next line to read."""
        self.reader: Any = None
        self.reader_start = 0
        """Index of the first line of `reader`."""
        self.last_spanned_line = -1
        """Last line of the latest value that spanned lines which look like rows."""

    def read(self) -> tuple[list[str], str]:
        """Read the record that begins at `position`, and advance `position`."""
        if self.reader is None:
            self.reader_start = self.position
            remaining = range(self.position, len(self.lines))
            self.reader = csv.reader(
                map(self.lines.__getitem__, remaining),
                delimiter=self.delimiter,
                **_quote_options(self.files),
            )
        start = self.position
        cells = next(self.reader)
        end = self.reader_start + self.reader.line_num
        has_width = len(cells) == self.width
        spanned = self.lines[start:end]
        if len(spanned) > 1 and (
            not has_width or _look_like_rows(spanned, self.delimiter, self.width)
        ):
            self.last_spanned_line = end - 1
            self.skip_line()
            return [], UNCLOSED_QUOTES
        self.position = end
        if cells and not has_width:
            return cells, f"{len(cells)} columns, not {self.width}"
        has_stray_quote = self.lines[start].count(self.files.quote) % 2
        if start == self.last_spanned_line and has_stray_quote:
            return cells, "a quote closes what none has opened"
        return cells, ""

    def skip_line(self) -> None:
        """Skip a broken line, and start a new reader at the next line."""
        self.position += 1
        self.reader = None


def _parse_line_by_line(
    text: bytes,
    files: Files,
    delimiter: str,
    names: list[str],
    columns: list[str],
    last: bool,
) -> ParsedText:
    """Parse a text with `_RecordReader`; arguments as in `_parse_csv`."""
    complete = text if last else text[: text.rfind(b"\n") + 1]
    lines = re.findall(r"[^\n]*\n|[^\n]+", complete.decode())
    reader = _RecordReader(lines, files, delimiter, len(names))
    rows: list[list[str]] = []
    broken: Broken = []
    while reader.position < len(lines):
        start = reader.position
        try:
            cells, reason = reader.read()
        except csv.Error as error:
            is_incomplete = "end of data" in str(error) and not last
            if is_incomplete and len(text) < MAX_ROW_BYTES // 2:
                break  # the record ends in the next block
            reader.skip_line()
            cells, reason = [], UNCLOSED_QUOTES
        if reason:
            record = "".join(lines[start : reader.position]).rstrip("\r\n")
            record = _restore_quotes(record, files)
            number = len(rows) + len(broken)
            broken.append((number, f"row: {reason}", record[:MAX_QUOTED_CHARS]))
        elif cells:
            rows.append(cells)
    num_bytes = sum(len(line.encode()) for line in lines[: reader.position])
    numbers = _row_numbers(len(rows), broken)
    if not rows:
        return ParsedText(None, numbers, broken, num_bytes)
    arrays = []
    for name in columns:
        index = names.index(name)
        arrays.append(pa.array([row[index] or None for row in rows], pa.string()))
    table = pa.table(arrays, names=columns)
    return ParsedText(table, numbers, broken, num_bytes)


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


def _read_lines(
    uri: str, files: Files, expressions: list[str], digest: Any, piece: FilePart | None
) -> Iterator[ParsedRows]:
    """Yield the rows of JSON lines or plain lines; arguments as in `read_frames`."""
    kind = files.detect_format(uri)
    if kind == "jsonl" and piece is None and _is_array(_read_head(uri, files)):
        yield from _read_json_value(uri, files, expressions, digest, piece)
        return
    parse = _parse_json_lines if kind == "jsonl" else _parse_text_lines
    partial_line = b""
    num_rows = 0
    for block in _read_blocks(uri, files, digest, piece):
        end = block.rfind(b"\n") + 1
        if end:
            text = partial_line + block[:end]
            frame, frame_rows = parse(text, uri, expressions, num_rows)
            partial_line = block[end:]
            num_rows += frame_rows
            yield frame
            continue
        partial_line += block
        if len(partial_line) > MAX_ROW_BYTES:
            raise UserError(f"{uri} has a line of more than {MAX_ROW_BYTES >> 20} MiB")
    if partial_line.strip():
        frame, frame_rows = parse(partial_line, uri, expressions, num_rows)
        num_rows += frame_rows
        if kind == "jsonl" and frame.broken and frame.broken[-1][0] == num_rows - 1:
            raise UserError(f"{uri} ends within a JSON object, so it is truncated")
        yield frame
    if not num_rows and piece is None:
        raise UserError(f"{uri} is empty")


def _parse_text_lines(
    text: bytes, uri: str, expressions: list[str], row: int
) -> tuple[ParsedRows, int]:
    """Parse lines of text; blank lines are skipped."""
    all_lines = text.decode().replace("\r\n", "\n").split("\n")
    lines = [line for line in all_lines if line.strip()]
    rows = pl.DataFrame(
        {"line": lines, ROW: np.arange(row, row + len(lines))},
        {"line": pl.String, ROW: pl.Int64},
    )
    _, missing = select_columns(expressions, ["line"])
    return ParsedRows(rows, missing=missing), len(lines)


def _parse_json_lines(
    text: bytes, uri: str, expressions: list[str], row: int
) -> tuple[ParsedRows, int]:
    """Parse whole JSON lines; a column of mixed types becomes text."""
    broken: Broken = []
    if b"\\ud" in text or b"\\uD" in text:
        text = LONE_SURROGATE.sub(rb"\1\\ufffd", text)
    try:
        rows = _read_ndjson(text)
        columns, _ = select_columns(expressions, rows.columns)
        for values in rows.select(columns):
            if _may_hold_objects(values) or _may_lose_digits(values):
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
    rows = rows.select(columns).with_columns(pl.Series(ROW, numbers, pl.Int64))
    broken = [(number + row, reason, line) for number, reason, line in broken]
    return ParsedRows(rows, broken, missing), len(numbers) + len(broken)


def _read_ndjson(text: bytes) -> pl.DataFrame:
    """Parse JSON lines with polars; blank text gives an empty frame."""
    if not text.strip():
        return pl.DataFrame()
    return pl.read_ndjson(text, infer_schema_length=None)


def _may_hold_objects(values: pl.Series) -> bool:
    """Return whether polars may have converted JSON objects or lists to text."""
    values = values.explode() if values.dtype == pl.List(pl.String) else values
    return values.dtype == pl.String and bool(values.str.contains(r"^[\[{]").any())


def _may_lose_digits(values: pl.Series) -> bool:
    """Return whether polars may have rounded large integers to floats."""
    return values.dtype == pl.Float64 and bool((values.abs() >= 2**53).any())


def _json_kind(value: Any) -> str:
    """Return the kind of a JSON value, of which a column may only have one."""
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
            value = json.loads(line, strict=False)
            if not isinstance(value, dict):
                raise ValueError(f"it is a JSON {type(value).__name__}")
            objects[line_index] = value
        except (ValueError, RecursionError) as error:
            reasons[line_index] = f"row: no JSON object ({error})"
    present = {key for row in objects.values() for key in row}
    columns, _ = select_columns(expressions, present)
    for name in columns:
        reasons |= _find_rare_kinds(objects, name)
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


def _find_rare_kinds(objects: dict[int, dict[str, Any]], name: str) -> dict[int, str]:
    """Find rows whose value of a column has another kind than most values."""
    # null and an empty list fit every kind, also a list of objects
    kinds = {
        line_index: _json_kind(row[name])
        for line_index, row in objects.items()
        if row.get(name) is not None and row[name] != []
    }
    if not kinds:
        return {}
    [(common_kind, _)] = Counter(kinds.values()).most_common(1)
    return {
        line_index: f"{name}: {kind}, where most rows have {common_kind}"
        for line_index, kind in kinds.items()
        if kind != common_kind
    }


def _read_json_value(
    uri: str, files: Files, expressions: list[str], digest: Any, piece: FilePart | None
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
            b"".join(_read_blocks(uri, files, digest, None)),
            object_pairs_hook=build_object,
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
        frame, _ = _parse_json_lines(lines.encode(), uri, expressions, first_row)
        yield frame


class _HashingReader:
    """A file that updates a hash with the bytes that are read."""

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
    """Yield the rows of a Parquet file; arguments as in `read_frames`."""
    filesystem, path = open_uri(uri)
    with filesystem.open_input_file(path) as file:
        parquet = pq.ParquetFile(pa.PythonFile(_HashingReader(file, digest), mode="r"))
        check_plain_types(parquet.schema_arrow, uri)
        columns, missing = select_columns(expressions, parquet.schema_arrow.names)
        groups = range(parquet.num_row_groups)
        if piece:
            groups = range(piece.start, piece.end)
        row = 0
        for group in groups:
            batches = parquet.iter_batches(
                _rows_per_frame(parquet.metadata.row_group(group), columns),
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


def _rows_per_frame(group: Any, columns: list[str]) -> int:
    """Return the number of rows that take about BLOCK_BYTES in memory."""
    size = 0
    for i in range(group.num_columns):
        column = group.column(i)
        if column.path_in_schema.split(".")[0] in columns:
            # dictionary-encoded values take less in the file than in memory
            size += max(column.total_uncompressed_size, 8 * column.num_values)
    return max(1, min(MAX_FRAME_ROWS, BLOCK_BYTES * group.num_rows // max(size, 1)))


def _to_text(column: pa.Array) -> Any:
    """Convert a column for polars: bytes and 256-bit decimals become text."""
    kind = column.type
    is_bytes = (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )
    if is_bytes:
        texts = [
            None if value is None else value.decode(errors="replace")
            for value in column.to_pylist()
        ]
        valid = [None if text and "\ufffd" in text else text for text in texts]
        return pl.Series(valid, dtype=pl.String)
    if pa.types.is_decimal256(kind):
        column = column.cast(pa.string())
    return pl.from_arrow(column)
