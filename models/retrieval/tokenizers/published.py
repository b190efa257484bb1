"""Published SIDs from other work, read by item_id.

Two layouts, gzipped or not: CSV with the header `item_id,c1,c2,...`, and the
`*.index.json` of LC-Rec with values `["<a_128>", "<b_241>", ...]` or `[128, 241, ...]`.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
from typing import Any

import numpy as np

from core.errors import UserError
from core.files import open_uri, storage_errors

TOKEN = re.compile(r"<?[A-Za-z]+_(\d+)>?")
"""A code as a token of LC-Rec, such as `<a_128>`."""

MAX_CODES = 65536
"""Most codes of a level."""


def _parse_code(value: object, item: str, uri: str) -> int:
    """Return a code from a value of the file; `item` and `uri` are for messages."""
    match = TOKEN.fullmatch(value) if isinstance(value, str) else None
    text = match.group(1) if match else str(value).strip()
    if not text.isdecimal() or int(text) >= MAX_CODES:
        raise UserError(
            f"{uri}: item {item!r} has the code {value!r}; a code is a whole number "
            f"from 0 to {MAX_CODES - 1}, or '<a_12>'"
        )
    return int(text)


def parse_published(content: bytes, uri: str) -> dict[str, list[int]]:
    """Parse a file of published SIDs.

    Args:
        content: Bytes of the file.
        uri: Location of the file. Its extension chooses the layout.

    Returns:
        Codes by item_id.
    """
    name = uri.lower().removesuffix(".gz")
    if not name.endswith((".json", ".csv")):
        raise UserError(f"{uri} is neither .json nor .csv, with .gz or without")
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")
        rows: Any
        if name.endswith(".csv"):
            lines = [line for line in csv.reader(io.StringIO(text)) if line]
            header = lines[0] if lines else []
            rows = [(item, codes) for item, *codes in lines[1:]]
        else:
            header = ["item_id"]
            # pairs keep repeated keys, unlike a dict
            rows = json.loads(text, object_pairs_hook=list)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(
            f"{uri} is damaged or not UTF-8 text of its layout ({error})"
        ) from error
    if header[:1] != ["item_id"]:
        raise UserError(
            f"{uri} has the header {','.join(header)!r}; it must be 'item_id,c1,c2,...'"
        )
    sids: dict[str, list[int]] = {}
    for row in rows if isinstance(rows, list) else [rows]:
        if not (isinstance(row, tuple) and isinstance(row[1], list)):
            raise UserError(f"{uri} is not a JSON object of item_id to codes")
        item = row[0].strip()  # as in the items table
        if item in sids:
            raise UserError(f"{uri} has item {item!r} twice")
        sids[item] = [_parse_code(value, item, uri) for value in row[1]]
    depths = {len(codes) for codes in sids.values()}
    if len(depths) != 1 or 0 in depths:
        raise UserError(
            f"{uri} has SIDs of {sorted(depths)} codes, not of one number of codes"
        )
    return sids


def read_published(uri: str) -> tuple[dict[str, list[int]], str]:
    """Read a file of published SIDs.

    Returns:
        Codes by item_id, and the SHA-256 of the file.
    """
    filesystem, path = open_uri(uri)
    with (
        storage_errors(uri),
        filesystem.open_input_stream(path, compression=None) as stream,
    ):
        content = stream.read()
    return parse_published(content, uri), hashlib.sha256(content).hexdigest()


def catalogue_codes(
    sids: dict[str, list[int]], item_ids: list[str], uri: str
) -> np.ndarray:
    """Return the codes (N, C) of the catalogue's items, in the order of `item_ids`.

    SIDs of other items are ignored.

    Args:
        sids: Codes by item_id.
        item_ids: Ids of the catalogue's items.
        uri: Location of the SIDs, for messages.
    """
    missing = [item for item in item_ids if item not in sids]
    if missing:
        raise UserError(
            f"{uri} has SIDs of {len(sids)} items, but none for {len(missing)} of the "
            f"catalogue's {len(item_ids)} (such as {missing[0]!r})"
        )
    return np.array([sids[item] for item in item_ids], dtype=np.int64)
