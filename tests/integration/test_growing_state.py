"""Test what a model keeps and extends when later days bring values new to its log."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from core.schemas import Inputs
from core.tables import read_manifest
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training_run import TrainingRun
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import parse_log
from tests.fixtures.commands import read_config
from tests.fixtures.trainings import build_training

pytestmark = pytest.mark.exhaustive

DAY_S = 86_400
SOURCE: dict[str, Any] = {
    "files": "day-*.jsonl",
    "user": "u",
    "item": "i",
    "time": {"column": "t", "unit": "s"},
    "labels": {"look": "a = 1", "like": "b = 1"},
    "numbers": ["price"],
}
SETTINGS: dict[str, Any] = {
    "kind": "actions",
    "core": 0,
    "split": {"by": "temporal", "val_days": 1, "test_days": 1},
    "actions": {"counts": {"keys": ["item"]}},
}
MODEL: dict[str, Any] = {
    "name": "attn_mvp",
    "width": 16,
    "num_layers": 1,
    "num_heads": 2,
    "ffn": 16,
    "max_history": 12,
    "experts": 2,
    "expert_width": 8,
    "tower_width": 8,
}


def add_days(folder: Path, *days: int) -> Any:
    """Append days to a log and prepare them; return the info of the sequences.

    Prices and likes begin on the fifth day.
    """
    for day in days:
        draw = random.Random(day)
        events = [
            {
                "u": f"u{n // 4 % 12}",
                "i": f"i{draw.randrange(8)}",
                "t": (20_000 + day) * DAY_S + n * 600,
                "a": int(draw.random() < 0.4),
                "b": n % 2 if day > 3 else 0,
                "price": 100.0 + n % 7 if day > 3 else None,
            }
            for n in range(120)
        ]
        frame = pl.DataFrame(events, schema_overrides={"price": pl.Float64})
        frame.write_ndjson(folder / f"day-{day}.jsonl")
    tables = str(folder / "tables")
    config = read_config(SETTINGS)
    prepare(parse_log(SOURCE), str(folder), tables, config, existing="append")
    return read_manifest(f"{tables}/sequences").info


def start_training(folder: Path, name: str, init: str | None = None) -> TrainingRun:
    """Set up a training and save its weights before the first step.

    Args:
        folder: Folder of the log, its tables and the checkpoints.
        name: Name of the checkpoint.
        init: Name of the checkpoint whose weights the training begins with.
    """
    setup = build_training(
        MODEL,
        FitConfig(batch_size=4),
        Inputs(str(folder / "tables")),
        init=str(folder / init) if init else None,
    )
    checkpoint.save(str(folder / name), setup.model, setup.checkpoint(epoch=1))
    return setup


def test_a_number_and_a_task_are_learned_from_the_first_day_on_which_they_vary(
    tmp_path: Path,
) -> None:
    add_days(tmp_path, 0, 1, 2, 3)
    first = start_training(tmp_path, "first").model
    assert first.items.own.std.isinf().all()
    assert first.labels == ("look", "like")

    info = add_days(tmp_path, 4, 5, 6)
    setup = start_training(tmp_path, "second", init="first")
    second = setup.model
    (number,) = info["custom"]["numbers"]
    scales = second.items.own.mean.tolist(), second.items.own.std.tolist()
    assert scales == (pytest.approx([number["mean"]]), pytest.approx([number["std"]]))
    bias = second.head.bias[1] + second.correction
    rate = info["base_rates"]["like"]
    assert bias.sigmoid().item() == pytest.approx(rate, abs=1e-6)
    messages = "\n".join(setup.messages)
    for fragment in ("num_price had no values", "task like was 0", "item_like"):
        assert fragment in messages

    add_days(tmp_path, 7)
    setup = start_training(tmp_path, "third", init="second")
    third = setup.model.items.own
    assert (third.mean.tolist(), third.std.tolist()) == scales  # fixed from then on
    assert "num_price" not in "\n".join(setup.messages)
