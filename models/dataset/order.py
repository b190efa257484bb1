"""The order of examples in training: a pure function of (seed, epoch), the same for any number of workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from models.ragged import split_evenly

WINDOW_STEPS = 64
"""Steps whose examples are sorted by length together, so that a batch has little
padding."""


def count_steps(weights: NDArray, batch_size: int) -> int:
    """Return the number of global batches of about `batch_size` in an epoch: at most one per example."""
    return min(-(-int(weights.sum()) // batch_size), len(weights))


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

    The examples are permuted and cut into steps of equal weight. The examples of
    `WINDOW_STEPS` steps are sorted by length and cut into steps again, which come in a
    random order.

    Args:
        lengths: (n,) length of each example's history.
        weights: (n,) what an example counts in a batch, such as its number of requests.
        batch_size: Examples of a batch, where all weigh 1.
        steps: Number of batches; with unequal weights each has about the same weight.
        seed: Seed of the order.
        epoch: Number of the epoch.
        skip: Steps to leave out, when a run is continued.

    Yields:
        The numbers of a batch's examples; no batch is empty.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    is_uniform = bool((weights == 1).all())
    if is_uniform:
        edges = np.minimum(np.arange(steps + 1) * batch_size, len(order))
    else:
        edges = split_evenly(weights[order], steps)
    for first in range(skip - skip % WINDOW_STEPS, steps, WINDOW_STEPS):
        last = min(first + WINDOW_STEPS, steps)
        window = order[edges[first] : edges[last]]
        window = window[np.argsort(lengths[window], kind="stable")]
        cuts = edges[first : last + 1] - edges[first]
        if not is_uniform:
            cuts = split_evenly(weights[window], last - first)
        batches = np.random.default_rng([seed, epoch, first]).permutation(last - first)
        for batch in batches[max(0, skip - first) :]:
            yield window[cuts[batch] : cuts[batch + 1]]
