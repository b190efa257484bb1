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

from core.errors import UserError, one_line, pluralize
from core.files import open_uri, storage_errors
from core.ids import clean_id
from core.tables import LARGEST_NUMBER, check_plain_types


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
        """
        rows = np.array([self.row_of_id.get(item_id, -1) for item_id in item_ids])
        num_missing = int((rows < 0).sum())
        if num_missing == len(item_ids):
            raise UserError(
                f"{self.uri} has no row for any item, such as {item_ids[0]!r}; its "
                f"first id is {next(iter(self.row_of_id))!r}"
            )
        if num_missing or len(item_ids) < len(self.row_of_id):
            say(
                f"note: {num_missing:,} of {pluralize(len(item_ids), 'item')} have no "
                f"row in {self.uri}, which has {pluralize(len(self.row_of_id), 'id')}, "
                "and get zeros"
            )
        return np.where(rows[:, None] >= 0, self.vectors[rows], np.float32(0))


def read_precomputed(uri: str, id: str) -> PrecomputedEmbeddings:
    """Read precomputed embeddings of items.

    Args:
        uri: Parquet or .npy file.
        id: For a Parquet file the column of ids, for an .npy file a text file with the
            id of row i on line i.
    """
    content = read_bytes(uri)
    digest = hashlib.sha256(content)
    try:
        if uri.lower().endswith(".npy"):
            lines = read_bytes(id)
            digest.update(lines)
            ids: list[object] = [*lines.decode("utf-8-sig").splitlines()]
            numbers = np.load(io.BytesIO(content), allow_pickle=False)
        else:
            digest.update(id.encode())
            file = pq.ParquetFile(pa.BufferReader(content))
            check_plain_types(file.schema_arrow, uri)
            table = file.read()
            ids = table[id].to_pylist()
            columns = table.drop_columns([id]).columns
            lists = [column for column in columns if pa.types.is_nested(column.type)]
            if lists:
                (column,) = lists
                widths = pc.unique(pc.list_value_length(column)).to_pylist()
                if len(widths) != 1:
                    raise ValueError(f"lists of {widths} numbers")
                flat = column.combine_chunks().flatten().to_numpy()
                numbers = flat.reshape(len(column), -1)
            else:
                numbers = np.stack([column.to_numpy() for column in columns], 1)
        with np.errstate(over="ignore"):
            vectors = numbers.astype(np.float32)
        if numbers.dtype.kind not in "fiu" or vectors.ndim != 2 or not vectors.size:
            raise ValueError(f"{numbers.dtype} of shape {numbers.shape}")
        if len(ids) != len(vectors):
            raise ValueError(f"{len(ids)} ids of {len(vectors)} rows")
    except (pa.ArrowException, KeyError, TypeError, ValueError, EOFError) as error:
        raise UserError(
            f"{uri} is no matrix of numbers with an id per row ({one_line(error)})"
        ) from error
    with np.errstate(over="ignore", invalid="ignore"):
        squared_norms = np.square(vectors, dtype=np.float32).sum(1, dtype=np.float32)
        # the squared distance of two vectors is at most four times the larger norm
        is_usable = np.isfinite(4 * squared_norms)
    if not is_usable.all():
        row = int(np.argmin(is_usable))
        raise UserError(
            f"{uri} has numbers that are not finite or over {LARGEST_NUMBER:g}, first "
            f"in row {row} (id {ids[row]!r})"
        )
    clean_ids = [clean_id(str(raw_id)) for raw_id in ids]
    row_of_id = {item_id: row for row, item_id in enumerate(clean_ids) if item_id}
    if len(row_of_id) < len(ids):
        raise UserError(f"{uri} has an item twice, or a row without an id")
    return PrecomputedEmbeddings(uri, row_of_id, vectors, digest.hexdigest())


def read_bytes(uri: str) -> bytes:
    """Return the content of a file at any `pyarrow.fs` URI."""
    filesystem, path = open_uri(uri)
    with storage_errors(uri), filesystem.open_input_file(path) as file:
        return bytes(file.read())
