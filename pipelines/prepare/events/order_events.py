"""Sort the events of one partition and find duplicates."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.prepare.reading.reader import MISSING_VALUES

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
    has_place = LOG_PLACE in table.column_names
    order, repeats_key = _sort_by_user_and_time(user, table["timestamp_ms"])
    is_duplicate = np.zeros(len(order), dtype=bool)
    position = np.zeros(len(order), dtype=np.int32)
    if repeats_key.any():
        is_tied = np.zeros(len(order), dtype=bool)
        is_tied[1:] |= repeats_key
        is_tied[:-1] |= repeats_key
        rows = order[is_tied]
        events = add_missing_columns(table.take(pa.array(rows)), schema)
        if has_place:
            events = events.append_column(LOG_PLACE, table[LOG_PLACE].take(rows))
        # (ties,) index of the user and time of each tied event
        group = np.append(0, np.cumsum(~repeats_key))[is_tied]
        ties = pl.DataFrame(events).with_columns(
            pl.Series("group", group), pl.int_range(pl.len()).alias("row")
        )
        keys = ["request_id", "position", "item_id"]
        keys += [name for name in schema.names if name not in keys]
        ties = ties.sort("group", *([LOG_PLACE, "position"] if has_place else keys))
        content = [pl.col(name) for name in ("group", *schema.names)]
        if has_place:
            # equal rows need not be adjacent in the log; the earliest is no duplicate
            repeats = pl.struct(content).is_first_distinct().not_()
        else:
            repeats = pl.all_horizontal(
                pl.col("row").shift(1).is_not_null(),
                *(column.eq_missing(column.shift(1)) for column in content),
            )
        ties = ties.with_columns(repeats.alias("repeats"))
        is_kept = (~pl.col("repeats") | keep_duplicates).cast(pl.Int32)
        rank = ties.select(is_kept.cum_sum().over("group") - 1).to_series()
        order[is_tied] = rows[ties["row"].to_numpy()]
        is_duplicate[is_tied] = ties["repeats"].to_numpy()
        position[is_tied] = rank.to_numpy()
    duplicates = int(is_duplicate.sum())
    if duplicates and not keep_duplicates:
        order, position = order[~is_duplicate], position[~is_duplicate]
    columns = {
        field.name: _take(table[field.name], field.type, order)
        for field in schema
        if field.name in table.column_names and field.name not in ("user_id", "item_id")
    }
    columns["user_id"] = pa.DictionaryArray.from_arrays(user[order], user_ids)
    columns["item_id"] = pa.DictionaryArray.from_arrays(item[order], item_ids)
    if has_place:
        columns["position"] = pa.array(position)
    return add_missing_columns(pa.table(columns), schema).combine_chunks(), duplicates


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
    """Return the order of events, and which are of the user and time before them."""
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
