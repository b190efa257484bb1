"""Batches of examples: tensors with named axes.

    batch = dataset.collate(rows).to(device)
    batch.history                              # (B, T)
    batch.pad_to_buckets(max_behaviours=100)   # few shapes, for CUDA graphs

Each kind declares its tensors in subclasses of `Batch`, with their axes and the value
at padded positions. Axes: `B` rows, `T` behaviours of the longest row, `R` requests,
`N` candidates; a kind documents others. Only the axes in `bucket_axes` are padded to
buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

PAD = -1
"""`item_index` at padding of a history, and target of a request without a target."""


def axes(*names: str, padding: float = 0, default: Any = dataclasses.MISSING) -> Any:
    """Declare a tensor of a batch.

    Args:
        names: The tensor's axes, in order.
        padding: Value at positions that `pad_to_buckets` adds.
        default: None for a tensor that may be left out.
    """
    return field(default=default, metadata={"axes": names, "padding": padding})


def bucket_size(size: int) -> int:
    """Round a size up to a bucket: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    if size < 2:
        return size
    power = 1 << (size - 1).bit_length() - 1
    half_more = power * 3 // 2
    return half_more if size <= half_more else power * 2


def to_tensor(values: NDArray) -> Tensor:
    """Convert an array of any integer type to an int64 tensor."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int64))


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


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of examples. Subclasses declare its tensors with `axes`."""

    bucket_axes: ClassVar[tuple[str, ...]] = ()
    """Axes whose sizes `pad_to_buckets` pads."""

    is_stand_in: bool = False
    """Whether the batch only fills in for a worker without examples of the global
    batch, so that its loss must not count."""
    is_padded: bool = False
    """Whether the batch is padded to buckets, so that models must keep its shapes and
    not select positions by value."""
    padding_rows: int = 0
    """Number of rows that `pad_to_buckets` added."""

    @property
    def num_rows(self) -> int:
        """Number of rows without padding."""
        return self.size("B") - self.padding_rows

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(iter(self.tensors().values())).device

    @property
    def signature(self) -> tuple[Any, ...]:
        """Shapes, dtypes and flags, which select the CUDA graph of the batch."""
        shapes = [
            (name, value.shape, value.dtype) for name, value in self.tensors().items()
        ]
        flags = [
            getattr(self, entry.name)
            for entry in dataclasses.fields(self)
            if entry.type == "bool"
        ]
        return (*shapes, *flags)

    @classmethod
    def tensor_axes(cls) -> dict[str, tuple[str, ...]]:
        """Return the axes of each declared tensor by name."""
        return {
            entry.name: entry.metadata["axes"]
            for entry in dataclasses.fields(cls)
            if "axes" in entry.metadata
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the batch by name, without fields that are None."""
        values = {name: getattr(self, name) for name in self.tensor_axes()}
        return {name: value for name, value in values.items() if value is not None}

    def size(self, axis: str) -> int:
        """Return the size of an axis."""
        declared = self.tensor_axes()
        for name, value in self.tensors().items():
            if axis in declared[name]:
                return value.shape[declared[name].index(axis)]
        raise KeyError(f"{type(self).__name__} has no axis {axis}")

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the batch with `function` applied to each tensor."""
        changed: dict[str, Any] = {
            name: function(value) for name, value in self.tensors().items()
        }
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> Self:
        """Return the batch on a device.

        Copies from pinned memory to a GPU run asynchronously.
        """
        device = torch.device(device)
        is_gpu = device.type == "cuda"
        return self.map(lambda value: value.to(device, non_blocking=is_gpu))

    def copy_from(self, other: Self) -> None:
        """Overwrite the tensors with the values of another batch, for CUDA graphs.

        Args:
            other: A batch with the same signature.
        """
        targets = self.tensors()
        for name, value in other.tensors().items():
            targets[name].copy_(value, non_blocking=True)

    def select(self, axis: str, index: Tensor | slice) -> Self:
        """Return the batch with some positions of an axis.

        Args:
            axis: The axis. Only tensors with this axis as their first one are changed.
            index: Positions to select.
        """
        declared = self.tensor_axes()
        changed: dict[str, Any] = {
            name: value[index]
            for name, value in self.tensors().items()
            if declared[name][0] == axis
        }
        return replace(self, **changed)

    def pad_to_buckets(
        self, max_behaviours: int, bucket_axes: Sequence[str] | None = None
    ) -> Self:
        """Pad the batch to one of few shapes.

        Padding changes neither loss nor gradient: models ignore the padded positions by
        the values there.

        Args:
            max_behaviours: Maximum number of behaviours of a row; the axis `T` is not
                padded to more.
            bucket_axes: The axes to pad; None pads the class's `bucket_axes`.
        """
        added: dict[str, int] = {}
        for axis in bucket_axes or self.bucket_axes:
            size = self.size(axis)
            padded_size = bucket_size(size)
            if axis == "T":
                padded_size = min(padded_size, max(size, max_behaviours))
            added[axis] = padded_size - size
        padded: dict[str, Any] = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            widths = [added.get(axis, 0) for axis in entry.metadata.get("axes", ())]
            if value is None or not any(widths):
                continue
            # functional.pad takes (before, after) of each axis, the last axis first
            pads: list[int] = []
            for width in reversed(widths):
                pads += [0, width]
            fill = entry.metadata["padding"]
            padded[entry.name] = functional.pad(value, pads, value=fill)
        return replace(self, **padded, is_padded=True, padding_rows=added.get("B", 0))
