"""Tables of features with a time of their own, such as an item's price or a user's plan as they change.

    as_of:
      prices:
        files: prices-*.csv
        item: article            # or user: customer
        time: {column: valid_from, unit: s}
        numbers: [price]
        categories: {stock: stock_state}

A request reads the latest row with a time strictly before its own; `pipelines/data/as_of.py` finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from models.tables import join
from pipelines.data.sources.base import LOG_ROW, Block, list_files
from pipelines.data.sources.load import build, check_name, named
from pipelines.data.sources.normalise import Columns, Time, blocks
from pipelines.data.sources.readers import TextFormat, read_frames
from pipelines.data.sources.transforms import check_transforms, raw_columns, read_transforms, transformed
from pipelines.data.tables import events_schema


@dataclass(frozen=True)
class AsOf(TextFormat):
    """Where features of items, or of users, come from as they change."""

    files: str
    """Pattern of the files, relative to the input folder (`*`, `?`, `[...]`)."""
    time: Any
    """Column and unit of the time from which a row holds: {column, unit}."""
    item: str | None = None
    """Column with the item's id, for features of items; or give `user`."""
    user: str | None = None
    """Column with the user's id, for features of users; or give `item`."""
    numbers: Any = field(default_factory=dict)
    """Numeric features by name: {name: column}, or a list of columns."""
    categories: Any = field(default_factory=dict)
    """Categorical features by name: {name: column}, or a list of columns."""
    transforms: Any = field(default_factory=dict)
    """Changes to values before they are read, by column, as in `items`."""

    def __post_init__(self) -> None:
        if (self.item is None) == (self.user is None):
            raise ValueError("it needs either 'item' or 'user', the column with whose features they are")
        if isinstance(self.time, dict):
            object.__setattr__(self, "time", build(Time, self.time, "time."))
        if not isinstance(self.time, Time):
            raise ValueError(f"'time' is {self.time!r}; write {{column: ..., unit: ...}}")
        for kind in ("numbers", "categories"):
            object.__setattr__(self, kind, named(getattr(self, kind), kind))
        if not self.numbers and not self.categories:
            raise ValueError("it has neither 'numbers' nor 'categories'; name at least one column")
        self.check_format()
        object.__setattr__(self, "transforms", read_transforms(self.transforms))
        check_transforms(self.transforms, self._columns)

    @property
    def _columns(self) -> tuple[str, ...]:
        wanted = [str(self.item or self.user), self.time.column, *self.numbers.values(), *self.categories.values()]
        return tuple(dict.fromkeys(wanted))

    @property
    def key(self) -> str:
        """The column of events that it is of: `item_id` or `user_id`."""
        return "item_id" if self.item else "user_id"

    @property
    def schema(self) -> pa.Schema:
        """Its columns: the key, `timestamp_ms` and features."""
        events = events_schema(None, self.numbers, self.categories)
        return pa.schema([events.field(self.key), events.field("timestamp_ms"), *self.features])

    @property
    def features(self) -> pa.Schema:
        """Its features alone."""
        made = events_schema(None, self.numbers, self.categories)
        return pa.schema([f for f in made if f.name.startswith(("num_", "cat_"))])

    @property
    def origins(self) -> dict[str, str]:
        """Its columns, each with what it is in the raw file."""
        return {
            self.key: str(self.item or self.user),
            "timestamp_ms": f"{self.time.column}, {self.time.unit}",
            **{f"num_{name}": column for name, column in self.numbers.items()},
            **{f"cat_{name}": column for name, column in self.categories.items()},
        }

    def listed(self, input_uri: str) -> list[str]:
        """Its files; UserError if there is none."""
        return list_files(input_uri, self.files, required=True, what="file of features")

    def read(self, input_uri: str, file: str) -> Iterator[Block]:
        """Streams a file: rows of `schema`, and those that break it, as events are read."""
        id_ = str(self.item or self.user)
        columns = Columns(id_, id_, self.time, None, None, None, {}, self.numbers, self.categories, None)
        raw, times, ids = (raw_columns(names, self.transforms) for names in (self._columns, [self.time.column], [id_]))
        reading, uri = self.read_as(raw, integers=frozenset(times), ids=ids), join(input_uri, file)
        schema, first = events_schema(None, self.numbers, self.categories).append(LOG_ROW), 0
        for frame in read_frames(input_uri, file, reading):
            rows = transformed(frame.rows, self.transforms, uri)
            for block in blocks(rows, frame.broken, columns, schema, uri=uri, file=file, first_log_row=first):
                rows = block.events.select(self.schema.names)
                yield replace(block, events=rows, missing=frame.missing)
                first += block.rows_read


def build_as_of(given: Any, clock: bool, taken: list[str]) -> dict[str, AsOf]:
    """The tables of a source file by name. ValueError for one that cannot be, a time of another sort than the log's
    (`clock`), and a feature with the name of another one; `taken` are those of events."""
    if not isinstance(given, dict):
        raise ValueError(f"'as_of' is {given!r}; write name: {{files: ..., item: ..., time: ..., numbers: ...}}")
    made: dict[str, AsOf] = {}
    names = list(taken)
    for name, content in given.items():
        check_name(name, "as_of")
        if not isinstance(content, dict | AsOf):
            raise ValueError(f"as_of.{name} is {content!r}; it is a mapping of keys")
        try:
            made[name] = build(AsOf, content, "") if isinstance(content, dict) else content
        except ValueError as error:
            raise ValueError(f"as_of.{name}: {error}") from error
        if made[name].time.clock != clock:
            raise ValueError(f"as_of.{name}.time has unit {made[name].time.unit}, which is not of the log's clock")
        for feature in made[name].features.names:
            if feature in names:
                raise ValueError(f"as_of.{name} has '{feature[4:]}', the name of another feature; give it another")
            names.append(feature)
    return made
