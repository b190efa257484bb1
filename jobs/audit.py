"""Proves tables free of leakage: recomputes every rule from the events with code of its own.

    python -m jobs.audit --tables TABLES

Prints each rule with the rows it checked and the violations it found, names the first offenders, and exits
with code 1 on any violation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from jobs import cli
from models.places import reach
from models.tables import UserError, join, read_manifest
from models.words import number_of
from pipelines.data.audit.rules import audit, report
from pipelines.data.kinds.table import KINDS


@dataclass
class Config:
    """Options of the audit."""

    tables: str
    """Folder or URI that holds `events`, `items` and `sequences`."""


def _progress(seconds: float = 2.0) -> Callable[[str], None]:
    """Says what is being audited, at most once in `seconds`."""
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            print(f"audit: {line}", file=sys.stderr, flush=True)

    return say


def run(config: Config) -> None:
    """Audits and prints; raises UserError where a rule is broken."""
    start = time.monotonic()
    reach(tables=config.tables)
    rules = audit(config.tables, _progress())
    print(f"Audit of {config.tables}, {time.monotonic() - start:.1f} s\n{report(rules)}", flush=True)
    broken = [rule.name for rule in rules if rule.violations]
    if broken:
        total = sum(rule.violations for rule in rules)
        found = f"{number_of(total, 'violation')} of {', '.join(broken)}"
        raise UserError(
            f"{found} in {config.tables}; do not train on these tables: make them again with python -m jobs.prepare "
            f"--overwrite"
        )
    kind = read_manifest(join(config.tables, "sequences"), "sequences").info["kind"]
    extra = KINDS[kind].flow.extra
    job = f"python -m jobs.{extra.job} --help, or " if extra else ""
    print(f"No violations. Next: {job}python -m jobs.train --help")


if __name__ == "__main__":
    cli.main(run, Config)
