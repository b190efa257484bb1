"""Features with times of their own, joined as of a request: the latest earlier row.

`python -m jobs.prepare` makes a table `as_of_NAME` for each section that a source file
declares in `as_of`, sorted by id and time. Requests and behaviours of `sequences` take
their values from it. Each task has the whole table in memory.
"""

from __future__ import annotations

from collections import Counter

import polars as pl

from core.errors import UserError
from core.schemas import AsOfInfo
from core.tables import Table, write_part
from pipelines.prepare.reading.rows import read_section
from pipelines.prepare.run import Run

PREFIX = "as_of_"
"""Prefix of the names of the tables."""


def make_as_of_tables(run: Run) -> dict[str, Table[AsOfInfo]]:
    """Make the tables that the source declares, and return them by name.

    Tables that are up to date stay.
    """
    tables: dict[str, Table[AsOfInfo]] = {}
    for section_name, section in run.source.as_of.items():
        name, files = f"{PREFIX}{section_name}", section.list_files(run.input)
        settings = {"as_of": run.source.config["as_of"][section_name]}
        stamps = run.stamps(files)
        if table := run.tables.find_finished(AsOfInfo, settings, {}, stamps, name):
            tables[name] = table
            continue
        read = read_section(section, run.input, files)
        run.check_rejects(read.rejected, f" of {name}")
        if not read.rows.height:
            raise UserError(f"{run.input} has no valid row in {', '.join(files[:3])}")
        keys = [section.key, "timestamp_ms"]
        rows = read.rows.sort(keys, maintain_order=True)
        last = rows.unique(keys, keep="last", maintain_order=True)
        schema, uri = section.schema, run.tables.table_uri(name)
        part = write_part(uri, last.to_arrow().cast(schema))
        info = AsOfInfo(section.key, stamps)
        run.report(
            f"{name}: {last.height:,} rows; dropped {rows.height - last.height:,} with "
            f"the id and time of a later row"
        )
        tables[name] = run.tables.commit(
            name, schema, [part], settings, read.hashes, info
        )
    return tables


def join_as_of(
    events: pl.DataFrame,
    tables: dict[str, tuple[str, pl.DataFrame]],
    count: Counter[str],
) -> pl.DataFrame:
    """Join the features of the latest row of each table strictly before `as_of`.

    Args:
        events: Events with ids and the column `as_of`, a time in ms.
        tables: The column of ids (`item_id` or `user_id`) and the rows of each table,
            sorted by id and time.
        count: Counter that the numbers of events without an earlier row, whose features
            are null, are added to, by table, in place.
    """
    for name, (key, rows) in tables.items():
        joined = (
            events.select(key, "as_of")
            .with_row_index("row")
            .sort("as_of")
            .join_asof(
                rows.rename({"timestamp_ms": "since"}).with_columns(is_found=True),
                left_on="as_of",
                right_on="since",
                by=key,
                allow_exact_matches=False,
                check_sortedness=False,
            )
            .sort("row")
        )
        count[f"nothing_of_{name}"] += joined["is_found"].null_count()
        events = events.hstack(joined.select(rows.columns[2:]))
    return events


def report_missing(
    run: Run,
    tables: dict[str, Table[AsOfInfo]],
    num_events: int,
    count: Counter[str],
) -> None:
    """Report how many events have no earlier row in each table.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        tables: The tables, by name.
        num_events: Number of events of the log.
        count: Counts of `join_as_of` over all parts.
    """
    for name in tables:
        num_missing = count[f"nothing_of_{name}"]
        if num_missing == num_events:
            raise UserError(
                f"{name} has no row before any of the {num_events:,} events"
            )
        if num_missing:
            run.report(
                f"{name}: {num_missing:,} of {num_events:,} events "
                f"({num_missing / num_events:.1%}) have no earlier row"
            )
