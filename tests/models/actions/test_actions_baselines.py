"""Baselines of actions count every training event once and predict its rates."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from core.files import join
from core.schemas import Inputs
from models.actions.baselines import (
    BaseRate,
    BaseRateConfig,
    ItemRate,
    SmoothedRateConfig,
)
from models.actions.requests import ACTIONS
from models.training.fit_config import FitConfig
from tests.fixtures.actions_tables import TASKS, write_actions
from tests.fixtures.commands import load_split, read_rows
from tests.fixtures.trainings import build_training

STRENGTH = 20.0


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> str:
    return write_actions(tmp_path_factory.mktemp("feed"))


def read_training_tasks(tables: str) -> dict[int, list[list[bool]]]:
    """Return the tasks of each item's training events, read row by row."""
    tasks_by_item: dict[int, list[list[bool]]] = defaultdict(list)
    for row in read_rows(tables, "sequences"):
        for index in range(row["train_end"]):
            tasks_by_item[row["item_index"][index]].append(row["tasks"][index])
    return tasks_by_item


def compute_base_rates(tasks_by_item: dict[int, list[list[bool]]]) -> np.ndarray:
    return np.mean(list(chain.from_iterable(tasks_by_item.values())), 0)


@pytest.mark.parametrize("max_history", [4, 1024])
def test_rates_of_an_item_are_those_of_its_training_events(tables, max_history):
    """With 4 events per row, rows overlap, and no event is counted twice."""
    run = build_training(
        {"name": "item_rate", "max_history": max_history},
        FitConfig(batch_size=8),
        Inputs(tables),
    )
    model: Any = run.model
    tasks_by_item = read_training_tasks(tables)
    base_rates = compute_base_rates(tasks_by_item)

    run.fit_in_one_pass()

    batch = run.val.collate(np.arange(len(run.val)))
    expected = []
    for item in batch.candidate_item[batch.candidate_valid].tolist():
        tasks = np.reshape(tasks_by_item.get(item, []), (-1, len(TASKS)))
        total = tasks.sum(0) + STRENGTH * base_rates
        expected.append(total / (len(tasks) + STRENGTH))
    np.testing.assert_allclose(model.score(batch).sigmoid(), expected, rtol=1e-9)


@pytest.mark.parametrize("split", ["val", "test"])
def test_rates_of_a_user_are_those_of_the_earlier_events(tables, split):
    run = build_training({"name": "user_rate"}, FitConfig(batch_size=8), Inputs(tables))
    model: Any = run.model
    base_rates = compute_base_rates(read_training_tasks(tables))
    expected = []
    for row in read_rows(tables, "sequences"):
        ends = {"val": (row["train_end"], row["val_end"])}
        begin, end = ends.get(split, (row["val_end"], len(row["tasks"])))
        for time in row["timestamp_ms"][begin:end]:
            earlier = [
                tasks
                for tasks, other in zip(
                    row["tasks"][:begin], row["timestamp_ms"], strict=False
                )
                if other < time
            ]
            total = np.reshape(earlier, (-1, len(TASKS))).sum(0)
            total = total + STRENGTH * base_rates
            expected.append(total / (len(earlier) + STRENGTH))

    run.fit_in_one_pass()

    examples = load_split(ACTIONS, join(tables, "sequences"), split, unit="user")
    batch = examples.collate(np.arange(len(examples)))
    np.testing.assert_allclose(model.score(batch).sigmoid(), expected, rtol=1e-9)


def test_base_rates_are_those_of_training_and_have_no_information_gain(tables):
    run = build_training({"name": "base_rate"}, FitConfig(batch_size=8), Inputs(tables))
    run.fit_in_one_pass()
    model: Any = run.model

    metrics, _ = run.validate(model)

    batch = run.val.collate(np.arange(4))
    expected = compute_base_rates(read_training_tasks(tables))
    np.testing.assert_allclose(model.score(batch)[0].sigmoid(), expected, rtol=1e-9)
    assert metrics["mean/gauc"] == 0.5
    assert metrics["mean/rig"] <= 0


def test_new_items_have_the_base_rates(catalogue, batch):
    model = ItemRate(SmoothedRateConfig(), catalogue)
    model.fit_in_one_pass([batch])
    base = BaseRate(BaseRateConfig(), catalogue)
    base.fit_in_one_pass([batch])
    new_items = torch.full_like(batch.candidate_item, catalogue.num_items + 1)

    scores = model.score(replace(batch, candidate_item=new_items))

    torch.testing.assert_close(scores, base.score(batch))
