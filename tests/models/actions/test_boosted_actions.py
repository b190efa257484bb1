"""Boosted trees of actions: inputs count strictly earlier events only, and a loaded
checkpoint has equal scores.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from models.actions.boosted import BoostedActions, BoostedActionsConfig
from models.actions.catalogue import ActionsCatalogue
from models.actions.requests import ActionsBatch

SMALL = {"num_iterations": 20, "min_data_in_leaf": 5}


def get_groups(
    catalogue: ActionsCatalogue, batch: ActionsBatch, user: int, candidate: int
) -> list[list[int]]:
    """Return the earlier events of each group of a candidate: all, those of the same
    item, and those with the same value of each category and viewer feature.
    """
    assert batch.viewer is not None
    assert batch.candidate_viewer is not None
    item = int(batch.candidate_item[user, candidate])
    is_earlier = batch.time[user] < batch.candidate_time[user, candidate]
    earlier = (is_earlier & batch.valid[user]).nonzero().flatten().tolist()
    items = batch.item[user].tolist()
    groups = [earlier, [event for event in earlier if items[event] == item]]
    for values in catalogue.categories.T.tolist():
        value = values[item]
        group = [event for event in earlier if values[items[event]] == value]
        groups.append(group if value > 0 else [])
    for key in range(batch.viewer.shape[2]):
        value = batch.candidate_viewer[user, candidate, key]
        group = [event for event in earlier if batch.viewer[user, event, key] == value]
        groups.append(group if value > 0 else [])
    return groups


def compute_inputs(catalogue: ActionsCatalogue, batch: ActionsBatch) -> np.ndarray:
    """Return the inputs of each candidate, from loops over users and events."""
    inputs = []
    for user, candidate in batch.candidate_valid.nonzero().tolist():
        item = int(batch.candidate_item[user, candidate])
        row = batch.candidate_feature[user, candidate].tolist()
        row += catalogue.numbers[item].tolist()
        for group in get_groups(catalogue, batch, user, candidate):
            row += [len(group), *batch.action[user, group].sum(0).tolist()]
        inputs.append(row)
    return np.array(inputs)


def test_inputs_count_the_strictly_earlier_events(catalogue, batch):
    model = BoostedActions(BoostedActionsConfig(), catalogue)
    tied_time = torch.full_like(batch.candidate_time, 30)
    for inputs in (batch, replace(batch, candidate_time=tied_time)):
        expected = compute_inputs(catalogue, inputs)
        np.testing.assert_allclose(model.columns(inputs), expected, rtol=1e-6)


def test_inputs_of_a_new_item_are_its_attributes_and_no_events_of_the_item(
    catalogue, batch
):
    model = BoostedActions(BoostedActionsConfig(), catalogue)
    item = batch.candidate_item[0, 0]
    new_item = batch.candidate_item.clone()
    new_item[0, 0] = catalogue.num_items

    served = replace(
        batch,
        candidate_item=new_item,
        new_numbers=catalogue.numbers[None, item],
        new_categories=catalogue.categories[None, item],
        new_text=torch.zeros(1, 0),
    )

    columns, new_columns = model.columns(batch), model.columns(served)

    num_actions = len(catalogue.actions)
    # features, numbers, the group of all events, the group of the same item
    first = len(catalogue.features) + catalogue.numbers.shape[1] + 1 + num_actions
    same_item = slice(first, first + 1 + num_actions)
    assert new_columns[0, same_item].abs().sum() == 0
    columns[0, same_item] = 0
    torch.testing.assert_close(new_columns, columns)


def test_a_task_of_one_class_is_predicted_by_its_rate(catalogue, batch):
    model = BoostedActions(BoostedActionsConfig(**SMALL), catalogue)
    batch = replace(batch, candidate_label=torch.zeros_like(batch.candidate_label))

    model.fit_in_one_pass([batch], [batch])

    rates = model.score(batch).sigmoid()
    expected = torch.tensor(catalogue.train_rates, dtype=torch.float64)
    torch.testing.assert_close(rates, expected.expand_as(rates))
