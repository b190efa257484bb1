"""Writes a simulated raw log with known causes, to try the other commands on.

    python -m jobs.simulate --output raw --users 1500 --items 400 --events 15000
    python -m jobs.simulate --kind search --output raw_search --query_driven 0.5
    python -m jobs.simulate --kind feed --output raw_feed --events 30000

The same settings give the same log. Read it with `jobs/configs/sources/simulated.yaml`, a search log with
`simulated_search.yaml`, a feed with `simulated_feed.yaml`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jobs import cli
from pipelines.data.feed_simulator import KINDS, best_entropy, simulate_feed
from pipelines.data.search_simulator import SearchSettings, best_gauc, simulate_search
from pipelines.data.simulator import Settings, is_simulated, simulate_retrieval

SOURCES = Path(__file__).parent / "configs" / "sources"


@dataclass
class Config:
    """Options."""

    output: str
    """Folder for the log: new, empty, or with an earlier simulated log, which is replaced."""
    kind: Literal["retrieval", "search", "feed"] = "retrieval"
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
    query_driven: float = 1.0
    """Search: share of searches whose clicks follow the query; in the others they follow the history."""
    taste: Literal["user", "query"] = "user"
    """Search: whether a user likes the same makers everywhere, or others in every second cluster of items."""
    disliked_click: float = 0.25
    """Search: chance of a click on a fitting result of a maker that the user does not like, if looked at; else 0.85."""

    def __post_init__(self) -> None:
        if self.kind != "search" and self.query_driven != 1:
            raise ValueError(f"query_driven is {self.query_driven}, which is of a search log; add --kind search")
        if self.kind != "search" and self.taste != "user":
            raise ValueError(f"taste is {self.taste}, which is of a search log; add --kind search")
        if self.kind != "search" and self.disliked_click != Config.disliked_click:
            raise ValueError(f"disliked_click is {self.disliked_click}, which is of a search log; add --kind search")
        self.settings()

    def settings(self) -> Any:
        """Settings of the simulator of this kind."""
        sizes = (self.users, self.items, self.events, self.seed)
        if self.kind == "search":
            return SearchSettings(*sizes, self.query_driven, self.taste, self.disliked_click)
        return Settings(*sizes)


def run(config: Config) -> None:
    """Writes the log, unless the folder holds it already."""
    settings = config.settings()
    things = "searches" if config.kind == "search" else "events"
    size = f"{config.events:,} {things} of {config.users:,} users on {config.items:,} items, seed {config.seed}"
    if config.kind == "search":
        size += f", {config.query_driven:.0%} query-driven" + (", taste by query" if config.taste == "query" else "")
        if config.disliked_click != Config.disliked_click:
            size += f", clicks on disliked makers {config.disliked_click:g}"
    if is_simulated(config.output, settings, config.kind):
        print(f"{config.output} is up to date: {size}")
    else:
        started, bounds = time.monotonic(), {}
        sizes = (config.users, config.items, config.events, config.seed)
        if config.kind == "search":
            causes = (config.query_driven, config.taste, config.disliked_click)
            bounds = best_gauc(*simulate_search(config.output, *sizes, *causes))
        elif config.kind == "feed":
            simulate_feed(config.output, *sizes)
        else:
            simulate_retrieval(config.output, *sizes)
        print(f"simulated {size}, in {time.monotonic() - started:.1f} s\n  {config.output}")
        if bounds:
            print("GAUC of clicks at best, by " + ", ".join(f"{name} {value:.4f}" for name, value in bounds.items()))
    if config.kind == "feed":
        print(
            f"half of the users like {KINDS[0]}s, half {KINDS[1]}s, which only their actions tell: normalised entropy "
            f"of like is 1 without actions and {best_entropy('like'):.3f} at best"
        )
    source = SOURCES / {"search": "simulated_search.yaml", "feed": "simulated_feed.yaml"}.get(
        config.kind, "simulated.yaml"
    )
    print(f"next: python -m jobs.prepare --source {source} --input {config.output} --output TABLES")


if __name__ == "__main__":
    cli.main(run, Config)
