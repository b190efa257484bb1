"""Codes of equal use by optimal transport: LC-Rec's uniform semantic mapping (Zheng et al., 2024, Sec. 3.1.2).

    min over Q of sum Q_bk ||x_b - e_k||^2, with rows of Q that sum to 1/B and columns that sum to 1/K

solved by Sinkhorn's iterations on exp(-cost / epsilon); each item takes the code with the most of its row. That costs
are scaled to [-1, 1] first, which gives epsilon a meaning, is not in the paper but in LC-Rec's code. What happens to
items with equal codes after training, where LC-Rec runs Sinkhorn among them again and again, is our choice: `spread`.

Shapes: B items, K codes, D width, N items of the catalogue, C levels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ITERATIONS = 50
"""Sinkhorn's iterations."""


def transport(points: Tensor, centres: Tensor, epsilon: float) -> Tensor:
    """(B,) codes of `points` (B, D) among `centres` (K, D), each used about equally often."""
    cost = torch.cdist(points.double(), centres.double()).square()
    middle, half = (cost.max() + cost.min()) / 2, (cost.max() - cost.min()) / 2
    plan = -(cost - middle) / (half.clamp(min=1e-12) * epsilon)  # logarithms, as exp of them overflows
    rows, columns = -math.log(len(points)), -math.log(len(centres))
    for _ in range(ITERATIONS):
        plan = plan - plan.logsumexp(0, keepdim=True) + columns
        plan = plan - plan.logsumexp(1, keepdim=True) + rows
    return plan.argmax(1)


def spread(vectors: Tensor, codebooks: Tensor, codes: Tensor) -> Tensor:
    """(N, C) codes where no two items that share all but the last code share that too, where there are codes enough.

    Of such items the last codes are those of the least total cost that differ (an assignment problem); more of them
    than codes stay as they are. `vectors` (N, D) are what the codes stand for.
    """
    from scipy.optimize import linear_sum_assignment  # models that rank need PyTorch alone

    codes = codes.clone()
    above = codebooks[torch.arange(codes.shape[1] - 1, device=codes.device), codes[:, :-1]].sum(1)
    left = (vectors - above).cpu()  # (N, D): what the last level stands for
    last = codebooks[-1].cpu()
    _, group, counts = codes[:, :-1].unique(dim=0, return_inverse=True, return_counts=True)
    order, ends = group.argsort(stable=True), counts.cumsum(0)
    for number in range(len(counts)):
        items = order[ends[number] - counts[number] : ends[number]]
        if len(items) <= len(last) and len(codes[items, -1].unique()) < len(items):
            cost = torch.cdist(left[items.cpu()].double(), last.double()).square()
            codes[items, -1] = torch.from_numpy(linear_sum_assignment(cost.numpy())[1]).to(codes.device)
    return codes
