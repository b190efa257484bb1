"""What may surprise in well made tables of a search log: requests of one class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.tables import Manifest
from pipelines.data.splits import NAMES


def classes(events: Manifest, info: dict[str, Any]) -> Iterator[str]:
    """A line for each split that no model can be compared on."""
    for name in NAMES:
        if info["requests"][name] and info["requests_one_class"][name] == info["requests"][name]:
            yield (
                f"all {info['requests'][name]:,} {name} requests have one class only, all results or none with "
                f"'{info['behaviour']}', so there is no GAUC; check the labels, and that results without it are in the "
                f"log"
            )
