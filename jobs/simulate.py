"""Writes a simulated raw log with known causes, to try the other commands on.

    python -m jobs.simulate --output raw --users 1500 --items 400 --events 15000

The same sizes and seed give the same log. Read it with `jobs/configs/sources/simulated.yaml`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from jobs import cli
from pipelines.data.simulator import Settings, is_simulated, simulate_retrieval

SOURCE = Path(__file__).parent / "configs" / "sources" / "simulated.yaml"


@dataclass
class Config:
    """Options."""

    output: str
    """Folder for the log: new, empty, or with an earlier simulated log, which is replaced."""
    users: int = 1500
    """Users, each with at least one event."""
    items: int = 400
    """Items of the catalogue; rare ones may have no event."""
    events: int = 15_000
    """Events, exactly."""
    seed: int = 42
    """Seed of everything that is drawn."""

    def __post_init__(self) -> None:
        Settings(self.users, self.items, self.events, self.seed)


def run(config: Config) -> None:
    """Writes the log, unless the folder holds it already."""
    settings = Settings(config.users, config.items, config.events, config.seed)
    size = f"{config.events:,} events of {config.users:,} users on {config.items:,} items, seed {config.seed}"
    if is_simulated(config.output, settings):
        print(f"{config.output} is up to date: {size}")
    else:
        started = time.monotonic()
        simulate_retrieval(config.output, config.users, config.items, config.events, config.seed)
        print(f"simulated {size}, in {time.monotonic() - started:.1f} s\n  {config.output}")
    print(f"next: python -m jobs.prepare --source {SOURCE} --input {config.output} --output TABLES")


if __name__ == "__main__":
    cli.main(run, Config)
