"""Search models without gradient training: click rates, and the order of the log.

    python -m jobs.train --config jobs/configs/search/pair_ctr.yaml --tables TABLES --storage runs --name pair_ctr

`pair_ctr` ranks by one column of the tables, the smoothed click rate of the pair of
query and item in the longest window that ends before the request, `item_ctr` by that of
the item after any query:

    rate = (clicks + prior * strength) / (exposures + strength)

with `ctr_prior` and `ctr_strength` of the source file's `search` section. A trained
search model has to clear the better of the two. Without clock times or windows the tables
have no rates, and all results tie.

`log_order` ranks results as the log showed them. The shown position is unknown when a
search is ranked, so this model is a diagnostic of the log and not a floor: its metrics
have the prefix `with_position/`, so it is never the best model of a comparison, and it
is neither served nor registered.

Shapes: `N` candidates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.layers.standardised import Standardised
from models.search.data import SearchCatalogue

Batch = dict[str, Tensor]


@dataclass
class FloorConfig:
    """What examples and requests ask of every search model."""

    max_history: int = 1
    """Behaviours read per request, as for every model; floors read none of them."""

    window_overlap: ClassVar[float] = 1.0
    batch_of: ClassVar[str] = "requests"
    history_pairs: ClassVar[bool] = False
    reads_times: ClassVar[bool] = False


@dataclass
class PairCtrConfig(FloorConfig):
    """Pair CTR: ranks results by their click rate after the same query."""

    by: ClassVar[str] = "pair"


@dataclass
class ItemCtrConfig(FloorConfig):
    """Item CTR: ranks results by their click rate after any query."""

    by: ClassVar[str] = "item"


@dataclass
class LogOrderConfig(FloorConfig):
    """Log order: ranks results as the log showed them. A diagnostic, never served."""


class SearchFloor(nn.Module):
    """A search model of the first label, the click, that reads no history."""

    def __init__(self, config: FloorConfig, catalogue: SearchCatalogue) -> None:
        super().__init__()
        self.config, self.labels = config, catalogue.labels[:1]
        # what a served request's missing features are filled with
        self.scale = Standardised(catalogue.feature_mean, catalogue.feature_std)


class ClickRate(SearchFloor):
    """Log-odds of the smoothed click rate in the longest window of the tables."""

    def __init__(
        self, config: PairCtrConfig | ItemCtrConfig, catalogue: SearchCatalogue
    ) -> None:
        super().__init__(config, catalogue)
        rates = rate_columns(catalogue.features, config.by)
        self.column = catalogue.features.index(rates[-1]) if rates else None

    def fit_counts(self, batches: Iterable[Batch]) -> None:
        """Do nothing: the tables have the rates of every request."""

    def score(self, batch: Batch) -> Tensor:
        """Return (N, 1) log-odds of a click, 0 for all without click rates."""
        features = batch["features"]
        if self.column is None:
            return features.new_zeros(len(features), 1)
        return features[:, self.column, None].logit(eps=1e-6)


def describe_rates(
    model: ClickRate, config: Any, catalogue: SearchCatalogue, examples: Any
) -> list[str]:
    """Return a line that says which column ranks, shown once before training."""
    if model.column is None:
        return [
            f"the tables have no click rates by {config.by} (the log has no clock times, "
            "or search.windows_days is empty): all results tie"
        ]
    return [f"ranks by {catalogue.features[model.column]}"]


def rate_columns(features: Iterable[str], by: str) -> list[str]:
    """Return the names of the click rates by `pair` or `item`, shortest window first."""
    found = {}
    for name in features:
        if match := re.fullmatch(rf"{by}_ctr_([0-9.e+]+)d", name):
            found[float(match[1])] = name
    return [found[days] for days in sorted(found)]


class LogOrder(SearchFloor):
    """Log-odds that fall with the shown position p, counted from 0.

    logit = log-odds of the first position's click rate in training - log(1 + p)
    """

    first_rate: Tensor

    def __init__(self, config: LogOrderConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(config, catalogue)
        self.register_buffer("first_rate", torch.tensor(0.5, dtype=torch.float64))

    def fit_counts(self, batches: Iterable[Batch]) -> None:
        """Count the clicks at the first position of the training batches."""
        clicks = shown = 0.0
        for batch in batches:
            first = batch["candidate_position"] == 0
            if "real" in batch:
                first &= batch["real"]
            clicks += float(batch["labels"][first, 0].sum())
            shown += float(first.sum())
        self.first_rate.fill_((clicks + 1) / (shown + 2))

    def score(self, batch: Batch) -> Tensor:
        """Return (N, 1) log-odds of a click."""
        position = batch["candidate_position"].clamp(min=0).double()
        return (self.first_rate.logit(eps=1e-6) - position.log1p())[:, None]
