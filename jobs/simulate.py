"""Writes a simulated raw log with known causes, to try the other commands on.

    python -m jobs.simulate --output raw --users 1500 --items 400 --events 15000
    python -m jobs.simulate --kind search --output raw_search --query_driven 0.5
    python -m jobs.simulate --kind feed --output raw_feed --events 30000

The same settings give the same log. Read it with `jobs/configs/sources/simulated.yaml`, a search log with
`simulated_search.yaml`, a feed with `simulated_feed.yaml`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from jobs import cli
from models.words import number_of
from pipelines.data.kind import Kind
from pipelines.data.kinds import KINDS
from pipelines.data.simulation import Settings, is_simulated

SOURCES = Path(__file__).parent / "configs" / "sources"
SIMULATED: dict[str, Kind] = {kind.simulated: kind for kind in KINDS.values()}


@dataclass
class Config:
    """Options."""

    output: str
    """Folder for the log: new, empty, or with an earlier simulated log, which is replaced."""
    kind: Literal[tuple(SIMULATED)] = "retrieval"  # type: ignore[valid-type]
    """`retrieval`: one item per event. `search`: searches with a query, ten results, clicks, purchases and dwell.
    `feed`: impressions with likes, comments, shares, follows, hides and dwell of dog and cat users."""
    users: int = 1500
    """Users, each with at least one event or search."""
    items: int = 400
    """Items of the catalogue; rare ones may have no event."""
    events: int = 15_000
    """Events or searches, exactly."""
    seed: int = 42
    """Seed of everything that is drawn."""
    files: int = 1
    """Files of equally many events, in the order of time, such as 14 days; more of a large log."""
    query_driven: float = 1.0
    """Search: share of searches whose clicks follow the query; in the others they follow the history."""
    taste: Literal["user", "class", "query"] = "user"
    """Search: whether a user likes some makers everywhere, those of one of two classes, or others in every second
    cluster of items."""
    disliked_click: float = 0.25
    """Search: chance of a click on a fitting result of a maker that the user does not like, if looked at; else 0.85."""
    shown_days: float = 0.0
    """Feed: days that each item is shown for, so that later ones are new; 0: as long as the log is."""

    def __post_init__(self) -> None:
        mine = _options(self.kind)
        for kind in SIMULATED:
            for name in _options(kind):
                value = getattr(self, name)
                if name not in mine and value != getattr(Config, name):
                    raise ValueError(f"{name} is {value}, which is of a {kind} log; add --kind {kind}")
        self.settings()

    def settings(self) -> Settings:
        """Settings of the simulated log."""
        return SIMULATED[self.kind].settings(**{name: getattr(self, name) for name in _options(self.kind)})


def _options(kind: str) -> list[str]:
    """Names of the settings of a simulated log."""
    return [field.name for field in fields(SIMULATED[kind].settings)]


def run(config: Config) -> None:
    """Writes the log, unless the folder holds it already."""
    kind, settings = SIMULATED[config.kind], config.settings()
    size = (
        f"{config.events:,} {settings.unit} of {number_of(config.users, 'user')} on {number_of(config.items, 'item')}, "
        f"seed {config.seed}{settings.describe()}"
    )
    if is_simulated(config.output, settings, config.kind):
        print(f"{config.output} is up to date: {size}")
    else:
        started = time.monotonic()
        lines = list(kind.simulate(config.output, settings))
        print(f"simulated {size}, in {time.monotonic() - started:.1f} s\n  {config.output}")
        for line in lines:
            print(line)
    source = SOURCES / f"{kind.source}.yaml"
    print(f"next: {cli.line('jobs.prepare', source=str(source), input=config.output, output='TABLES')}")


if __name__ == "__main__":
    cli.main(run, Config)
