"""Read item embeddings of another program from a file.

read_own("vectors.parquet", "item_id")   # a column of lists, or one column per number
read_own("vectors.npy", "ids.txt")       # one id per line
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from models.config import pluralize
from models.item_ids import clean_id
from models.storage.tables import LARGEST_NUMBER, UserError, open_uri

SUFFIXES = (".parquet", ".npy")


@dataclass(frozen=True)
class OwnEmbeddings:
    """The embeddings of a file, by item."""

    uri: str
    """The file."""
    ids: dict[str, int]
    """Row of each item."""
    vectors: np.ndarray
    """(rows, width) float32."""
    sha256: str
    """Hash of the file, and of the file of ids or the name of the id column."""

    def align(self, items: list[str], say: Callable[[str], None]) -> np.ndarray:
        """Return the (items, width) vectors of the items, zeros for items without a
        row.

        Raises:
            UserError: if no item has a row.
        """
        rows = np.array([self.ids.get(item, -1) for item in items])
        found = int((rows >= 0).sum())
        if not found:
            raise UserError(
                f"{self.uri} has no row of any item, such as {items[0]!r}; its ids begin with {next(iter(self.ids))!r}"
            )
        if found < len(items):
            say(
                f"note: {len(items) - found:,} of {pluralize(len(items), 'item')} have no row in {self.uri}: zeros"
            )
        if found < len(self.ids):
            say(
                f"note: {len(self.ids) - found:,} of {pluralize(len(self.ids), 'id')} of {self.uri} are no items"
            )
        return np.where(rows[:, None] >= 0, self.vectors[rows], np.float32(0))


def read_own(uri: str, id: str) -> OwnEmbeddings:
    """Read a Parquet file with an id column, or an .npy file with a text file of ids.

    Raises:
        UserError: unless the file is a matrix of finite numbers with one id per row.
    """
    content = read_bytes(uri)
    digest, ids = hashlib.sha256(content), list[object]()
    if uri.lower().endswith(".npy"):
        lines = read_bytes(id)
        digest.update(lines)
        try:
            ids, vectors = (
                list(lines.decode("utf-8-sig").splitlines()),
                read_npy(uri, content),
            )
        except UnicodeDecodeError as error:
            raise UserError(
                f"{id} is not UTF-8 text ({error}); give the id of each row on a line of its own"
            ) from error
    else:
        digest.update(id.encode())
        ids, vectors = read_columns(uri, content, id)
    if len(ids) != len(vectors):
        raise UserError(
            f"{id} has {pluralize(len(ids), 'line')} and {uri} {pluralize(len(vectors), 'row')}; give one each"
        )
    if not vectors.size:
        raise UserError(
            f"{uri} holds no embeddings, but {' x '.join(map(str, vectors.shape))} numbers"
        )
    usable = has_finite_length(vectors)
    if not usable.all():
        row = int(np.argmin(usable))
        raise UserError(
            f"{uri} has numbers that are not finite or over {LARGEST_NUMBER:g}, first in row {row} "
            f"(of {ids[row]!r}); leave such rows out, or scale all down"
        )
    rows: dict[str, int] = {}
    for row, text in enumerate(ids):
        if not (item := clean_id(str(text))):
            raise UserError(
                f"{uri} has no id in row {row}, but {text!r}; leave such rows out"
            )
        if rows.setdefault(item, row) != row:
            raise UserError(
                f"{uri} has the item {item!r} twice, in rows {rows[item]} and {row}; give each item once"
            )
    return OwnEmbeddings(uri, rows, vectors, digest.hexdigest())


def has_finite_length(vectors: np.ndarray) -> np.ndarray:
    """Return a mask (rows,) of the `vectors` (rows, width) whose squared distances fit float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        squared = np.square(vectors, dtype=np.float32).sum(1, dtype=np.float32)
        return np.isfinite(4 * squared)


def read_bytes(uri: str) -> bytes:
    """Return the content of a file.

    Raises:
        UserError: if it cannot be read.
    """
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_file(path) as file:
            return bytes(file.read())
    except OSError as error:
        raise UserError(
            f"{uri} cannot be read ({str(error).splitlines()[0]}); give --embeddings and --id files"
        ) from error


def read_npy(uri: str, content: bytes) -> np.ndarray:
    """Return the (rows, width) float32 array of an .npy file."""
    try:
        vectors = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{uri} is no array of NumPy ({error})") from error
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiu":
        raise UserError(
            f"{uri} holds {vectors.dtype} of shape {vectors.shape}; give numbers of shape (items, width)"
        )
    return narrow(vectors)


def read_columns(uri: str, content: bytes, id: str) -> tuple[list[object], np.ndarray]:
    """Return ids and (rows, width) float32 vectors of a Parquet file.

    Vectors are its column of lists, or else all columns except the ids.
    """
    try:
        table = pq.read_table(pa.BufferReader(content))
    except pa.ArrowException as error:
        raise UserError(
            f"{uri} cannot be read as Parquet ({str(error).splitlines()[0]})"
        ) from error
    if id not in table.column_names:
        raise UserError(
            f"{uri} has no column '{id}'; --id is one of {', '.join(table.column_names)}"
        )
    columns = {
        name: table[name].combine_chunks() for name in table.column_names if name != id
    }
    lists = [name for name, column in columns.items() if is_list(column.type)]
    flat = {
        name: column.flatten() if name in lists else column
        for name, column in columns.items()
    }
    if len(lists) > 1:
        raise UserError(
            f"{uri} has several columns of lists, {', '.join(lists)}; leave one beside '{id}'"
        )
    read = lists or list(columns)
    others = [name for name in read if not is_number(flat[name].type)]
    if others or not read:
        raise UserError(
            f"{uri} has columns without numbers, {', '.join(others) or 'or none'}; leave them out"
        )
    if not lists:
        numbers = [
            narrow(column.to_numpy(zero_copy_only=False)) for column in columns.values()
        ]
        return table[id].to_pylist(), np.stack(numbers, 1)
    widths = pc.fill_null(pc.list_value_length(columns[lists[0]]), 0).to_numpy()
    if len(widths) and widths.min() != widths.max():
        raise UserError(
            f"{uri} has embeddings of {widths.min()} to {widths.max()} numbers; give all the same width"
        )
    vectors = narrow(flat[lists[0]].to_numpy(zero_copy_only=False))
    return table[id].to_pylist(), vectors.reshape(len(table), -1) if len(
        table
    ) else vectors[:, None]


def narrow(values: np.ndarray) -> np.ndarray:
    """Convert values to float32; values out of range become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def is_list(kind: pa.DataType) -> bool:
    """Return whether values are lists."""
    return (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
    )


def is_number(kind: pa.DataType) -> bool:
    """Return whether values are numbers."""
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)
