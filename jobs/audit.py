"""Audit tables for leakage: recompute every rule from the events with separate code.

    python -m jobs.audit --tables TABLES

Prints each rule with the rows it checked and the violations it found, names the first
offenders, and exits with code 1 on any violation.
"""

from __future__ import annotations

import sys
import time

from pydantic.dataclasses import dataclass

from core.errors import UserError, pluralize
from core.options import STRICT, Folder
from jobs import cli


@dataclass(config=STRICT)
class Config:
    """Options of the audit."""

    tables: Folder
    """TABLES: folder or URI with the tables `events`, `items` and `sequences`."""


def run(config: Config) -> None:
    """Run the audit and print its report."""
    from pipelines.prepare.audit.rules import audit, report

    start = time.monotonic()
    rules = audit(
        config.tables, lambda step: print(f"audit: {step}", file=sys.stderr, flush=True)
    )
    print(
        f"Audit of {config.tables}, {time.monotonic() - start:.1f} s\n{report(rules)}",
        flush=True,
    )
    broken = [rule.name for rule in rules if rule.violations]
    if broken:
        total = sum(rule.violations for rule in rules)
        violations = f"{pluralize(total, 'violation')} of {', '.join(broken)}"
        raise UserError(
            f"{violations} in {config.tables}; do not train on these tables: make them "
            f"again with python -m jobs.prepare --overwrite"
        )
    print(
        "No violations. Next: python -m jobs.tokenize, jobs.encode or jobs.train --help"
    )


if __name__ == "__main__":
    cli.main(run)
