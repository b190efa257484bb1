"""Sort the events of one partition and find duplicates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.prepare.reading.log import MISSING_VALUES

LOG_PLACE = "log_place"
"""Column with the row number of an event in the log; only with `ties: log_order`."""


def order_events(
    table: pa.Table, schema: pa.Schema, keep_duplicates: bool = False
) -> tuple[pa.Table, int]:
    """Sort the events of one partition and drop exact duplicates.

    Events are sorted by (user_id, timestamp_ms, request_id, position, item_id) and then
    by every other column, so the result does not depend on the order of the input. With
    a column `log_place` (`ties: log_order`), events of one user and time are sorted by
    (log_place, position) instead, and `position` becomes their rank in this order.

    Rows are sorted by one integer key of user and time. Only ties, which are rare in
    most logs, are compared column by column.

    Args:
        table: Events in any order; columns that the log does not have may be missing.
        schema: Schema of the result.
        keep_duplicates: Keep events that repeat another event in every column.

    Returns:
        The events, whose ids are dictionary-encoded with sorted dictionaries, and the
        number of duplicates, whether dropped or kept.
    """
    user, user_ids = _sorted_codes(table["user_id"])
    item, item_ids = _sorted_codes(table["item_id"])
    order, same_as_previous = _sort_by_user_and_time(user, table["timestamp_ms"])
    positions, duplicates = None, 0
    if same_as_previous.any():
        ties = _Ties.find(table, order, same_as_previous, schema)
        sorted_ties = ties.sort(schema, keep_duplicates)
        order, positions = sorted_ties.apply(order, ties.rows, keep_duplicates)
        duplicates = int(sorted_ties.is_duplicate.sum())
    if LOG_PLACE in table.column_names and positions is None:
        positions = np.zeros(len(order), dtype=np.int32)
    columns = {
        field.name: _take(table[field.name], field.type, order)
        for field in schema
        if field.name in table.column_names and field.name not in ("user_id", "item_id")
    }
    columns["user_id"] = pa.DictionaryArray.from_arrays(user[order], user_ids)
    columns["item_id"] = pa.DictionaryArray.from_arrays(item[order], item_ids)
    if positions is not None:
        columns["position"] = pa.array(positions)
    events = add_missing_columns(pa.table(columns), schema)
    return events.combine_chunks(), duplicates


def add_missing_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with all columns of `schema`, in the order of `schema`.

    Missing columns get their value of MISSING_VALUES, otherwise null.
    """
    columns = []
    for field in schema:
        if field.name in table.column_names:
            columns.append(table[field.name])
        else:
            value = pa.scalar(MISSING_VALUES.get(field.name), field.type)
            columns.append(pa.repeat(value, table.num_rows))
    # The types of ids differ from the schema if they are dictionary-encoded.
    fields = [
        field.with_type(column.type)
        for field, column in zip(schema, columns, strict=True)
    ]
    return pa.table(columns, schema=pa.schema(fields))


def _sorted_codes(strings: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """Encode strings by the rank of their value."""
    encoded = pc.dictionary_encode(strings)
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    order = pc.sort_indices(encoded.dictionary)
    rank = np.empty(len(order), dtype=np.int32)
    rank[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
    return rank[encoded.indices.to_numpy()], encoded.dictionary.take(order)


def _sort_by_user_and_time(
    user: np.ndarray, times: pa.ChunkedArray
) -> tuple[np.ndarray, np.ndarray]:
    """Sort events by user and time."""
    time = times.to_numpy()
    first = int(time.min())
    span = int(time.max()) - first + 1
    if span * (int(user.max()) + 1) < 2**63:
        key = user.astype(np.int64) * span + (time - first)
        order = np.argsort(key)
        key = key[order]
        return order, key[1:] == key[:-1]
    order = np.lexsort((time, user))
    user, time = user[order], time[order]
    return order, (user[1:] == user[:-1]) & (time[1:] == time[:-1])


def _take(
    column: pa.ChunkedArray, dtype: pa.DataType, rows: np.ndarray
) -> pa.ChunkedArray:
    """Return the values of a column at `rows`, as type `dtype`."""
    # A partition may hold over 2 GB of text, which needs 64-bit offsets.
    wide_dtype = pa.large_string() if dtype == pa.string() else dtype
    return column.cast(wide_dtype).take(pa.array(rows)).cast(dtype)


@dataclass(frozen=True)
class _Ties:
    """The T events that share user and time with another event."""

    rows: np.ndarray
    """(E,) bool: whether a sorted row is tied."""
    group: np.ndarray
    """(T,) index of the (user, time) group of each tied row, ascending."""
    events: pa.Table
    """(T,) tied events."""

    @classmethod
    def find(
        cls,
        table: pa.Table,
        order: np.ndarray,
        same_as_previous: np.ndarray,
        schema: pa.Schema,
    ) -> _Ties:
        """Collect the tied rows of a sorted partition."""
        rows = np.zeros(len(order), dtype=bool)
        rows[1:] |= same_as_previous
        rows[:-1] |= same_as_previous
        group = np.append(0, np.cumsum(~same_as_previous))[rows]
        fields = list(schema)
        if LOG_PLACE in table.column_names:
            fields.append(pa.field(LOG_PLACE, pa.int64()))
        events = table.take(pa.array(order[rows]))
        return cls(rows, group, add_missing_columns(events, pa.schema(fields)))

    def sort(self, schema: pa.Schema, keep_duplicates: bool) -> _SortedTies:
        """Sort the tied events within their groups and mark duplicates."""
        frame = pl.from_arrow(self.events)
        assert isinstance(frame, pl.DataFrame)
        frame = frame.with_columns(
            pl.Series("group", self.group), pl.int_range(pl.len()).alias("row")
        )
        if LOG_PLACE in frame.columns:
            return _sort_by_log_place(frame, schema, keep_duplicates)
        return _sort_by_content(frame, schema)


def _sort_by_log_place(
    frame: pl.DataFrame, schema: pa.Schema, keep_duplicates: bool
) -> _SortedTies:
    """Sort tied events by their row in the log, and then by position."""
    frame = frame.sort("group", LOG_PLACE, "position")
    # Equal rows need not be adjacent in the log; the earliest is no duplicate.
    content = pl.struct([*schema.names, "group"])
    is_first = frame.select(content.is_first_distinct()).to_series()
    is_kept = (is_first | keep_duplicates).cast(pl.Int32).alias("is_kept")
    rank = pl.col("is_kept").cum_sum().over("group") - 1
    position = frame.with_columns(is_kept).select(rank).to_series()
    return _SortedTies(
        frame["row"].to_numpy(), ~is_first.to_numpy(), position.to_numpy()
    )


def _sort_by_content(frame: pl.DataFrame, schema: pa.Schema) -> _SortedTies:
    """Sort tied events by all columns, so that duplicates are adjacent."""
    first_keys = ["request_id", "position", "item_id"]
    other_keys = [name for name in schema.names if name not in (*first_keys, "user_id")]
    frame = frame.sort("group", *first_keys, *other_keys)
    equals_previous = [
        pl.col(name).eq_missing(pl.col(name).shift(1))
        for name in [*schema.names, "group"]
    ]
    is_duplicate = frame.select(pl.all_horizontal(equals_previous)).to_series()
    flags = is_duplicate.to_numpy().copy()
    flags[0] = False
    return _SortedTies(frame["row"].to_numpy(), flags, None)


@dataclass(frozen=True)
class _SortedTies:
    """Order and duplicates of T tied events."""

    tie_order: np.ndarray
    """(T,) index of each tied event, in sorted order."""
    is_duplicate: np.ndarray
    """(T,) bool, in sorted order: whether an earlier event is equal."""
    position: np.ndarray | None
    """(T,) rank within the group, in sorted order; None without `log_place`."""

    def apply(
        self, order: np.ndarray, tied: np.ndarray, keep_duplicates: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Reorder the tied rows of a partition and drop duplicates."""
        order = order.copy()
        order[tied] = order[tied][self.tie_order]
        positions = None
        if self.position is not None:
            positions = np.zeros(len(order), dtype=np.int32)
            positions[tied] = self.position
        if keep_duplicates or not self.is_duplicate.any():
            return order, positions
        is_kept = np.ones(len(order), dtype=bool)
        is_kept[tied] = ~self.is_duplicate
        if positions is not None:
            positions = positions[is_kept]
        return order[is_kept], positions
