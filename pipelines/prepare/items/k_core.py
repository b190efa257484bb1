"""The iterative k-core of users and items with at least k behaviours each.

No process holds a table of users. The driver holds one id and one count per item.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa

from core.errors import UserError
from pipelines.prepare.events.parts import (
    EventStats,
    is_behaviour,
    label_columns,
    read_events,
)
from pipelines.prepare.executor import Executor


def core_items(
    stats: EventStats,
    core: int,
    before_ms: int | None,
    executor: Executor,
    always_kept: pl.Series | None = None,
) -> tuple[pl.DataFrame, int]:
    """Compute the items in the k-core.

    Each round drops users with fewer than `core` behaviours on the remaining items, and
    then items with fewer than `core` behaviours by the remaining users. The rounds end
    when no item is dropped. Between rounds, 8 bytes per behaviour stay in Ray's object
    store.

    Args:
        stats: Statistics of the events.
        core: Minimum number of behaviours; 0 and 1 keep all items that have one.
        before_ms: Epoch ms; only behaviours known earlier are counted. None counts all.
        executor: Runs one task per part and round.
        always_kept: Ids of items that are kept even with fewer behaviours.

    Returns:
        Ids of the items, sorted, with their numbers of behaviours, as in `stats.items`,
        and the number of rounds.
    """
    core = max(core, 1)
    if core == 1 and before_ms is None:
        return stats.items, 0
    ids = stats.items["id"]
    items = executor.put(ids.to_frame("item_id").with_row_index("item"))
    shared = (stats.behaviour, stats.is_late, before_ms, items)
    parts = list(executor.submit(_read_pairs, [(uri,) for uri in stats.parts], shared))
    is_in_core = np.ones(len(ids), dtype=bool)
    is_always_kept = np.zeros(len(ids), dtype=bool)
    if always_kept is not None:
        is_always_kept = ids.is_in(always_kept.implode()).to_numpy()
    rounds = 0
    while True:
        counts = np.zeros(len(is_in_core), dtype=np.int64)
        calls = [(core, part) for part in parts]
        mask = (executor.put(is_in_core),)
        for _, part in executor.map_unordered(_count_items, calls, mask):
            counts[part["item"].to_numpy()] += part["count"].to_numpy()
        rounds += 1
        is_still_in_core = (counts >= core) | is_always_kept
        if not counts[is_still_in_core].any():
            raise UserError(
                f"no item remains in the {core}-core of {stats.behaviours:,} behaviours"
            )
        if (is_still_in_core == is_in_core).all():
            return stats.items.filter(is_in_core), rounds
        is_in_core = is_still_in_core


def _read_pairs(
    behaviour: str | None,
    is_late: bool,
    before_ms: int | None,
    items: pl.DataFrame,
    uri: str,
) -> pa.Table:
    """Read the user and the item of each counted behaviour of a part."""
    columns = ["user_id", "item_id", "timestamp_ms", *label_columns(behaviour, is_late)]
    events = read_events(uri, columns).filter(is_behaviour(behaviour))
    if before_ms is not None:
        known = pl.coalesce(*label_columns(behaviour, is_late)[1:], "timestamp_ms")
        events = events.filter(known < before_ms)
    pairs = events.join(items, on="item_id", maintain_order="left")
    return pairs.select(user=pl.col("user_id").rle_id(), item="item").to_arrow()


def _count_items(is_in_core: np.ndarray, core: int, pairs: pa.Table) -> pl.DataFrame:
    """Count the behaviours per item of a part, without users below the core."""
    counted = pl.DataFrame(pairs.filter(pa.array(is_in_core[pairs["item"]])))
    counted = counted.filter(pl.len().over("user") >= core)
    return counted.group_by("item").len("count")
