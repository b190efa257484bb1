"""Means of losses over the global batch, computed from the means of all workers.

    mean = functional.cross_entropy(logits, target)   # over the B rows of this worker
    loss = global_mean(mean, len(target))             # scaled for DDP

DDP averages the gradients of the workers. The average is the gradient of the global
batch only if all workers have the same number of terms in each mean. Shares of a batch
differ in size and may be empty, so every mean in a loss passes through `global_mean`,
which weights it by the worker's number of terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

_step = {"workers": 1, "idle": False}
"""Number of workers, and whether this worker is idle, in the current training step."""


@contextmanager
def set_workers(world: int, idle: bool) -> Iterator[None]:
    """Set the number of workers for `global_mean` while the block runs.

    Args:
        world: Number of workers.
        idle: Whether this worker has no example of the batch, so that its means do not
            count.
    """
    before = dict(_step)
    _step.update(workers=world, idle=idle)
    try:
        yield
    finally:
        _step.update(before)


def global_mean(mean: Tensor, terms: int | Tensor) -> Tensor:
    """Scale a worker's mean so that the average over workers is the global mean.

    A collective call. The mean of an idle worker counts as 0 with weight 0. With one
    worker that is not idle, or outside of a training step, `mean` is returned
    unchanged.

    Args:
        mean: () mean over the terms of this worker, or (K,) means.
        terms: Number of terms in the mean; (K,) numbers for (K,) means.
    """
    world, idle = _step["workers"], _step["idle"]
    if world == 1:
        return mean * 0 if idle else mean
    count = torch.as_tensor(terms, device=mean.device).detach().to(torch.float64)
    if idle:
        count = torch.zeros_like(count)
    total = count.clone()
    dist.all_reduce(total)
    return mean * (count * world / total.clamp(min=1)).to(mean.dtype)
