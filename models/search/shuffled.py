"""What a search model ranks by, part by part, and how each is exchanged among requests: for permutation importance.

Shapes: `R` requests, `N` candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.search.inputs import feature_groups
from models.search.qgs import QGS
from models.search.ranker import Batch
from models.shuffles import Shuffle, exchanged


@contextmanager
def history(model: Any, batch: Batch, generator: torch.Generator) -> Iterator[Batch]:
    """Every request takes what another one's user did before it."""
    order = torch.randperm(len(batch["request_row"]), generator=generator).to(batch["request_row"].device)
    yield {**batch, "request_row": batch["request_row"][order], "request_end": batch["request_end"][order]}


@contextmanager
def text(model: Any, batch: Batch, generator: torch.Generator) -> Iterator[Batch]:
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
def features(places: list[int], model: Any, batch: Batch, generator: torch.Generator) -> Iterator[Batch]:
    """Every candidate takes the features at `places` of another one."""
    values = batch["features"].clone()
    values[:, places] = exchanged(values[:, places], generator)
    yield {**batch, "features": values}


def shuffles(model: Any, catalogue: Any) -> dict[str, Shuffle]:
    """By name, what the model ranks by: the history where it reads one, text, and its groups of features."""
    hidden = set() if model.shown_at.reads else set(catalogue.unknown_when_ranking)
    groups = {
        f"features: {name}": [place for place in places if catalogue.features[place] not in hidden]
        for name, places in feature_groups(catalogue.features, catalogue.groups).items()
    }
    known = {name: partial(features, places) for name, places in groups.items() if places}
    return {**({"history": history} if isinstance(model, QGS) else {}), "text": text, **known}
