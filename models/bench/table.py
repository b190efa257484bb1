"""The benchmarks of models by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from models.bench import actions, decode, search_encoder, shares
from models.bench.harness import Row

BENCHMARKS: dict[str, Callable[..., Iterator[Row]]] = {
    "decode": decode.decode,
    "search_encoder": search_encoder.search_encoder,
    "actions": actions.actions,
    "shares": shares.shares,
}
