"""Audit tables for leakage: recompute every rule from the events with separate code.

    python -m jobs.audit --tables TABLES

Prints each rule with the rows it checked and the violations it found, names the first
offenders, and exits with code 1 on any violation.
"""

from __future__ import annotations

from jobs import cli
from pipelines.steps import AuditConfig, audit_tables

Config = AuditConfig


def run(config: AuditConfig) -> None:
    """Run the audit, and name the next commands."""
    audit_tables(config)
    print("next: python -m jobs.tokenize, jobs.encode or jobs.train --help")


if __name__ == "__main__":
    cli.main(run)
