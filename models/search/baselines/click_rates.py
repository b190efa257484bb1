"""Search baselines, which need no gradient training: click rates and the shown order.

    python -m jobs.train --config jobs/configs/search/pair_ctr.yaml --tables TABLES
        --storage runs --name pair_ctr

`pair_ctr` ranks by one column of the tables: the smoothed click rate of the pair of
query and item, in the longest window that ends before the request. `item_ctr` ranks by
the click rate of the item after any query:

    rate = (clicks + prior * strength) / (exposures + strength)

with `ctr_prior` and `ctr_strength` of the source file's `search` section. A trained
search model should exceed the better of the two. Without clock times or windows the
tables have no rates, and all results tie.

`shown_order` ranks results in the order in which the log showed them, as the present
ranking does. Clicks on a shown order favour it, and the shown position is unknown when
a search is ranked. So comparisons show it beside the best baseline, and it is neither
served nor registered.

Shapes: `N` candidates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from core.options import STRICT, NamedConfig
from models.search.catalogue import SearchCatalogue
from models.search.ranker import SearchModel
from models.search.requests import SearchBatch


@dataclass(config=STRICT)
class BaselineConfig(NamedConfig):
    """Options of search models that need no training."""

    max_history: PositiveInt = 1
    """Behaviours read per request; baselines ignore them."""


@dataclass(config=STRICT)
class ShownOrderConfig(BaselineConfig):
    """Shown order: ranks results as the log showed them. Never served."""


class SearchBaseline(SearchModel):
    """A search model of the first label, the click, that reads no history."""

    example_unit = "request"
    extra_inputs: ClassVar[Mapping[str, bool]] = {}
    trains_by_gradient = False
    reads_first_label = True

    def __init__(self, config: BaselineConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(config, catalogue)
        self.labels = catalogue.labels[:1]


class ClickRate(SearchBaseline):
    """Log-odds of the smoothed click rate in the longest window of the tables."""

    is_baseline = True
    by: ClassVar[str]
    """Key of the click rates, `pair` or `item`."""

    def __init__(self, config: BaselineConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(config, catalogue)
        matches = [
            re.fullmatch(rf"{self.by}_ctr_([0-9.e+]+)d", name)
            for name in catalogue.features
        ]
        names = {float(match[1]): match[0] for match in matches if match}
        if names:
            self.ranks_by = names[max(names)]
            self.column = catalogue.features.index(self.ranks_by)

    def fit_in_one_pass(self, batches: Iterable[SearchBatch]) -> None:
        """Do nothing: the tables have the rates of every request."""

    def score(self, batch: SearchBatch) -> Tensor:
        """Return (N, 1) log-odds of a click, 0 for all without click rates."""
        features = batch.features
        if not self.ranks_by:
            return features.new_zeros(len(features), 1)
        return features[:, self.column, None].logit(eps=1e-6)


class PairCtr(ClickRate):
    """Log-odds of the click rate of the pair of query and item."""

    name = "pair_ctr"
    config_class = BaselineConfig
    by = "pair"


class ItemCtr(ClickRate):
    """Log-odds of the click rate of the item after any query."""

    name = "item_ctr"
    config_class = BaselineConfig
    by = "item"


class ShownOrder(SearchBaseline):
    """Log-odds that fall with the shown position p, counted from 0.

    logit = log-odds of the first position's click rate in training - log(1 + p)
    """

    name = "shown_order"
    config_class = ShownOrderConfig
    is_diagnostic = True
    not_served = "it reads values that are known only after results were shown"
    first_rate: Tensor

    def __init__(self, config: ShownOrderConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(config, catalogue)
        self.register_buffer("first_rate", torch.tensor(0.5, dtype=torch.float64))

    def fit_in_one_pass(self, batches: Iterable[SearchBatch]) -> None:
        """Count the clicks at the first position of the training batches."""
        clicks = impressions = 0.0
        for batch in batches:
            is_first = (batch.candidate_position == 0) & batch.candidate_valid
            clicks += float(batch.labels[is_first, 0].sum())
            impressions += float(is_first.sum())
        self.first_rate.fill_((clicks + 1) / (impressions + 2))

    def score(self, batch: SearchBatch) -> Tensor:
        """Return (N, 1) log-odds of a click."""
        position = batch.candidate_position.clamp(min=0).double()
        return (self.first_rate.logit(eps=1e-6) - position.log1p())[:, None]
