"""A metric without a request is undefined: it selects no checkpoint and is not shown as 0."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import UserError
from core.schemas import Inputs
from models.training.fit_config import FitConfig
from models.training_run import TrainingRun
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.training_tables import change_sequences, write_tables
from tests.fixtures.trainings import CASES, SASREC, build_training


def repeat_one_item(row: dict[str, Any]) -> dict[str, Any]:
    item = row["item_index"][0]
    requests = [request | {"candidates": [item]} for request in row["requests"]]
    return row | {"item_index": [item] * len(row["item_index"]), "requests": requests}


def like_nothing(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"tasks": [[dwell, other, False] for dwell, other, _ in row["tasks"]]}


@pytest.fixture(scope="module")
def repeats(tmp_path_factory) -> str:
    """Folder of the tables of users who repeat one item."""
    tables, _ = write_tables(tmp_path_factory.mktemp("repeats"), users=20)
    change_sequences(tables, repeat_one_item)
    return tables


def build_small_training(
    model: dict[str, Any], inputs: Inputs, **fit: Any
) -> TrainingRun:
    return build_training(model, FitConfig(batch_size=4, **fit), inputs)


def test_a_metric_that_is_not_defined_is_rejected(repeats, tmp_path):
    actions = write_actions(tmp_path / "actions")
    change_sequences(actions, like_nothing)
    entropy = "like/normalised_entropy"
    for model, tables, metric in (
        (SASREC, repeats, "first/ndcg@10"),
        (CASES["attn_mvp"], actions, entropy),
    ):
        run = build_small_training(model, Inputs(tables), metric=metric)
        with pytest.raises(UserError, match=f"fit.metric is {metric}, which is not"):
            run.validate(run.model)
