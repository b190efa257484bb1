"""The temporal item-shift diagnostic of SID-MLP (App. E.3, Table 15): how well are new items recommended?

    python -m papers.item_shift --checkpoint runs/tiger --tables TABLES --sids SIDS

A request is in the subset `temporal80` (`temporal90`) if the first interaction with its target, by anyone,
comes after the global 80% (90%) timestamp: the one by which that share of all interactions has happened.
The model ranks once, all items; the subset only says whose result counts. So this measures robustness to
a shift of items, not recommendation of unseen ones: where histories of other users end later than the
request, training has seen its target.

Shapes: `N` items, `E` interactions, `B` requests of a batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from jobs import cli
from models import registry
from models.fit import to_device
from models.places import reach
from models.retrieval.metrics import CUTOFFS, EXAMPLES, add_sums, metric_sums
from models.tables import UserError, iter_parts, join, read_manifest
from models.uri import write_file
from papers.loaded import Options, load

PERCENTS = (80, 90)
"""Global timestamps after which an item counts as new (App. E.3 of SID-MLP)."""

SHOWN = ("recall@10", "ndcg@10")
"""Metrics that are printed."""

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
            f"global timestamp; prepare a log with times"
        )
    first = np.full(num_items, np.iinfo(np.int64).max)
    times = []
    for part in iter_parts(sequences_uri, "sequences", ["item_index", "timestamp_ms"]):
        item, time = (
            pc.list_flatten(part[name]).to_numpy()
            for name in ("item_index", "timestamp_ms")
        )  # (E,)
        np.minimum.at(first, item, time)
        times.append(time)
    ordered = np.sort(np.concatenate(times))
    # whole numbers: 0.8 * E in floating point can fall on the wrong side of an interaction
    cuts = {
        percent: ordered[-(-len(ordered) * percent // 100) - 1] for percent in PERCENTS
    }
    return {f"temporal{percent}": first > cut for percent, cut in cuts.items()}


def measure(model: Any, batch: dict[str, Tensor], subsets: Subsets) -> dict[str, float]:
    """Sums over a batch of the metrics of each subset's requests, as `temporal80/ndcg@10`."""
    items, _ = model.recommend(batch, max(CUTOFFS))  # (B, K)
    target = batch["target"]
    sums: dict[str, float] = {}
    for name, chosen in subsets.items():
        inside = torch.from_numpy(chosen).to(target.device)[target]  # (B,)
        sums |= {
            f"{name}/{key}": value
            for key, value in metric_sums(items[inside], target[inside]).items()
        }
    return sums


def means(sums: dict[str, float], subsets: Subsets) -> dict[str, float]:
    """Metrics per request from sums; a subset without requests has `temporal80/examples` 0 and no metrics."""
    metrics: dict[str, float] = {}
    for name in subsets:
        part = {
            key.removeprefix(f"{name}/"): value
            for key, value in sums.items()
            if key.startswith(f"{name}/")
        }
        count = part.pop(EXAMPLES)
        metrics[f"{name}/{EXAMPLES}"] = count
        metrics |= {
            f"{name}/{key}": value / count for key, value in part.items() if count
        }
    return metrics


@dataclass(kw_only=True)
class Config(Options):
    """Options."""

    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""


def run(config: Config) -> dict[str, float]:
    """Ranks, prints the metrics of each subset, and writes them beside the checkpoint."""
    reach(checkpoint=config.checkpoint, tables=config.tables, sids=config.sids)
    subsets = new_items(
        join(config.tables, "sequences"),
        read_manifest(join(config.tables, "items"), "items").rows,
    )
    loaded = load(
        config.checkpoint,
        config.tables,
        sids=config.sids,
        split=config.split,
        device=config.device,
    )
    if registry.find(loaded.name).recommends is None:
        raise UserError(
            f"papers.item_shift looks at ranked catalogues and the model '{loaded.name}' ranks none"
        )
    examples = loaded.examples
    with torch.no_grad():
        batches = (
            to_device(examples.collate(rows), loaded.device)
            for rows in examples.batches(config.batch_size)
        )
        metrics = means(
            add_sums(measure(loaded.model, batch, subsets) for batch in batches),
            subsets,
        )
    print(f"{loaded.name} on {config.split}")
    for name in subsets:
        found = "".join(
            f", {key} {metrics[f'{name}/{key}']:.4f}"
            for key in SHOWN
            if f"{name}/{key}" in metrics
        )
        print(f"  {name}  {metrics[f'{name}/{EXAMPLES}']:,.0f} requests{found}")
    place = join(loaded.uri, f"item_shift-{config.split}.json")
    write_file(place, json.dumps(metrics, indent=2).encode())
    print(f"  written to  {place}")
    return metrics


if __name__ == "__main__":
    cli.main(run, Config)
