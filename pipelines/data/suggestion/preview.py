"""The beginning of a raw log, read by the code that reads all of it: a mistake in its description shows in seconds.

`python -m jobs.prepare` looks at it before Ray starts, and with `--dry-run` prints it and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from models.config import pluralize
from models.storage.tables import UserError
from pipelines.data.reading.log import Log
from pipelines.data.reading.rows import Block, Rejected, check_missing, common
from pipelines.data.reading.times import EPOCH

BLOCKS = 4  # of a file, each of about 8 MiB, in search of rows and of a column that the first does not have
MOST_REJECTS = (
    0.5  # share of the rows read above which the description is taken to be wrong
)
VALUES = 3  # shown of each column
LONGEST_VALUE = 40  # characters

Blocks = Callable[[str], Iterator[Block]]


@dataclass(frozen=True)
class Preview:
    """The first rows of the files of a kind."""

    kind: str
    """`events`, `items`, `users` or a table of features."""
    files: list[str]
    """All of them."""
    begun: list[str]
    """Those that were looked into."""
    rows: pa.Table
    """Of the first block that has any."""
    origins: dict[str, str]
    """Columns of `rows` to show, each with what it is in the raw file."""
    clock: bool
    """Whether times are clock times."""
    rejected: Rejected
    """Of all that was read."""
    missing: dict[str, str]
    """Columns that were in no row, each with a hint at the nearest."""
    is_whole: bool
    """Whether the files were read to their ends."""


def preview(
    log: Log, input_uri: str, max_rejects: float, items: bool = True
) -> list[Preview]:
    """Read the first rows of events, items, users and features.

    Args:
        items: Whether to read items.

    Raises:
        UserError: for unreadable files, for a column without any row, and if more than
            MOST_REJECTS rows and a share `max_rejects` break the schema.
    """
    users = log.read_users(input_uri, {}, beginning=True)
    begin = partial(_begin, input_uri, log.clock)
    user_rows = users.rows if users else None

    def read(file: str) -> Iterator[Block]:
        return log.read_events(input_uri, file, user_rows)

    found = [begin("events", log.event_files(input_uri), read, log.origins)]
    if items and log.items and (files := log.item_files(input_uri)):
        found.append(
            begin("items", files, partial(log.items.read, input_uri), log.items.origins)
        )
    if users and log.users:
        found.append(
            begin(
                "users",
                log.user_files(input_uri)[:1],
                lambda file: iter([users]),
                log.users.origins,
            )
        )
    for name, of in log.as_of.items():
        found.append(
            begin(
                f"as_of.{name}",
                of.list_files(input_uri, "feature"),
                partial(of.read, input_uri),
                of.origins,
            )
        )
    check_rejects(found, max_rejects, MOST_REJECTS)
    return found


def _begin(
    input_uri: str,
    clock: bool,
    kind: str,
    files: list[str],
    read: Blocks,
    origins: dict[str, str],
) -> Preview:
    """Read the first rows of the first, the middle and the last file."""
    blocks, rejected = list[Block](), Rejected()
    begun = list(dict.fromkeys([files[0], files[-1], files[len(files) // 2]]))
    whole = len(begun) == len(files)
    is_whole = True
    for file in begun:
        with closing(block for block in read(file)) as stream:
            for block in islice(stream, BLOCKS):
                blocks.append(block)
                rejected.add(Rejected.from_block(block))
                if rejected.rows_read and not common(each.missing for each in blocks):
                    break
            else:
                whole = whole and next(stream, None) is None
            is_whole = is_whole and next(stream, None) is None
    missing = common(each.missing for each in blocks)
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


def check_rejects(found: list[Preview], max_rejects: float, least: float = 0.0) -> None:
    """Raise UserError if more than a share `max_rejects` and more than `least` rows
    break the schema.
    """
    for seen in found:
        seen.rejected.check(
            max_rejects, f" at the beginning of {', '.join(seen.begun)}", least
        )


def warnings(found: list[Preview]) -> list[str]:
    """Return one line per column that none of the first rows has."""
    return [
        f"warning: no row of the first {seen.rejected.rows_read:,} of {', '.join(seen.begun)} has '{name}'; {hint}; "
        f"unless later rows have it, correct the source file"
        for seen in found
        for name, hint in seen.missing.items()
    ]


def lines(found: list[Preview]) -> list[str]:
    """Return the lines that `--dry-run` prints."""
    said: list[str] = []
    for seen in found:
        of = (
            f"{len(seen.begun)} of {pluralize(len(seen.files), 'file')}"
            if len(seen.files) > 1
            else "the only file"
        )
        read = f"{pluralize(seen.rejected.rows_read, 'row')} read"
        if not seen.is_whole:
            read = f"the first {read}, and not yet the rest"
        said.append(
            f"{seen.kind}: {', '.join(seen.begun)}, {of}: {read}, {seen.rejected.rejects:,} rejected"
        )
        said += [f"  rejected: {line}" for line in seen.rejected.lines()]
        table = [
            (
                column,
                origin,
                str(seen.rows.schema.field(column).type).removeprefix("large_"),
                _values(seen, column),
            )
            for column, origin in seen.origins.items()
            if column in seen.rows.column_names
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)][:3]
        for row in table:
            said.append(
                "  ".join(
                    [
                        "",
                        *(cell.ljust(w) for cell, w in zip(row, widths, strict=False)),
                        row[3],
                    ]
                )
            )
    return said + warnings(found)


def _values(seen: Preview, column: str) -> str:
    """Return the first distinct values of a column."""
    values = pc.unique(seen.rows[column].slice(0, 10_000).drop_null())[
        :VALUES
    ].to_pylist()

    def instant(ms: int) -> str:
        time = EPOCH + timedelta(milliseconds=ms)
        return time.isoformat(timespec="milliseconds")[:-6] + "Z"

    timed = seen.clock and (column == "timestamp_ms" or column.startswith("known_"))
    texts = [
        instant(each)
        if timed
        else f"{each:.7g}"
        if isinstance(each, float)
        else str(each)
        for each in values
    ]
    return " | ".join(text[:LONGEST_VALUE] for text in texts) or "nothing in these rows"
