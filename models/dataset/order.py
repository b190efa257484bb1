"""The order of training examples, a pure function of seed and epoch.

The order does not depend on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from core.ragged import narrow_indices, split_evenly

WINDOW_STEPS = 64
"""Number of steps whose examples are sorted together by length, so that a batch has
little padding."""


def count_steps(weights: NDArray, batch_size: int) -> int:
    """Return the number of global batches of an epoch, at most one per example.

    Args:
        weights: (n,) weight of each example, such as its number of requests.
        batch_size: Weight of a batch.
    """
    return min(math.ceil(int(weights.sum()) / batch_size), len(weights))


def order_epoch(
    lengths: NDArray,
    weights: NDArray,
    batch_size: int,
    steps: int,
    *,
    seed: int,
    epoch: int,
    skip: int = 0,
) -> Iterator[NDArray[np.int64]]:
    """Yield the global batches of an epoch from step `skip` on.

    The examples are permuted and split into windows of `WINDOW_STEPS` steps. The
    examples of a window are sorted by length and split into batches, which are yielded
    in random order.

    Args:
        lengths: (n,) length of each example's history.
        weights: (n,) weight of each example, such as its number of requests.
        batch_size: Number of examples of a batch, used if all weights are 1.
        steps: Number of batches. If weights differ, batches have about equal weights.
        seed: Seed of the order.
        epoch: Number of the epoch, from 0.
        skip: Number of steps to skip, to resume a run.

    Yields:
        (b,) indices of a batch's examples; no batch is empty.
    """
    order = narrow_indices(np.arange(len(lengths)))
    np.random.default_rng([seed, epoch]).shuffle(order)
    is_uniform = bool((weights == 1).all())
    if is_uniform:
        edges = np.minimum(np.arange(steps + 1) * batch_size, len(order))
    else:
        edges = split_evenly(weights[order], steps)
    first_window = skip - skip % WINDOW_STEPS
    for first in range(first_window, steps, WINDOW_STEPS):
        last = min(first + WINDOW_STEPS, steps)
        window = order[edges[first] : edges[last]].astype(np.int64)
        window = window[np.argsort(lengths[window], kind="stable")]
        cuts = edges[first : last + 1] - edges[first]
        if not is_uniform:
            cuts = split_evenly(weights[window], last - first)
        rng = np.random.default_rng([seed, epoch, first])
        batches = rng.permutation(last - first)  # order of the window's batches
        for batch in batches[max(0, skip - first) :]:
            yield window[cuts[batch] : cuts[batch + 1]]
