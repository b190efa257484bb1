"""Precomputed embeddings of items, read from a file of the user by item id.

read_precomputed("vectors.parquet", "item_id")   # a list column, or a column per number
read_precomputed("vectors.npy", "ids.txt")       # line i is the id of row i
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
from models.error_text import one_line
from models.item_ids import clean_id
from models.storage.tables import (
    LARGEST_NUMBER,
    UserError,
    check_plain_types,
    open_uri,
)

SUFFIXES = (".parquet", ".npy")
"""Suffixes of files of precomputed embeddings."""


@dataclass(frozen=True)
class PrecomputedEmbeddings:
    """Embeddings of items from a file of the user."""

    uri: str
    """URI of the file, for messages."""
    row_of_id: dict[str, int]
    """Row of each item id in `vectors`."""
    vectors: np.ndarray
    """(rows, width) float32."""
    sha256: str
    """Hash of the file, and of the ids' file or the name of the ids' column."""

    def align(self, item_ids: list[str], say: Callable[[str], None]) -> np.ndarray:
        """Return the embeddings (items, width) in the order of `item_ids`.

        An item without a row gets zeros; `say` reports the number of these items.

        Raises:
            UserError: If no item has a row.
        """
        rows = np.array([self.row_of_id.get(item_id, -1) for item_id in item_ids])
        num_matched = int((rows >= 0).sum())
        if not num_matched:
            raise UserError(
                f"{self.uri} has no row for any item, such as {item_ids[0]!r}; its "
                f"first id is {next(iter(self.row_of_id))!r}"
            )
        if num_matched < len(item_ids):
            say(
                f"note: {len(item_ids) - num_matched:,} of "
                f"{pluralize(len(item_ids), 'item')} have no row in {self.uri} and get "
                f"zeros"
            )
        num_ids = len(self.row_of_id)
        if num_matched < num_ids:
            say(
                f"note: {num_ids - num_matched:,} of {pluralize(num_ids, 'id')} of "
                f"{self.uri} are not in the items table"
            )
        return np.where(rows[:, None] >= 0, self.vectors[rows], np.float32(0))


def read_precomputed(uri: str, id: str) -> PrecomputedEmbeddings:
    """Read precomputed embeddings of items.

    Args:
        uri: Parquet or .npy file.
        id: For a Parquet file the column of ids, for an .npy file a text file with the
            id of row i on line i.

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
            f"{pluralize(len(vectors), 'row')}"
        )
    if not vectors.size:
        shape = " x ".join(map(str, vectors.shape))
        raise UserError(f"{uri} holds no embeddings: its array has {shape} numbers")
    is_usable = has_finite_distances(vectors)
    if not is_usable.all():
        row = int(np.argmin(is_usable))
        raise UserError(
            f"{uri} has numbers that are not finite or over {LARGEST_NUMBER:g}, first "
            f"in row {row} (id {ids[row]!r})"
        )
    row_of_id = _index_ids(uri, ids)
    return PrecomputedEmbeddings(uri, row_of_id, vectors, digest.hexdigest())


def _parse_lines(uri: str, content: bytes) -> list[object]:
    """Return the lines of a text file."""
    try:
        return list(content.decode("utf-8-sig").splitlines())
    except UnicodeDecodeError as error:
        raise UserError(f"{uri} is not UTF-8 text ({error})") from error


def _index_ids(uri: str, ids: list[object]) -> dict[str, int]:
    """Return the row of each item id."""
    row_of_id: dict[str, int] = {}
    for row, raw_id in enumerate(ids):
        item_id = clean_id(str(raw_id))
        if not item_id:
            raise UserError(f"{uri} has {raw_id!r} instead of an id in row {row}")
        first_row = row_of_id.setdefault(item_id, row)
        if first_row != row:
            raise UserError(
                f"{uri} has the item {item_id!r} twice, in rows {first_row} and {row}"
            )
    return row_of_id


def has_finite_distances(vectors: np.ndarray) -> np.ndarray:
    """Return a mask (rows,) of vectors (rows, width) whose distances fit float32.

    The squared distance of two vectors is at most four times the larger squared norm.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squared_norms = np.square(vectors, dtype=np.float32).sum(1, dtype=np.float32)
        return np.isfinite(4 * squared_norms)


def read_bytes(uri: str) -> bytes:
    """Return the content of a file at any `pyarrow.fs` URI.

    Raises:
        UserError: If the file cannot be read.
    """
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_file(path) as file:
            return bytes(file.read())
    except OSError as error:
        raise UserError(f"{uri} cannot be read ({one_line(error)})") from error


def read_npy(uri: str, content: bytes) -> np.ndarray:
    """Parse the content of an .npy file as an array (rows, width) float32.

    Args:
        uri: The file, for messages.
        content: Bytes of the file.

    Raises:
        UserError: If the file is not a matrix of numbers.
    """
    try:
        vectors = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{uri} is not a NumPy array ({error})") from error
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiu":
        raise UserError(f"{uri} holds {vectors.dtype} of shape {vectors.shape}")
    return to_float32(vectors)


def read_columns(uri: str, content: bytes, id: str) -> tuple[list[object], np.ndarray]:
    """Parse the content of a Parquet file.

    The embeddings are its only list column, or all columns except the ids.

    Args:
        uri: The file, for messages.
        content: Bytes of the file.
        id: Name of the column of ids.

    Returns:
        The ids, and the embeddings (rows, width) float32.

    Raises:
        UserError: If the file has no column `id`, several list columns, columns
            without numbers, or embeddings of different widths.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        check_plain_types(file.schema_arrow, uri)
        table = file.read()
    except pa.ArrowException as error:
        raise UserError(f"{uri} is not a Parquet file ({one_line(error)})") from error
    if id not in table.column_names:
        names = ", ".join(table.column_names)
        raise UserError(f"{uri} has no column '{id}'; --id is one of {names}")
    columns = {
        name: table[name].combine_chunks() for name in table.column_names if name != id
    }
    list_names = [name for name, column in columns.items() if is_list(column.type)]
    if len(list_names) > 1:
        raise UserError(
            f"{uri} has several list columns, {', '.join(list_names)}; keep one of "
            f"them beside '{id}'"
        )
    ids = table[id].to_pylist()
    if list_names:
        return ids, _list_matrix(uri, list_names[0], columns[list_names[0]])
    if not columns:
        raise UserError(f"{uri} has no columns of numbers")
    _check_numeric(uri, columns)
    numbers = [
        to_float32(column.to_numpy(zero_copy_only=False)) for column in columns.values()
    ]
    return ids, np.stack(numbers, 1)


def _list_matrix(uri: str, name: str, lists: pa.Array) -> np.ndarray:
    """Convert a column of lists of equal lengths to an array (rows, width) float32."""
    _check_numeric(uri, {name: lists.flatten()})
    numbers = to_float32(lists.flatten().to_numpy(zero_copy_only=False))
    if not len(lists):
        return numbers[:, None]
    widths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    if widths.min() != widths.max():
        raise UserError(
            f"{uri} has embeddings of {widths.min()} to {widths.max()} numbers"
        )
    return numbers.reshape(len(lists), -1)


def _check_numeric(uri: str, columns: dict[str, pa.Array]) -> None:
    """Raise a UserError if a column has other values than numbers."""
    others = [name for name, column in columns.items() if not is_number(column.type)]
    if others:
        raise UserError(f"{uri} has columns without numbers, {', '.join(others)}")


def to_float32(values: np.ndarray) -> np.ndarray:
    """Convert numbers to float32; numbers beyond its range become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def is_list(dtype: pa.DataType) -> bool:
    """Return whether a type is a list of any kind, fixed-size lists included."""
    return (
        pa.types.is_list(dtype)
        or pa.types.is_large_list(dtype)
        or pa.types.is_fixed_size_list(dtype)
    )


def is_number(dtype: pa.DataType) -> bool:
    """Return whether a type is an integer or a float."""
    return pa.types.is_floating(dtype) or pa.types.is_integer(dtype)
