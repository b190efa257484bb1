"""Keys and values of a language model as `transformers` asks for them, given and taken as plain tensors.

What it is given stays as it is: what a pass adds makes new tensors, so searches can begin at one prompt many times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from models.retrieval.parts import Memory


class CacheLayer(DynamicLayer):
    """Those of one layer; the first ones are kept without a copy."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            key_states = torch.cat([self.keys, key_states], 2)
            value_states = torch.cat([self.values, value_states], 2)
        self.keys, self.values = key_states, value_states
        self.dtype, self.device, self.is_initialized = (
            key_states.dtype,
            key_states.device,
            True,
        )
        return key_states, value_states


def cache_of(memory: Memory | None) -> Cache:
    """A cache that begins with `memory`."""
    if memory is None:
        return Cache(layer_class_to_replicate=CacheLayer)
    layers: list[Any] = [CacheLayer() for _ in memory]
    for layer, (keys, values) in zip(layers, memory, strict=True):
        layer.update(keys, values)
    return Cache(layers=layers)


def memory_of(cache: Any) -> Memory:
    """What the cache holds."""
    return [(layer.keys, layer.values) for layer in cache.layers]
