"""Base rates count every training event once, and predict by them alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.actions.floors import BaseRate, BaseRateConfig, ItemRate, ItemRateConfig
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import join, read_table
from models.training.fit import FitConfig
from pipelines.evaluation.inference import infer_all
from tests.fixtures.actions_tables import TASKS, write_actions
from tests.fixtures.trainings import build_training

STRENGTH = 20.0


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_actions(tmp_path_factory.mktemp("feed"))


def training_events(tables: str) -> dict[int, list[list[bool]]]:
    """Return the tasks of each item's training events, read row by row."""
    found: dict[int, list[list[bool]]] = defaultdict(list)
    for row in read_table(join(tables, "sequences")).to_pylist():
        for place in range(row["train_end"]):
            found[row["item_index"][place]].append(row["tasks"][place])
    return found


@pytest.mark.parametrize("overlap", [4, 1024])
def test_an_item_s_rates_are_those_of_its_training_events(
    tables: str, overlap: int
) -> None:
    """With 4 events to a row, rows overlap, and no event counts twice."""
    setup = build_training(
        {"name": "item_rate", "max_history": overlap},
        FitConfig(batch_size=8),
        Inputs(tables),
    )
    model: Any = setup.model
    events = training_events(tables)
    base = np.mean([tasks for of_item in events.values() for tasks in of_item], 0)

    setup.fit_counts()

    batch = setup.val.collate(np.arange(len(setup.val)))
    items = batch.candidate_item[batch.candidate_valid].tolist()
    expected = [
        (np.sum(events.get(item, np.zeros((0, len(TASKS)))), 0) + STRENGTH * base)
        / (len(events.get(item, [])) + STRENGTH)
        for item in items
    ]
    np.testing.assert_allclose(model.score(batch).sigmoid(), expected, rtol=1e-9)


def test_base_rates_are_those_of_training_and_have_no_gain(tables: str) -> None:
    setup = build_training(
        {"name": "base_rate"}, FitConfig(batch_size=8), Inputs(tables)
    )
    setup.fit_counts()

    metrics = setup.means(setup.validate(setup.model)[0])

    rates = np.mean(
        [tasks for of_item in training_events(tables).values() for tasks in of_item], 0
    )
    batch = setup.val.collate(np.arange(4))
    model: Any = setup.model
    np.testing.assert_allclose(model.score(batch)[0].sigmoid(), rates, rtol=1e-9)
    assert metrics["mean/gauc"] == 0.5
    assert metrics["mean/rig"] <= 0


def test_new_items_have_the_base_rates(catalogue: Any, batch: dict[str, Any]) -> None:
    model = ItemRate(ItemRateConfig(), catalogue)
    model.fit_counts([batch])
    base = BaseRate(BaseRateConfig(), catalogue)
    base.fit_counts([batch])
    new = torch.full_like(batch.candidate_item, catalogue.num_items + 1)

    scores = model.score(replace(batch, candidate_item=new))

    torch.testing.assert_close(scores, base.score(batch))
    with pytest.raises(ValueError, match="strength"):
        ItemRateConfig(strength=0)


def test_an_item_rate_is_saved_and_inferred(tables: str, tmp_path: Path) -> None:
    setup = build_training(
        {"name": "item_rate"}, FitConfig(batch_size=8), Inputs(tables)
    )
    setup.fit_counts()
    checkpoint.save(tmp_path / "best", setup.model, setup.checkpoint(epoch=1))

    manifest, _ = infer_all(
        str(tmp_path / "best"), Inputs(tables), str(tmp_path / "scores")
    )

    assert manifest.rows > 0
