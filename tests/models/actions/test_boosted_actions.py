"""Boosted trees of actions read strictly earlier events only, and come back as saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.actions.batch import ActionsBatch
from models.actions.boosted import BoostedActions, BoostedActionsConfig
from models.actions.catalogue import ActionsCatalogue
from models.build import load_model
from models.loaded_model import load_catalogue
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError, read_table
from models.training.fit import FitConfig
from pipelines.evaluation.inference import infer_all
from tests.fixtures.actions_tables import TASKS, write_actions
from tests.fixtures.trainings import build_training

SMALL = {"num_iterations": 20, "min_data_in_leaf": 5}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_actions(tmp_path_factory.mktemp("feed"), viewers=True, content=True)


def read_columns(catalogue: ActionsCatalogue, batch: ActionsBatch) -> np.ndarray:
    """Return the columns of each candidate, from loops over users and events."""
    assert batch.viewer is not None
    assert batch.candidate_viewer is not None
    rows = []
    for user, candidate in batch.candidate_valid.nonzero().tolist():
        item = int(batch.candidate_item[user, candidate])
        time = batch.candidate_time[user, candidate]
        earlier = [
            event
            for event in range(batch.item.shape[1])
            if batch.valid[user, event] and batch.time[user, event] < time
        ]
        past_items = {event: int(batch.item[user, event]) for event in earlier}
        groups = [earlier, [event for event in earlier if past_items[event] == item]]
        for values in catalogue.categories.T:
            value = values[item]
            groups.append(
                [e for e in earlier if values[past_items[e]] == value and value > 0]
            )
        for key in range(batch.viewer.shape[2]):
            value = batch.candidate_viewer[user, candidate, key]
            past = batch.viewer[user, :, key]
            groups.append([e for e in earlier if past[e] == value and value > 0])
        row = [
            *batch.candidate_feature[user, candidate].tolist(),
            *catalogue.numbers[item].tolist(),
        ]
        for group in groups:
            row += [len(group), *batch.action[user, group].sum(0).tolist()]
        rows.append(row)
    return np.array(rows)


def test_columns_count_the_strictly_earlier_events(
    catalogue: ActionsCatalogue, batch: ActionsBatch
) -> None:
    model = BoostedActions(BoostedActionsConfig(), catalogue)

    columns = model.columns(batch)

    np.testing.assert_allclose(columns, read_columns(catalogue, batch), rtol=1e-6)


def test_no_column_depends_on_the_same_or_a_later_time(
    catalogue: ActionsCatalogue, batch: ActionsBatch
) -> None:
    model = BoostedActions(BoostedActionsConfig(), catalogue)
    batch = replace(batch, candidate_time=torch.full_like(batch.candidate_time, 30))
    late = batch.time >= 30

    changed = replace(
        batch,
        item=torch.where(late, 0, batch.item),
        action=torch.where(late[..., None], 1 - batch.action, batch.action),
        candidate_label=1 - batch.candidate_label,
    )
    earlier = replace(batch, action=torch.where(late[..., None], batch.action, 2.0))

    assert torch.equal(model.columns(batch), model.columns(changed))
    assert not torch.equal(model.columns(batch), model.columns(earlier))


def test_new_items_bring_their_attributes(
    catalogue: ActionsCatalogue, batch: ActionsBatch
) -> None:
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

    A = len(catalogue.actions)
    before_item = len(catalogue.features) + catalogue.numbers.shape[1] + 1 + A
    same_item = slice(before_item, before_item + 1 + A)
    assert new_columns[0, same_item].abs().sum() == 0
    columns[0, same_item] = 0
    torch.testing.assert_close(new_columns, columns)


def test_boosting_learns_and_comes_back_as_saved(tables: str, tmp_path: Path) -> None:
    setup = build_training(
        {"name": "boosted_actions", **SMALL}, FitConfig(batch_size=8), Inputs(tables)
    )
    model: Any = setup.model
    setup.fit_counts()
    metrics = setup.means(setup.validate(model)[0])
    checkpoint.save(tmp_path / "best", model, setup.checkpoint(epoch=1))
    catalogue = load_catalogue("boosted_actions", Inputs(tables))
    loaded, _ = load_model(tmp_path / "best", catalogue, "boosted_actions")
    batch = setup.val.collate(np.arange(len(setup.val)))

    infer_all(str(tmp_path / "best"), Inputs(tables), str(tmp_path / "scores"))

    assert metrics["like/auc"] > 0.8
    assert torch.equal(loaded.score(batch), model.score(batch))  # type: ignore[operator]
    names = read_table(str(tmp_path / "scores"), "scores").column_names
    assert {f"score_{task}" for task in TASKS} <= set(names)


def test_a_task_with_one_label_keeps_its_rate(
    catalogue: ActionsCatalogue, batch: ActionsBatch
) -> None:
    model = BoostedActions(BoostedActionsConfig(**SMALL), catalogue)
    batch = replace(batch, candidate_label=torch.zeros_like(batch.candidate_label))

    model.fit_counts([batch], [batch])

    rates = model.score(batch).sigmoid()
    expected = torch.tensor(catalogue.train_rates, dtype=torch.float64)
    torch.testing.assert_close(rates, expected.expand_as(rates))


def test_boosting_needs_a_val_split(
    catalogue: ActionsCatalogue, batch: ActionsBatch
) -> None:
    model = BoostedActions(BoostedActionsConfig(**SMALL), catalogue)
    with pytest.raises(UserError, match="the val split is empty"):
        model.fit_counts([batch], [])
