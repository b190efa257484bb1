"""Metrics of a search model that ranks by the shown position, under `with_position/`.

The names keep them apart from the metrics of models that rank before anything is shown.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from models.metrics.per_user_metrics import PER_USER_PREFIX
from models.search import metrics
from models.search.metrics import WITH_POSITION, summary

__all__ = ["SHOWN", "means", "measure", "names", "summary"]

SHOWN: tuple[str, ...] = (f"{WITH_POSITION}gauc", f"{WITH_POSITION}auc")
"""Metrics of a training's best epoch that are printed."""


def measure(model: Any, batch: dict[str, Tensor], by_user: int = 0) -> dict[str, Any]:
    """Return the sums of `metrics.measure`, under `with_position/`."""
    sums = metrics.measure(model, batch, by_user)
    return {_rename(name): value for name, value in sums.items()}


def _rename(name: str) -> str:
    if name == metrics.EXAMPLES:
        return name
    kind = PER_USER_PREFIX if name.startswith(PER_USER_PREFIX) else ""
    return f"{kind}{WITH_POSITION}{name.removeprefix(PER_USER_PREFIX)}"


def names(catalogue: Any) -> list[str]:
    """Return the names of the metrics of the first label."""
    return ["requests", *(f"{WITH_POSITION}{name}" for name in metrics.METRIC_NAMES)]


def means(sums: dict[str, Any]) -> dict[str, float]:
    """Return the metrics, and the number of requests under its plain name."""
    found = metrics.means(sums)
    return {"requests": found[f"{WITH_POSITION}requests"], **found}
