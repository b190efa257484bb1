"""The iterative k-core: items and users that have at least k behaviours with each other.

No process holds a table of users; the driver holds one id and one count per item.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from models.ragged import run_starts
from models.storage.tables import UserError
from pipelines.data.engine import Engine
from pipelines.data.events.columns import (
    Vocabulary,
    bool_column,
    dictionary_column,
    index_in,
    known_columns,
    known_times,
    label_columns,
    read_part,
)
from pipelines.data.events.event_stats import EventStats


def core_items(
    stats: EventStats,
    core: int,
    before_ms: int | None,
    engine: Engine,
    always_kept: pa.Array | None = None,
) -> tuple[pa.Array, int]:
    """Return the ids of the items in the k-core, sorted, and the number of rounds it took.

    Repeats until nothing changes: drop users with fewer than `core` behaviours on the
    items that are left, then items with fewer than `core` behaviours by the users that
    are left. 8 bytes per behaviour stay in the object store, or on its disk, between
    the rounds.

    Args:
        stats: Statistics of the events.
        core: Least number of behaviours; 0 and 1 keep every item.
        before_ms: Count only behaviours known earlier than this; None for all.
        engine: Runs one task per part and round.
        always_kept: (sorted) ids of items that stay whatever their behaviours.

    Raises:
        UserError: if no item is left.
    """
    core = max(core, 1)
    if core == 1 and before_ms is None:
        return stats.items, 0
    vocabulary = engine.put(Vocabulary.from_ids(stats.items))
    shared = (stats.behaviour, stats.late, before_ms, vocabulary)
    parts = list(engine.submit(_read_pairs, [(uri,) for uri in stats.parts], shared))
    kept = np.ones(len(stats.items), dtype=bool)
    is_always_kept = np.zeros(len(stats.items), dtype=bool)
    if always_kept is not None:
        is_always_kept = pc.is_in(
            stats.items.cast(pa.large_string()), always_kept
        ).to_numpy(zero_copy_only=False)
    rounds = 0
    while True:
        counts = np.zeros(len(kept), dtype=np.int64)
        calls = [(core, part) for part in parts]
        for _, table in engine.map_unordered(_count_items, calls, (engine.put(kept),)):
            counts[table["item"].to_numpy()] += table["count"].to_numpy()
        rounds += 1
        left = (counts >= core) | is_always_kept
        if not counts[left].any():
            raise UserError(
                f"no item is left in the {core}-core of {stats.behaviours:,} behaviours; set a lower --core"
            )
        if (left == kept).all():
            return stats.items.filter(pa.array(kept)), rounds
        kept = left


def _read_pairs(
    behaviour: str | None,
    late: bool,
    before_ms: int | None,
    items: Vocabulary,
    uri: str,
) -> pa.Table:
    """Return the behaviours of one part that count: `user` (a code within the part, ascending) and `item`."""
    columns = ["user_id", "item_id", *label_columns(behaviour)]
    if before_ms is not None:
        columns += ["timestamp_ms", *known_columns(behaviour, late)]
    table = read_part(uri, columns)
    counts = np.ones(table.num_rows, dtype=bool)
    if behaviour:
        counts = bool_column(table, f"label_{behaviour}")
    if before_ms is not None:
        counts = counts & (known_times(table, behaviour) < before_ms)
    user = dictionary_column(table, "user_id").indices.to_numpy()[counts]
    item = index_in(dictionary_column(table, "item_id"), items)[counts]
    return pa.table({"user": pa.array(user, pa.int32()), "item": item})


def _count_items(kept: np.ndarray, core: int, pairs: pa.Table) -> pa.Table:
    """Return for each item of a part its behaviours by users with `core` behaviours on `kept` (N,) items."""
    user, item = pairs["user"].to_numpy(), pairs["item"].to_numpy()
    counts = kept[item]
    if len(item):
        start = run_starts(user)
        per_user = np.add.reduceat(counts, start, dtype=np.int64)
        lengths = np.diff(np.append(start, len(item)))
        counts &= np.repeat(per_user >= core, lengths)
    per_item = pl.DataFrame({"item": item[counts]}).group_by("item").len("count")
    schema = pa.schema([("item", pa.int32()), ("count", pa.int64())])
    return per_item.to_arrow().cast(schema)
