"""Encodings that the datasets of several kinds share.

String hashes, request numbers, splits as integers, and arrays as tensors.

Shapes: `m` requests.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.splits import SPLITS

PAD = -1
"""`item_index` at padding of a history, and target of a request without a target."""

FNV_PRIME = 0x100000001B3
"""Base of the polynomial in `hash_strings`, which wraps at 64 bits."""


def hash_strings(strings: pa.Array) -> NDArray[np.int64]:
    """Return a stable, non-negative 63-bit hash of each string.

    The hash is a polynomial over the string's bytes, mixed by the finaliser of
    SplitMix64.
    """
    binary = strings.cast(pa.large_binary())
    if len(binary) == 0:
        return np.zeros(0, np.int64)
    _, offset_buffer, data_buffer = binary.buffers()
    first, last = binary.offset, binary.offset + len(binary)
    offsets = np.frombuffer(offset_buffer, np.int64)[first : last + 1]
    if offsets[-1] == offsets[0]:
        return np.zeros(len(binary), np.int64)
    # (n,) bytes of all strings, end to end
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    lengths = np.diff(offsets)
    powers = np.cumprod(np.full(int(lengths.max()), FNV_PRIME, np.uint64))
    position = np.arange(len(data)) - np.repeat(offsets[:-1], lengths)
    terms = (data.astype(np.uint64) + np.uint64(1)) * powers[position]
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms)])
    value = totals[offsets[1:]] - totals[offsets[:-1]]  # (strings,)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value = value ^ (value >> np.uint64(31))
    return (value >> np.uint64(1)).astype(np.int64)


REQUEST_INDEX_BITS = 24
"""Bits of a request number for the index among a user's requests: 16 million."""


def request_number(
    user_row: NDArray[np.integer], index: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Return unique numbers of requests.

    Args:
        user_row: (m,) table row of each request's user.
        index: (m,) index of each request among its user's requests.
    """
    return (np.asarray(user_row, np.int64) << REQUEST_INDEX_BITS) + index


def request_index(number: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the `index` (m,) from which `request_number` made each `number` (m,)."""
    return np.asarray(number, np.int64) & ((1 << REQUEST_INDEX_BITS) - 1)


def request_columns(*names: str) -> list[str]:
    """Return the Parquet paths of the requests' fields `names`."""
    return [f"requests.list.element.{name}" for name in names]


def decode_splits(splits: pa.Array) -> NDArray[np.int8]:
    """Return the index (m,) of each split name in `SPLITS`, or -1 for other names."""
    index = pc.index_in(splits, pa.array(SPLITS, splits.type))
    return pc.fill_null(index, -1).to_numpy(zero_copy_only=False).astype(np.int8)


def to_tensor(values: NDArray) -> Tensor:
    """Convert an array of any integer type to an int64 tensor."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int64))
