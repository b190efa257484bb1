"""Top-k with ties broken by position, deterministic on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def select(scores: Tensor, k: int) -> Tensor:
    """Select the k highest scores of each row.

    Of equal scores the first are selected. NaN is above all numbers.

    Args:
        scores: (B, N) scores.
        k: Number of scores, at most N.

    Returns:
        (B, k) positions in ascending order.
    """
    batch, width = scores.shape
    if k == width:
        return torch.arange(width, device=scores.device).expand(batch, width)
    if scores.device.type != "cpu":
        # a GPU would have to wait for the rows with ties
        return _select_all_passes(scores, k)
    values, position = torch.topk(scores, k + 1)
    values, next_value = values.split([k, 1], 1)
    position = position[:, :k]
    # rows in which another score equals the k-th highest
    tied = (values[:, -1:] == next_value).nonzero()[:, 0]
    if len(tied):
        row, column = (scores[tied] == next_value[tied]).nonzero(as_tuple=True)
        start = torch.searchsorted(row, torch.arange(len(tied)))[:, None]
        # the first ties follow the higher scores
        num_above = (values[tied] != next_value[tied]).sum(1, keepdim=True)
        tie = torch.arange(k) - num_above
        ties = column[start + tie.clamp(min=0)]
        position = position.clone()
        position[tied] = torch.where(tie < 0, position[tied], ties)
    return position.sort(1).values


def _select_all_passes(scores: Tensor, k: int) -> Tensor:
    """Return the result of `select` for k < N, without a dynamic shape."""
    scores = torch.where(scores.isnan(), torch.inf, scores)
    kth_score = torch.topk(scores, k, sorted=False).values.amin(1, keepdim=True)
    above = scores > kth_score
    equal = scores == kth_score
    num_equal = k - above.sum(1, keepdim=True)  # number of ties to select
    is_selected = above | (equal & (equal.cumsum(1) <= num_equal))
    # all other positions go to an extra slot
    slot = torch.where(is_selected, is_selected.cumsum(1) - 1, k)
    position = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    slots = scores.new_zeros((scores.shape[0], k + 1), dtype=torch.long)
    return slots.scatter_(1, slot, position)[:, :k]


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest scores of each row, sorted by score, then by position.

    Args:
        scores: (B, N) scores.
        k: Number of scores. If it exceeds N, the tail is position -1 and value -inf.

    Returns:
        Positions and values, (B, k) both.
    """
    available = min(k, scores.shape[1])
    position = select(scores, available)
    values, order = scores.gather(1, position).sort(dim=1, descending=True, stable=True)
    position = position.gather(1, order)
    if available < k:
        missing = (scores.shape[0], k - available)
        position = torch.cat([position, position.new_full(missing, -1)], 1)
        values = torch.cat([values, values.new_full(missing, -torch.inf)], 1)
    return position, values
