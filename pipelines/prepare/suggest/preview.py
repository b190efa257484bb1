"""Preview the first rows of a raw log, to find mistakes of a mapping within seconds.

The rows are read by the code that reads the whole log, and `python -m jobs.prepare`
prints them with `--dry-run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl
import polars.selectors as cs

from core.errors import UserError, pluralize
from pipelines.prepare.reading.log import Log
from pipelines.prepare.reading.rows import (
    RejectCounts,
    check_missing,
    read_events,
    read_section,
    read_section_file,
)


@dataclass(frozen=True)
class Preview:
    """The first block of rows of the files of one kind."""

    kind: str
    """`events` or `items`."""
    rows: pl.DataFrame
    """Rows of the first block that has any; clock times are datetimes."""
    origins: dict[str, str]
    """Column or SQL expression in the raw file, by column of `rows` to print."""
    rejected: RejectCounts


def preview(log: Log, input_uri: str) -> list[Preview]:
    """Read the first rows of events and items."""
    users = None
    if log.users:
        rows, _ = read_section(log.users, input_uri, log.user_files(input_uri)[:1])
        users = rows.unique("user_id", keep="first")
    read = partial(read_events, log, input_uri, users=users)
    sections: list[Any] = [("events", log.event_files(input_uri), read, log.columns)]
    if log.items and (files := log.item_files(input_uri)):
        read_items = partial(read_section_file, log.items, input_uri)
        sections.append(("items", files, read_items, log.items.columns))
    previews = []
    for kind, files, read, origins in sections:
        blocks = (block for file in files for block in read(file))
        block = next((block for block in blocks if block.counts.rows_read), None)
        if block is None:
            raise UserError(f"{input_uri} has no rows of {kind}")
        if block.counts.missing and next(blocks, None) is None:
            check_missing(block.counts.missing, kind.removesuffix("s"), input_uri)
        rows = block.rows.drop("log_row", strict=False)
        if log.has_clock_times:
            clocks = cs.matches("^(timestamp_ms|known_.*)$")
            rows = rows.cast({clocks: pl.Datetime("ms")})
        previews.append(Preview(kind, rows, origins, block.counts))
    return previews


def lines(previews: list[Preview]) -> Iterator[str]:
    """Yield the lines that `--dry-run` prints."""
    for preview in previews:
        rejected = preview.rejected
        rows = f"{pluralize(rejected.rows_read, 'row')}, {rejected.rejects:,} rejected"
        yield f"{preview.kind}: the first {rows}"
        if rejected.left_out:
            yield f"  where: {rejected.left_out:,} more rows left out"
        for line in rejected.lines():
            yield f"  rejected: {line}"
        for values in preview.rows:
            distinct = values.drop_nulls().unique(maintain_order=True)
            texts = [str(value)[:40] for value in distinct.head(3)]
            origin = preview.origins.get(values.name, "")
            yield f"  {values.name:<16} {origin:<20} {' | '.join(texts)}"
        for name, hint in (rejected.missing or {}).items():
            yield f"warning: none of the {preview.kind} has '{name}'; {hint}"
