"""Options of baselines that are chosen on validation.

decay: Values[PositiveFloat] = (0.8, 1.0)  # or a single number

best = choose(model, ("l2", "decay"), learn, val_batches)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar

from annotated_types import MinLen
from pydantic import BeforeValidator

from models.retrieval.data import RequestBatch

MAX_VAL_BATCHES = 50
"""Most validation batches on which the options are tried."""

T = TypeVar("T")
Values = Annotated[
    tuple[T, ...],
    MinLen(1),
    BeforeValidator(lambda v: v if isinstance(v, list | tuple) else [v]),
]
"""One value, or several from which validation chooses."""


def choose(
    model: Any,
    names: Sequence[str],
    learn: Callable[[dict[str, Any]], object],
    val_batches: Iterable[RequestBatch],
) -> dict[str, Any]:
    """Learn with the choice of the highest validation NDCG@10, the first of equal ones.

    Args:
        model: The model that `learn` fits; its `choice` is set.
        names: Names of the options that are chosen.
        learn: Fits the model with a choice.
        val_batches: Validation requests, by length of their histories.

    Returns:
        The chosen values by name.
    """
    values = itertools.product(*(getattr(model.config, name) for name in names))
    choices = [dict(zip(names, combination, strict=True)) for combination in values]
    best = choices[0]
    if len(choices) > 1:
        batches = list(val_batches)
        batches = batches[:: 1 + len(batches) // MAX_VAL_BATCHES]
        ndcg = []
        for choice in choices:
            learn(choice)
            ndcg.append(sum(model.measure(batch)["ndcg@10"] for batch in batches))
        best = choices[ndcg.index(max(ndcg))]
    learn(best)
    model.choice = ", ".join(f"{name} {value}" for name, value in best.items())
    return best
