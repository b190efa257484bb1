"""What may surprise in well made tables of a retrieval log: requests without a history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.tables import Manifest
from pipelines.data.durations import DAY_MS

TIED = 0.1
"""Share of requests that ties leave without a history."""
WITHOUT_HISTORY = 0.5
"""Share of training requests without a history, whatever the reason."""


def histories(events: Manifest, info: dict[str, Any]) -> Iterator[str]:
    """A line where many training requests have no history."""
    requests, without = info["requests"], info["requests_without_history"]
    train, bare = requests["train"], without["train"]
    first = sum(without.values()) - info["users"]  # each user's first behaviour has none, whatever the ties
    said = f"{bare:,} of {train:,} training requests ({bare / max(train, 1):.0%}) have no history and train nothing"
    if info["ties"] == "strict" and first > TIED * sum(requests.values()):
        times = (
            "all times are days"
            if events.info["clock"] and events.info.get("grain_ms") == DAY_MS
            else "many share their time"
        )
        yield (
            f"{said}: {times}, and ties are in no history; --ties log_order lets each behaviour see those before it in "
            f"the log"
        )
    elif bare > WITHOUT_HISTORY * train:
        yield f"{said}: most users have one behaviour; a longer log, or a higher --core, leaves those with more"
