"""Earlier behaviours that a log names in the rows of later ones, without their times: MIND's column of clicked news.

history: {column: history, separator: " ", at: "2019-10-12", labels: [click]}

The k-th of a row's list becomes an event of its user k milliseconds after `at`. So rows that repeat the list, or that
have grown by newer behaviours at its end, give the same events again, which the step that drops repetitions drops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import polars as pl

from pipelines.data.sources.normalise import (
    NO_ID,
    Columns,
    Label,
    Time,
    as_list,
    elements_of,
    milliseconds,
    moments,
    slices,
)
from pipelines.data.sources.readers import ROW
from pipelines.data.sources.transforms import REFUSED

MOMENT, ROW_MOMENT, TRUE, NONE = "__moment", "__row_moment", "__true", "__none"


@dataclass(frozen=True)
class History:
    """Earlier behaviours of the row's user, as a list of items without times."""

    column: str
    """Column with the list of items, oldest first."""
    at: str
    """A time before the log, as ISO 8601: the first item of a list gets it, each next one a millisecond more."""
    separator: str | None = None
    """Text between two elements of a list that is written as text; None: real lists (JSON, Parquet)."""
    labels: list[str] | None = None
    """The bool labels that are true for these behaviours; [] for none. Required if the log has bool labels."""
    newest_first: bool = False
    """true: the lists begin with the newest item."""

    def __post_init__(self) -> None:
        if self.separator == "":
            raise ValueError("history.separator is empty; give the text between two elements, such as ' '")
        if milliseconds(self.at) is None:
            raise ValueError(f"history.at is '{self.at}', which is no ISO 8601 time; write such as '2019-10-12'")


def check_history(history: History, labels: dict[str, Label], clock: bool) -> None:
    """ValueError for earlier behaviours that the log's times or labels do not allow."""
    flags = [name for name, label in labels.items() if label.type == "bool"]
    if not clock:
        raise ValueError(
            "'history' dates earlier behaviours before the log, which needs clock times; give 'time' a unit"
        )
    if history.labels is None and flags:
        raise ValueError(
            f"'history.labels' is missing; say which labels the earlier behaviours have, of {', '.join(flags)}, or [] "
            f"for none"
        )
    for name in history.labels or []:
        if name not in flags:
            raise ValueError(
                f"history.labels has '{name}', which is no bool label; those are {', '.join(flags) or 'none'}"
            )


def earlier(
    raw: pl.DataFrame, history: History, columns: Columns, of_users: list[str], uri: str
) -> Iterator[tuple[pl.DataFrame, Columns]]:
    """The earlier behaviours that the rows name, one row each, and where their columns come from. Lists that a user has
    twice are taken once; rows without a user or a time, which are rejects themselves, are left out."""
    item, start = history.column, milliseconds(history.at)
    user = pl.col(columns.user).cast(pl.String).str.strip_chars()
    listed = as_list(raw, item, history.separator, uri, "history.separator")
    raw = raw.with_columns(
        listed.list.reverse() if history.newest_first else listed, moments(raw, columns.time, uri).alias(ROW_MOMENT)
    )
    known = (user != "") & ~user.is_in(NO_ID) & pl.col(ROW_MOMENT).is_not_null() & (pl.col(item).list.len() > 0)
    rows = raw.filter(known).select(columns.user, *of_users, item, ROW, ROW_MOMENT)
    rows = rows.sort(ROW_MOMENT, maintain_order=True).unique([columns.user, item], keep="first", maintain_order=True)
    rows = rows.sort(ROW).with_columns(pl.int_ranges(0, pl.col(item).list.len()).alias(MOMENT))
    made = replace(
        columns,
        item=item,
        time=Time(MOMENT, "ms"),
        query=None,
        request=None,
        position=None,
        labels={name: _label(label, name in (history.labels or ())) for name, label in columns.labels.items()},
        numbers=dict.fromkeys(columns.numbers, NONE),
        categories={name: c if c in of_users else NONE for name, c in columns.categories.items()},
        explode=None,
    )
    for piece in slices(rows, item):
        each = piece.explode(item, MOMENT)
        each = each.with_columns(pl.col(MOMENT) + start, pl.lit(True).alias(TRUE), pl.lit(None, pl.String).alias(NONE))
        each = elements_of(each, [item], columns, uri)
        late = pl.when(pl.col(MOMENT) >= pl.col(ROW_MOMENT)).then(
            pl.lit(f"{item}: not before its row, give an earlier history.at than {history.at}")
        )
        before = [pl.col(REFUSED)] if REFUSED in each.columns else []
        yield each.with_columns(pl.coalesce(*before, late).alias(REFUSED)), made


def _label(label: Label, has: bool) -> Label:
    """The label of an earlier behaviour: known with it."""
    column = TRUE if has else NONE
    time = Time(MOMENT, "ms") if label.late else None
    return replace(label, column=column, true_when=None, member_of=None, time=time, delay_minutes=None)
