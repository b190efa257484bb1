"""The batch of an actions model: each row is one user's context and candidates.

The context holds past events ordered by time, each with its actions and labels.
Candidates are events whose actions are predicted, all in one pass and independently of
each other. The batch has the labels of a candidate, but not its actions.

Each context event and candidate reads the context events with a strictly earlier
timestamp. Events with the same millisecond, such as the events of one page in many
logs, do not read each other. The order of events of equal time is irrelevant, except in
LAC, which reads one action before an event.

Shapes: `B` users, `T` context events, `C` candidates, `A` kinds of action, `K` tasks,
`F` late features, `V` viewer-side categories, `O` custom features of the log, `I` items
of the catalogue, `M` new items, `X` numbers and `G` categories of an item, `W` width of
text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.dataset.batch import Batch, axes


@dataclass(frozen=True, kw_only=True)
class ActionsBatch(Batch):
    """A batch of users, each with a context and candidates."""

    bucket_axes: ClassVar[tuple[str, ...]] = ("B", "T", "C")

    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    item: Tensor = axes("B", "T")
    """(B, T) int64 `item_index`; I and above are new items."""
    time: Tensor = axes("B", "T")
    """(B, T) int64 ms, ascending in each row."""
    action: Tensor = axes("B", "T", "A")
    """(B, T, A) float32 actions of the user on the item, from 0 to 1."""
    label: Tensor = axes("B", "T", "K")
    """(B, T, K) float32 label of each task, 0 or 1."""
    feature: Tensor = axes("B", "T", "F")
    """(B, T, F) float32 late features: counts as of the time of the event."""
    valid: Tensor = axes("B", "T")
    """(B, T) bool, false at padding, which follows the events."""
    learn: Tensor = axes("B", "T")
    """(B, T) bool, true for events that are learned; an event is learned in one
    example."""
    candidate_item: Tensor = axes("B", "C")
    """(B, C) int64 `item_index`, in any order; C may be 0 in training."""
    candidate_time: Tensor = axes("B", "C")
    """(B, C) int64 ms."""
    candidate_label: Tensor = axes("B", "C", "K")
    """(B, C, K) float32 label of each task, 0 or 1."""
    candidate_feature: Tensor = axes("B", "C", "F")
    """(B, C, F) float32 late features."""
    candidate_valid: Tensor = axes("B", "C")
    """(B, C) bool, false at padding."""
    viewer: Tensor | None = axes("B", "T", "V", default=None)
    """(B, T, V) int64 viewer-side categories of the event, 0 for an unknown value; None
    if the log has none."""
    candidate_viewer: Tensor | None = axes("B", "C", "V", default=None)
    """(B, C, V) int64 viewer-side categories."""
    custom: Tensor | None = axes("B", "T", "O", default=None)
    """(B, T, O) float32 custom features of the log, from `CustomFeatures.matrix`; None
    if the log has none."""
    candidate_custom: Tensor | None = axes("B", "C", "O", default=None)
    """(B, C, O) float32 custom features of the log."""
    new_numbers: Tensor | None = axes("M", "X", default=None)
    """(M, X) float32 numbers of the new items of served requests; None without new
    items."""
    new_categories: Tensor | None = axes("M", "G", default=None)
    """(M, G) int64 categories of the new items."""
    new_text: Tensor | None = axes("M", "W", default=None)
    """(M, W) float32 text vectors of the new items."""
    has_ties: bool = True
    """Whether context events of a row may share a timestamp; attention is faster
    without ties."""

    def join(self, name: str) -> Tensor:
        """Return a field of the context, then of the candidates, (B, T + C, ...)."""
        return torch.cat([getattr(self, name), getattr(self, f"candidate_{name}")], 1)

    def candidate_keys(self) -> dict[str, Tensor]:
        """Return the user, request, time, item and labels of each valid candidate.

        The candidates of a user with the same timestamp form one request. Impressions
        have no query, so `query` is -1.
        """
        valid = self.candidate_valid
        time = self.candidate_time[valid]
        return {
            "user_row": self.user_row[:, None].expand_as(valid)[valid],
            "request": time,
            "time": time,
            "query": torch.full_like(time, -1),
            "item": self.candidate_item[valid],
            "labels": self.candidate_label[valid],
        }

    def count_earlier(self) -> Tensor:
        """Count the strictly earlier context events of each event and candidate.

        Returns:
            (B, T + C) int64. A count of n refers to the first n events of the row.
        """
        last = torch.iinfo(torch.int64).max
        # ascending, padding included
        context_time = self.time.masked_fill(~self.valid, last)
        times = torch.cat([context_time, self.candidate_time], 1)
        return torch.searchsorted(context_time, times)


def has_tied_times(time: Tensor, valid: Tensor) -> bool:
    """Return whether two valid events of a row share a timestamp.

    Args:
        time: (B, T) timestamps, ascending in each row.
        valid: (B, T) bool, false at padding, which follows the events.
    """
    return bool(((time[:, 1:] == time[:, :-1]) & valid[:, 1:]).any())
