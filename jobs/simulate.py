"""Write a simulated raw log with known causes, to try the other commands on.

    python -m jobs.simulate --output raw --users 1500 --items 400 --events 15000
    python -m jobs.simulate --kind search --output raw_search --query_driven 0.5
    python -m jobs.simulate --kind feed --output raw_feed --events 30000

The same settings give the same log. Read it with `jobs/configs/sources/simulated.yaml`,
a search log with `simulated_search.yaml`, a feed with `simulated_feed.yaml`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, Literal

from jobs import cli
from jobs.options import most_derived
from models.config import pluralize
from pipelines.data.kind import Kind
from pipelines.data.kinds import KINDS
from pipelines.data.simulation import Settings, is_simulated

SOURCES = Path(__file__).parent / "configs" / "sources"
SIMULATED: dict[str, Kind] = {kind.simulated_name: kind for kind in KINDS.values()}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of jobs.simulate."""

    output: str
    """Folder for the log: new, empty, or with an earlier simulated log, which is
    replaced."""
    kind: Literal[tuple(SIMULATED)] = "retrieval"  # type: ignore[valid-type]
    """`retrieval`: one item per event. `search`: searches with a query, ten results,
    clicks, purchases and dwell. `feed`: impressions with likes, comments, shares,
    follows, hides and dwell of dog and cat users."""

    def __post_init__(self) -> None:
        mine = _options(self.kind)
        for kind in SIMULATED:
            for name in _options(kind):
                value = getattr(self, name)
                if name not in mine and value != getattr(Config, name):
                    raise ValueError(
                        f"{name} is {value}, which is of a {kind} log; add --kind {kind}"
                    )
        self.settings()

    def settings(self) -> Settings:
        """Return the settings of the simulated log."""
        return SIMULATED[self.kind].simulator_settings(
            **{name: getattr(self, name) for name in _options(self.kind)}
        )


Config: Any = make_dataclass(
    "Config",
    [],
    bases=(Options, *most_derived(kind.simulator_settings for kind in KINDS.values())),
    frozen=True,
    kw_only=True,
)
Config.__doc__, Config.__module__ = Options.__doc__, __name__


def _options(kind: str) -> list[str]:
    """Return the names of the settings of a kind of simulated log."""
    return [field.name for field in fields(SIMULATED[kind].simulator_settings)]


def run(config: Any) -> None:
    """Write the log, unless the folder holds it already."""
    kind, settings = SIMULATED[config.kind], config.settings()
    size = (
        f"{config.events:,} {settings.unit} of {pluralize(config.users, 'user')} on {pluralize(config.items, 'item')}, "
        f"seed {config.seed}{settings.describe()}"
    )
    if is_simulated(config.output, settings, config.kind):
        print(f"{config.output} is up to date: {size}")
    else:
        started = time.monotonic()
        print(f"simulating {config.events:,} {settings.unit}", flush=True)
        lines = list(kind.simulate(config.output, settings))
        print(
            f"simulated {size}, in {time.monotonic() - started:.1f} s\n  {config.output}"
        )
        for line in lines:
            print(line)
    source = SOURCES / f"{kind.simulated_source}.yaml"
    if source.is_relative_to(Path.cwd()):  # as a submitted job's is, in Ray's own copy
        source = source.relative_to(Path.cwd())
    print(
        f"next: {cli.line('jobs.prepare', source=str(source), input=config.output, output='TABLES')}"
    )


if __name__ == "__main__":
    cli.main(run, Config)
