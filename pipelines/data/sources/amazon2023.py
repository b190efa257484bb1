"""Amazon Reviews 2023 (McAuley Lab): review and metadata JSON lines, and the published 5-core CSVs.

    CATEGORY.jsonl(.gz)        reviews: user_id, parent_asin, rating, timestamp (ms), verified_purchase, ...
    meta_CATEGORY.jsonl(.gz)   items: parent_asin, title, store, main_category, categories, features, description
    CATEGORY.csv(.gz)          user_id,parent_asin,rating,timestamp (ms), from the 0-core and 5-core folders

Reviews and CSVs have the same schema here; `verified` is null in the CSVs. Votes for helpfulness are left
out: they come after the event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from models.tables import UserError
from pipelines.data.sources.base import Block, Metadata, Source, list_files
from pipelines.data.sources.mapping import Items, Mapping, items_origins, read_items
from pipelines.data.sources.pieces import Piece
from pipelines.data.sources.readers import Reading, TextFormat, format_of

TIME = {"column": "timestamp", "unit": "ms"}
RATING = {"column": "rating", "type": "float32"}


@dataclass(frozen=True)
class Amazon2023(Source):
    """Reviews as events, by the files' suffix from JSON lines or CSV."""

    files: str = "*"
    """Pattern of the event files, relative to the input folder; metadata files are left out of it."""
    items: str | None = "*meta_*.jsonl*"
    """Pattern of the metadata files; None: no item texts."""

    @property
    def reviews(self) -> Mapping:
        """How the review JSON lines are read."""
        labels = {"rating": RATING, "verified": {"column": "verified_purchase"}}
        return Mapping(files=self.files, user="user_id", item="parent_asin", time=TIME, labels=labels)

    @property
    def ratings(self) -> Mapping:
        """How the CSVs are read."""
        return Mapping(files=self.files, user="user_id", item="parent_asin", time=TIME, labels={"rating": RATING})

    @property
    def metadata(self) -> Items:
        """How the item JSON lines are read."""
        return Items(
            files=self.items or "",
            item="parent_asin",
            texts=["title", "store", "categories", "features", "description"],
            attributes=["main_category", "store"],
            lists=["categories", "features", "description"],
        )

    @property
    def info(self) -> dict[str, Any]:
        return self.reviews.info

    @property
    def origins(self) -> dict[str, dict[str, str]]:
        return {**self.reviews.origins, "items": items_origins(self.metadata) if self.items else {}}

    def written(self, kind: str) -> TextFormat | None:
        return self.metadata if kind == "items" else self.reviews

    @property
    def absent(self) -> frozenset[str]:
        return self.reviews.absent & self.ratings.absent

    @property
    def items_columns(self) -> tuple[list[str], list[str]]:
        return (list(self.metadata.texts), list(self.metadata.attributes)) if self.items else ([], [])

    @property
    def events_config(self) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if key != "items"}

    def event_files(self, input_uri: str) -> list[str]:
        files = list_files(input_uri, self.files, required=True, what="event file")
        files = [f for f in files if ".csv" in f or (".jsonl" in f and not f.rsplit("/", 1)[-1].startswith("meta_"))]
        if not files:
            raise UserError(
                f"{input_uri} holds no reviews (*.jsonl*) and no ratings (*.csv*) like '{self.files}'; check --input"
            )
        if len({format_of(file) for file in files}) > 1:
            raise UserError(
                f"{input_uri} holds reviews ({next(f for f in files if '.jsonl' in f)}) and ratings "
                f"({next(f for f in files if '.csv' in f)}), which are the same events; set 'files' to one of them"
            )
        return files

    def reading_of(self, file: str) -> Reading:
        return (self.reviews if format_of(file) == "jsonl" else self.ratings).reading

    def read_events(
        self, input_uri: str, file: str, users: pa.Table | None = None, piece: Piece | None = None
    ) -> Iterator[Block]:
        if format_of(file) == "jsonl":
            yield from self.reviews.read_events(input_uri, file, None, piece)
            return
        schema = self.block_schema
        for block in self.ratings.read_events(input_uri, file, None, piece):
            at = schema.get_field_index("label_verified")
            events = block.events.add_column(at, schema.field(at), pa.nulls(block.events.num_rows, pa.bool_()))
            yield Block(events, block.rejects, block.rows_read)

    def item_files(self, input_uri: str) -> list[str]:
        return list_files(input_uri, self.items, required=False, what="metadata file") if self.items else []

    def read_items(self, input_uri: str, file: str) -> Iterator[Metadata]:
        return read_items(self.metadata, input_uri, file)
