"""A metric without a request is undefined: it selects no checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import UserError
from core.schemas import Inputs
from models.training.fit_config import FitConfig
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.training_tables import change_sequences, write_tables
from tests.fixtures.trainings import CASES, SASREC, build_training


def repeat_one_item(row: dict[str, Any]) -> dict[str, Any]:
    item = row["item_index"][0]
    requests = [request | {"candidates": [item]} for request in row["requests"]]
    return row | {"item_index": [item] * len(row["item_index"]), "requests": requests}


def like_nothing(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"tasks": [[dwell, other, False] for dwell, other, _ in row["tasks"]]}


@pytest.mark.parametrize(
    ("model", "metric"),
    [(SASREC, "first/ndcg@10"), (CASES["attn_mvp"], "like/normalised_entropy")],
)
def test_a_metric_that_is_not_defined_selects_no_checkpoint(model, metric, tmp_path):
    """Users repeat one item, so no target is an item's first; nobody likes anything."""
    if model is SASREC:
        tables, _ = write_tables(tmp_path, users=20)
        change_sequences(tables, repeat_one_item)
    else:
        tables = write_actions(tmp_path)
        change_sequences(tables, like_nothing)
    fit = FitConfig(batch_size=4, metric=metric)
    run = build_training(model, fit, Inputs(tables))

    with pytest.raises(UserError, match=metric):
        run.validate(run.model)
