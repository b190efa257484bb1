"""SIDs that others published, read by item_id.

Two layouts, gzipped or not: CSV with the header `item_id,c1,c2,...`, and the LC-Rec `*.index.json`, whose
values are `["<a_128>", "<b_241>", ...]` or `[128, 241, ...]`.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re

import numpy as np

from models.storage.tables import UserError, open_uri

TOKEN = re.compile(r"<?[A-Za-z]+_(\d+)>?")
CODES = 65536


def _code(value: object, item: str, uri: str) -> int:
    match = TOKEN.fullmatch(value) if isinstance(value, str) else None
    text = match.group(1) if match else str(value).strip()
    if not text.isdecimal() or int(text) >= CODES:
        raise UserError(
            f"{uri}: item {item!r} has the code {value!r}; a code is a whole number from 0 to {CODES - 1}, or '<a_12>'"
        )
    return int(text)


def parse_published(content: bytes, uri: str) -> dict[str, list[int]]:
    """item_id to codes, from the bytes of a file; `uri` names it in errors and tells the layout."""
    name = uri.lower().removesuffix(".gz")
    if not name.endswith((".json", ".csv")):
        raise UserError(
            f"{uri} is neither .json nor .csv, with .gz or without; published SIDs have these layouts"
        )
    rows: list[tuple[str, list[object]]]
    try:
        text = (
            gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        ).decode("utf-8-sig")
        if name.endswith(".csv"):
            header, *lines = [row for row in csv.reader(io.StringIO(text)) if row] or [
                []
            ]
            rows = [(row[0], list(row[1:])) for row in lines]
        else:  # pairs keep repeated keys, which a dict would swallow
            header, rows = [], json.loads(text, object_pairs_hook=list)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(
            f"{uri} is damaged or not UTF-8 text of its layout ({error}); fetch it again"
        ) from error
    if name.endswith(".csv") and header[:1] != ["item_id"]:
        raise UserError(
            f"{uri} has the header {','.join(header)!r}; it must be 'item_id,c1,c2,...'"
        )
    sids: dict[str, list[int]] = {}
    for row in rows if isinstance(rows, list) else [rows]:
        if not (isinstance(row, tuple) and isinstance(row[1], list)):
            raise UserError(
                f"{uri} is not a JSON object of item_id to codes, such as {{'0': ['<a_12>', '<b_7>']}}"
            )
        item = row[0].strip()  # as in the items table
        if item in sids:
            raise UserError(f"{uri} has item {item!r} twice; each item has one SID")
        sids[item] = [_code(value, item, uri) for value in row[1]]
    depths = {len(codes) for codes in sids.values()}
    if len(depths) != 1 or 0 in depths:
        raise UserError(
            f"{uri} has SIDs of {sorted(depths)} codes; all must have the same number, at least 1"
        )
    return sids


def read_published(uri: str) -> tuple[dict[str, list[int]], str]:
    """The SIDs of the file at `uri` by item_id, and the hash of its bytes."""
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_stream(path, compression=None) as stream:
            content = stream.read()
    except OSError as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"cannot read the published SIDs {uri} ({first}); check --published"
        ) from error
    return parse_published(content, uri), hashlib.sha256(content).hexdigest()


def codes_of(sids: dict[str, list[int]], item_ids: list[str], uri: str) -> np.ndarray:
    """Codes (N, C) of the catalogue's items in its order; ids beyond the catalogue are not used.

    Raises UserError with the counts if an item of the catalogue has no SID.
    """
    missing = [item for item in item_ids if item not in sids]
    if missing:
        raise UserError(
            f"{uri} has SIDs of {len(sids)} items, but none for {len(missing)} of the catalogue's {len(item_ids)} "
            f"(such as {missing[0]!r}); use SIDs made for this catalogue, or train your own"
        )
    return np.array([sids[item] for item in item_ids], dtype=np.int64)
