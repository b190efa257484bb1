"""The query-conditioned InfoNCE loss of QGS (Eq. 4 and 5) with its padding and collision masks.

Shapes: `B` users, `T` positions, `D` width, `M` valid positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.training.distributed import global_mean


def masked_logits(
    z: Tensor, v: Tensor, items: Tensor, valid: Tensor, temperature: float
) -> Tensor:
    """(T, B, B) float32: s_t^(b, c) of Eq. 4, -inf where user c is no negative for user b at position t.

    `z` (B, T, D) predictions, `v` (B, T, D) targets, `items` (B, T) item_index of the targets, `valid` (B, T)
    whether the target is there. A negative that is padding or has the same item as the positive is out; the
    positive, on the diagonal, stays.
    """
    z, v = (
        functional.normalize(x.float(), dim=-1).transpose(0, 1) for x in (z, v)
    )  # (T, B, D)
    with torch.autocast(
        z.device.type, enabled=False
    ):  # it would multiply in bfloat16, 1/16 apart at 10
        logits = z @ v.transpose(1, 2) / temperature
    items, valid = items.T, valid.T  # (T, B)
    same = items[:, :, None] == items[:, None]
    self_ = torch.eye(z.shape[1], dtype=torch.bool, device=z.device)
    return logits.masked_fill((same | ~valid[:, None]) & ~self_, -torch.inf)


def info_nce(
    z: Tensor,
    v: Tensor,
    items: Tensor,
    valid: Tensor,
    temperature: float = 0.1,
    negatives: str = "position",
) -> Tensor:
    """Eq. 5: the mean over valid positions of the cross-entropy of the positive; 0 where none is valid.

    Shapes as of `masked_logits`. `negatives`: `position` takes other users' targets at the same position, as
    the paper does; `batch` those at all positions of the batch, with M x M memory.
    """
    if negatives == "batch":
        z, v, items = (
            z[valid][:, None],
            v[valid][:, None],
            items[valid][:, None],
        )  # (M, 1, D): M users of one position
        valid = torch.ones_like(items, dtype=torch.bool)
    count = valid.sum()
    if not z.numel():
        return global_mean((z + v).sum(), 0)  # 0, and part of the graph
    logits = masked_logits(z, v, items, valid, temperature)
    loss = torch.logsumexp(logits, -1) - logits.diagonal(dim1=1, dim2=2)  # (T, B)
    return global_mean(torch.where(valid.T, loss, 0).sum() / count.clamp(min=1), count)
