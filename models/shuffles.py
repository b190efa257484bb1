"""How inputs of a model are exchanged between the rows of a batch, for permutation importance."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Shuffle = Callable[[Any, dict[str, Tensor], torch.Generator], AbstractContextManager[dict[str, Tensor]]]
"""`with shuffle(model, batch, generator) as batch`: within it the model reads one input of another row."""


def exchanged(values: Tensor, generator: torch.Generator) -> Tensor:
    """The rows of `values` (N, ...) in a random order."""
    return values[torch.randperm(len(values), generator=generator).to(values.device)]
