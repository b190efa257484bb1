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
    try:
        if content.startswith(b"PAR1"):
            file = pq.ParquetFile(pa.BufferReader(content))
            check_plain_types(file.schema_arrow, uri)
            values = file.read([COLUMN])[COLUMN].to_pylist()
        else:
            lines = csv.reader(io.StringIO(content.decode("utf-8-sig")))
            rows = [row for row in lines if any(map(str.strip, row))]
            header = [name.strip() for name in rows[0]] if rows else []
            column, width = 0, 1
            if COLUMN in header:
                rows, column, width = rows[1:], header.index(COLUMN), len(header)
            for row in rows:
                if len(row) != width:
                    raise ValueError(f"the row {','.join(row)!r} is not one item id")
            values = [row[column] for row in rows]
        ids = [parse_item_id(value) for value in values]
    except (pa.ArrowException, KeyError, ValueError, csv.Error) as error:
        raise UserError(f"{uri} has no column {COLUMN} ({one_line(error)})") from error
    if not ids:
        raise UserError(f"{uri} has no item id, so nothing could be recommended")
    index = {
        item: row for row, item in enumerate(items.read([COLUMN])[COLUMN].to_pylist())
    }
    unknown = [item for item in ids if item not in index]
    if unknown:
        raise UserError(
            f"{uri} has {len(unknown):,} ids that are not among the {items.rows:,} of "
            f"{items.uri}, the first is {unknown[0]!r}"
        )
    mask = torch.zeros(items.rows, dtype=torch.bool)
    mask[[index[item] for item in ids]] = True
    return mask, hashlib.sha256(content).hexdigest()
