"""Tables that every task of a run looks up."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pipelines.prepare.events.columns import Vocabulary
from pipelines.prepare.run import Run
from pipelines.prepare.sequences.as_of import AsOfTable


@dataclass(frozen=True)
class Lookups:
    """Tables that every part looks up, which are stored once for all tasks."""

    catalogue: Vocabulary
    """Item ids, whose indices are item_index."""
    queries: Vocabulary | None = None
    """Queries, whose indices are query_index; None for kinds without queries."""
    as_of: tuple[AsOfTable, ...] = ()
    """Tables whose features are joined to events."""
    attributes: dict[str, np.ndarray] = field(default_factory=dict)
    """(I,) codes of the items' values of each attribute that is counted, by name, -1
    for an item without a value."""


def read_vocabulary(run: Run, table: str, column: str) -> Vocabulary:
    """Return the `Vocabulary` of a column of unique ids, whose indices are its rows."""
    ids = pa.array([], pa.large_string())
    if run.tables.current(table).files:
        ids = run.tables.current(table).read([column])[column].combine_chunks()
    return Vocabulary.from_ids(ids)


def read_catalogue(run: Run) -> Vocabulary:
    """Return the `Vocabulary` of item ids, whose indices are item_index."""
    return read_vocabulary(run, "items", "item_id")
