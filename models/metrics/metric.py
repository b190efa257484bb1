"""Metrics of rankings of a catalogue, as classes in the files of `ranked`.

    class HitRate(RequestMetric):
        name = "hit_rate"

        def values(self, ranking, k):
            return (ranking.rank < k).double()

A file with such a class adds the metric to validation, `fit.metric`, evaluation and
comparison. Files outside `ranked` count only if `fit.metric` or a model's name refers
to them. Shapes: `B` requests, `K` ranked items, `N` items of the catalogue.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from torch import Tensor

from models.metrics import ranked

CUTOFFS = (1, 5, 10, 20)
"""Ranks K at which metrics of requests are measured."""

TOP = 10
"""Rank of the metrics of catalogues, and of metrics per user."""

COSTS = ("entropy", "entropy_train", "loss", "seconds", "memory_mb", "mse", "median_s")
"""Ends of the names of other metrics of which a smaller value is better."""


@dataclass(frozen=True)
class Ranking:
    """Ranked items of a batch of requests with one target each, or a set of them."""

    items: Tensor
    """(B, K) items, best first, -1 at padding."""
    hits: Tensor
    """(B, K) whether a ranked item is a target."""
    size: Tensor
    """(B,) number of targets, at least 1."""
    rank: Tensor
    """(B,) rank of the first target, from 0; at least `max(CUTOFFS)` if none is
    ranked."""


class Metric:
    """A metric of ranked items."""

    name: ClassVar[str]
    """Name without the rank: `ndcg` is measured as `ndcg@10`."""
    lower_is_better: ClassVar[bool] = False
    """Whether a smaller value is better."""
    is_printed: ClassVar[bool] = True
    """Whether `jobs.evaluate` prints the metric."""
    compared: ClassVar[tuple[int, ...]] = ()
    """Ranks K of the columns in the tables of `jobs.compare`."""


class RequestMetric(Metric):
    """A metric that is a mean over requests."""

    by_user: ClassVar[tuple[str, ...]] = ()
    """Requests of which means per user are stored, for intervals over users: all (the
    empty prefix), and those for a first-time item (`first/`). A training prints the
    metrics with any of them of its best epoch."""

    def values(self, ranking: Ranking, k: int) -> Tensor:
        """Return the metric (B,) of the first `k` items of each request.

        NaN leaves a request out of the mean.
        """
        raise NotImplementedError


class CatalogueMetric(Metric):
    """A metric of all top 10 lists of an evaluation together."""

    label: ClassVar[str]
    """Name in the printed line."""

    def value(self, shown: Tensor, trained: Tensor) -> float:
        """Return the metric.

        Args:
            shown: (N,) number of top 10 lists that contain each item.
            trained: (N,) number of training behaviours of each item.
        """
        raise NotImplementedError


@cache
def import_metrics() -> None:
    """Import the files of `ranked`."""
    for module in pkgutil.iter_modules(ranked.__path__, f"{ranked.__name__}."):
        importlib.import_module(module.name)


def find_metrics(kind: type[Any]) -> tuple[Any, ...]:
    """Return a metric of each class of a kind, in the order of their files."""
    import_metrics()
    return tuple(metric() for metric in kind.__subclasses__())


def lower_is_better(name: str) -> bool:
    """Return whether a smaller value of the metric with this name is better."""
    last = name.rsplit("/", 1)[-1].split("@")[0]
    for metric in (*find_metrics(RequestMetric), *find_metrics(CatalogueMetric)):
        if metric.name == last:
            return bool(metric.lower_is_better)
    return not last.startswith("neg_") and last.endswith(COSTS)
