"""Read a file with the ids of the items that may be recommended.

mask, sha256 = read_allowed("in_stock.txt", items)
"""

from __future__ import annotations

import csv
import hashlib
import io

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from core.errors import UserError, one_line
from core.files import open_uri, storage_errors
from core.ids import parse_item_id
from core.schemas import ItemsInfo
from core.tables import Table, check_plain_types

COLUMN = "item_id"
"""Column of the ids in a CSV or Parquet file."""


def read_allowed(uri: str, items: Table[ItemsInfo]) -> tuple[Tensor, str]:
    """Read item ids from a Parquet or CSV column `item_id`, or from lines of text.

    Args:
        uri: URI of the file.
        items: Table of the N items.

    Returns:
        (N,) bool, whether an item is in the file, and the SHA-256 of the file.
    """
    filesystem, path = open_uri(uri)
    with storage_errors(uri), filesystem.open_input_stream(path) as stream:
        content = stream.read()
    read = read_parquet_ids if content.startswith(b"PAR1") else read_text_ids
    try:
        ids = [parse_item_id(value) for value in read(content, uri)]
    except ValueError as error:
        raise UserError(f"{uri}: {error}") from error
    if not ids:
        raise UserError(f"{uri} has no item id, so nothing could be recommended")
    item_index = {
        item: index
        for index, item in enumerate(items.read([COLUMN])[COLUMN].to_pylist())
    }
    unknown = [item for item in ids if item not in item_index]
    if unknown:
        raise UserError(
            f"{uri} has {len(unknown):,} ids that are not among the {items.rows:,} of "
            f"{items.uri}, the first is {unknown[0]!r}"
        )
    mask = torch.zeros(items.rows, dtype=torch.bool)
    mask[[item_index[item] for item in ids]] = True
    return mask, hashlib.sha256(content).hexdigest()


def read_parquet_ids(content: bytes, uri: str) -> list[object]:
    """Return the ids in a Parquet file.

    Args:
        content: Content of the file.
        uri: URI of the file, for messages.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        check_plain_types(file.schema_arrow, uri)
        return file.read([COLUMN])[COLUMN].to_pylist()
    except (pa.ArrowException, KeyError) as error:
        raise UserError(
            f"{uri} is not a Parquet file with a column {COLUMN} ({one_line(error)})"
        ) from error


def read_text_ids(content: bytes, uri: str) -> list[str]:
    """Return the ids in a CSV file with a header, or in a text with one id per line.

    Args:
        content: Content of the file.
        uri: URI of the file, for messages.
    """
    try:
        lines = csv.reader(io.StringIO(content.decode("utf-8-sig")))
        rows = [row for row in lines if any(map(str.strip, row))]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{uri} is not UTF-8 text ({error})") from error
    column, width = 0, 1
    header = [name.strip() for name in rows[0]] if rows else []
    if COLUMN in header:
        rows = rows[1:]
        column, width = header.index(COLUMN), len(header)
    for row in rows:
        if len(row) != width:
            raise UserError(
                f"{uri} has the row {','.join(row)!r}, neither one item id nor a row "
                f"of a CSV with {COLUMN}"
            )
    return [row[column] for row in rows]
