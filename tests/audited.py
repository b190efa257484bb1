"""Tables with one planted violation, and what the audit finds in tables."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from models.tables import commit, read_manifest, read_table, write_part
from pipelines.data.audit.rules import audit, report

Change = Callable[[list[dict[str, Any]], dict[str, Any]], Any]


def broken(tables: str) -> dict[str, list[str]]:
    """The rules that are broken, each with its examples."""
    rules = audit(tables)
    assert report(rules)
    return {rule.name: rule.examples for rule in rules if rule.violations}


def rewrite(tables: str, folder: Path, change: Change, name: str = "sequences") -> str:
    """A copy of the tables in which `change` has changed the rows and the info of one."""
    copied = folder / "tables"
    shutil.copytree(tables, copied)
    uri = str(copied / name)
    manifest, table = read_manifest(uri), read_table(uri)
    rows, info = table.to_pylist(), copy.deepcopy(manifest.info)
    change(rows, info)
    part = write_part(uri, pa.Table.from_pylist(rows, schema=table.schema))
    commit(uri, name, table.schema, [part], config=manifest.config, inputs=manifest.inputs, info=info)
    return str(copied)
