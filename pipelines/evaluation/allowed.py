"""The items that may be recommended, as a file of their ids names them.

allowed, sha256 = read_allowed("in_stock.txt", "runs/shop/tables")
"""

from __future__ import annotations

import csv
import hashlib
import io

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from models.item_ids import parse_item_ids
from models.storage.tables import UserError, join, open_uri, read_table
from models.storage.uri import storage_errors

COLUMN = "item_id"


def read_allowed(uri: str, tables: str) -> tuple[Tensor, str]:
    """(N,) bool, by item_index, of the items in a file, and the hash of its bytes. It is Parquet or CSV with a column
    `item_id`, or text with one id per line. UserError for ids that the tables do not have, and for none."""
    filesystem, path = open_uri(uri)
    with storage_errors(uri), filesystem.open_input_stream(path) as stream:
        content = stream.read()
    ids = parse_item_ids(
        uri, _parquet(content, uri) if content[:4] == b"PAR1" else _text(content, uri)
    )
    if not ids:
        raise UserError(
            f"{uri} has no item id, so nothing could be recommended; give the ids of the allowed items"
        )
    items = read_table(join(tables, "items"), "items", [COLUMN])[COLUMN].to_pylist()
    index = {item: place for place, item in enumerate(items)}
    if unknown := [item for item in dict.fromkeys(ids) if item not in index]:
        raise UserError(
            f"{uri} has {len(unknown):,} ids that are not among the {len(items):,} items of {tables}, the first is "
            f"{unknown[0]!r}; leave them out"
        )
    places = torch.tensor([index[item] for item in ids])
    return torch.zeros(len(items), dtype=torch.bool).index_fill(
        0, places, True
    ), hashlib.sha256(content).hexdigest()


def _parquet(content: bytes, uri: str) -> list[object]:
    try:
        return (
            pq.ParquetFile(pa.BufferReader(content)).read([COLUMN])[COLUMN].to_pylist()
        )
    except (pa.ArrowException, KeyError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"{uri} is not a Parquet file with a column {COLUMN} ({first}); give one"
        ) from error


def _text(content: bytes, uri: str) -> list[str]:
    try:
        rows = [
            row
            for row in csv.reader(io.StringIO(content.decode("utf-8-sig")))
            if any(map(str.strip, row))
        ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{uri} is not UTF-8 text ({error}); give one item id per line"
        ) from error
    if rows and COLUMN in (header := [name.strip() for name in rows[0]]):
        rows = rows[1:]
        place, width = header.index(COLUMN), len(header)
    else:
        place, width = 0, 1
    if odd := next((row for row in rows if len(row) != width), None):
        raise UserError(
            f"{uri} has the row {','.join(odd)!r}; give one item id per line, or a CSV with {COLUMN}"
        )
    return [row[place] for row in rows]
