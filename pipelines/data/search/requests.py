"""Which results a search log shows together: what it says is one request, (user, request id)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from models.storage.tables import UserError
from pipelines.data.events.event_stats import coded
from pipelines.data.reading.durations import MINUTE_MS
from pipelines.data.search.config import SearchConfig


@dataclass(frozen=True)
class Requests:
    """Which of a part's events are of one request: what the log says is one, (user, request id).

    A request id with several queries is one request per query, all at the time of the earliest, so that none has what
    was clicked for another in its history. Only events without a request id are cut by time.
    """

    first: np.ndarray
    """(E,) row of the earliest event of each event's request, of its query."""
    earliest: np.ndarray
    """(E,) row of the earliest event of its (user, request id), whatever the query; its time is the request's."""
    moment: np.ndarray | None
    """(E,) number of the (user, time, request id) at which each event's request begins; None where each request is of
    one moment and each moment of one request, so that events are in the order of requests."""

    @classmethod
    def of(cls, events: pa.Table, query: np.ndarray) -> Requests:
        """Of events as their table sorts them; query (E,) query_index."""
        rows = events.num_rows
        here = np.arange(rows)
        if not rows:
            return cls(here, here, None)
        user, id_ = (
            coded(events, "user_id").indices.to_numpy(),
            coded(events, "request_id"),
        )
        named = pc.not_equal(id_.dictionary, "").to_numpy(zero_copy_only=False)[
            id_.indices.to_numpy()
        ]
        columns = {
            "user": user,
            "id": id_.indices.to_numpy(),
            "query": query,
            "time": events["timestamp_ms"].to_numpy(),
        }
        new = _changes(*(columns[name] for name in ("user", "time", "id")))
        moment = np.cumsum(new)  # (E,) number of the (user, time, request id)
        begin = np.maximum.accumulate(np.where(new, here, 0))
        pairs = pl.DataFrame(
            {"user": user[new & named], "id": columns["id"][new & named]}
        )
        if pairs.n_unique() == pairs.height and (query == query[begin]).all():
            return cls(
                begin, begin, None
            )  # as in most logs: one time and one query per request
        key = pl.DataFrame(
            columns | {"row": here, "time": np.where(named, 0, columns["time"])}
        )
        first, earliest = (
            key.select(pl.col("row").first().over("user", "id", "time", *also))
            .to_series()
            .to_numpy()
            for also in (["query"], [])
        )
        return cls(first, earliest, moment[earliest])

    def order(
        self, query: np.ndarray, position: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(E,) rows in the order of their requests, which is that of (user, time, request id, query), and of their
        position within one; and (E,) which of them begin a request."""
        rows = (
            np.arange(len(query))
            if self.moment is None
            else np.lexsort((position, query, self.moment))
        )
        return rows, _changes(self.first[rows])

    def spread(self, time: np.ndarray) -> np.ndarray:
        """(E,) ms from the request's time to the event's. time (E,) ms"""
        return time - time[self.earliest]


def _changes(*columns: np.ndarray) -> np.ndarray:
    """(E,) whether a row differs from the one above it, the first always."""
    new = np.ones(len(columns[0]), dtype=bool)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return new


def requests_of(
    events: pa.Table, query: np.ndarray, config: SearchConfig, clock: bool
) -> Requests:
    """The requests of a part; UserError for one whose events lie further apart than `max_request_minutes`."""
    found = Requests.of(events, query)
    time = events["timestamp_ms"].to_numpy()
    spread = found.spread(time)
    if clock and len(spread) and spread.max() > config.max_request_minutes * MINUTE_MS:
        row = int(spread.argmax())
        user, id_ = (events[name][row].as_py() for name in ("user_id", "request_id"))
        raise UserError(
            f"request '{id_}' of user '{user}' has results {spread[row] / MINUTE_MS:,.1f} minutes apart, over the "
            f"limit search.max_request_minutes {config.max_request_minutes:g}; ids that come again, such as those of "
            f"sessions or a counter, name no request: map another column to 'request', leave it out to cut by time, "
            f"or raise the limit in the mapping file, under prepare"
        )
    return found
