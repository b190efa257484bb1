"""Preview the first rows of a raw log, to find mistakes of a mapping within seconds.

The rows are read by the code that reads the whole log. `python -m jobs.prepare` reads
them before Ray starts, and prints them with `--dry-run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl
import polars.selectors as cs

from core.errors import UserError, pluralize
from pipelines.prepare.reading.log import Log
from pipelines.prepare.reading.rows import RejectCounts, check_missing

MAX_REJECT_SHARE = 0.5
"""Share of rejected rows above which the mapping is considered wrong."""


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
    missing: dict[str, str]
    """Columns that no row had, each with a hint at a similar name."""


def preview(
    log: Log, input_uri: str, max_rejects: float, items: bool = True
) -> list[Preview]:
    """Read the first rows of events and items.

    Args:
        log: Log to read.
        input_uri: Input folder.
        max_rejects: Maximum share of rejected rows; MAX_REJECT_SHARE is always allowed.
        items: Whether to read the item files.
    """
    users = log.read_users(input_uri, {}, first_file_only=True)
    event_files = log.event_files(input_uri)
    user_rows = users.rows if users else None
    read_events = partial(log.read_events, input_uri, users=user_rows)
    sections: list[Any] = [("events", event_files, read_events, log.origins)]
    if items and log.items and (item_files := log.item_files(input_uri)):
        read_items = partial(log.items.read, input_uri)
        sections.append(("items", item_files, read_items, log.items.origins))
    previews = []
    for kind, files, read, origins in sections:
        blocks = (block for file in files for block in read(file))
        block = next((block for block in blocks if block.rows_read), None)
        if block is None:
            raise UserError(f"{input_uri} has no rows of {kind}")
        if block.missing and next(blocks, None) is None:
            check_missing(block.missing, kind.removesuffix("s"), input_uri)
        rows = pl.DataFrame(block.rows)
        if log.has_clock_times:
            clocks = cs.matches("^(timestamp_ms|known_.*)$")
            rows = rows.with_columns(clocks.cast(pl.Datetime("ms")))
        rejected = RejectCounts.from_block(block)
        rejected.check(max_rejects, f" of the first {kind}", MAX_REJECT_SHARE)
        previews.append(Preview(kind, rows, origins, rejected, block.missing))
    return previews


def warnings(previews: list[Preview]) -> list[str]:
    """Return a warning per column that no previewed row had."""
    return [
        f"warning: none of the first {pluralize(preview.rejected.rows_read, 'row')} of "
        f"the {preview.kind} has '{name}'; {hint}"
        for preview in previews
        for name, hint in preview.missing.items()
    ]


def lines(previews: list[Preview]) -> list[str]:
    """Return the lines that `--dry-run` prints."""
    result: list[str] = []
    for preview in previews:
        rejected = preview.rejected
        rows = pluralize(rejected.rows_read, "row")
        counts = f"the first {rows}, {rejected.rejects:,} rejected"
        result.append(f"{preview.kind}: {counts}")
        result += [f"  rejected: {line}" for line in rejected.lines()]
        for name, origin in preview.origins.items():
            if name in preview.rows.columns:
                values = preview.rows[name].drop_nulls().unique(maintain_order=True)
                texts = [str(value)[:40] for value in values.head(3).to_list()]
                result.append(f"  {name:<16} {origin:<20} {' | '.join(texts)}")
    return result + warnings(previews)
