"""Tables with one planted violation, and what the audit finds in tables."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from models.storage.tables import commit, read_manifest, read_table, write_part
from pipelines.data.audit.rules import audit, report

Row = dict[str, Any]
Change = Callable[[list[Row], Row], Any]


def broken(tables: str) -> dict[str, list[str]]:
    """The rules that are broken, each with its examples."""
    rules = audit(tables)
    assert report(rules)
    return {rule.name: rule.examples for rule in rules if rule.violations}


def rewrite(
    tables: str,
    folder: Path,
    change: Change,
    name: str = "sequences",
    second: int | None = None,
) -> str:
    """A copy of the tables in which `change` has changed the rows and the info of one,
    which has a second part from the row `second` on; the tables that were made from it
    name its new hash."""
    copied, hashes = folder / "tables", dict[str, str]()
    shutil.copytree(tables, copied)
    for table in ("events", "items", "queries", "sequences"):
        uri = str(copied / table)
        if not (copied / table).is_dir():
            continue
        manifest, content = read_manifest(uri), read_table(uri)
        info, files = copy.deepcopy(manifest.info), manifest.files
        if table == name:
            rows = content.to_pylist()
            change(rows, info)
            pieces = [rows[:second], rows[second:]] if second else [rows]
            files = [
                write_part(uri, pa.Table.from_pylist(piece, schema=content.schema))
                for piece in pieces
            ]
        inputs = {of: hashes.get(of, known) for of, known in manifest.inputs.items()}
        made = commit(
            uri,
            table,
            content.schema,
            files,
            config=manifest.config,
            inputs=inputs,
            info=info,
        )
        hashes[table] = made.hash
    return str(copied)
