"""What a model of actions scores by, part by part, and how each is exchanged among users or candidates: for permutation
importance.

Shapes: `B` users, `N` candidates of all users.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from models.actions.batch import Batch
from models.own_features import NUMBER
from models.shuffles import Shuffle, exchanged

CONTEXT = ("item", "time", "action", "label", "feature", "viewer", "own", "valid", "learn")


@contextmanager
def history(model: Any, batch: Batch, generator: torch.Generator) -> Iterator[Batch]:
    """Every user's candidates take another user's context; of it they see what is strictly earlier than they are."""
    order = torch.randperm(len(batch["item"]), generator=generator).to(batch["item"].device)
    yield {**batch, **{name: batch[name][order] for name in CONTEXT if name in batch}}


@contextmanager
def candidates(name: str, places: list[int] | None, model: Any, batch: Batch, generator: torch.Generator) -> Any:
    """Every candidate takes `name` of another one, or of a vector the entries at `places`."""
    valid, values = batch["candidate_valid"], batch[f"candidate_{name}"].clone()
    own = values[valid]
    if places is None:
        own = exchanged(own, generator)
    else:
        own[:, places] = exchanged(own[:, places], generator)
    values[valid] = own
    yield {**batch, f"candidate_{name}": values}


def shuffles(model: Any, catalogue: Any) -> dict[str, Shuffle]:
    """By name, what the model scores by: the history, the item, viewer-side categories, the log's own features one by
    one, and counts by their key."""
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(catalogue.features):
        groups.setdefault(f"features: {name.split('_')[0]}", []).append(place)
    viewer = {"viewer": partial(candidates, "viewer", None)} if catalogue.viewers else {}
    counts = {name: partial(candidates, "feature", places) for name, places in groups.items()}
    own = {
        f"features: {name[len(NUMBER) :]}": partial(candidates, "own", [place])
        for place, name in enumerate(catalogue.own.names)
    }
    return {"history": history, "item": partial(candidates, "item", None), **viewer, **own, **counts}
