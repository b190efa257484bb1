"""Simulate a raw log whose behaviours have known causes, to try the other commands on.

    python -m jobs.simulate --output raw --users 1500 --items 400 --events 15000
    python -m jobs.simulate --kind search --output raw_search --taste class
    python -m jobs.simulate --kind actions --output raw_feed --events 30000

The same options give the same log. The source file that describes it is
`simulated.yaml` in `jobs/configs/sources`, for a search log `simulated_search.yaml`,
for a feed `simulated_feed.yaml`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs import cli

if TYPE_CHECKING:
    from pipelines.prepare.kinds.simulation import SimulateOptions


def __getattr__(name: str) -> Any:
    """Import the class of the options, after a first line is printed."""
    if name != "Config":
        raise AttributeError(name)
    cli.say_loading("polars")
    from pipelines.prepare.kinds.simulation import SimulateOptions

    return SimulateOptions


def run(options: SimulateOptions) -> None:
    """Write the log, and print the next command."""
    from pipelines.prepare.kinds.registry import KINDS, simulate_log

    simulate_log(options)
    source = f"jobs/configs/sources/{KINDS[options.kind].simulated_source}.yaml"
    prepare = cli.command_line(
        "jobs.prepare", source=source, input=options.output, output="TABLES"
    )
    print(f"next: {prepare}")


if __name__ == "__main__":
    cli.main(run)
