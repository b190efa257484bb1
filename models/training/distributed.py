"""The mean of a loss over the batch of all workers, out of what each worker has of it.

DDP averages the workers' gradients. That is the gradient of the whole batch only where
every worker has equally many terms of each mean; a worker's share of a batch has not,
and may even be empty. So every mean in a loss goes through `global_mean`, which weighs
it by the worker's number of terms:

    mean = functional.cross_entropy(logits, target)     # over B rows of this worker
    loss = global_mean(mean, len(target))                # DDP's average of these is the mean over the rows of all
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

_step = {"workers": 1, "idle": False}
"""Of the training step that is going on: a process has one."""


@contextmanager
def set_workers(world: int, idle: bool) -> Iterator[None]:
    """Set the number of workers, and whether this one is idle, for `global_mean`."""
    before = dict(_step)
    _step.update(workers=world, idle=idle)
    try:
        yield
    finally:
        _step.update(before)


def global_mean(mean: Tensor, terms: int | Tensor) -> Tensor:
    """Scale a mean over this worker's `terms` so that the workers' average is the mean
    over all terms.

    Every worker must call it equally often. With one worker, or outside of a training
    step, return `mean` unchanged.
    """
    world, idle = _step["workers"], _step["idle"]
    if world == 1:
        return mean * 0 if idle else mean
    count = (
        torch.as_tensor(0 if idle else terms, device=mean.device)
        .detach()
        .to(torch.float64)
    )
    total = count.clone()
    dist.all_reduce(total)
    return mean * (count * world / total.clamp(min=1)).to(mean.dtype)
