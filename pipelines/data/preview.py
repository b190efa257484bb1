"""The beginning of a raw log, read by the code that reads all of it: a mistake in its description shows in seconds.

`python -m jobs.prepare` looks at it before Ray starts, and with `--dry-run` prints it and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from models.tables import UserError
from models.words import number_of
from pipelines.data.log import Log
from pipelines.data.rows import Block, Rejected, check_missing, common

BLOCKS = 4  # of a file, each of about 8 MiB, and
FILES = 3  # the most files that are begun, in search of a column that the first block does not have, or for a dry run
MOST_REJECTS = 0.5  # share of the rows read above which the description is taken to be wrong
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


def preview(log: Log, input_uri: str, max_rejects: float, items: bool = True, thorough: bool = False) -> list[Preview]:
    """The first rows of events, of items where they are wanted, of users and of features; `thorough`: of more files
    than the first. UserError for what cannot be read, for a column that no row of the log has, and where more than
    MOST_REJECTS of the rows, and than `max_rejects`, break the schema."""
    users = log.read_users(input_uri, {}, beginning=True)
    clock = log.info["clock"]
    begin = partial(_begin, input_uri, clock, thorough)
    read: Blocks = lambda file: log.read_events(input_uri, file, users.rows if users else None)  # noqa: E731
    found = [begin("events", log.event_files(input_uri), read, log.origins)]
    if items and log.items and (files := log.item_files(input_uri)):
        found.append(begin("items", files, partial(log.items.read, input_uri), log.items.origins))
    if users and log.users:
        found.append(begin("users", log.user_files(input_uri)[:1], lambda file: iter([users]), log.users.origins))
    for name, of in log.as_of.items():
        found.append(begin(f"as_of.{name}", of.listed(input_uri, "feature"), partial(of.read, input_uri), of.origins))
    check_rejects(found, max(MOST_REJECTS, max_rejects), max_rejects)
    return found


def _begin(
    input_uri: str, clock: bool, thorough: bool, kind: str, files: list[str], read: Blocks, origins: dict[str, str]
) -> Preview:
    """The first block of the first file; then more, of the last file and the middle one too, while a column is missing
    or there is no row, and if `thorough` in any case."""
    blocks: list[Block] = []
    begun, whole, rejected = list[str](), True, Rejected()
    for file in list(dict.fromkeys([files[0], files[-1], files[len(files) // 2]]))[:FILES]:
        begun.append(file)
        with closing(block for block in read(file)) as stream:
            for block in islice(stream, BLOCKS):
                blocks.append(block)
                rejected.add(Rejected.of(block))
                if rejected.rows_read and not common(each.missing for each in blocks):
                    break
            else:
                whole = whole and next(stream, None) is None
        if rejected.rows_read and not common(each.missing for each in blocks) and not thorough:
            break
    whole, missing = whole and len(begun) == len(files), common(each.missing for each in blocks)
    if kind == "events" and whole and not rejected.rows_read:
        raise UserError(f"{input_uri} holds no rows in {', '.join(files[:3])}; check --input")
    if whole and missing:
        check_missing(missing, kind.removesuffix("s"), input_uri)
    rows = next((block.rows for block in blocks if block.rows.num_rows), pa.table({}))
    return Preview(kind, files, begun, rows, origins, clock, rejected, missing)


def check_rejects(found: list[Preview], most: float, max_rejects: float) -> None:
    """UserError where more than the share `most` of the rows read break the schema; `max_rejects` is what the whole log
    may have."""
    for seen in found:
        rows, rejects = seen.rejected.rows_read, sum(seen.rejected.reasons.values())
        if rejects > most * rows:
            reason, _ = seen.rejected.reasons.most_common(1)[0]
            raise UserError(
                f"{rejects:,} of the first {rows:,} rows of {', '.join(seen.begun)} ({rejects / rows:.2%}) break the "
                f"schema, over the limit max_rejects {max_rejects:.2%}; most often {reason}, such as "
                f"{seen.rejected.examples[reason]}; fix the source file or the log, or raise --max_rejects"
            )


def warnings(found: list[Preview]) -> list[str]:
    """One line for each column that no row had, though a later one may."""
    return [
        f"warning: no row of the first {seen.rejected.rows_read:,} of {', '.join(seen.begun)} has '{name}'; {hint}; "
        f"unless later rows have it, correct the source file"
        for seen in found
        for name, hint in seen.missing.items()
    ]


def lines(found: list[Preview]) -> list[str]:
    """What `--dry-run` prints."""
    said: list[str] = []
    for seen in found:
        rejects = sum(seen.rejected.reasons.values())
        of = f"{len(seen.begun)} of {number_of(len(seen.files), 'file')}" if len(seen.files) > 1 else "the only file"
        read = number_of(seen.rejected.rows_read, "row")
        said.append(f"{seen.kind}: {', '.join(seen.begun)}, {of}: {read} read, {rejects:,} rejected")
        for reason, count in seen.rejected.reasons.most_common():
            said.append(f"  rejected: {number_of(count, 'row')}, {reason}; such as {seen.rejected.examples[reason]}")
        table = [
            (column, origin, str(seen.rows.schema.field(column).type).removeprefix("large_"), _values(seen, column))
            for column, origin in seen.origins.items()
            if column in seen.rows.column_names
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)][:3]
        for row in table:
            said.append("  ".join(["", *(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]))
    return said + warnings(found)


def _values(seen: Preview, column: str) -> str:
    """The first few values of a column, each once."""
    values = pc.unique(seen.rows[column].slice(0, 10_000).drop_null())[:VALUES].to_pylist()
    timed = seen.clock and (column == "timestamp_ms" or column.startswith("known_"))
    texts = [_instant(each) if timed else f"{each:.7g}" if isinstance(each, float) else str(each) for each in values]
    return " | ".join(text[:LONGEST_VALUE] for text in texts) or "nothing in these rows"


def _instant(time_ms: int) -> str:
    """ISO 8601 in UTC."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
