"""Simulate a raw log whose behaviours have known causes, to try the other commands on.

    python -m jobs.simulate --output raw --users 1500 --items 400 --events 15000
    python -m jobs.simulate --kind search --output raw_search --taste class
    python -m jobs.simulate --kind actions --output raw_feed --events 30000

The same options give the same log. The source file that describes it is
`simulated.yaml` in `jobs/configs/sources`, for a search log `simulated_search.yaml`,
for a feed `simulated_feed.yaml`.
"""

from __future__ import annotations

from jobs import cli
from pipelines.prepare.settings.simulation import SimulateOptions

Config = SimulateOptions


def run(options: SimulateOptions) -> None:
    """Write the log, and print the next command."""
    cli.say_loading("polars")
    from pipelines.prepare.kinds.registry import KINDS, simulate_log

    simulate_log(options)
    source = f"jobs/configs/sources/{KINDS[options.kind].simulated_source}.yaml"
    prepare = cli.command_line(
        "jobs.prepare", source=source, input=options.output, output="TABLES"
    )
    print(f"next: {prepare}")


if __name__ == "__main__":
    cli.main(run)
