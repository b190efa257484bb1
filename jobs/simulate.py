"""Simulate a raw log whose behaviours have known causes, to try the other commands on.

    python -m jobs.simulate --output raw --users 1500 --items 400 --events 15000
    python -m jobs.simulate --kind search --output raw_search --query_driven 0.5
    python -m jobs.simulate --kind feed --output raw_feed --events 30000

The same options give the same log. The source file that describes it is
`simulated.yaml` in `jobs/configs/sources`, for a search log `simulated_search.yaml`,
for a feed `simulated_feed.yaml`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from jobs import cli
from models.config import pluralize
from pipelines.data.actions.simulator import FeedSettings
from pipelines.data.kind import Kind
from pipelines.data.kinds import KINDS
from pipelines.data.search.simulator import SearchSettings
from pipelines.data.simulation import Settings, is_simulated

SOURCES = Path(__file__).parent / "configs" / "sources"

SIMULATED: dict[str, Kind] = {kind.simulated_name: kind for kind in KINDS.values()}
"""Kinds of log by the values of `--kind`."""


@dataclass(frozen=True, kw_only=True)
class Config(SearchSettings, FeedSettings):
    """Options of jobs.simulate."""

    output: str
    """Folder for the log: new, empty, or with an earlier simulated log, which is
    replaced."""
    kind: Literal[tuple(SIMULATED)] = "retrieval"  # type: ignore[valid-type]
    """`retrieval`: one item per event. `search`: searches with a query, ten results,
    clicks, purchases and dwell. `feed`: impressions with likes, comments, shares,
    follows, hides and dwell of dog and cat users."""

    def __post_init__(self) -> None:
        allowed = _list_settings(self.kind)
        for kind in SIMULATED:
            for name in _list_settings(kind):
                value = getattr(self, name)
                if name not in allowed and value != getattr(Config, name):
                    raise ValueError(
                        f"{name} is {value}, and is an option of --kind {kind}; add "
                        f"--kind {kind}"
                    )
        self.settings()  # checks the values

    def settings(self) -> Settings:
        """Return the simulator's settings: the options that apply to `kind`."""
        names = _list_settings(self.kind)
        return SIMULATED[self.kind].simulator_settings(
            **{name: getattr(self, name) for name in names}
        )


def _list_settings(kind: str) -> list[str]:
    """Return the names of the settings of a simulated log of one kind."""
    return [field.name for field in fields(SIMULATED[kind].simulator_settings)]


def run(config: Config) -> None:
    """Write the log, unless the folder already holds the log of the same options."""
    kind = SIMULATED[config.kind]
    settings = config.settings()
    users = pluralize(config.users, "user")
    items = pluralize(config.items, "item")
    size = (
        f"{config.events:,} {settings.unit} of {users} on {items}, seed "
        f"{config.seed}{settings.describe()}"
    )
    if is_simulated(config.output, settings, config.kind):
        print(f"{config.output} is up to date: {size}")
    else:
        start_s = time.monotonic()
        print(f"simulating {config.events:,} {settings.unit}", flush=True)
        lines = list(kind.simulate(config.output, settings))
        seconds = time.monotonic() - start_s
        print(f"simulated {size}, in {seconds:.1f} s\n  {config.output}")
        for line in lines:
            print(line)
    source = SOURCES / f"{kind.simulated_source}.yaml"
    # A submitted job runs in Ray's copy of the working directory, so an absolute path
    # would be of no use in the next command.
    if source.is_relative_to(Path.cwd()):
        source = source.relative_to(Path.cwd())
    prepare = cli.command_line(
        "jobs.prepare", source=str(source), input=config.output, output="TABLES"
    )
    print(f"next: {prepare}")


if __name__ == "__main__":
    cli.main(run, Config)
