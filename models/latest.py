"""What was last asked for, within a bound.

kept = Latest(1000)
kept.put("u1", state, size=24)
kept.get("u1")     # None once others of this size in all were asked for since
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

TEXTS = 1 << 16
"""Encoded texts that are kept: 100 MB at a width of 384."""


class Latest(Generic[V]):
    """Values by key; where their sizes exceed `most` together, what was asked for longest ago goes."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> V | None:
        """The value of the key, or None."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: Hashable, value: V, size: int = 1) -> None:
        """Keeps the value, unless it alone is larger than the bound."""
        if key in self._values:
            self.held -= self._values.pop(key)[1]
        self._values[key] = value, size
        self.held += size
        while self.held > self.most:
            self.held -= self._values.popitem(last=False)[1][1]

    def of(self, keys: Sequence[K], make: Callable[[list[K]], dict[K, V]]) -> list[V]:
        """The values of the keys; `make` gives those of keys that have none."""
        known = {key: value for key in keys if (value := self.get(key)) is not None}
        if missing := [key for key in dict.fromkeys(keys) if key not in known]:
            for key, value in make(missing).items():
                known[key] = value
                self.put(key, value)
        return [known[key] for key in keys]
