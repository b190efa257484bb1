"""Sort one partition of events and find its duplicates: `order_events`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.data.reading.log import MISSING_VALUES

LOG_PLACE = "log_place"
"""Column with an event's row number in the log; events have it with `ties:
log_order`."""


def order_events(
    table: pa.Table, schema: pa.Schema, keep_duplicates: bool = False
) -> tuple[pa.Table, int]:
    """Sort the events of one partition and drop exact duplicates, unless they are kept.

    The order is total: (user_id, timestamp_ms, request_id, position, item_id), then
    every other column, so the result does not depend on the order of the input. With a
    `log_place` column (`ties: log_order`) events of one user and time stay in the order
    of the log, events of one row by their position, and `position` becomes the rank
    among them.

    Most logs have few ties, so the bulk of the sort is one argsort of an integer. Only
    tied rows are compared column by column.

    Args:
        table: Events in any order; columns that the log does not have may be missing.
        schema: Schema of the result.
        keep_duplicates: Keep events that repeat another in every column.

    Returns:
        The events, with dictionary-coded ids and sorted dictionaries, and the number of
        duplicates.
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
    """Return the table with all columns of `schema`, in its order."""
    columns = []
    for field in schema:
        if field.name in table.column_names:
            columns.append(table[field.name])
        else:
            value = pa.scalar(MISSING_VALUES.get(field.name), field.type)
            columns.append(pa.repeat(value, table.num_rows))
    # ids may be dictionary-coded
    fields = [f.with_type(c.type) for f, c in zip(schema, columns, strict=True)]
    return pa.table(columns, schema=pa.schema(fields))


def _sorted_codes(strings: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """Return the values as int32 indices into their sorted set, and that set."""
    coded = pc.dictionary_encode(strings)
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    order = pc.sort_indices(coded.dictionary)
    rank = np.empty(len(order), dtype=np.int32)
    rank[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
    return rank[coded.indices.to_numpy()], coded.dictionary.take(order)


def _sort_by_user_and_time(
    user: np.ndarray, times: pa.ChunkedArray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (E,) rows by user and time, and (E - 1,) whether a sorted row ties with the row above it.

    user (E,) is the rank of each user.
    """
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
    column: pa.ChunkedArray, kind: pa.DataType, rows: np.ndarray
) -> pa.ChunkedArray:
    """Take rows of a column. A partition may hold more than 2 GB of text, over Arrow's limit of 32-bit offsets."""
    wide = pa.large_string() if kind == pa.string() else kind
    return column.cast(wide).take(pa.array(rows)).cast(kind)


@dataclass(frozen=True)
class _Ties:
    """Events that share user and time with a neighbour. T tied rows."""

    rows: np.ndarray
    """(E,) bool: whether a sorted row is tied."""
    group: np.ndarray
    """(T,) number of the (user, time) group of each tied row."""
    events: pa.Table
    """(T,) the tied events."""

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
        content = [*schema.names, "group"]
        if LOG_PLACE in frame.columns:
            # The earliest of equal rows stays; equal rows need not be neighbours in the
            # log.
            frame = frame.sort("group", LOG_PLACE, "position")
            is_first = frame.select(pl.struct(content).is_first_distinct()).to_series()
            stays = (is_first | keep_duplicates).cast(pl.Int32).alias("stays")
            rank = pl.col("stays").cum_sum().over("group") - 1
            position = frame.with_columns(stays).select(rank).to_series()
            return _SortedTies(
                frame["row"].to_numpy(), ~is_first.to_numpy(), position.to_numpy()
            )
        first = ["request_id", "position", "item_id"]
        others = [name for name in schema.names if name not in (*first, "user_id")]
        frame = frame.sort("group", *first, *others)
        equal = [pl.col(name).eq_missing(pl.col(name).shift(1)) for name in content]
        is_duplicate = frame.select(pl.all_horizontal(equal)).to_series()
        flags = is_duplicate.to_numpy().copy()
        flags[0] = False
        return _SortedTies(frame["row"].to_numpy(), flags, None)


@dataclass(frozen=True)
class _SortedTies:
    """The order of tied events. T tied rows."""

    order: np.ndarray
    """(T,) tied rows in their order."""
    is_duplicate: np.ndarray
    """(T,) bool, in that order: whether an earlier row is equal."""
    position: np.ndarray | None
    """(T,) rank within the group, in that order; None without `log_place`."""

    def apply(
        self, order: np.ndarray, tied: np.ndarray, keep_duplicates: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the rows of the partition and their positions, without duplicates unless they are kept.

        Args:
            order: (E,) rows by user and time.
            tied: (E,) bool: which of them are tied.
            keep_duplicates: Keep events that repeat another.
        """
        order = order.copy()
        order[tied] = order[tied][self.order]
        positions = None
        if self.position is not None:
            positions = np.zeros(len(order), dtype=np.int32)
            positions[tied] = self.position
        if keep_duplicates or not self.is_duplicate.any():
            return order, positions
        stays = np.ones(len(order), dtype=bool)
        stays[tied] = ~self.is_duplicate
        return order[stays], None if positions is None else positions[stays]
