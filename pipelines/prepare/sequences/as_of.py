"""Tables with times of their own: features as of a request, and behaviours in sessions.

`python -m jobs.prepare` makes a table `as_of_NAME` for each section that a source file
declares in `as_of`, sorted by id and time. Requests and behaviours of `sequences` take
the values of the latest earlier row. A table `session_NAME` has the behaviours of a
section in `sessions`, which enter histories. Each task has the whole tables in memory.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import polars as pl
from pydantic import TypeAdapter

from core.errors import UserError
from core.schemas import AsOfInfo
from core.tables import Table, write_frame
from pipelines.prepare.reading.rows import read_section
from pipelines.prepare.run import Run

PREFIX = "as_of_"
"""Prefix of the names of the tables."""


def make_timed_tables(run: Run) -> dict[str, Table[AsOfInfo]]:
    """Make the tables that the source declares, and return them by name.

    Tables that are up to date stay.
    """
    tables: dict[str, Table[AsOfInfo]] = {}
    for name, section in run.source.timed.items():
        files, adapter = section.list_files(run.input), TypeAdapter(type(section))
        settings = {"as_of": adapter.dump_python(section, exclude_defaults=True)}
        stamps = run.stamps(files)
        if table := run.find_finished(AsOfInfo, settings, {}, stamps, name):
            tables[name] = table
            continue
        rows, rejected = read_section(section, run.input, files)
        run.check_rejects(rejected, f" of {name}")
        if not rows.height:
            raise UserError(f"{run.input} has no valid row in {', '.join(files[:3])}")
        ids = [key for key in ("user_id", "item_id") if key in section.columns]
        keys = [*ids, "timestamp_ms"]
        rows = rows.sort(keys, maintain_order=True)
        last = rows.unique(keys, keep="last", maintain_order=True)
        schema, uri = section.schema, run.table_uri(name)
        part = write_frame(uri, last, schema)
        info = AsOfInfo(section.key, stamps)
        run.report(
            f"{name}: {last.height:,} rows; dropped {rows.height - last.height:,} with "
            f"the id and time of a later row"
        )
        tables[name] = run.commit(name, schema, [part], settings, {}, info)
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


def add_sessions(
    behaviours: pl.DataFrame,
    events: pl.DataFrame,
    sessions: pl.DataFrame,
    count: Counter[str],
) -> pl.DataFrame:
    """Add behaviours of sessions to behaviours of events, sorted by user and `known`.

    At equal times, the behaviours of events come first. Session behaviours have
    `query_index` and `position` -1, null labels and zero features.

    Args:
        behaviours: Behaviours of the users of a part.
        events: Events of the part.
        sessions: Rows of all sessions, with `session_type` and features of items.
        count: Counter of rows of the part's users and of those outside the catalogue.
    """
    users = events.select("user_id", "user").unique()
    rows = sessions.join(users, on="user_id", maintain_order="left")
    count["session_rows"] += rows.height
    rows = rows.filter(pl.col("item_index") >= 0)
    count["sessions_inside"] += rows.height
    minus_one, time = pl.lit(-1, pl.Int32), pl.col("timestamp_ms")
    known = [name for name in behaviours.columns if name.startswith("known")]
    dtype: Any = behaviours.schema["features"]
    no_features = pl.Series("features", np.zeros((rows.height, dtype.size)), dtype)
    rows = rows.with_columns(
        *(time.alias(name) for name in known),
        no_features,
        query_index=minus_one,
        position=minus_one,
    )
    joined = pl.concat([behaviours, rows], how="diagonal_relaxed")
    return joined.sort("user", "known", maintain_order=True)


def check_matched(
    run: Run,
    num_events: int,
    num_missing: dict[str, int],
) -> None:
    """Check that each table matches events, and report how many have no earlier row.

    Args:
        run: Log, settings and tables of this call of `prepare`.
        num_events: Number of events of the log.
        num_missing: Number of events without an earlier row, by table.

    Raises:
        UserError: If a table has no row before any event.
    """
    for name, missing in num_missing.items():
        if missing == num_events:
            raise UserError(
                f"{name} has no row before any of the {num_events:,} events"
            )
        if missing:
            run.report(
                f"{name}: {missing:,} of {num_events:,} events "
                f"({missing / num_events:.1%}) have no earlier row"
            )
