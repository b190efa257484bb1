"""Which results a search log shows together: those of one (user, request id).

Shapes: E events of a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from models.storage.tables import UserError
from pipelines.data.events.columns import dictionary_column, first_of_run
from pipelines.data.reading.durations import MINUTE_MS
from pipelines.data.search.config import SearchConfig


@dataclass(frozen=True)
class EventRequests:
    """The request of each event of a part: its (user, request id).

    A request id with several queries is one request per query, all at the time of the
    earliest, so that no request has what was clicked for another in its history. Only
    events without a request id are separated by time.
    """

    first: np.ndarray
    """(E,) earliest event of each event's request, of its query."""
    earliest: np.ndarray
    """(E,) earliest event of the (user, request id), whatever the query; its time is
    the request's."""
    moment: np.ndarray | None
    """(E,) number of the (user, time, request id) at which each event's request begins;
    None where each request has one time and each time one request, so that events are
    in the order of requests."""

    @classmethod
    def find(cls, events: pa.Table, query: np.ndarray) -> EventRequests:
        """Find the requests of sorted events. query (E,) is the query_index."""
        row = np.arange(events.num_rows)
        if not len(row):
            return cls(row, row, None)
        user = dictionary_column(events, "user_id").indices.to_numpy()
        request_id = dictionary_column(events, "request_id")
        code = request_id.indices.to_numpy()
        time = events["timestamp_ms"].to_numpy()
        is_text = pc.not_equal(request_id.dictionary, "")
        has_id = is_text.to_numpy(zero_copy_only=False)[code]
        begin = first_of_run(user, time, code)
        is_new = begin == row
        new_ids = is_new & has_id
        pairs = pl.DataFrame({"user": user[new_ids], "id": code[new_ids]})
        if pairs.n_unique() == pairs.height and (query == query[begin]).all():
            # as in most logs: one time and one query per request
            return cls(begin, begin, None)
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
        moment = np.cumsum(is_new)[earliest.to_numpy()]
        return cls(first.to_numpy(), earliest.to_numpy(), moment)

    def sort(
        self, query: np.ndarray, position: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (E,) rows in the order of their requests, and (E,) whether a sorted row begins a request.

        Requests are in the order of (user, time, request id, query), the results of a
        request in the order of their position.
        """
        row = np.arange(len(query))
        if self.moment is not None:
            row = np.lexsort((position, query, self.moment))
        first = self.first[row]
        return row, first_of_run(first) == np.arange(len(first))

    def spread(self, time: np.ndarray) -> np.ndarray:
        """Return (E,) ms from the request's time to the event's. time (E,) ms is the event's."""
        return time - time[self.earliest]


def find_requests(
    events: pa.Table, query: np.ndarray, config: SearchConfig, clock: bool
) -> EventRequests:
    """Return the requests of a part.

    Args:
        events: Rows of `read_part`.
        query: (E,) query_index.
        config: Settings of search logs.
        clock: Whether times are clock times.

    Raises:
        UserError: if events of one request are more than `max_request_minutes` apart.
    """
    requests = EventRequests.find(events, query)
    spread = requests.spread(events["timestamp_ms"].to_numpy())
    if clock and len(spread) and spread.max() > config.max_request_minutes * MINUTE_MS:
        row = int(spread.argmax())
        user, request_id = (
            events[name][row].as_py() for name in ("user_id", "request_id")
        )
        raise UserError(
            f"request '{request_id}' of user '{user}' has results {spread[row] / MINUTE_MS:,.1f} minutes apart, over "
            f"the limit search.max_request_minutes {config.max_request_minutes:g}; ids that come again, such as those "
            f"of sessions or a counter, name no request: map another column to 'request', leave it out to cut by time, "
            f"or raise the limit in the mapping file, under prepare"
        )
    return requests
