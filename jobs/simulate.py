"""Simulate a raw log whose behaviours have known causes, to try the other commands on.

    python -m jobs.simulate --output raw --users 1500 --items 400 --events 15000
    python -m jobs.simulate --kind search --output raw_search --taste class
    python -m jobs.simulate --kind actions --output raw_feed --events 30000

The same options give the same log. The source file that describes it is
`simulated.yaml` in `jobs/configs/sources`, for a search log `simulated_search.yaml`,
for a feed `simulated_feed.yaml`.
"""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from core.options import STRICT, Folder, as_base
from jobs import cli
from pipelines.prepare.kinds.registry import KINDS
from pipelines.prepare.kinds.simulation import Settings, write_log


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Config(Settings):
    """Options of jobs.simulate: where to write the log, its size, seed and causes."""

    output: Folder
    """Folder for the log: new, empty, or with an earlier simulated log, which is
    replaced."""
    kind: Literal[tuple(KINDS)] = "retrieval"  # type: ignore[valid-type]
    """`retrieval`: one item per event. `search`: searches with a query, ten results,
    clicks, purchases and dwell. `actions`: impressions of a feed with
    likes, comments, shares, follows, hides and dwell of dog and cat users."""


def run(config: Config) -> None:
    """Write the log, unless the folder already holds the log of the same options."""
    kind, settings = KINDS[config.kind], as_base(config, Settings)
    size = (
        f"{settings.events:,} events of {settings.users:,} users on "
        f"{settings.items:,} items, seed {settings.seed}: {config.output}"
    )
    is_new = write_log(config.output, config.kind, settings, kind.draw_log)
    print(f"{'simulated' if is_new else 'up to date:'} {size}")
    source = f"jobs/configs/sources/{kind.simulated_source}.yaml"
    prepare = cli.command_line(
        "jobs.prepare", source=source, input=config.output, output="TABLES"
    )
    print(f"next: {prepare}")


if __name__ == "__main__":
    cli.main(run)
