"""The LC-Rec layout: `*.inter.json` {user: [item, ...]} and, optionally, `*.item.json` {item: {title, ...}}.

Histories are in order and without clock times, so `timestamp_ms` is the place in the history. Published
semantic IDs (`*.index.json`) are read by `jobs.tokenize --tokenizer published`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from models.tables import UserError, join, open_uri
from pipelines.data.sources.base import Block, Metadata, Source, list_files
from pipelines.data.sources.mapping import items_fields
from pipelines.data.sources.normalise import NO_ID
from pipelines.data.sources.pieces import Piece
from pipelines.data.tables import REJECTS

USERS_PER_BLOCK = 20_000


@dataclass(frozen=True)
class LcRec(Source):
    """Histories by user in one JSON object; read whole, as JSON objects must be."""

    files: str = "*inter.json*"
    """Pattern of the history files, relative to the input folder."""
    items: str | None = "*item.json*"
    """Pattern of the item files; None: the log has none."""
    texts: list[str] = field(default_factory=lambda: ["title", "brand", "categories", "description"])
    """Keys of an item that are its texts; lists are joined by a space."""
    attributes: list[str] = field(default_factory=list)
    """Keys of an item that are categorical attributes."""

    @property
    def info(self) -> dict[str, Any]:
        return {"labels": {}, "numbers": [], "categories": [], "clock": False}

    @property
    def events_config(self) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if key not in ("items", "texts", "attributes")}

    @property
    def origins(self) -> dict[str, dict[str, str]]:
        names = items_fields(*self.items_columns).names
        return {
            "events": {"user_id": "the key", "item_id": "its list", "timestamp_ms": "the place in its list"},
            "items": dict(zip(names, ["the key", *self.texts, *self.attributes], strict=True)) if self.items else {},
            "users": {},
        }

    @property
    def absent(self) -> frozenset[str]:
        return frozenset({"query", "request_id", "position"})

    @property
    def items_columns(self) -> tuple[list[str], list[str]]:
        return (list(self.texts), list(self.attributes)) if self.items else ([], [])

    def event_files(self, input_uri: str) -> list[str]:
        return list_files(input_uri, self.files, required=True, what="history file")

    def item_files(self, input_uri: str) -> list[str]:
        return list_files(input_uri, self.items, required=False, what="item file") if self.items else []

    def read_events(
        self, input_uri: str, file: str, users: pa.Table | None = None, piece: Piece | None = None
    ) -> Iterator[Block]:
        uri = join(input_uri, file)
        histories = _load(uri, "user", list, "a list of items")
        order = list(histories)
        first = 0
        for start in range(0, len(order), USERS_PER_BLOCK):
            some = order[start : start + USERS_PER_BLOCK]
            block = self._block([(user, histories[user]) for user in some], file, first)
            first += block.rows_read
            yield block

    def _block(self, histories: list[tuple[str, list[Any]]], file: str, first: int) -> Block:
        lengths = np.array([len(items) for _, items in histories], dtype=np.int64)
        total = int(lengths.sum())
        users = np.repeat(np.array([user for user, _ in histories], dtype=object), lengths)
        ordinals = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        raw = list(chain.from_iterable(items for _, items in histories))
        items = [
            str(item).strip() if isinstance(item, str | int) and not isinstance(item, bool) else "" for item in raw
        ]
        # Python's own comparison: NumPy's text drops NULs at the end
        none = {"", *NO_ID}
        named = np.array([user not in none for user, _ in histories], dtype=bool)
        valid = np.array([item not in none for item in items], dtype=bool) & np.repeat(named, lengths)
        rows = np.arange(first, first + total)
        events = pa.table(
            [
                pa.array(users[valid], pa.string()),
                pa.array([""] * int(valid.sum()), pa.string()),
                pa.array(ordinals[valid], pa.int64()),
                pa.array(items, pa.string()).filter(pa.array(valid)),
                pa.nulls(int(valid.sum()), pa.string()),
                pa.array(np.zeros(int(valid.sum())), pa.int32()),
                pa.array(rows[valid], pa.int64()),
            ],
            schema=self.block_schema,
        )
        rejects = [
            {
                "file": file,
                "row": int(rows[i]),
                "reason": "user_id: missing"
                if users[i] in ("", *NO_ID)
                else "item_id: missing or not text or an integer",
                "source": json.dumps({"user": users[i], "item": raw[i], "order": int(ordinals[i])}),
            }
            for i in np.flatnonzero(~valid)
        ]
        return Block(events, pa.Table.from_pylist(rejects, REJECTS), total)

    def read_items(self, input_uri: str, file: str) -> Iterator[Metadata]:
        uri = join(input_uri, file)
        content = _load(uri, "item", dict, "a mapping of texts")
        keys = [*self.texts, *self.attributes]
        if content and not any(key in item for item in content.values() for key in keys):
            raise UserError(f"{uri}: no item has a key of {', '.join(keys)}; set 'texts' to the keys that it has")
        rejects = [
            {"file": file, "row": row, "reason": "item_id: missing", "source": json.dumps(item)}
            for row, (name, item) in enumerate(content.items())
            if name in ("", *NO_ID)
        ]
        known = {name: item for name, item in content.items() if name not in ("", *NO_ID)}
        columns = [
            pa.array(list(known), pa.string()),
            *(pa.array([_text(item.get(key)) for item in known.values()], pa.string()) for key in keys),
        ]
        table = pa.table(columns, schema=items_fields(self.texts, self.attributes))
        yield Metadata(table, pa.Table.from_pylist(rejects, REJECTS), len(content))


def _text(value: Any) -> str | None:
    """A value as text: lists joined by a space, nested ones too; empty text is null."""
    if isinstance(value, list):
        value = " ".join(filter(None, map(_text, value)))
    return str(value).strip() or None if value is not None else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise UserError(f"the key '{key}' comes twice; merge its entries")
    return content


def _load(uri: str, key: str, kind: type, need: str) -> dict[str, Any]:
    """The JSON object at `uri`, whose values are each of `kind`; keys without the white space around them."""
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_stream(path) as stream:
            text = stream.read()
        if not text.strip():
            raise UserError("it is empty; copy it again")
        content = json.loads(text, object_pairs_hook=_unique)
        if isinstance(content, dict):
            content = _unique([(name.strip(), value) for name, value in content.items()])
    except UserError as error:
        raise UserError(f"{uri}: {error}") from error
    except (ValueError, OSError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{uri} is not readable JSON ({reason}); it may be truncated: copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{uri} holds a JSON {type(content).__name__}, not {{{key}: {need}}}; check the layout")
    for name, value in content.items():
        if not isinstance(value, kind):
            raise UserError(f"{uri}: {key} '{name}' has {json.dumps(value)[:60]}, not {need}; check the layout")
    return content
