"""Tables that every task of a run looks up, stored once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from pipelines.prepare.events.columns import Vocabulary
from pipelines.prepare.executor import Shared, fetch
from pipelines.prepare.run import Run


@dataclass(frozen=True)
class Lookups:
    """Tables that every part looks up: the tables themselves, or references to them."""

    catalogue: Shared
    """`Vocabulary` of item ids, whose indices are item_index."""
    queries: Shared = None
    """`Vocabulary` of queries, whose indices are query_index; None for kinds without
    queries."""
    as_of: tuple[Shared, ...] = ()
    """`AsOfTable` of each table whose features are joined to events."""
    attributes: Shared = None
    """Codes (I,) int32 of the items' values of each attribute that is counted, by name,
    -1 for an item without a value."""

    def fetch(self) -> Lookups:
        """Return the lookups with all references resolved."""
        return Lookups(
            fetch(self.catalogue),
            fetch(self.queries),
            tuple(fetch(table) for table in self.as_of),
            fetch(self.attributes),
        )


def share_vocabulary(run: Run, table: str, column: str) -> Shared:
    """Store the `Vocabulary` of a column of unique ids, whose indices are its rows."""
    ids = pa.array([], pa.large_string())
    if run.tables.current(table).files:
        ids = run.tables.current(table).read([column])[column].combine_chunks()
    return run.executor.put(Vocabulary.from_ids(ids))


def share_catalogue(run: Run) -> Shared:
    """Store the `Vocabulary` of item ids, whose indices are item_index."""
    return share_vocabulary(run, "items", "item_id")
