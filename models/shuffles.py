"""What a model ranks by, part by part, and how each is exchanged among users, requests or candidates: for permutation
importance.

Shapes: `B` users, `R` requests, `N` candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.own_features import NUMBER
from models.search.inputs import feature_groups
from models.search.qgs import QGS
from models.search.ranker import Ranker

Batch = dict[str, Tensor]
Shuffle = Callable[[Any, Batch, torch.Generator], AbstractContextManager[Batch]]
"""`with shuffle(model, batch, generator) as batch`: within it the model reads one input of another row."""


def exchanged(values: Tensor, generator: torch.Generator) -> Tensor:
    """The rows of `values` (N, ...) in a random order."""
    return values[torch.randperm(len(values), generator=generator).to(values.device)]


CONTEXT = (
    "item",
    "time",
    "action",
    "label",
    "feature",
    "viewer",
    "own",
    "valid",
    "learn",
)


@contextmanager
def context_of_others(
    model: Any, batch: Batch, generator: torch.Generator
) -> Iterator[Batch]:
    """Every user's candidates take another user's context; of it they see what is strictly earlier than they are."""
    order = torch.randperm(len(batch["item"]), generator=generator).to(
        batch["item"].device
    )
    yield {**batch, **{name: batch[name][order] for name in CONTEXT if name in batch}}


@contextmanager
def candidates_of_others(
    name: str,
    places: list[int] | None,
    model: Any,
    batch: Batch,
    generator: torch.Generator,
) -> Any:
    """Every candidate takes `name` of another one, or of a vector the entries at `places`."""
    valid, values = batch["candidate_valid"], batch[f"candidate_{name}"].clone()
    own = values[valid]
    if places is None:
        own = exchanged(own, generator)
    else:
        own[:, places] = exchanged(own[:, places], generator)
    values[valid] = own
    yield {**batch, f"candidate_{name}": values}


def of_actions(model: Any, catalogue: Any) -> dict[str, Shuffle]:
    """By name, what the model scores by: the history, the item, viewer-side categories, the log's own features one by
    one, and counts by their key."""
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(catalogue.features):
        groups.setdefault(f"features: {name.split('_')[0]}", []).append(place)
    viewer = (
        {"viewer": partial(candidates_of_others, "viewer", None)}
        if catalogue.viewers
        else {}
    )
    counts = {
        name: partial(candidates_of_others, "feature", places)
        for name, places in groups.items()
    }
    own = {
        f"features: {name[len(NUMBER) :]}": partial(
            candidates_of_others, "own", [place]
        )
        for place, name in enumerate(catalogue.own.names)
    }
    return {
        "history": context_of_others,
        "item": partial(candidates_of_others, "item", None),
        **viewer,
        **own,
        **counts,
    }


@contextmanager
def history_of_others(
    model: Any, batch: Batch, generator: torch.Generator
) -> Iterator[Batch]:
    """Every request takes what another one's user did before it."""
    order = torch.randperm(len(batch["request_row"]), generator=generator).to(
        batch["request_row"].device
    )
    yield {
        **batch,
        "request_row": batch["request_row"][order],
        "request_end": batch["request_end"][order],
    }


@contextmanager
def text_of_others(
    model: Any, batch: Batch, generator: torch.Generator
) -> Iterator[Batch]:
    """Every candidate takes the text of another one, every request that of another query. Behaviours keep theirs."""
    own = model.text

    def of(embed: Any, item_or_query: Tensor, *query: Tensor) -> Tensor:
        found = embed(item_or_query, *query)
        return exchanged(found, generator) if item_or_query.ndim == 1 else found

    own.pair, own.query = partial(of, own.pair), partial(of, own.query)
    if isinstance(model, QGS):
        model.document = partial(of, model.document)  # type: ignore[method-assign]  # which `match` reads
    try:
        yield batch
    finally:
        del own.pair, own.query  # the methods of the class are seen again
        vars(model).pop("document", None)


@contextmanager
def features_of_others(
    places: list[int], model: Any, batch: Batch, generator: torch.Generator
) -> Iterator[Batch]:
    """Every candidate takes the features at `places` of another one."""
    values = batch["features"].clone()
    values[:, places] = exchanged(values[:, places], generator)
    yield {**batch, "features": values}


def of_search(model: Any, catalogue: Any) -> dict[str, Shuffle]:
    """By name, what the model ranks by: the history where it reads one, text, and its groups of features."""
    ranker = isinstance(model, Ranker)  # others have trees
    hidden = (
        set()
        if ranker and model.shown_at.reads
        else set(catalogue.unknown_when_ranking)
    )
    groups = {
        f"features: {name}": [
            place for place in places if catalogue.features[place] not in hidden
        ]
        for name, places in feature_groups(catalogue.features, catalogue.groups).items()
    }
    known = {
        name: partial(features_of_others, places)
        for name, places in groups.items()
        if places
    }
    past = (
        {"history": history_of_others} if isinstance(model, QGS) or not ranker else {}
    )
    return {**past, **({"text": text_of_others} if ranker else {}), **known}
