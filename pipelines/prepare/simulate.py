"""Simulate a raw log whose behaviours have known causes.

simulate_log(SimulateOptions(output="raw", users=300))
"""

from __future__ import annotations

from core.options import as_base, check_known
from pipelines.prepare.kinds.registry import KINDS
from pipelines.prepare.kinds.simulation import Settings, SimulateOptions, write_log


def simulate_log(options: SimulateOptions) -> None:
    """Write a simulated log, unless the folder already holds the log of the options."""
    check_known([options.kind], KINDS, "kind")
    settings, draw_log = as_base(options, Settings), KINDS[options.kind].draw_log
    is_new = write_log(options.output, options.kind, settings, draw_log)
    print(
        f"{'simulated' if is_new else 'up to date:'} {settings.events:,} events of "
        f"{settings.users:,} users on {settings.items:,} items, seed {settings.seed}: "
        f"{options.output}"
    )
