"""Pieces of large plain files, so that several tasks read one: Parquet at row groups, text at line starts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from models.tables import open_uri
from pipelines.data.sources.encodings import open_text

BLOCK = 8 << 20  # bytes that are looked at together
BLANK = np.frombuffer(b"\r \t", np.uint8)


@dataclass(frozen=True)
class Piece:
    """A part of a plain file that is read by itself."""

    start: int
    """First byte, the first of a line; of Parquet the first row group."""
    end: int
    """The byte after the last, or the row group."""
    first_row: int
    """Number of its first row in the file."""


def cuts(uri: str, kind: str, size: int) -> list[tuple[int, int]]:
    """Where a file of the format `kind` can be cut into pieces of about `size` bytes, each for `piece_at`; none for a
    smaller file, which is read as a whole."""
    filesystem, path = open_uri(uri)
    length = filesystem.get_file_info(path).size
    if length <= size:
        return []
    if kind == "parquet":
        with filesystem.open_input_file(path) as stream:
            metadata = pq.read_metadata(stream)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        sizes = [sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups]
        edges = np.unique(np.cumsum([0, *sizes]) // size, return_index=True)[1].tolist()
        return list(pairwise([*edges[: -1 if edges[-1] == len(groups) else None], len(groups)]))
    return list(pairwise([*range(0, length, size), length]))


def piece_at(uri: str, kind: str, header: bool, cut: tuple[int, int]) -> tuple[Piece, int, bool]:
    """The piece of whole lines that begin between two bytes (its first row yet unknown), its rows, and whether it holds
    a quote. header: whether the file begins with a line of names."""
    filesystem, path = open_uri(uri)
    if kind == "parquet":
        with filesystem.open_input_file(path) as stream:
            metadata = pq.read_metadata(stream)
        return Piece(*cut, 0), sum(metadata.row_group(number).num_rows for number in range(*cut)), False
    with filesystem.open_input_file(path) as stream:
        start, end = (_line_start(stream, byte) for byte in cut)
        stream.seek(start)
        at, last, rows, quoted = start, start - 1, 0, False  # last: place of the line break before
        while at < end and (block := stream.read(min(BLOCK, end - at))):
            quoted = quoted or b'"' in block
            text = np.frombuffer(block, np.uint8)
            breaks = np.flatnonzero(text == ord("\n"))
            length = np.diff(breaks + at, prepend=last) - 1
            # Rows may be numbered with gaps, never twice: a line of several blanks counts.
            empty = (length == 0) | ((length == 1) & np.isin(text[breaks - 1], BLANK))
            rows += len(breaks) - int(empty.sum())
            last = int(breaks[-1]) + at if len(breaks) else last
            at += len(block)
        return Piece(start, end, 0), rows + (last < end - 1) - (header and start == 0), quoted


def _line_start(stream: Any, byte: int) -> int:
    """The first byte from `byte` on that begins a line, or the end of the file."""
    if byte == 0:
        return 0
    stream.seek(byte - 1)
    at = byte - 1
    while block := stream.read(1 << 16):
        if (found := block.find(b"\n")) >= 0:
            return at + found + 1
        at += len(block)
    return at


class _Range:
    """A stream of some bytes of a file."""

    def __init__(self, stream: Any, piece: Piece) -> None:
        stream.seek(piece.start)
        self.stream, self.left = stream, piece.end - piece.start

    @property
    def closed(self) -> bool:
        return bool(self.stream.closed)

    def read(self, size: int) -> bytes:
        block = self.stream.read(min(size, self.left))
        self.left -= len(block)
        return bytes(block)

    def read_buffer(self, size: int) -> pa.Buffer:
        return pa.py_buffer(self.read(size))

    def __enter__(self) -> _Range:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


def open_piece(uri: str, encoding: str | None, piece: Piece | None) -> Any:
    """The text of a file, or of a piece of it."""
    if piece is None:
        return open_text(uri, encoding)
    filesystem, path = open_uri(uri)
    return _Range(filesystem.open_input_file(path), piece)
