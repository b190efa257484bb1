"""Read a file with the ids of the items that may be recommended.

mask, sha256 = read_allowed("in_stock.txt", items)
"""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from core.errors import UserError, one_line
from core.files import open_uri, storage_errors
from core.ids import parse_item_id
from core.schemas import ItemsInfo
from core.tables import Table, check_plain_types

COLUMN = "item_id"
"""Column of the ids in a Parquet file, or heading of a text file."""


def read_allowed(uri: str, items: Table[ItemsInfo]) -> tuple[Tensor, str]:
    """Read item ids from a Parquet column `item_id`, or from lines of text.

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
            lines = content.decode("utf-8-sig").splitlines()
            values = [line.strip() for line in lines if line.strip()]
            if values[:1] == [COLUMN]:
                del values[0]
        ids = [parse_item_id(value) for value in values]
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise UserError(f"{uri} has no column {COLUMN} ({one_line(error)})") from error
    if not ids:
        raise UserError(f"{uri} has no item id, so nothing could be recommended")
    catalogue = items.read([COLUMN])[COLUMN].combine_chunks()
    unknown = sorted({*ids} - {*catalogue.to_pylist()})
    if unknown:
        raise UserError(
            f"{uri} has {len(unknown):,} ids that are not among the {items.rows:,} of "
            f"{items.uri}, such as {unknown[0]!r}"
        )
    mask = pc.is_in(catalogue, pa.array(ids)).to_numpy(zero_copy_only=False)
    return torch.from_numpy(mask), hashlib.sha256(content).hexdigest()
