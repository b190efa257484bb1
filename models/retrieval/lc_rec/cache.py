"""Keys and values of a language model as a `transformers` cache that is never mutated.

A pass creates new tensors for its keys and values, so many searches can start from one
prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from models.retrieval.parts import Memory


class CacheLayer(DynamicLayer):
    """Keys and values of one layer. The first update copies no tensors."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, heads, S, width), and return all of them."""
        if self.keys is not None and self.values is not None:
            key_states = torch.cat([self.keys, key_states], 2)
            value_states = torch.cat([self.values, value_states], 2)
        self.keys, self.values = key_states, value_states
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True
        return key_states, value_states


def to_cache(memory: Memory | None) -> Cache:
    """Return a cache that starts with `memory`."""
    if memory is None:
        return Cache(layer_class_to_replicate=CacheLayer)
    layers: list[Any] = [CacheLayer() for _ in memory]
    for layer, (keys, values) in zip(layers, memory, strict=True):
        layer.update(keys, values)
    return Cache(layers=layers)


def to_memory(cache: Any) -> Memory:
    """Return the keys and values of each layer of a cache."""
    return [(layer.keys, layer.values) for layer in cache.layers]
