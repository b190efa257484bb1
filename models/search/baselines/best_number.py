"""The baseline that ranks results by a single number of the log, such as the price.

    python -m jobs.train --config jobs/configs/search/best_number.yaml --tables TABLES
        --storage runs --name best_number

Candidates are all numbers of the tables that are known when a search is ranked, in both
directions. The one with the highest GAUC on the training searches is chosen, and names
the baseline in comparisons: `price, ascending`. A missing value ranks last.

Shapes: `N` candidates, `C` numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional

from core.options import STRICT
from models.custom_features import NUMBER
from models.metrics.ranking_metrics import request_auc
from models.search.baselines.click_rates import BaselineConfig, SearchBaseline
from models.search.catalogue import SearchCatalogue
from models.search.requests import SearchBatch


@dataclass(config=STRICT)
class BestNumberConfig(BaselineConfig):
    """Options of the ranking by the number with the highest training GAUC."""


class BestNumber(SearchBaseline):
    """A score that rises or falls with one number, between -1 and 1."""

    name = "best_number"
    config_class = BestNumberConfig
    is_baseline = True
    column: Tensor
    """() int64 column of the features by which results are ranked."""
    largest: Tensor
    """() float64 largest absolute value in training; negative if the smallest value
    ranks first, 0 if the tables have no number."""

    def __init__(self, config: BestNumberConfig, catalogue: SearchCatalogue) -> None:
        super().__init__(config, catalogue)
        _, self.numbers = catalogue.readable_features()
        self.index = [catalogue.features.index(name) for name in self.numbers]
        self.register_buffer("column", torch.tensor(0))
        self.register_buffer("largest", torch.tensor(0.0, dtype=torch.float64))

    def fit_in_one_pass(self, batches: Iterable[SearchBatch]) -> None:
        """Choose the number and the direction with the highest GAUC on the batches."""
        if not self.numbers:
            return
        count = len(self.index)
        auc_sums = torch.zeros(2 * count, dtype=torch.float64)  # falling, then rising
        maximum = torch.zeros(count, dtype=torch.float64)
        for batch in batches:
            if not batch.candidate_valid.any():
                continue
            values = batch.features[batch.candidate_valid][:, self.index].T.double()
            maximum = maximum.maximum(values.abs().nan_to_num(0.0).amax(1))
            scores = torch.cat([values, -values]).nan_to_num(-torch.inf)
            num_requests = len(batch.request_row)
            first_request = torch.arange(2 * count)[:, None] * num_requests
            request = first_request + batch.candidate_request[batch.candidate_valid]
            labels = batch.labels[batch.candidate_valid, 0].expand(scores.shape)
            auc, valid = request_auc(
                scores.flatten(), labels.flatten(), request.flatten()
            )
            row = torch.arange(len(auc)) // num_requests
            auc_sums.index_add_(0, row[valid], auc[valid])
        rises, best = divmod(int(auc_sums.argmax()), count)
        self.column.fill_(self.index[best])
        self.largest.fill_(maximum[best].clamp(min=1e-30) * (-1 if rises else 1))
        name = self.numbers[best].removeprefix(NUMBER)
        self.ranks_by = f"{name}, {'ascending' if rises else 'descending'}"

    def score(self, batch: SearchBatch) -> Tensor:
        """Return (N, 1) scores, -1 for a missing value; 0 for all without numbers."""
        if not self.numbers:
            return batch.features.new_zeros(len(batch.features), 1)
        values = batch.features[:, self.column, None].double() / self.largest
        return functional.softsign(values).nan_to_num(-1.0)
