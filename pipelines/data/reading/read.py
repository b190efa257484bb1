"""Raw files as frames of rows: CSV, JSON lines, Parquet and plain lines.

    digest = hashlib.sha256()
    columns = ["user", "cast(price as double)"]
    for frame in read_frames("s3://bucket/log.csv", Files(delimiter=";"), columns, digest):
        frame.rows, frame.broken

Files may be compressed, and each byte is read once. A large uncompressed file is split
into pieces (`split_file`): text from line start to line start, Parquet by row groups.
Values of CSV are text, with empty ones null; values of JSON and Parquet have the types
of the file. Lines that are no rows are in `ParsedRows.broken`, so all lines of a file
are accounted for: header, blank lines, rows and broken lines.
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

from models.config import did_you_mean
from models.storage.tables import JOB_FILES, UserError, open_uri

ROW = "__row"
"""Column with the number of the row in its piece, from 0, counting broken rows too."""

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
"""Bytes of text per frame."""
MAX_ROW_BYTES = 64 << 20
PARQUET_ROWS = 1 << 17
"""Most rows of a frame of Parquet."""
MAX_QUOTED_CHARS = 2000
"""Characters of a broken line in its reject."""
QUOTE_MARK = b"\x0e\x0f"
"""Replaces an escaped quote during parsing, as no parser supports both kinds of
quotes."""
DELIMITER_MARK = b"\x1f"
"""Replaces a delimiter of several characters: the ASCII unit separator."""
LONE_SURROGATE = re.compile(
    rb"(?<!\\)((?:\\\\)*)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
)
"""An escaped lone high surrogate in JSON, half of a character."""
csv.field_size_limit(MAX_ROW_BYTES)

# lines that are no rows: number in the piece, reason, text
Broken = list[tuple[int, str, str]]


@dataclass(frozen=True, kw_only=True)
class Files:
    """Format of the files of a section."""

    format: str | None = None
    """csv, jsonl, parquet; `lines`, where each line is a row with the column `line`;
    `keyed`, a JSON object by id, with the columns `key` and `value`. By default by the
    suffix."""
    delimiter: str | None = None
    """CSV: separator of columns, such as `;` or `::`; by default a tab for `.tsv`,
    otherwise a comma."""
    header: list[str] | None = None
    """CSV without a header line: names of the columns."""
    quote: str = '"'
    """CSV: quote character around values; empty if quotes are plain characters."""
    escape: str = ""
    """CSV: character before a quote within a value, such as a backslash; by default
    quotes are doubled."""
    encoding: str = "utf-8"
    """A Python codec for text files, such as cp1252."""

    def check_files(self) -> None:
        """Raise a ValueError for settings that no file can have."""
        if self.format is not None and self.format not in FORMATS:
            raise ValueError(
                f"'format' is '{self.format}'; it must be one of {', '.join(FORMATS)}"
            )
        for key in ("quote", "escape"):
            if len(getattr(self, key).encode()) > 1:
                raise ValueError(
                    f"'{key}' is {getattr(self, key)!r}; it is one ASCII character, or "
                    f"''"
                )
        delimiter = self.delimiter
        if delimiter is not None and not (
            delimiter.isascii() and 1 <= len(delimiter) <= 8 and "\n" not in delimiter
        ):
            raise ValueError(
                f"'delimiter' is {delimiter!r}; it is one to eight ASCII characters, "
                f"such as ';'"
            )
        try:
            "".encode(self.encoding)
        except LookupError as error:
            raise ValueError(
                f"'encoding' is '{self.encoding}', which is no text encoding of "
                f"Python's, such as cp1252"
            ) from error

    @property
    def needs_decoding(self) -> bool:
        """Whether the encoding is not a subset of UTF-8."""
        return codecs.lookup(self.encoding).name not in ("utf-8", "utf-8-sig", "ascii")

    def detect_format(self, file: str) -> str:
        """Return the format of a file, as set or by its suffix without compression.

        Raises:
            UserError: If the format is unknown or the compression is not supported.
        """
        suffixes = [s[1:].lower() for s in PurePosixPath(file).suffixes]
        if suffixes and suffixes[-1] in ("xz", "zip", "7z", "rar"):
            raise UserError(
                f"{file} is compressed as {suffixes[-1]}, which is not read; use gzip, "
                f"bz2 or zstd"
            )
        suffixes = [s for s in suffixes if s not in COMPRESSED_SUFFIXES]
        if self.format is None and (not suffixes or suffixes[-1] not in SUFFIXES):
            raise UserError(
                f"the format of {file} cannot be told from its name; set 'format' to "
                f"{', '.join(FORMATS)}"
            )
        return self.format or SUFFIXES[suffixes[-1]]

    def detect_delimiter(self, file: str) -> str:
        """Return the delimiter of a CSV file, as set or by its suffix."""
        suffixes = [suffix.lower() for suffix in PurePosixPath(file).suffixes]
        return self.delimiter or ("\t" if ".tsv" in suffixes else ",")


@dataclass(frozen=True)
class FilePart:
    """A part of an uncompressed file; a row that begins at its end is not in it."""

    start: int
    """First byte; of Parquet the first row group."""
    end: int


@dataclass(frozen=True)
class ParsedRows:
    """Rows of a raw file."""

    rows: pl.DataFrame
    """The required columns and ROW."""
    broken: Broken = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Columns that do not exist, each with a hint at the nearest one."""

    @property
    def with_missing(self) -> pl.DataFrame:
        """The rows, with nulls for missing columns."""
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
    """List the files of a folder that match a pattern, sorted.

    Hidden files are skipped, and in subfolders also parts and manifests of this
    project's tables.

    Args:
        input_uri: Folder.
        pattern: Pattern with shell wildcards for paths relative to the folder.
        required: Whether to raise an error if no file matches.
        what: Kind of file, for the message.
        beside: Patterns of files to leave out.

    Raises:
        UserError: If the folder cannot be read, or no file matches a required pattern.
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
            f"{input_uri} holds no {what} like '{pattern}'; check --input and the "
            f"source's file pattern"
        )
    return files


def split_file(uri: str, files: Files, size: int) -> list[FilePart | None]:
    """Return the pieces of about `size` bytes that a file is read in.

    Returns:
        [None] for a file that is read as a whole: a small, compressed or decoded file,
        or a JSON array.
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
    """Yield parts of a Parquet file with about `size` bytes of row groups."""
    sizes = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(i) for i in range(group.num_columns)]
        sizes.append(sum(column.total_compressed_size for column in columns))
    part = np.cumsum([0, *sizes])[:-1] // size  # of each row group
    edges = np.unique(part, return_index=True)[1].tolist()
    for start, end in pairwise([*edges, len(sizes)]):
        yield FilePart(start, end)


def _detect_compression(head: bytes) -> str | None:
    """Return the compression of a file by its first bytes, or None."""
    return next(
        (name for magic, name in COMPRESSION_MAGIC.items() if head.startswith(magic)),
        None,
    )


def _is_array(head: bytes) -> bool:
    """Return whether a text begins with a JSON array."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _open(uri: str) -> Any:
    """Open a file's decompressed bytes; its name does not matter."""
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

    Raises:
        UserError: If the file is empty, damaged or of another format.
    """
    kind, expressions = files.detect_format(uri), list(dict.fromkeys(expressions))
    readers = {"csv": _read_csv, "parquet": _read_parquet, "keyed": _read_whole}
    reader = readers.get(kind, _read_lines)
    try:
        yield from reader(uri, files, expressions, digest, piece)
    except UnicodeError as error:
        raise _encoding_error(uri, files.encoding) from error
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if "invalid UTF8" in reason:
            raise _encoding_error(uri, files.encoding) from error
        raise UserError(
            f"{uri} cannot be read as {kind} ({reason[:300]}); it may be truncated, "
            f"damaged or of another format: copy it again or set 'format'"
        ) from error


def _encoding_error(uri: str, encoding: str) -> UserError:
    """Return the error for a file in another encoding, with the line if it is near."""
    with _open(uri) as stream:
        head, where = stream.read(BLOCK_BYTES), ""
    try:
        head.decode(encoding)
    except UnicodeDecodeError as error:
        where = f" in line {head.count(10, 0, error.start) + 1:,}"
    return UserError(
        f"{uri} is not {encoding}{where}; set 'encoding' beside its 'files' in the "
        f"source file, such as utf-16, cp1252 or gb18030, or convert it to UTF-8"
    )


def select_columns(
    expressions: Iterable[str], present: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the columns that expressions read, and the missing ones with hints.

    An expression that is the name of a column is this column; any other is SQL.

    Args:
        expressions: Columns or SQL expressions.
        present: Columns of the file.

    Returns:
        Existing columns, and hints by missing column.
    """
    columns = dict.fromkeys(
        name for text in expressions for name in root_columns(text, present)
    )
    missing = {
        name: hint_at_column(name, present) for name in columns if name not in present
    }
    return [name for name in columns if name in present], missing


def root_columns(text: str, present: Collection[str]) -> list[str]:
    """Return the columns that an expression reads."""
    if text in present:
        return [text]
    try:
        return pl.sql_expr(text).meta.root_names()
    except pl.exceptions.PolarsError:
        return [text]  # a name that is a word of SQL


def hint_at_column(column: str, present: Collection[str]) -> str:
    """Return half a sentence that names the nearest column and all columns."""
    named = f" of {', '.join(list(present)[:40])}" if present else ""
    return did_you_mean(column, sorted(present), "it has none") + named


def _read_blocks(
    uri: str, files: Files, digest: Any, piece: FilePart | None, size: int | None = None
) -> Generator[bytes, None, None]:
    """Yield the text as UTF-8 in blocks of about `size` bytes, cut anywhere.

    Args:
        uri: File.
        files: Format of the file.
        digest: Hash that is updated with the raw bytes, or None.
        piece: Part of the file; None for the whole file.
        size: Bytes per block; by default BLOCK_BYTES.
    """
    size = size or BLOCK_BYTES
    decode = (
        codecs.getincrementaldecoder(files.encoding)() if files.needs_decoding else None
    )
    remaining, is_first = 1 << 62, True
    with ExitStack() as stack:
        if piece is None:
            stream = stack.enter_context(_open(uri))
        else:
            filesystem, path = open_uri(uri)
            stream = stack.enter_context(filesystem.open_input_file(path))
            start, end = (
                _find_row_start(stream, uri, files, byte)
                for byte in (piece.start, piece.end)
            )
            stream.seek(start)
            remaining, is_first = end - start, start == 0
        while remaining and (block := stream.read(min(size, remaining))):
            if digest is not None:
                digest.update(block)
            remaining -= len(block)
            text = decode.decode(block).encode() if decode else block
            yield text.removeprefix(codecs.BOM_UTF8) if is_first else text
            is_first = False
        if decode and (rest := decode.decode(b"", True)):
            yield rest.encode()


def _read_head(uri: str, files: Files) -> bytes:
    """Return the beginning of the text.

    Raises:
        UserError: If the file is empty.
    """
    with closing(_read_blocks(uri, files, None, None, 1 << 18)) as blocks:
        head = next((block for block in blocks if block.strip()), b"")
    if not head:
        raise UserError(
            f"{uri} is empty; copy it again or take it out of the input folder"
        )
    return head


def _find_row_start(stream: Any, uri: str, files: Files, byte: int) -> int:
    """Return the first byte from `byte` on at which a row begins.

    In CSV, a line within quotes may look like a row. There it is the first line from
    which the next 20 rows have as many columns as the header.
    """
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
    has_quotes = files.quote and files.quote.encode() in text[line_start:]
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
                skipped = sum(map(len, lines[:first]))
                return min(start + skipped, stream.size())
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
    mark, quote = files.escape.encode(), files.quote.encode()
    pairs = re.compile(
        b"%b(%b|%b)" % (re.escape(mark), re.escape(mark), re.escape(quote))
    )
    return pairs.sub(lambda pair: QUOTE_MARK if pair[1] == quote else pair[0], text)


def _unescape(
    rows: pl.DataFrame, files: Files, mark: str, delimiter: str
) -> pl.DataFrame:
    r"""Restore marked and escaped characters in values.

    `\\` becomes `\`, and `\N` null, as MySQL writes them.
    """
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
    delimiter = files.detect_delimiter(uri).encode()
    mark = delimiter if len(delimiter) == 1 else DELIMITER_MARK
    names, header_lines = _read_header(uri, files, delimiter, mark)
    columns, missing = select_columns(expressions, names)
    if missing and len(names) == 1:
        _check_delimiter(uri, names[0], delimiter.decode(), min(missing))
    skip = header_lines if piece is None or piece.start == 0 else 0
    rest, row, last = b"", 0, False
    blocks = _read_blocks(uri, files, digest, piece)
    while not last:
        block = next(blocks, None)
        last = block is None
        rest = (rest + (block or b"")).replace(delimiter, mark)
        while skip and (line_end := rest.find(b"\n") + 1):
            rest, skip = rest[line_end:], skip - 1
        if skip or not rest:
            continue
        table, numbers, broken, used = _parse_csv(
            rest, files, mark.decode(), names, columns, last
        )
        rest = rest[used:]
        if len(rest) > MAX_ROW_BYTES:
            raise UserError(
                f"{uri}: row {row:,} is longer than {MAX_ROW_BYTES >> 20} MiB; set "
                f"quote: '' where quotes are plain characters"
            )
        if table is None:
            rows = pl.DataFrame(schema=dict.fromkeys(columns, pl.String))
        else:
            rows = pl.DataFrame(table)
        rows = _unescape(rows, files, mark.decode(), delimiter.decode())
        rows = rows.with_columns(pl.Series(ROW, numbers + row, pl.Int64))
        broken = [
            (number + row, why, text.replace(mark.decode(), delimiter.decode()))
            for number, why, text in broken
        ]
        yield ParsedRows(rows, broken, missing)
        row += len(numbers) + len(broken)


def _read_header(
    uri: str, files: Files, delimiter: bytes, mark: bytes
) -> tuple[list[str], int]:
    """Read the header of a CSV file.

    Args:
        uri: File.
        files: Format of the file.
        delimiter: Delimiter in the file.
        mark: Single character that replaces the delimiter.

    Returns:
        Names of all columns, and the number of header lines. Later columns with the
        name of an earlier one get a number, as in pandas.
    """
    head = _read_head(uri, files)
    if head[:400].count(0) * 4 > len(head[:400]):
        raise _encoding_error(uri, files.encoding)
    if b"\r" in head and b"\n" not in head:
        raise UserError(
            f"{uri} ends its lines with carriage returns alone; convert it to line "
            f"feeds (tr '\\r' '\\n')"
        )
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
        raise UserError(
            f"{uri}: its header cannot be read ({error}); name the columns in 'header'"
        ) from error
    repetitions: Counter[str] = Counter()
    unique = []
    for name in names:
        number = repetitions[name]
        repetitions[name] += 1
        numbered = f"{name}.{number}" if number else name
        unique.append(numbered.replace(QUOTE_MARK.decode(), files.quote))
    return unique, reader.line_num


def _check_delimiter(uri: str, header: str, delimiter: str, wanted: str) -> None:
    """Raise a UserError if another delimiter would split a header of one column."""
    for other in ("\t", ";", "::", "|", ",", " "):
        if other in header:
            raise UserError(
                f"{uri} has no column '{wanted}': by the delimiter "
                f"{json.dumps(delimiter)} its header is one column, '{header[:80]}'; "
                f"set 'delimiter: {json.dumps(other)}' in the source file"
            )


def _parse_csv(
    text: bytes,
    files: Files,
    delimiter: str,
    names: list[str],
    columns: list[str],
    last: bool,
) -> tuple[pa.Table | None, np.ndarray, Broken, int]:
    """Parse a text that begins with a row.

    Arrow parses it if all quotes enclose whole values of one line; otherwise Python's
    strict reader does, line by line.

    Args:
        text: Text, with marked delimiters.
        files: Format of the file.
        delimiter: Single character that separates columns.
        names: Names of all columns.
        columns: Columns to return.
        last: Whether the text ends with the file.

    Returns:
        Table of the rows, their numbers, broken lines, and number of parsed bytes.
    """
    text = _mark_escapes(text, files)
    used = len(text) if last else text.rfind(b"\n") + 1
    if _is_regular(text[:used], files, delimiter):
        return *_parse_with_arrow(text[:used], files, delimiter, names, columns), used
    return _parse_line_by_line(text, files, delimiter, names, columns, last)


def _is_regular(text: bytes, files: Files, delimiter: str) -> bool:
    """Return whether quotes only enclose whole values of one line, or are doubled."""
    if not files.quote or files.quote.encode() not in text:
        return True
    codes, quote_code = np.frombuffer(text, np.uint8), ord(files.quote)
    quotes, breaks = np.flatnonzero(codes == quote_code), np.flatnonzero(codes == 10)
    if len(quotes) % 2:
        return False
    opens, closes = quotes[::2], quotes[1::2]
    before = codes[opens - 1][opens > 0]  # the first byte begins a row
    after = codes[np.minimum(closes + 1, len(codes) - 1)][closes < len(codes) - 1]
    separators = [ord(delimiter), 10, quote_code]
    is_one_line = np.searchsorted(breaks, opens) == np.searchsorted(breaks, closes)
    return bool(
        np.isin(before, separators).all()
        and np.isin(after, [*separators, 13]).all()
        and is_one_line.all()
    )


def _parse_with_arrow(
    text: bytes, files: Files, delimiter: str, names: list[str], columns: list[str]
) -> tuple[pa.Table | None, np.ndarray, Broken]:
    """Parse rows of one line each with Arrow."""
    if not text.strip(b"\r\n"):
        return None, np.zeros(0, np.int64), []
    broken: Broken = []
    decode_error = None
    try:
        text.decode()
    except UnicodeDecodeError as error:  # Arrow cannot hand such a row to `skip`
        decode_error = error

    def skip(row: Any) -> str:
        why = f"row: {row.actual_columns} columns, not {row.expected_columns}"
        text_shown = (row.text or "").replace(
            QUOTE_MARK.decode(), f"{files.escape}{files.quote}"
        )
        broken.append((row.number - 1, why, text_shown[:MAX_QUOTED_CHARS]))
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


def _row_numbers(rows: int, broken: Broken) -> np.ndarray:
    """Return the numbers (rows,) of the rows between the broken ones."""
    is_row = np.ones(rows + len(broken), bool)
    is_row[[number for number, *_ in broken]] = False
    return np.flatnonzero(is_row)


def _parse_line_by_line(
    text: bytes,
    files: Files,
    delimiter: str,
    names: list[str],
    columns: list[str],
    last: bool,
) -> tuple[pa.Table | None, np.ndarray, Broken, int]:
    """Parse a text with Python's CSV reader; arguments and results as in `_parse_csv`.

    A line is broken if a value that begins in it is not closed correctly, or swallows
    lines that look like rows. Parsing then continues with the next line, so a stray
    quote only costs its own line.
    """
    whole = text if last else text[: text.rfind(b"\n") + 1]
    lines, quotes = (
        re.findall(r"[^\n]*\n|[^\n]+", whole.decode()),
        _quote_options(files),
    )
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
                or _look_like_rows(lines[at:end], delimiter, len(names))
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
                and len(text) < MAX_ROW_BYTES // 2
            ):
                break  # its end is in the next block
            end, why, reader = at + 1, "its quotes are not closed", None
        if why:
            shown = (
                "".join(lines[at:end])
                .rstrip("\r\n")
                .replace(QUOTE_MARK.decode(), f"{files.escape}{files.quote}")
            )
            if f"\\{files.quote}" in shown and not files.escape:
                why += "; set escape: '\\'"
            elif "quote" in why:
                why += "; set quote: '' where quotes are plain"
            broken.append(
                (len(rows) + len(broken), f"row: {why}", shown[:MAX_QUOTED_CHARS])
            )
        elif cells:
            rows.append(cells)
        at = end
    used = sum(len(line.encode()) for line in lines[:at])
    values = [[row[names.index(name)] or None for row in rows] for name in columns]
    table = pa.table([pa.array(each, pa.string()) for each in values], names=columns)
    return table if rows else None, _row_numbers(len(rows), broken), broken, used


def _look_like_rows(lines: list[str], delimiter: str, width: int) -> bool:
    """Return whether the lines of a value look like rows.

    They do if they have the number of columns, and numbers in the columns of the first.
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
    """Read JSON lines, or lines of text."""
    kind = files.detect_format(uri)
    if kind == "jsonl" and piece is None and _is_array(_read_head(uri, files)):
        yield from _read_whole(uri, files, expressions, digest, piece)
        return
    parse = _parse_json_lines if kind == "jsonl" else _parse_text_lines
    rest, row = b"", 0
    for block in _read_blocks(uri, files, digest, piece):
        end = block.rfind(b"\n") + 1
        if end:
            frame, rows = parse(rest + block[:end], uri, expressions, row)
            rest, row = block[end:], row + rows
            yield frame
            continue
        rest += block
        if len(rest) > MAX_ROW_BYTES:
            raise UserError(
                f"{uri} has a line of more than {MAX_ROW_BYTES >> 20} MiB; write one "
                f"row per line"
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


def _parse_text_lines(
    text: bytes, uri: str, expressions: list[str], row: int
) -> tuple[ParsedRows, int]:
    """Parse lines of text; blank lines are skipped."""
    lines = [
        line for line in text.decode().replace("\r\n", "\n").split("\n") if line.strip()
    ]
    rows = pl.DataFrame(
        {"line": lines, ROW: np.arange(row, row + len(lines))},
        {"line": pl.String, ROW: pl.Int64},
    )
    return ParsedRows(rows, missing=select_columns(expressions, ["line"])[1]), len(
        lines
    )


def _parse_json_lines(
    text: bytes, uri: str, expressions: list[str], row: int
) -> tuple[ParsedRows, int]:
    """Parse whole JSON lines; a column of mixed types becomes text.

    Returns:
        The rows, and the number of lines, broken ones included.
    """
    broken: Broken = []
    if b"\\ud" in text or b"\\uD" in text:
        text = LONE_SURROGATE.sub(rb"\1\\ufffd", text)
    try:
        rows = (
            pl.read_ndjson(text, infer_schema_length=None)
            if text.strip()
            else pl.DataFrame()
        )
        read = rows.select(select_columns(expressions, rows.columns)[0])
        if any(map(_may_hold_objects, read)) or any(map(_may_lose_digits, read)):
            raise pl.exceptions.ComputeError(
                "text and objects, or large integers and floats, in one column"
            )
    except pl.exceptions.PolarsError:
        good, broken = _parse_objects(
            [line for line in text.split(b"\n") if line.strip()], expressions
        )
        if not good and not row:
            raise UserError(
                f"{uri} is not JSON lines ({broken[0][1]}); write one JSON object per "
                f"line, or set 'format'"
            ) from None
        rows = (
            pl.read_ndjson("\n".join(good).encode(), infer_schema_length=None)
            if good
            else pl.DataFrame()
        )
    columns, missing = select_columns(expressions, rows.columns)
    numbers = _row_numbers(len(rows), broken) + row
    rows = rows.select(columns).with_columns(pl.Series(ROW, numbers, pl.Int64))
    broken = [(number + row, why, shown) for number, why, shown in broken]
    return ParsedRows(rows, broken, missing), len(numbers) + len(broken)


def _may_hold_objects(values: pl.Series) -> bool:
    """Return whether text, or a list of it, may be JSON that polars made of objects."""
    values = values.explode() if values.dtype == pl.List(pl.String) else values
    return values.dtype == pl.String and bool(values.str.contains(r"^[\[{]").any())


def _may_lose_digits(values: pl.Series) -> bool:
    """Return whether integers may have lost digits by being read as floats."""
    return values.dtype == pl.Float64 and bool((values.abs() >= 2**53).any())


def _json_kind(value: Any) -> str:
    """Describe the kind of a JSON value. A column has values of one kind."""
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
    """Parse JSON lines one by one.

    Returns:
        JSON of the required columns of each valid line, and the broken lines: those
        that are no JSON object, and those with another kind of value than most lines
        have.
    """
    objects: dict[int, dict[str, Any]] = {}
    why: dict[int, str] = {}
    for number, line in enumerate(lines):
        try:
            value = json.loads(line, strict=False)
            if not isinstance(value, dict):
                raise ValueError(f"it is a JSON {type(value).__name__}")
            objects[number] = value
        except (ValueError, RecursionError) as error:
            why[number] = f"row: no JSON object ({error})"
    present = {key for row in objects.values() for key in row}
    columns = select_columns(expressions, present)[0]
    for name in columns:
        why |= _find_rare_kinds(objects, name)
        types = {type(row.get(name)) for row in objects.values()}
        if len(types - {type(None), list, dict}) > 1:  # mixed values become text
            for row in objects.values():
                if isinstance(row.get(name), bool | int | float):
                    row[name] = json.dumps(row[name])
    valid = [
        json.dumps({name: row.get(name) for name in columns})
        for number, row in objects.items()
        if number not in why
    ]
    broken = []
    for number in sorted(why):
        text = lines[number].decode(errors="replace")[:MAX_QUOTED_CHARS]
        broken.append((number, why[number], text))
    return valid, broken


def _find_rare_kinds(objects: dict[int, dict[str, Any]], name: str) -> dict[int, str]:
    """Return reasons for the rows whose value has another kind than most values."""
    kinds = {
        number: _json_kind(row[name])
        for number, row in objects.items()
        if row.get(name) is not None and row[name] != []
    }
    if not kinds:
        return {}
    most, _ = Counter(kinds.values()).most_common(1)[0]
    return {
        number: f"{name}: {kind}, where most rows have {most}"
        for number, kind in kinds.items()
        if kind != most
    }


def _read_whole(
    uri: str, files: Files, expressions: list[str], digest: Any, piece: FilePart | None
) -> Iterator[ParsedRows]:
    """Read a file that is one JSON value: an array of objects, or an object by id."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(made := dict(pairs)) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise UserError(f"{uri}: the key '{twice}' comes twice; merge its entries")
        return made

    try:
        content = json.loads(
            b"".join(_read_blocks(uri, files, digest, None)),
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
            f"{uri} holds a JSON {type(content).__name__}, not {{id: ...}}; set "
            f"another 'format'"
        )
    if not content:
        raise UserError(
            f"{uri} is empty; copy it again or take it out of the input folder"
        )
    for row in range(0, len(content), PARQUET_ROWS):
        lines = "\n".join(
            json.dumps(each) for each in content[row : row + PARQUET_ROWS]
        )
        yield _parse_json_lines(lines.encode(), uri, expressions, row)[0]


class _HashingReader:
    """A file whose bytes are hashed while they are read."""

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
        parquet = pq.ParquetFile(pa.PythonFile(_HashingReader(file, digest), mode="r"))
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
    """Return the rows per frame of a row group of about BLOCK_BYTES in memory."""
    size = 0
    for i in range(group.num_columns):
        column = group.column(i)
        if column.path_in_schema.split(".")[0] in columns:
            # dictionary-encoded values take less in the file than in memory
            size += max(column.total_uncompressed_size, 8 * column.num_values)
    return max(1, min(PARQUET_ROWS, BLOCK_BYTES * group.num_rows // max(size, 1)))


def _to_text(column: pa.Array) -> Any:
    """Convert bytes to text (null if they are none), and decimals polars lacks."""
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
