"""Gradient-boosted trees (LightGBM) over counts of a user's context, one per task.

    python -m jobs.train --config jobs/configs/actions/boosted.yaml --tables TABLES
        --storage runs --name boosted_actions

Each training sequence is cut into context and candidates, so that the trees learn from
candidates as in evaluation. Boosting of a task stops when the task's log loss on the
val split has not fallen for `EARLY_STOPPING_ROUNDS` trees. A task whose label is the
same in all training events is predicted by its rate. The model reads neither ids nor
text.

Shapes: `B` users, `T` context events, `C` candidates, `N` valid candidates, `A` kinds
of action, `K` tasks, `G` categories of items, viewers and the log, `J` keys of counts,
`X` columns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from core.options import STRICT
from models.actions.base import ActionsModel
from models.actions.catalogue import ActionsCatalogue
from models.actions.requests import ActionsBatch
from models.boosting import BoostedTrees, TreeConfig, concat_batches, grow_trees


@dataclass(config=STRICT)
class BoostedActionsConfig(TreeConfig):
    """Options of gradient-boosted trees for actions."""

    max_history: PositiveInt = 1024
    """Number of latest events in which the user's actions are counted."""


class BoostedActions(BoostedTrees, ActionsModel):
    """LightGBM boosters that score candidates by the log-odds of each task."""

    name = "boosted_actions"
    config_class = BoostedActionsConfig
    example_unit = "split_sequence"
    config: BoostedActionsConfig
    categories: Tensor
    """(items, categories) int64 codes of the catalogue's items."""
    numbers: Tensor
    """(items, numbers) float32 attributes of the catalogue's items."""

    def __init__(
        self, config: BoostedActionsConfig, catalogue: ActionsCatalogue
    ) -> None:
        super().__init__(config, catalogue)
        self.labels = catalogue.labels
        self.train_rates = catalogue.train_rates
        self.num_custom_numbers = len(catalogue.custom_features.numbers)
        num_items = catalogue.num_items
        for name in ("numbers", "categories"):
            table = getattr(catalogue, name)
            width = table.numel() // num_items
            self.register_buffer(name, table.view(num_items, width), persistent=False)

    def columns(self, batch: ActionsBatch) -> Tensor:
        """Return the columns (N, X) float32 that the trees read, row by row.

        The candidate's features come first, followed by its item's numbers and the
        log's custom numbers. The last columns are counts of strictly earlier context
        events: the number of events, and the sum of each graded action. The
        counts are over all events, over events of the same item, and for each category
        over events with the same value.
        """
        is_match = self._match_context(batch)  # (B, J, C, T)
        actions = is_match @ batch.action[:, None]  # (B, J, C, A)
        counts = torch.cat([is_match.sum(-1, keepdim=True), actions], -1)
        counts = counts.movedim(1, 2).flatten(2)  # (B, C, J * (1 + A))
        numbers = [
            batch.candidate_feature,
            self._item_attributes("numbers", batch.candidate_item, batch),
        ]
        if batch.candidate_custom is not None:
            numbers.append(batch.candidate_custom[..., : self.num_custom_numbers])
        return torch.cat([*numbers, counts], -1)[batch.candidate_valid]

    def _match_context(self, batch: ActionsBatch) -> Tensor:
        """Match the context events of each candidate by each key."""
        context = batch.item.shape[1]
        end = batch.count_earlier()[:, context:, None]  # (B, C, 1)
        is_earlier = torch.arange(context, device=end.device) < end  # (B, C, T)
        same_item = batch.candidate_item[:, :, None] == batch.item[:, None]
        matches = [is_earlier, is_earlier & same_item]
        codes = [self._item_attributes("categories", batch.join("item"), batch)]
        if batch.viewer is not None:
            codes.append(batch.join("viewer"))
        if batch.custom is not None:
            codes.append(batch.join("custom")[..., self.num_custom_numbers :].long())
        # (B, T, G) of context events, (B, C, G) of candidates
        event_codes, candidate_codes = torch.cat(codes, -1).tensor_split([context], 1)
        for category in range(event_codes.shape[2]):
            code = candidate_codes[:, :, None, category]  # (B, C, 1)
            event_code = event_codes[:, None, :, category]  # (B, 1, T)
            matches.append(is_earlier & (code == event_code) & (code > 0))
        return torch.stack(matches, 1).float()

    def _item_attributes(self, name: str, item: Tensor, batch: ActionsBatch) -> Tensor:
        """Return attributes (..., width) of items; padding reads item 0."""
        table = getattr(self, name).to(item.device)
        new_rows = getattr(batch, f"new_{name}")
        if new_rows is not None:
            table = torch.cat([table, new_rows])
        return table[item]

    def fit_in_one_pass(
        self, train: Iterable[ActionsBatch], val: Iterable[ActionsBatch]
    ) -> None:
        """Grow the trees of each task until its log loss on val stops falling."""

        def read(batch: ActionsBatch) -> tuple[Tensor, Tensor]:
            """Return columns (N, X) and labels (N, K)."""
            labels = batch.candidate_label[batch.candidate_valid]
            return self.columns(batch), labels

        columns, labels = concat_batches(train, read)
        val_columns, val_labels = concat_batches(val, read)
        self.boosters = grow_trees(
            columns, labels, val_columns, val_labels, self.config
        )
