"""Top-k with ties broken by position, the same way every time and on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def select(scores: Tensor, k: int) -> Tensor:
    """(B, k) positions of the k highest of `scores` (B, N), in rising order of position.

    Of equal scores the first come first: all above the k-th highest value are taken, then the first
    that equal it. NaN is above all. Needs k <= N.
    """
    batch, width = scores.shape
    if k > width:
        raise ValueError(f"k {k} exceeds the {width} scores; ask for fewer")
    if k == width:
        return torch.arange(width, device=scores.device).expand(batch, width)
    if scores.device.type != "cpu" or torch.compiler.is_compiling():
        return _first_of_equals(
            scores, k
        )  # a GPU would have to wait to see which rows have ties
    values, position = torch.topk(scores, k + 1)
    tied = (
        (values[:, k - 1] == values[:, k]).nonzero().squeeze(1)
    )  # rows whose k-th highest value is there again
    position = position[:, :k].sort(1).values
    if len(tied):
        position[tied] = _first_of_equals(
            scores if len(tied) == batch else scores[tied], k
        )
    return position


def _first_of_equals(scores: Tensor, k: int) -> Tensor:
    """`select` of k < N by passes over all scores, the same for any scores."""
    scores = torch.where(scores.isnan(), torch.inf, scores)
    least = torch.topk(scores, k, sorted=False).values.amin(1, keepdim=True)
    above = scores > least
    equal = scores == least
    room = k - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= room))
    slot = torch.where(
        chosen, chosen.cumsum(1) - 1, k
    )  # those not chosen fall into an extra slot
    position = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    return scores.new_zeros((scores.shape[0], k + 1), dtype=torch.long).scatter_(
        1, slot, position
    )[:, :k]


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(positions, values), each (B, k), by (score falling, position rising).

    Where k exceeds the scores, the tail is position -1 and value -inf.
    """
    have = min(k, scores.shape[1])
    position = select(scores, have)
    values, order = scores.gather(1, position).sort(dim=1, descending=True, stable=True)
    position = position.gather(1, order)
    if have < k:
        missing = (scores.shape[0], k - have)
        position = torch.cat([position, position.new_full(missing, -1)], 1)
        values = torch.cat([values, values.new_full(missing, -torch.inf)], 1)
    return position, values
