"""Scoring: a limited validation takes as many rows as it says, spread over the lengths of histories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_tables import write_tables

from models.fit import FitConfig
from models.inputs import Inputs
from models.setup import score, set_up

SASREC = {"name": "sasrec", "dim": 16, "num_layers": 1, "max_history": 12}


@pytest.mark.parametrize("limit", [7, 20, 59, 60, 1000])
def test_a_limited_validation_takes_that_many_rows_of_all_lengths(tmp_path: Path, limit: int) -> None:
    tables, _ = write_tables(tmp_path)
    setup = set_up(SASREC, FitConfig(), Inputs(tables))
    seen: list[int] = []

    def count_rows(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        assert len(batch["history"]) > 0
        seen.extend(batch["history_length"].tolist())
        return {"examples": float(len(batch["history"]))}

    sums, count, _ = score(setup.model, count_rows, setup.val, batch_size=8, device=setup.device, limit=limit)
    assert count == sums["examples"] == len(seen) == min(limit, 60)
    assert {min(seen), max(seen)} == {min(setup.val.lengths), max(setup.val.lengths)}
