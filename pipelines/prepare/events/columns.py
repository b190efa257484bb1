"""Read parts of the events table, and convert their columns to numpy arrays.

    events = read_part(uri, ["user_id", "item_id", "timestamp_ms"])
    item_index = encode_ids(dictionary_column(events, "item_id"), catalogue)

Shapes: E events of a part, V ids of a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from core.tables import read_parquet

USER_AND_ITEM = ("user_id", "item_id")


@dataclass(frozen=True)
class Vocabulary:
    """Mapping from ids to indices, by binary search in sorted ids.

    Tasks on a node share one copy in Ray's object store.
    """

    ids: pa.Array
    """(V,) distinct large strings, sorted."""
    index: np.ndarray | None = None
    """(V,) int32 index of each id; None if it is the position in `ids`."""

    @classmethod
    def from_ids(cls, ids: pa.Array) -> Vocabulary:
        """Build the vocabulary that maps each of the distinct `ids` to its position."""
        ids = ids.cast(pa.large_string())
        if pl.Series(pl.from_arrow(ids)).is_sorted():
            return cls(ids)
        order = pc.sort_indices(ids)
        return cls(ids.take(order), order.to_numpy().astype(np.int32))

    def __len__(self) -> int:
        return len(self.ids)

    def lookup(self, ids: pa.Array) -> np.ndarray:
        """Return the (n,) int32 index of each id, -1 for null or unknown ids."""
        if not len(self) or not len(ids):
            return np.full(len(ids), -1, dtype=np.int32)
        vocabulary = pl.Series(pl.from_arrow(self.ids.cast(pa.large_string())))
        queries = pl.Series(pl.from_arrow(ids.cast(pa.large_string())))
        position = vocabulary.search_sorted(queries).to_numpy()
        position = np.minimum(position, len(vocabulary) - 1)
        equal = (vocabulary.gather(position) == queries).fill_null(False).to_numpy()
        index = position if self.index is None else self.index[position]
        return np.where(equal, index, -1).astype(np.int32)

    def ids_at(self, index: np.ndarray) -> pa.Array:
        """Return the (n,) ids at (n,) indices."""
        if self.index is None:
            return self.ids.take(pa.array(index))
        position = np.empty(len(self), dtype=np.int64)
        position[self.index] = np.arange(len(self))
        return self.ids.take(pa.array(position[index]))


def read_part(
    uri: str,
    columns: list[str] | None = None,
    ids: tuple[str, ...] = USER_AND_ITEM,
) -> pa.Table:
    """Read a part of the events table, with each column in one chunk.

    Args:
        uri: Parquet file of the part.
        columns: Columns to read; None for all.
        ids: Columns to read as dictionary-encoded arrays.
    """
    table = read_parquet(uri, columns, dictionary=ids)
    return table.unify_dictionaries().combine_chunks()


def dictionary_column(table: pa.Table, name: str) -> pa.DictionaryArray:
    """Return a dictionary-encoded column of `read_part` as one array."""
    column = table[name]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def bool_column(table: pa.Table, name: str) -> np.ndarray:
    """Return the (E,) values of a bool column, false for nulls."""
    column = pc.fill_null(table[name].combine_chunks(), False)
    return column.to_numpy(zero_copy_only=False)


def encode_ids(ids: pa.DictionaryArray, vocabulary: Vocabulary) -> np.ndarray:
    """Return the (E,) int32 vocabulary index of each id, -1 for null or unknown ids."""
    index = vocabulary.lookup(ids.dictionary)
    code = pc.fill_null(ids.indices.cast(pa.int64()), -1).to_numpy()
    return np.append(index, np.int32(-1))[code].astype(np.int32)


def user_keys(users: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return (n,) 63-bit hashes of user ids as int64, the same in every process."""
    hashes = pl.Series(pl.from_arrow(users)).hash(seed=0).to_numpy()
    return (hashes >> np.uint64(1)).astype(np.int64)


def sorted_unique(values: np.ndarray) -> np.ndarray:
    """Return the distinct values of (n,) integers in ascending order.

    `np.unique` hashes integers since NumPy 2.3, which takes 7 to 45 times as long.
    """
    return pl.Series(values).unique().sort().to_numpy()


def count_pairs(users: np.ndarray, items: np.ndarray) -> int:
    """Return the number of distinct (user, item) pairs of two (n,) arrays of integers.

    A user is in one part only, so the counts of all parts may be summed.
    """
    return pl.Series(users.astype(np.int64) << 32 | items).n_unique()


def label_columns(behaviour: str | None) -> list[str]:
    """Return a list with the column of the behaviour label, empty without a label."""
    return [f"label_{behaviour}"] if behaviour else []


def known_columns(behaviour: str | None, is_late: bool) -> list[str]:
    """Return a list with the column of times at which the label became known.

    The list is empty unless the label is known later than its event.
    """
    return [f"known_{behaviour}"] if behaviour and is_late else []


def known_times(table: pa.Table, behaviour: str | None) -> np.ndarray:
    """Return the (E,) epoch ms from which each event is known as a behaviour.

    This is the value of the column `known_*` of the label, or the time of the event if
    there is no column or value.
    """
    time = table["timestamp_ms"]
    if behaviour and f"known_{behaviour}" in table.column_names:
        time = pc.coalesce(table[f"known_{behaviour}"], time)
    return time.to_numpy()
