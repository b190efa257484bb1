"""A log whose repeated events become one, with how often it was there as the label `repeats`: plays of a song in a day,
pieces of an article in a basket. `jobs.prepare --duplicates count`.

What happened several times is not known before it happened: so it is a label, which no model reads of its own event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pipelines.data.sources.base import Block, Metadata, Source
from pipelines.data.sources.pieces import Piece
from pipelines.data.sources.readers import Reading, TextFormat

REPEATS = "repeats"
"""Name of the label."""


@dataclass(frozen=True)
class Counted(Source):
    """Another source, whose events have the label REPEATS too; 1 until repeated ones are put together."""

    source: Source

    @property
    def info(self) -> dict[str, Any]:
        info = self.source.info
        return {**info, "labels": {**info["labels"], REPEATS: "float32"}}

    @property
    def config(self) -> dict[str, Any]:
        return self.source.config

    @property
    def events_config(self) -> dict[str, Any]:
        return self.source.events_config

    @property
    def origins(self) -> dict[str, dict[str, str]]:
        return self.source.origins

    def written(self, kind: str) -> TextFormat | None:
        return self.source.written(kind)

    @property
    def absent(self) -> frozenset[str]:
        return self.source.absent

    @property
    def items_columns(self) -> tuple[list[str], list[str]]:
        return self.source.items_columns

    @property
    def items_numbers(self) -> list[str]:
        return self.source.items_numbers

    @property
    def keeps_all_items(self) -> bool:
        return self.source.keeps_all_items

    def event_files(self, input_uri: str) -> list[str]:
        return self.source.event_files(input_uri)

    def reading_of(self, file: str) -> Reading | None:
        return self.source.reading_of(file)

    def read_events(
        self, input_uri: str, file: str, users: pa.Table | None = None, piece: Piece | None = None
    ) -> Iterator[Block]:
        at = self.schema.get_field_index(f"label_{REPEATS}")
        for block in self.source.read_events(input_uri, file, users, piece):
            once = pa.repeat(pa.scalar(1.0, pa.float32()), block.events.num_rows)
            yield replace(block, events=block.events.add_column(at, self.schema.field(at), once))

    def user_files(self, input_uri: str) -> list[str]:
        return self.source.user_files(input_uri)

    def read_users(self, input_uri: str, beginning: bool = False) -> Metadata | None:
        return self.source.read_users(input_uri, beginning)

    def item_files(self, input_uri: str) -> list[str]:
        return self.source.item_files(input_uri)

    def read_items(self, input_uri: str, file: str) -> Iterator[Metadata]:
        return self.source.read_items(input_uri, file)
