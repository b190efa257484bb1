"""The batch of a model of actions: each row is one user's context and candidates.

The context is what happened before, in order of time, each event with its actions and
labels. Candidates are events whose actions are to be predicted, all in one pass; no
candidate reads another one. A candidate's actions are not in the batch, only its
labels.

Every position, of the context or a candidate, reads the context that is strictly
earlier by timestamp. Events of one millisecond, such as those of one page in many logs,
do not read each other. Their order changes nothing, except for LAC, which reads one
action before an event.

Shapes: `B` users, `T` context events, `C` candidates, `A` kinds of action, `K` tasks,
`F` features, `V` viewer-side categories, `O` features of the log's own, `M` new items,
`X` numbers and `G` categories of an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.dataset.batch import Batch, axes


@dataclass(frozen=True, kw_only=True)
class ActionsBatch(Batch):
    """Contexts and candidates of users."""

    bucket_axes: ClassVar[tuple[str, ...]] = ("B", "T", "C")

    user_row: Tensor = axes("B")
    """(B,) int64 table row of the user."""
    item: Tensor = axes("B", "T")
    """(B, T) int64 `item_index`; from I on it numbers new items."""
    time: Tensor = axes("B", "T")
    """(B, T) int64 ms, ascending in each row."""
    action: Tensor = axes("B", "T", "A")
    """(B, T, A) float32 from 0 to 1: what the user did."""
    label: Tensor = axes("B", "T", "K")
    """(B, T, K) float32: the tasks' 0 or 1."""
    feature: Tensor = axes("B", "T", "F")
    """(B, T, F) float32: counting statistics at the time of the event, for late
    fusion."""
    valid: Tensor = axes("B", "T")
    """(B, T) bool, false at padding, which comes after the events."""
    learn: Tensor = axes("B", "T")
    """(B, T) bool: events that are learned from in training, each in one row."""
    candidate_item: Tensor = axes("B", "C")
    """(B, C) int64, in any order; C may be 0 in training."""
    candidate_time: Tensor = axes("B", "C")
    """(B, C) int64 ms."""
    candidate_label: Tensor = axes("B", "C", "K")
    """(B, C, K) float32."""
    candidate_feature: Tensor = axes("B", "C", "F")
    """(B, C, F) float32."""
    candidate_valid: Tensor = axes("B", "C")
    """(B, C) bool, false at padding."""
    viewer: Tensor | None = axes("B", "T", "V", default=None)
    """(B, T, V) int64 viewer-side categories of the event, 0 for an unknown value; None
    where the log has none."""
    candidate_viewer: Tensor | None = axes("B", "C", "V", default=None)
    """(B, C, V) int64."""
    own: Tensor | None = axes("B", "T", "O", default=None)
    """(B, T, O) float32 the log's own features, as `OwnFeatures.matrix` returns them;
    None where the log has none."""
    candidate_own: Tensor | None = axes("B", "C", "O", default=None)
    """(B, C, O) float32."""
    new_numbers: Tensor | None = axes("M", "X", default=None)
    """(M, X) float32 attributes of items that a served request brings; None without new
    items."""
    new_categories: Tensor | None = axes("M", "G", default=None)
    """(M, G) int64."""
    new_text: Tensor | None = axes("M", "W", default=None)
    """(M, W) float32."""
    has_ties: bool = True
    """Whether two context events of a row may have one time; models take a faster way
    where none have."""

    def join(self, name: str) -> Tensor:
        """Return a tensor of the context and the candidates' one, (B, T + C, ...)."""
        return torch.cat([getattr(self, name), getattr(self, f"candidate_{name}")], 1)

    def count_earlier(self) -> Tensor:
        """Return (B, T + C) int64: how many context events are strictly earlier than each event and candidate.

        These are the row's first events.
        """
        last = torch.iinfo(torch.int64).max
        # ascending, padding included
        context_time = self.time.masked_fill(~self.valid, last)
        times = torch.cat([context_time, self.candidate_time], 1)
        return torch.searchsorted(context_time, times)


def any_tied(time: Tensor, valid: Tensor) -> bool:
    """Return whether two valid events of a row have one time; `time` (B, T) is ascending."""
    return bool(((time[:, 1:] == time[:, :-1]) & valid[:, 1:]).any())
