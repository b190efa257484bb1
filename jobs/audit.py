"""Audit tables for leakage: recompute every rule from the events with separate code.

    python -m jobs.audit --tables TABLES

Prints each rule with the rows it checked and the violations it found, names the first
offenders, and exits with code 1 on any violation.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from core.options import STRICT, Folder
from jobs import cli


@dataclass(config=STRICT)
class Config:
    """Options of the audit."""

    tables: Folder
    """TABLES: folder or URI with the tables `events`, `items` and `sequences`."""


def run(config: Config) -> None:
    """Run the audit, and name the next commands."""
    cli.say_loading("polars")
    from pipelines.prepare.audit.rules import audit_tables

    audit_tables(config.tables)
    print("next: python -m jobs.tokenize, jobs.encode or jobs.train --help")


if __name__ == "__main__":
    cli.main(run)
