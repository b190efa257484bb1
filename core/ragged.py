"""Arrays of rows with different lengths, stored end to end (CSR).

Row `i` of `values` is `values[offsets[i]:offsets[i + 1]]`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def lengths_to_offsets(lengths: NDArray) -> NDArray[np.int64]:
    """Return the (n + 1,) offsets of rows with these (n,) lengths."""
    return np.append(0, np.cumsum(lengths, dtype=np.int64))


def lengths_to_starts(lengths: NDArray) -> NDArray[np.int64]:
    """Return the (n,) index of each row's first value, given the (n,) lengths."""
    return np.cumsum(lengths, dtype=np.int64) - lengths


def gather_ranges(begin: NDArray, lengths: NDArray) -> NDArray[np.int64]:
    """Return the indices `begin[i], ..., begin[i] + lengths[i] - 1` of all rows.

    Args:
        begin: (n,) index of each row's first value.
        lengths: (n,) number of values of each row.

    Returns:
        (sum of lengths,) indices of all values, row by row.
    """
    total = int(lengths.sum())
    return np.arange(total) + np.repeat(begin - lengths_to_starts(lengths), lengths)


def row_numbers(lengths: NDArray) -> NDArray[np.int64]:
    """Return the row number of each value, given the (n,) lengths of the rows."""
    return np.repeat(np.arange(len(lengths)), lengths)


def find_rows(offsets: NDArray[np.int64], index: NDArray) -> NDArray[np.int64]:
    """Return the row of each (m,) index into the values of all rows."""
    return np.searchsorted(offsets, index, side="right") - 1


def narrow_indices(index: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return ascending indices as int32 if the last one fits, which halves memory."""
    fits = not len(index) or index[-1] <= np.iinfo(np.int32).max
    return index.astype(np.int32) if fits else index


def run_starts(*keys: NDArray) -> NDArray[np.int64]:
    """Return the indices at which a run of equal keys begins.

    Args:
        keys: (n,) arrays; a run ends where any of them changes.
    """
    length = len(keys[0])
    is_start = np.zeros(length, bool)
    is_start[:1] = True
    for key in keys:
        is_start[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(is_start)


def pad_indices(
    begin: NDArray, lengths: NDArray, min_width: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the indices of ragged rows as a padded matrix.

    Args:
        begin: (B,) index of each row's first value.
        lengths: (B,) number of values of each row.
        min_width: Minimum number of columns T; T is the largest length if larger.

    Returns:
        (B, T) indices, 0 at padding, and a (B, T) mask that is false at padding.
    """
    column = np.arange(max(min_width, int(lengths.max(initial=0))))
    inside = column < lengths[:, None]
    return np.where(inside, begin[:, None] + column, 0), inside


def pad_ragged(
    values: NDArray, index: NDArray[np.int64], inside: NDArray[np.bool_], fill: int
) -> NDArray:
    """Gather ragged rows into a padded array.

    Args:
        values: (E, ...) values of all rows, end to end.
        index: (B, T) indices from `pad_indices`.
        inside: (B, T) mask from `pad_indices`.
        fill: Value at padding.

    Returns:
        (B, T, ...) values.
    """
    if not len(values):
        return np.full((*index.shape, *values.shape[1:]), fill, values.dtype)
    padded = values.take(index, axis=0)  # faster than values[index] for wide rows
    padded[~inside] = fill
    return padded


def find_sorted(
    values: NDArray, queries: NDArray
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Look up values in an ascending array.

    Args:
        values: (n,) ascending values.
        queries: (m,) values to look up.

    Returns:
        (m,) indices into `values`, and a (m,) mask that is true for values that occur
        in `values`.
    """
    index = np.minimum(np.searchsorted(values, queries), max(0, len(values) - 1))
    if not len(values):
        return index, np.zeros(len(queries), bool)
    return index, values[index] == queries


def split_evenly(weights: NDArray, num_parts: int) -> NDArray[np.int64]:
    """Split rows into consecutive parts with about equal sums of weights.

    No part is empty if there are at least as many rows as parts.

    Args:
        weights: (n,) weights of the rows.
        num_parts: Number of parts.

    Returns:
        (num_parts + 1,) edges of the parts.
    """
    part = np.arange(num_parts + 1)
    if len(weights) < num_parts:
        return len(weights) * part // num_parts
    total = np.cumsum(weights)  # (n,)
    # (num_parts,) sums at the ends of parts
    targets = total[-1] * part[1:] / num_parts - 0.5
    edges = np.append(0, np.searchsorted(total, targets) + 1)
    # At least one row per part: edges rise by 1 or more and leave rows for later parts.
    edges = np.maximum.accumulate(edges - part) + part
    return np.minimum(edges, len(weights) - num_parts + part)
