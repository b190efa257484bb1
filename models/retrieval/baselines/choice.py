"""Options of baselines that are chosen on validation.

decay: Values[PositiveFloat] = (0.8, 1.0)  # or a single number

choices = list_choices(config, ("l2", "decay"))
best = choose(model, choices, learn, val_batches)
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


def list_choices(config: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return all combinations of the values of a config's options."""
    values = itertools.product(*(getattr(config, name) for name in names))
    return [dict(zip(names, combination, strict=True)) for combination in values]


def choose(
    model: Any,
    choices: list[dict[str, Any]],
    learn: Callable[[dict[str, Any]], None],
    val_batches: Iterable[RequestBatch],
) -> dict[str, Any]:
    """Return the choice with the highest validation NDCG@10, the first of equal ones.

    Args:
        model: The model that `learn` fits.
        choices: Values of the options, by name.
        learn: Fits the model with a choice.
        val_batches: Validation requests, by length of their histories.
    """
    if len(choices) == 1:
        return choices[0]
    batches = list(val_batches)
    batches = batches[:: 1 + len(batches) // MAX_VAL_BATCHES]
    ndcg = []
    for choice in choices:
        learn(choice)
        ndcg.append(sum(model.measure(batch)["ndcg@10"] for batch in batches))
    return choices[ndcg.index(max(ndcg))]


def describe(choice: dict[str, Any]) -> str:
    """Return a choice as words, such as `l2 200, history_decay 0.8`."""
    return ", ".join(f"{name} {value}" for name, value in choice.items())
