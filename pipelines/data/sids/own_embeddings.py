"""Embeddings of items from other tools, read from a file by item id.

read_own("vectors.parquet", "item_id")   # a column of lists, or one column per number
read_own("vectors.npy", "ids.txt")       # one id per line, for each row
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
    """Embeddings of items from a file of the user."""

    uri: str
    ids: dict[str, int]
    """Row of each item."""
    vectors: np.ndarray
    """(rows, width) float32."""
    sha256: str
    """Hash of the file, and of the ids' file or the name of their column."""

    def align(self, items: list[str], say: Callable[[str], None]) -> np.ndarray:
        """Return the embeddings (items, width), zeros for an item without a row.

        Args:
            items: Ids of the items.
            say: Prints a message.

        Raises:
            UserError: If no item has a row.
        """
        rows = np.array([self.ids.get(item, -1) for item in items])
        matched = int((rows >= 0).sum())
        if not matched:
            raise UserError(
                f"{self.uri} has no row of any item, such as {items[0]!r}; its ids "
                f"begin with {next(iter(self.ids))!r}"
            )
        if matched < len(items):
            say(
                f"note: {len(items) - matched:,} of {pluralize(len(items), 'item')} "
                f"have no row in {self.uri}: zeros"
            )
        if matched < len(self.ids):
            say(
                f"note: {len(self.ids) - matched:,} of "
                f"{pluralize(len(self.ids), 'id')} of {self.uri} are no items"
            )
        return np.where(rows[:, None] >= 0, self.vectors[rows], np.float32(0))


def read_own(uri: str, id: str) -> OwnEmbeddings:
    """Read embeddings of items from a file.

    Args:
        uri: Parquet or .npy file.
        id: Column of ids of a Parquet file; text file with one id per line of an .npy
            file.

    Raises:
        UserError: If the file is not a matrix of finite numbers with one id per row.
    """
    content = read_bytes(uri)
    digest = hashlib.sha256(content)
    if uri.lower().endswith(".npy"):
        lines = read_bytes(id)
        digest.update(lines)
        ids, vectors = _parse_lines(id, lines), read_npy(uri, content)
    else:
        digest.update(id.encode())
        ids, vectors = read_columns(uri, content, id)
    if len(ids) != len(vectors):
        raise UserError(
            f"{id} has {pluralize(len(ids), 'line')} and {uri} "
            f"{pluralize(len(vectors), 'row')}; give one each"
        )
    if not vectors.size:
        raise UserError(
            f"{uri} holds no embeddings, but {' x '.join(map(str, vectors.shape))} "
            f"numbers"
        )
    usable = has_finite_length(vectors)
    if not usable.all():
        row = int(np.argmin(usable))
        raise UserError(
            f"{uri} has numbers that are not finite or over {LARGEST_NUMBER:g}, first "
            f"in row {row} (of {ids[row]!r}); leave such rows out, or scale all down"
        )
    rows = _index_ids(uri, ids)
    return OwnEmbeddings(uri, rows, vectors, digest.hexdigest())


def _parse_lines(uri: str, content: bytes) -> list[object]:
    """Return the lines of a text file."""
    try:
        return list(content.decode("utf-8-sig").splitlines())
    except UnicodeDecodeError as error:
        raise UserError(
            f"{uri} is not UTF-8 text ({error}); give the id of each row on a line of "
            f"its own"
        ) from error


def _index_ids(uri: str, ids: list[object]) -> dict[str, int]:
    """Return the row of each id."""
    rows: dict[str, int] = {}
    for row, text in enumerate(ids):
        item = clean_id(str(text))
        if not item:
            raise UserError(
                f"{uri} has no id in row {row}, but {text!r}; leave such rows out"
            )
        if rows.setdefault(item, row) != row:
            raise UserError(
                f"{uri} has the item {item!r} twice, in rows {rows[item]} and {row}; "
                f"give each item once"
            )
    return rows


def has_finite_length(vectors: np.ndarray) -> np.ndarray:
    """Return a mask (rows,) of vectors (rows, width) whose distances fit float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        squared = np.square(vectors, dtype=np.float32).sum(1, dtype=np.float32)
        return np.isfinite(4 * squared)


def read_bytes(uri: str) -> bytes:
    """Return the content of a file.

    Raises:
        UserError: If it cannot be read.
    """
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_file(path) as file:
            return bytes(file.read())
    except OSError as error:
        raise UserError(
            f"{uri} cannot be read ({str(error).splitlines()[0]}); give --embeddings "
            f"and --id files"
        ) from error


def read_npy(uri: str, content: bytes) -> np.ndarray:
    """Return the array (rows, width) float32 of an .npy file.

    Raises:
        UserError: If the file is not a numeric matrix.
    """
    try:
        vectors = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{uri} is no array of NumPy ({error})") from error
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiu":
        raise UserError(
            f"{uri} holds {vectors.dtype} of shape {vectors.shape}; give numbers of "
            f"shape (items, width)"
        )
    return narrow(vectors)


def read_columns(uri: str, content: bytes, id: str) -> tuple[list[object], np.ndarray]:
    """Return the ids and the vectors (rows, width) float32 of a Parquet file.

    Vectors are its only column of lists, otherwise all columns but the ids.

    Raises:
        UserError: If the file has no such columns.
    """
    try:
        table = pq.read_table(pa.BufferReader(content))
    except pa.ArrowException as error:
        raise UserError(
            f"{uri} cannot be read as Parquet ({str(error).splitlines()[0]})"
        ) from error
    if id not in table.column_names:
        names = ", ".join(table.column_names)
        raise UserError(f"{uri} has no column '{id}'; --id is one of {names}")
    columns = {
        name: table[name].combine_chunks() for name in table.column_names if name != id
    }
    lists = [name for name, column in columns.items() if is_list(column.type)]
    if len(lists) > 1:
        raise UserError(
            f"{uri} has several columns of lists, {', '.join(lists)}; leave one beside "
            f"'{id}'"
        )
    used = {name: columns[name] for name in lists or columns}
    flat = {
        name: column.flatten() if lists else column for name, column in used.items()
    }
    others = [name for name, column in flat.items() if not is_number(column.type)]
    if others or not flat:
        raise UserError(
            f"{uri} has columns without numbers, {', '.join(others) or 'or none'}; "
            f"leave them out"
        )
    ids = table[id].to_pylist()
    numbers = [
        narrow(column.to_numpy(zero_copy_only=False)) for column in flat.values()
    ]
    if not lists:
        return ids, np.stack(numbers, 1)
    widths = pc.fill_null(pc.list_value_length(used[lists[0]]), 0).to_numpy()
    if not len(widths):
        return ids, numbers[0][:, None]
    if widths.min() != widths.max():
        raise UserError(
            f"{uri} has embeddings of {widths.min()} to {widths.max()} numbers; give "
            f"all the same width"
        )
    return ids, numbers[0].reshape(len(table), -1)


def narrow(values: np.ndarray) -> np.ndarray:
    """Convert values to float32; too large values become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
    )


def is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)
