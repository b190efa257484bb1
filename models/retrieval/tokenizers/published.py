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

from core.errors import UserError, one_line
from core.files import open_uri, storage_errors

TOKEN = re.compile(r"<?[A-Za-z]+_(\d+)>?")
"""A code as a token of LC-Rec, such as `<a_128>`."""

MAX_CODE = 65_535
"""Codes are stored as uint16."""


def parse_published(content: bytes, uri: str) -> dict[str, list[int]]:
    """Parse a file of published SIDs.

    Args:
        content: Bytes of the file.
        uri: Location of the file. Its extension chooses the layout.

    Returns:
        Codes by item_id.
    """
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")
        rows: list[tuple[str, list[Any]]]
        if uri.lower().removesuffix(".gz").endswith(".csv"):
            _, *lines = (line for line in csv.reader(io.StringIO(text)) if line)
            rows = [(item, codes) for item, *codes in lines]
        else:
            # pairs keep repeated keys, unlike a dict
            rows = json.loads(text, object_pairs_hook=list)
        sids = {
            item.strip(): [int(TOKEN.sub(r"\1", str(code))) for code in codes]
            for item, codes in rows
        }
        codes = np.array(list(sids.values()), np.int64)
    except (OSError, EOFError, ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"{uri} is neither CSV with the header item_id,c1,c2,... nor JSON of codes "
            f"by item ({one_line(error)})"
        ) from error
    if len(sids) < len(rows) or codes.ndim != 2 or not codes.size:
        raise UserError(f"{uri} has an item twice, or no codes")
    if codes.min() < 0 or codes.max() > MAX_CODE:
        raise UserError(
            f"{uri} has codes from {codes.min()} to {codes.max()}; 0 to {MAX_CODE} fit"
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
