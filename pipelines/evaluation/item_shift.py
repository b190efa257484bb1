"""The temporal item-shift diagnostic of SID-MLP (App. E.3, Table 15): how well are new items recommended?

    python -m jobs.evaluate --checkpoint runs/tiger --tables TABLES --sids SIDS --item_shift true

A request is in the subset `temporal80` (`temporal90`) if the first interaction with its target, by anyone,
comes after the global 80% (90%) timestamp: the one by which that share of all interactions has happened.
The model ranks once, all items; the subset only says whose result counts. So this measures robustness to
a shift of items, not recommendation of unseen ones: where histories of other users end later than the
request, training has seen its target.

Shapes: `N` items, `E` interactions, `B` requests of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.retrieval.metrics import CUTOFFS, EXAMPLES, metric_means, metric_sums, ranking_sums
from models.tables import UserError, iter_parts, read_manifest

PERCENTS = (80, 90)
"""Global timestamps after which an item counts as new (App. E.3 of SID-MLP)."""

Subsets = dict[str, NDArray[np.bool_]]
"""Name -> (N,) which items are in the subset, such as `temporal80`."""


def new_items(sequences_uri: str, num_items: int) -> Subsets:
    """The items first interacted with strictly after the global timestamp, for each of PERCENTS.

    The log is all behaviours of all users, whatever their split. UserError where it has no clock times.
    """
    info = read_manifest(sequences_uri, "sequences").info
    if not info.get("clock"):
        raise UserError(
            f"{sequences_uri} comes from a log without clock times (only an order within each user), so there is no "
            f"global timestamp; leave --item_shift out, or prepare a log with times"
        )
    first = np.full(num_items, np.iinfo(np.int64).max)
    times = []
    for part in iter_parts(sequences_uri, "sequences", ["item_index", "timestamp_ms"]):
        item, time = (pc.list_flatten(part[name]).to_numpy() for name in ("item_index", "timestamp_ms"))  # (E,)
        np.minimum.at(first, item, time)
        times.append(time)
    ordered = np.sort(np.concatenate(times))
    # whole numbers: 0.8 * E in floating point can fall on the wrong side of an interaction
    cuts = {percent: ordered[-(-len(ordered) * percent // 100) - 1] for percent in PERCENTS}
    return {f"temporal{percent}": first > cut for percent, cut in cuts.items()}


def measure(model: Any, batch: dict[str, Tensor], subsets: Subsets, by_user: int = 0, **options: Any) -> dict[str, Any]:
    """Sums over a batch of the metrics of all requests and, as `temporal80/ndcg@10`, of each subset's."""
    items, _ = model.recommend(batch, max(CUTOFFS), **options)  # (B, K)
    target = batch["target"]
    sums = ranking_sums(items, batch, by_user)
    for name, chosen in subsets.items():
        inside = torch.from_numpy(chosen).to(target.device)[target]  # (B,)
        sums |= {f"{name}/{key}": value for key, value in metric_sums(items[inside], target[inside]).items()}
    return sums


def means(sums: dict[str, Any], subsets: Subsets) -> dict[str, float]:
    """Metrics per request from sums; a subset without requests has `temporal80/examples` 0 and no metrics."""
    of_subsets = tuple(f"{name}/" for name in subsets)
    found = {"": {key: value for key, value in sums.items() if not key.startswith(of_subsets)}}
    found |= {
        f"{name}/": {key.removeprefix(f"{name}/"): value for key, value in sums.items() if key.startswith(f"{name}/")}
        for name in subsets
    }
    metrics: dict[str, float] = {}
    for prefix, part in found.items():
        if prefix:
            metrics[f"{prefix}{EXAMPLES}"] = float(part[EXAMPLES])
        if part[EXAMPLES]:
            metrics |= {f"{prefix}{name}": float(value) for name, value in metric_means(part).items()}
    return metrics
