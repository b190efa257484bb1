"""Paired timings of models and decoders, with PyTorch alone: a file for each, on one harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from models.bench import actions, decode, search_encoder
from models.bench.harness import Row

BENCHMARKS: dict[str, Callable[..., Iterator[Row]]] = {
    "decode": decode.decode,
    "search_encoder": search_encoder.search_encoder,
    "actions": actions.actions,
}
