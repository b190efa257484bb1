"""The batch of a search model: histories, requests and their candidates.

The candidates of all requests of a batch form one flat axis. A candidate refers to its
request. A request refers to its row and has the number of the row's behaviours before
the request.

Shapes: `B` rows, `T` behaviours, `R` requests, `N` candidates, `Q` distinct queries,
`P` distinct pairs of item and query, `F` features, `K` labels, `W` width of text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from models.dataset.batch import Batch, axes
from models.dataset.encoding import PAD
from models.search.catalogue import NO_QUERY


@dataclass(frozen=True, kw_only=True)
class SearchBatch(Batch):
    """A batch of histories, with their requests and the requests' candidates."""

    bucket_axes: ClassVar[tuple[str, ...]] = ("B", "T", "R", "N", "Q", "P")

    history: Tensor = axes("B", "T", padding=PAD)
    """(B, T) int64 `item_index`, oldest first, -1 at padding."""
    history_query: Tensor = axes("B", "T", padding=NO_QUERY)
    """(B, T) int64 `query_index` of each behaviour, -1 without a query."""
    history_time: Tensor = axes("B", "T")
    """(B, T) int64 ms."""
    history_features: Tensor = axes("B", "T", "F")
    """(B, T, F) float32."""
    history_length: Tensor = axes("B")
    """(B,) int64 number of behaviours of each history."""
    history_new: Tensor = axes("B")
    """(B,) int64 position of the first behaviour that no earlier example of the user
    learns."""
    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    request_row: Tensor = axes("R")
    """(R,) int64 row of each request."""
    request_end: Tensor = axes("R")
    """(R,) int64 number of the row's behaviours before the request."""
    request_query: Tensor = axes("R", padding=NO_QUERY)
    """(R,) int64 `query_index`, -1 without a query."""
    request_time: Tensor = axes("R")
    """(R,) int64 ms."""
    request: Tensor = axes("R")
    """(R,) int64 `request_number`."""
    candidate: Tensor = axes("N")
    """(N,) int64 `item_index`."""
    candidate_request: Tensor = axes("N")
    """(N,) int64 request of each candidate, ascending."""
    candidate_position: Tensor = axes("N")
    """(N,) int64 position at which the candidate was shown."""
    candidate_valid: Tensor = axes("N")
    """(N,) bool, false at padding."""
    labels: Tensor = axes("N", "K")
    """(N, K) bool."""
    features: Tensor = axes("N", "F")
    """(N, F) float32."""
    query_text: Tensor = axes("Q", "W")
    """(Q, W) float32 vectors of the batch's distinct queries."""
    request_query_text: Tensor = axes("R", padding=-1)
    """(R,) int64 row of `query_text`, -1 without a query."""
    history_query_text: Tensor = axes("B", "T", padding=-1)
    """(B, T) int64 row of `query_text`, -1 without a query or if the model does not
    read it."""
    pair_text: Tensor = axes("P", "W")
    """(P, W) float32 vectors of the batch's distinct pairs of item and query."""
    joint_text: Tensor = axes("P", "W")
    """(P, W) float32 [SEP] vectors of the pairs of `pair_text`, or (P, 0)."""
    candidate_pair_text: Tensor = axes("N", padding=-1)
    """(N,) int64 row of `pair_text`, -1 without a query or a vector."""
    history_pair_text: Tensor = axes("B", "T", padding=-1)
    """(B, T) int64 row of `pair_text`, -1 without a query or if the model does not
    read it."""

    def candidate_keys(self) -> dict[str, Tensor]:
        """Return the user, request, time, query, item and labels of each candidate."""
        request = self.candidate_request
        return {
            "user_row": self.user_row[self.request_row][request],
            "request": self.request[request],
            "time": self.request_time[request],
            "query": self.request_query[request],
            "item": self.candidate,
            "labels": self.labels,
        }
