"""Options of baselines that are chosen on validation.

decay: Values[PositiveFloat] = (0.8, 1.0)  # or a single number

best = choose(model, ("l2",), "decay", learn, val_batches)
"""

from __future__ import annotations

import itertools
import math
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
    learned: Sequence[str],
    applied: str,
    learn: Callable[..., object],
    val_batches: Iterable[RequestBatch],
    measure: Callable[[RequestBatch], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Learn with the choice of the highest validation NDCG@10, the first of equal ones.

    Args:
        model: The model that `learn` fits; its `choice` is set.
        learned: Names of the chosen options that `learn` reads.
        applied: Name of the chosen option that is a () buffer of the model, which only
            its rankings read.
        learn: Fits the model with values of `learned`, in their order.
        val_batches: Validation requests, by length of their histories.
        measure: Returns the metrics of a batch; by default the model's `measure`.

    Returns:
        The chosen values by name.
    """
    names = (*learned, applied)
    options = [getattr(model.config, name) for name in names]
    choices = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*options)
    ]
    last_learned: list[Any] | None = None

    def use(choice: dict[str, Any]) -> None:
        nonlocal last_learned
        values = [choice[name] for name in learned]
        if values != last_learned:
            learn(*values)
        last_learned = values
        getattr(model, applied).fill_(choice[applied])

    best = choices[0]
    if len(choices) > 1:
        measure = measure or model.measure
        batches = list(val_batches)
        batches = batches[:: max(1, math.ceil(len(batches) / MAX_VAL_BATCHES))]
        ndcg = []
        for choice in choices:
            use(choice)
            ndcg.append(sum(measure(batch)["ndcg@10"] for batch in batches))
        best = choices[ndcg.index(max(ndcg))]
    use(best)
    model.choice = ", ".join(f"{name} {value}" for name, value in best.items())
    return best
