"""The beginning of a raw log, read by the code that reads all of it: a mistake in its description shows in seconds.

`python -m jobs.prepare` looks at it before Ray starts, and with `--dry-run` prints it and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from models.tables import UserError
from models.words import number_of
from pipelines.data.sources.base import Block, Metadata, Rejected, Source
from pipelines.data.sources.readers import TextFormat

BLOCKS = 4  # of a file, each of about 8 MiB, and
FILES = 3  # the most files that are begun, in search of a column that the first block does not have, or for a dry run
MOST_REJECTS = 0.5  # share of the rows read above which the description is taken to be wrong
VALUES = 3  # shown of each column
LONGEST_VALUE = 40  # characters


@dataclass(frozen=True)
class Preview:
    """The first rows of the files of a kind."""

    kind: str
    """`events`, `items` or `users`."""
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
    """Wanted keys that were in no row, each with a hint at the nearest."""
    input_uri: str
    """Folder of the files."""
    written: TextFormat | None
    """How they are."""

    def example(self, reason: str) -> str:
        """A row that was rejected for this reason."""
        return self.rejected.example(reason, self.input_uri, self.written)


def preview(
    source: Source, input_uri: str, max_rejects: float, items: bool = True, thorough: bool = False
) -> list[Preview]:
    """The first rows of events, of items where they are wanted, and of users; `thorough`: of more files than the first.
    UserError for what cannot be read, for a
    key that no row of the log has, and where more than MOST_REJECTS of the rows, and than `max_rejects`, break the
    schema."""
    users = source.read_users(input_uri, beginning=True)
    known = users.rows if users else None

    def events(file: str) -> Iterator[Block]:
        return source.read_events(input_uri, file, known)

    def of_items(file: str) -> Iterator[Metadata]:
        return source.read_items(input_uri, file)

    begin = partial(_begin, source, input_uri)
    found = [begin("events", source.event_files(input_uri), events, thorough)]
    if items and (files := source.item_files(input_uri)):
        found.append(begin("items", files, of_items, thorough))
    if users:
        found.append(begin("users", source.user_files(input_uri), lambda file: iter([users]), False))
    for name, of in source.tables_as_of.items():
        found.append(begin(f"as_of.{name}", of.listed(input_uri), partial(of.read, input_uri), thorough))
    check_rejects(found, max(MOST_REJECTS, max_rejects), max_rejects)
    return found


def _begin(
    source: Source, input_uri: str, kind: str, files: list[str], read: Callable[[str], Iterable[Block | Metadata]],
    thorough: bool,
) -> Preview:  # fmt: skip
    """The first block of the first file; then more, of the last file and the middle one too, while a key is missing
    or there is no row, and if `thorough` in any case."""
    rows: pa.Table | None = None
    rejected, begun, whole = Rejected(), list[str](), True
    missing: dict[str, str] | None = None

    for file in list(dict.fromkeys([files[0], files[-1], files[len(files) // 2]]))[:FILES]:
        begun.append(file)
        with closing(block for block in read(file)) as blocks:
            for block in islice(blocks, BLOCKS):
                table = block.events if isinstance(block, Block) else block.rows
                rows = table if rows is None or not rows.num_rows else rows
                rejected.add(Rejected.of(block))
                absent = block.missing if missing is None else missing
                missing = {name: hint for name, hint in absent.items() if name in block.missing}
                if rejected.rows_read and not missing:
                    break
            else:
                whole = whole and next(blocks, None) is None
        if rejected.rows_read and not missing and not thorough:
            break
    whole = whole and len(begun) == len(files)
    if kind == "events" and whole and not rejected.rows_read:
        raise UserError(f"{input_uri} holds no rows in {', '.join(files[:3])}; check --input")
    if kind == "events" and whole:
        check_missing(input_uri, missing or {})
    rows, origins, clock = pa.table({}) if rows is None else rows, source.origins[kind], source.info["clock"]
    return Preview(kind, files, begun, rows, origins, clock, rejected, missing or {}, input_uri, source.written(kind))


def check_missing(input_uri: str, missing: dict[str, str]) -> None:
    """UserError for a key that no row of any event file has."""
    for name, hint in missing.items():
        raise UserError(
            f"no event file of {input_uri} has a column '{name}'; {hint}; correct the source file or the log"
        )


def check_rejects(found: Iterable[Preview], most: float, max_rejects: float) -> None:
    """UserError where more than the share `most` of the rows read break the schema; `max_rejects` is what the whole log
    may have."""
    for seen in found:
        rows, rejects = seen.rejected.rows_read, sum(seen.rejected.reasons.values())
        if rejects > most * rows:
            reason, _ = seen.rejected.reasons.most_common(1)[0]
            raise UserError(
                f"{rejects:,} of the first {rows:,} rows of {', '.join(seen.begun)} ({rejects / rows:.2%}) break the "
                f"schema, over the limit max_rejects {max_rejects:.2%}; most often {reason}, such as "
                f"{seen.example(reason)}; fix the source file or the log, or raise --max_rejects"
            )


def warnings(found: Iterable[Preview]) -> list[str]:
    """One line for each key that no row had, though a later one may."""
    return [
        f"warning: no row of the first {seen.rejected.rows_read:,} of {', '.join(seen.begun)} has '{name}'; {hint}; "
        f"unless later rows have it, correct the source file"
        for seen in found
        for name, hint in seen.missing.items()
    ]


def lines(found: Iterable[Preview]) -> list[str]:
    """What `--dry-run` prints."""
    said: list[str] = []
    for seen in found:
        rejects = sum(seen.rejected.reasons.values())
        of = f"{len(seen.begun)} of {number_of(len(seen.files), 'file')}" if len(seen.files) > 1 else "the only file"
        said.append(
            f"{seen.kind}: {', '.join(seen.begun)}, {of}: {number_of(seen.rejected.rows_read, 'row')} read, "
            f"{rejects:,} rejected"
        )
        said += [
            f"  rejected: {number_of(count, 'row')}, {reason}; such as {seen.example(reason)}"
            for reason, count in seen.rejected.reasons.most_common()
        ]
        table = [
            (column, origin, _type(seen, column), _values(seen, column))
            for column, origin in seen.origins.items()
            if column in seen.rows.column_names
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)][:3]
        said += [
            "  ".join(["", *(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
            for row in table
        ]
    return said + warnings(found)


def _type(seen: Preview, column: str) -> str:
    return str(seen.rows.schema.field(column).type).removeprefix("large_")


def _values(seen: Preview, column: str) -> str:
    """The first few values of a column, each once."""
    values = pc.unique(seen.rows[column].slice(0, 10_000).drop_null())[:VALUES].to_pylist()
    texts = [_instant(value) if column == "timestamp_ms" and seen.clock else _text(value) for value in values]
    return " | ".join(text[:LONGEST_VALUE] for text in texts) or "nothing in these rows"


def _text(value: object) -> str:
    """A value in words; a float32 in the digits that it holds."""
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _instant(time_ms: int) -> str:
    """ISO 8601 in UTC."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
