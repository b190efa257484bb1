"""The first rows of a raw log, read by the code that reads all of it.

A mistake in the mapping shows in seconds. `python -m jobs.prepare` reads them before
Ray starts, and prints them with `--dry-run`.
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
"""Most blocks (of about 8 MiB) of a file to read in search of rows and columns."""
MAX_REJECT_SHARE = 0.5
"""Share of rejected rows above which the mapping is considered wrong."""
MAX_VALUES = 3
"""Values to show per column."""
MAX_VALUE_CHARS = 40

Blocks = Callable[[str], Iterator[Block]]


@dataclass(frozen=True)
class Preview:
    """The first rows of the files of a kind."""

    kind: str
    """`events`, `items`, `users` or a table of features."""
    files: list[str]
    """All files."""
    begun: list[str]
    """Files that were read from the beginning."""
    rows: pa.Table
    """Rows of the first block that has any."""
    origins: dict[str, str]
    """Column or expression in the raw file of each column of `rows` to show."""
    clock: bool
    """Whether times are clock times."""
    rejected: RejectCounts
    """Counts of all rows that were read."""
    missing: dict[str, str]
    """Columns that no row had, each with a hint at the nearest one."""
    is_whole: bool
    """Whether the files were read to their ends."""


def preview(
    log: Log, input_uri: str, max_rejects: float, items: bool = True
) -> list[Preview]:
    """Read the first rows of events, items, users and tables of features.

    Args:
        log: Log to read.
        input_uri: Input folder.
        max_rejects: Share of rejected rows that is always allowed.
        items: Whether to read the item files.

    Raises:
        UserError: If a file cannot be read, a column is in no row, or more than
            MAX_REJECT_SHARE of the rows break the schema.
    """
    users = log.read_users(input_uri, {}, beginning=True)
    user_rows = users.rows if users else None
    begin = partial(_begin, input_uri, log.clock)

    def read_events(file: str) -> Iterator[Block]:
        return log.read_events(input_uri, file, user_rows)

    previews = [begin("events", log.event_files(input_uri), read_events, log.origins)]
    item_files = log.item_files(input_uri) if items else []
    if log.items and item_files:
        read_items = partial(log.items.read, input_uri)
        previews.append(begin("items", item_files, read_items, log.items.origins))
    if users and log.users:
        user_files = log.user_files(input_uri)[:1]
        previews.append(
            begin("users", user_files, lambda file: iter([users]), log.users.origins)
        )
    for name, section in log.as_of.items():
        files = section.list_files(input_uri, "feature")
        read_features = partial(section.read, input_uri)
        previews.append(begin(f"as_of.{name}", files, read_features, section.origins))
    check_rejects(previews, max_rejects, MAX_REJECT_SHARE)
    return previews


def _begin(
    input_uri: str,
    clock: bool,
    kind: str,
    files: list[str],
    read: Blocks,
    origins: dict[str, str],
) -> Preview:
    """Read the first rows of the first, the last and the middle file.

    Args:
        input_uri: Input folder, for messages.
        clock: Whether times are clock times.
        kind: "events", "items", "users" or a table of features.
        files: Files of the kind.
        read: Yields the blocks of a file.
        origins: Column or expression in the raw file of each column.
    """
    blocks, rejected = list[Block](), RejectCounts()
    begun = list(dict.fromkeys([files[0], files[-1], files[len(files) // 2]]))
    whole = len(begun) == len(files)
    is_whole = True
    for file in begun:
        with closing(block for block in read(file)) as stream:
            for block in islice(stream, MAX_BLOCKS):
                blocks.append(block)
                rejected.add(RejectCounts.from_block(block))
                if rejected.rows_read and not common_missing(
                    each.missing for each in blocks
                ):
                    break
            else:
                whole = whole and next(stream, None) is None
            is_whole = is_whole and next(stream, None) is None
    missing = common_missing(each.missing for each in blocks)
    if kind == "events" and whole and not rejected.rows_read:
        raise UserError(
            f"{input_uri} holds no rows in {', '.join(files[:3])}; check --input"
        )
    if whole and missing:
        check_missing(missing, kind.removesuffix("s"), input_uri)
    rows = next((block.rows for block in blocks if block.rows.num_rows), pa.table({}))
    return Preview(
        kind, files, begun, rows, origins, clock, rejected, missing, is_whole
    )


def check_rejects(
    previews: list[Preview], max_rejects: float, least: float = 0.0
) -> None:
    """Raise a UserError if more than `max_rejects` and `least` of rows are rejected."""
    for preview in previews:
        where = f" at the beginning of {', '.join(preview.begun)}"
        preview.rejected.check(max_rejects, where, least)


def warnings(previews: list[Preview]) -> list[str]:
    """Return a warning per column that no row had, though a later row may have it."""
    return [
        f"warning: no row of the first {preview.rejected.rows_read:,} of "
        f"{', '.join(preview.begun)} has '{name}'; {hint}; unless later rows have it, "
        f"correct the source file"
        for preview in previews
        for name, hint in preview.missing.items()
    ]


def lines(previews: list[Preview]) -> list[str]:
    """Return the lines that `--dry-run` prints."""
    result: list[str] = []
    for preview in previews:
        result.append(_summarize(preview))
        result += [f"  rejected: {line}" for line in preview.rejected.lines()]
        result += _format_columns(preview)
    return result + warnings(previews)


def _summarize(preview: Preview) -> str:
    """Return a line with the files and the numbers of read and rejected rows."""
    files = "the only file"
    if len(preview.files) > 1:
        files = f"{len(preview.begun)} of {pluralize(len(preview.files), 'file')}"
    rows = f"{pluralize(preview.rejected.rows_read, 'row')} read"
    if not preview.is_whole:
        rows = f"the first {rows}, and not yet the rest"
    return (
        f"{preview.kind}: {', '.join(preview.begun)}, {files}: {rows}, "
        f"{preview.rejected.rejects:,} rejected"
    )


def _format_columns(preview: Preview) -> list[str]:
    """Return a line per column: name, origin, type and first values."""
    table = []
    for column, origin in preview.origins.items():
        if column in preview.rows.column_names:
            kind = str(preview.rows.schema.field(column).type).removeprefix("large_")
            table.append((column, origin, kind, _values(preview, column)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:3]
    result = []
    for *cells, values in table:
        padded = [cell.ljust(w) for cell, w in zip(cells, widths, strict=True)]
        result.append("  ".join(["", *padded, values]))
    return result


def _values(preview: Preview, column: str) -> str:
    """Return the first distinct values of a column."""
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
