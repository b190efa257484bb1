"""Logs written by `pipelines/data/kinds/retrieval/simulator.py`: `events-*.parquet` and `items.parquet`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipelines.data.sources.mapping import Mapping


@dataclass(frozen=True)
class Simulated(Mapping):
    """A mapping whose columns are those that the simulator writes."""

    files: str = "events-*.parquet"
    """Pattern of the event files."""
    user: str = "user_id"
    """Column with the user's id."""
    item: str = "item_id"
    """Column with the item's id."""
    time: Any = None
    """Column and unit; the simulator's own by default."""

    def __post_init__(self) -> None:
        if self.time is None:
            object.__setattr__(self, "time", {"column": "timestamp_ms", "unit": "ms"})
        if self.items is None:
            items = {
                "files": "items.parquet",
                "item": "item_id",
                "texts": ["title", "description"],
                "attributes": ["brand"],
            }
            object.__setattr__(self, "items", items)
        super().__post_init__()
