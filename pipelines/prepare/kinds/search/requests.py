"""Grouping of a search log's results into requests, by user and request id.

Shapes: E events of a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from core.errors import UserError
from pipelines.prepare.events.columns import dictionary_column, first_of_run
from pipelines.prepare.kinds.search.config import SearchConfig
from pipelines.prepare.reading.durations import MINUTE_MS


@dataclass(frozen=True)
class EventRequests:
    """The request of each event of a part, identified by (user, request id, query).

    If a request id has several queries, each query is a request, and all take the time
    of the earliest event. So no click for one query is in another query's history.
    Events without a request id are a request if they have the same user, time and
    query.
    """

    first: np.ndarray
    """(E,) row of the earliest event of each event's request."""
    earliest: np.ndarray
    """(E,) row of the earliest event with the same (user, request id) and any query;
    its time is the request's time."""
    begin_rank: np.ndarray | None
    """(E,) rank of the (user, time, request id) at which each event's request begins.
    None if each request has one time and each time one request: events are in the order
    of requests then."""

    @classmethod
    def find(cls, events: pa.Table, query: np.ndarray) -> EventRequests:
        """Find the requests of events.

        Args:
            events: Rows of `read_part`, sorted by user, time and request id.
            query: query_index (E,) of the events.
        """
        row = np.arange(events.num_rows)
        if not len(row):
            return cls(row, row, None)
        user = dictionary_column(events, "user_id").indices.to_numpy()
        request_id = dictionary_column(events, "request_id")
        code = request_id.indices.to_numpy()
        time = events["timestamp_ms"].to_numpy()
        is_named = pc.not_equal(request_id.dictionary, "")
        has_id = is_named.to_numpy(zero_copy_only=False)[code]
        # runs of events with the same user, time and request id
        run_start = first_of_run(user, time, code)
        is_start = run_start == row
        named_starts = is_start & has_id
        pairs = pl.DataFrame({"user": user[named_starts], "id": code[named_starts]})
        if pairs.n_unique() == pairs.height and (query == query[run_start]).all():
            # the usual log: one time and one query per request
            return cls(run_start, run_start, None)
        frame = pl.DataFrame(
            {
                "row": row,
                "user": user,
                "id": code,
                "time": np.where(has_id, 0, time),
                "query": query,
            }
        )
        request = ["user", "id", "time"]
        earliest = frame.select(pl.col("row").first().over(*request)).to_series()
        first = frame.select(pl.col("row").first().over(*request, "query")).to_series()
        begin_rank = np.cumsum(is_start)[earliest.to_numpy()]
        return cls(first.to_numpy(), earliest.to_numpy(), begin_rank)

    def sort(
        self, query: np.ndarray, position: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sort events by request.

        Requests are sorted by (user, time, request id, query), the results of a request
        by position.

        Args:
            query: query_index (E,) of the events.
            position: Positions (E,) of the events.

        Returns:
            The rows (E,) in this order, and a mask (E,) of sorted rows that begin a
            request.
        """
        row = np.arange(len(query))
        if self.begin_rank is not None:
            row = np.lexsort((position, query, self.begin_rank))
        first = self.first[row]
        return row, first_of_run(first) == np.arange(len(first))

    def spread(self, time: np.ndarray) -> np.ndarray:
        """Return the time (E,) in ms from the request's time to each event's `time`."""
        return time - time[self.earliest]


def find_requests(
    events: pa.Table, query: np.ndarray, config: SearchConfig, has_clock_times: bool
) -> EventRequests:
    """Return the requests of a part, after a check of their lengths.

    Args:
        events: Rows of `read_part`.
        query: query_index (E,) of the events.
        config: Settings with the limit of a request's length.
        has_clock_times: Whether times are clock times; other times are not checked.
    """
    requests = EventRequests.find(events, query)
    spread = requests.spread(events["timestamp_ms"].to_numpy())
    if (
        has_clock_times
        and len(spread)
        and spread.max() > config.max_request_minutes * MINUTE_MS
    ):
        row = int(spread.argmax())
        user, request_id = (
            events[name][row].as_py() for name in ("user_id", "request_id")
        )
        raise UserError(
            f"request '{request_id}' of user '{user}' has results "
            f"{spread[row] / MINUTE_MS:,.1f} minutes apart, over "
            f"search.max_request_minutes {config.max_request_minutes:g}: 'request' may "
            f"be an id that is reused"
        )
    return requests
