"""Preview the first rows of a raw log, to find mistakes of a mapping within seconds.

The rows are read by the code that reads the whole log. `python -m jobs.prepare` reads
them before Ray starts, and prints them with `--dry-run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from models.config import pluralize
from models.storage.tables import UserError
from pipelines.data.reading.log import Log
from pipelines.data.reading.rows import (
    Block,
    RejectCounts,
    check_missing,
    common_missing,
)
from pipelines.data.reading.times import EPOCH

MAX_BLOCKS = 4
"""Maximum number of blocks (of about 8 MiB) to read per file."""
MAX_REJECT_SHARE = 0.5
"""Share of rejected rows above which the mapping is considered wrong."""
MAX_VALUES = 3
"""Maximum number of values to print per column."""
MAX_VALUE_CHARS = 40

ReadFile = Callable[[str], Iterator[Block]]
"""Yields the blocks of a file, given relative to the input folder."""


@dataclass(frozen=True)
class Preview:
    """The first rows of the files of one kind."""

    kind: str
    """`events`, `items`, `users`, or `as_of.NAME` for a table of features."""
    files: list[str]
    """All files of the kind."""
    read_files: list[str]
    """Files whose first rows were read."""
    rows: pa.Table
    """Rows of the first block that has any."""
    origins: dict[str, str]
    """Column or SQL expression in the raw file, by column of `rows` to print."""
    clock: bool
    """Whether times are clock times."""
    rejected: RejectCounts
    """Counts of all rows that were read."""
    missing: dict[str, str]
    """Columns that no row had, each with a hint at a similar name."""
    is_complete: bool
    """Whether `read_files` were read to their ends."""


def preview(
    log: Log, input_uri: str, max_rejects: float, items: bool = True
) -> list[Preview]:
    """Read the first rows of events, items, users and tables of features.

    Args:
        log: Log to read.
        input_uri: Input folder.
        max_rejects: Maximum share of rejected rows; MAX_REJECT_SHARE is always allowed.
        items: Whether to read the item files.

    Raises:
        UserError: If a file cannot be read, a column does not exist, or more than
            MAX_REJECT_SHARE and `max_rejects` of the rows are rejected.
    """
    users = log.read_users(input_uri, {}, first_file_only=True)
    user_rows = users.rows if users else None
    read_first = partial(_read_first_rows, input_uri, log.has_clock_times)

    def read_events(file: str) -> Iterator[Block]:
        return log.read_events(input_uri, file, user_rows)

    event_files = log.event_files(input_uri)
    previews = [read_first("events", event_files, read_events, log.origins)]
    item_files = log.item_files(input_uri) if items else []
    if log.items and item_files:
        read_items = partial(log.items.read, input_uri)
        previews.append(read_first("items", item_files, read_items, log.items.origins))
    if users and log.users:
        user_files = log.user_files(input_uri)[:1]

        def read_users(file: str) -> Iterator[Block]:
            return iter([users])

        previews.append(read_first("users", user_files, read_users, log.users.origins))
    for name, section in log.as_of.items():
        files = section.list_files(input_uri, "feature")
        read_features = partial(section.read, input_uri)
        previews.append(
            read_first(f"as_of.{name}", files, read_features, section.origins)
        )
    check_rejects(previews, max_rejects, MAX_REJECT_SHARE)
    return previews


def _read_first_rows(
    input_uri: str,
    clock: bool,
    kind: str,
    files: list[str],
    read: ReadFile,
    origins: dict[str, str],
) -> Preview:
    """Read the first rows of the first, the last and the middle file."""
    blocks: list[Block] = []
    rejected = RejectCounts()
    read_files = list(dict.fromkeys([files[0], files[-1], files[len(files) // 2]]))
    # whether every row that may have a missing column was read
    is_exhausted = len(read_files) == len(files)
    is_complete = True
    for file in read_files:
        with closing(block for block in read(file)) as stream:
            for block in islice(stream, MAX_BLOCKS):
                blocks.append(block)
                rejected.add(RejectCounts.from_block(block))
                missing = common_missing(block.missing for block in blocks)
                if rejected.rows_read and not missing:
                    break
            else:
                is_exhausted = is_exhausted and next(stream, None) is None
            is_complete = is_complete and next(stream, None) is None
    missing = common_missing(block.missing for block in blocks)
    if kind == "events" and is_exhausted and not rejected.rows_read:
        raise UserError(
            f"{input_uri} has no rows in {', '.join(files[:3])}; check --input"
        )
    if is_exhausted and missing:
        check_missing(missing, kind.removesuffix("s"), input_uri)
    rows = next((block.rows for block in blocks if block.rows.num_rows), pa.table({}))
    return Preview(
        kind, files, read_files, rows, origins, clock, rejected, missing, is_complete
    )


def check_rejects(
    previews: list[Preview], max_rejects: float, always_allowed: float = 0.0
) -> None:
    """Raise a UserError if too many of the previewed rows are rejected.

    Args:
        previews: First rows of each kind of files.
        max_rejects: Maximum share of rejected rows.
        always_allowed: Share of rejected rows that is allowed if `max_rejects` is
            lower.
    """
    for preview in previews:
        rows = f" at the beginning of {', '.join(preview.read_files)}"
        preview.rejected.check(max_rejects, rows, always_allowed)


def warnings(previews: list[Preview]) -> list[str]:
    """Return a warning per column that no previewed row had."""
    messages = []
    for preview in previews:
        for name, hint in preview.missing.items():
            messages.append(
                f"warning: no row of the first {preview.rejected.rows_read:,} of "
                f"{', '.join(preview.read_files)} has '{name}'; {hint}; unless later "
                f"rows have it, correct the source file"
            )
    return messages


def lines(previews: list[Preview]) -> list[str]:
    """Return the lines that `--dry-run` prints."""
    result: list[str] = []
    for preview in previews:
        result.append(_summarize(preview))
        result += [f"  rejected: {line}" for line in preview.rejected.lines()]
        result += _format_columns(preview)
    return result + warnings(previews)


def _summarize(preview: Preview) -> str:
    """Return a line with the files, and the numbers of read and rejected rows."""
    files = "the only file"
    if len(preview.files) > 1:
        files = f"{len(preview.read_files)} of {pluralize(len(preview.files), 'file')}"
    rows = f"{pluralize(preview.rejected.rows_read, 'row')} read"
    if not preview.is_complete:
        rows = f"the first {rows}, and not yet the rest"
    return (
        f"{preview.kind}: {', '.join(preview.read_files)}, {files}: {rows}, "
        f"{preview.rejected.rejects:,} rejected"
    )


def _format_columns(preview: Preview) -> list[str]:
    """Return a line per column: name, origin, type and first values."""
    table = []
    for column, origin in preview.origins.items():
        if column in preview.rows.column_names:
            kind = str(preview.rows.schema.field(column).type).removeprefix("large_")
            table.append((column, origin, kind, _format_values(preview, column)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:3]
    result = []
    for *cells, values in table:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        result.append("  ".join(["", *padded, values]))
    return result


def _format_values(preview: Preview, column: str) -> str:
    """Join the first distinct values of a column."""
    values = pc.unique(preview.rows[column].slice(0, 10_000).drop_null())
    values = values[:MAX_VALUES].to_pylist()
    is_time = column == "timestamp_ms" or column.startswith("known_")
    is_clock_time = preview.clock and is_time

    def to_text(value: Any) -> str:
        if is_clock_time:
            time = EPOCH + timedelta(milliseconds=value)
            return time.isoformat(timespec="milliseconds")[:-6] + "Z"
        return f"{value:.7g}" if isinstance(value, float) else str(value)

    texts = [to_text(value)[:MAX_VALUE_CHARS] for value in values]
    return " | ".join(texts) or "nothing in these rows"
