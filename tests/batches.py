"""Batches of which a test gives only the tensors that it is about."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from models.dataset.batch import Batch

Kind = TypeVar("Kind", bound=Batch)


def fill_batch(kind: type[Kind], sizes: dict[str, int], **tensors: Any) -> Kind:
    """A batch of these tensors; all others are zeros of the `sizes` of their axes, 0 by
    default.
    """
    for name, axes in kind.tensor_axes().items():
        shape = [sizes.get(axis, 0) for axis in axes]
        tensors.setdefault(name, torch.zeros(shape, dtype=torch.long))
    return kind(**tensors)
