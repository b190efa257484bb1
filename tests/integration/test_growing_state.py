"""Test what a model keeps and extends when later days bring values new to its log."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from core.schemas import Inputs
from core.tables import read_manifest
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training_run import TrainingRun
from models.warm_start import assign_by_hash
from pipelines.data.audit.rules import audit
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import parse_log
from tests.fixtures.commands import read_config
from tests.fixtures.trainings import build_training

pytestmark = pytest.mark.exhaustive

FIRST_DAY_S = 1_700_000_000
DAY_S = 86_400
ACTIONS: dict[str, Any] = {
    "files": "day-*.jsonl",
    "user": "u",
    "item": "i",
    "time": {"column": "t", "unit": "s"},
    "labels": {"look": "a = 1", "like": "b = 1"},
    "numbers": ["price"],
    "categories": ["city"],
    "items": {
        "files": "items.jsonl",
        "item": "i",
        "attributes": ["author"],
        "numbers": ["weight"],
    },
    "users": {"files": "users.csv", "user": "u", "attributes": ["tier"]},
}
ACTIONS_SETTINGS: dict[str, Any] = {
    "kind": "actions",
    "core": 0,
    "split": {"by": "temporal", "val_days": 1, "test_days": 1},
    "actions": {"counts": {"keys": ["item"]}},
    "min_matched": 0,
}
SMALL = {"width": 16, "num_layers": 1, "num_heads": 2, "ffn": 16, "max_history": 12}
ATTN = {"name": "attn_mvp", **SMALL, "experts": 2, "expert_width": 8, "tower_width": 8}
Row = dict[str, Any]


class GrowingLog:
    """A log by days and the models trained on it.

    The last two days are for validation and test.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = parse_log(ACTIONS)
        self.tables = Inputs(str(folder / "tables"))
        users = "".join(f"u{n},{'gold' if n % 2 else 'tin'}\n" for n in range(12))
        (folder / "users.csv").write_text("u,tier\n" + users)
        self.lines: list[str] = []

    def add_day(self, day: int, change: Callable[[Row], Row]) -> None:
        """Append a day of 120 events, with each item and event changed by `change`."""
        draw = random.Random(day)
        catalogue = [
            {"i": f"i{n}", "author": f"a{n % 3}", "weight": None} for n in range(8)
        ]
        changed_items = [change(row) for row in catalogue]
        pl.DataFrame(changed_items).write_ndjson(self.folder / "items.jsonl")
        events = []
        for n in range(120):
            event = {
                "u": f"u{n // 4 % 12}",
                "i": f"i{draw.randrange(8)}",
                "t": FIRST_DAY_S + day * DAY_S + n * 600,
                "a": int(draw.random() < 0.4),
                "b": 0,
                "price": None,
                "city": f"c{n % 3}",
            }
            events.append(change(event))
        frame = pl.DataFrame(events, infer_schema_length=None)
        frame.write_ndjson(self.folder / f"day-{day}.jsonl")

    def add_days(self, days: Iterable[int], change: Callable[[Row], Row] = dict) -> Row:
        """Append days and prepare them; return the info of the table of sequences."""
        for day in days:
            self.add_day(day, change)
        tables = str(self.folder / "tables")
        prepare(
            self.source,
            str(self.folder),
            tables,
            read_config(ACTIONS_SETTINGS),
            report=self.lines.append,
            existing="append",
        )
        assert not any(rule.violations for rule in audit(tables))
        return read_manifest(f"{tables}/sequences").info

    def train(self, name: str, model: Row, init: str | None = None) -> TrainingRun:
        """Set up a training and save its weights before the first step.

        Args:
            name: Name of the folder of the checkpoint.
            model: Options of the model.
            init: Name of the checkpoint whose weights the training begins with.
        """
        init_path = str(self.folder / init) if init else None
        setup = build_training(
            model, FitConfig(batch_size=4), self.tables, init=init_path
        )
        saved = setup.checkpoint(epoch=1)
        checkpoint.save(str(self.folder / name), setup.model, saved)
        return setup


def set_column(name: str, value: Callable[[Row], Any]) -> Callable[[Row], Row]:
    """Return a function that sets a column of the rows that have it."""

    def change(row: Row) -> Row:
        return row | {name: value(row)} if name in row else row

    return change


with_price = set_column("price", lambda row: 100.0 + row["t"] % 7)
with_likes = set_column("b", lambda row: row["t"] // 600 % 2)


@pytest.mark.parametrize("constant", [None, 3.0], ids=["empty", "constant"])
def test_a_constant_number_takes_the_scale_of_the_first_day_on_which_it_varies(
    tmp_path: Path, constant: float | None
) -> None:
    log = GrowingLog(tmp_path)
    log.add_days(range(4), set_column("price", lambda row: constant))
    first = log.train("first", ATTN).model.items.own
    assert first.std.isinf().all()

    info = log.add_days((4, 5, 6), with_price)
    setup = log.train("second", ATTN, init="first")
    second = setup.model.items.own
    (number,) = info["custom"]["numbers"]
    assert second.std.tolist() == pytest.approx([number["std"]])
    assert second.mean.tolist() == pytest.approx([number["mean"]])
    note = "num_price had no values or was constant"
    assert any(note in message for message in setup.messages)

    log.add_days([7], with_price)
    setup = log.train("third", ATTN, init="second")
    third = setup.model.items.own
    assert third.std.tolist() == second.std.tolist()  # fixed from then on
    assert not any("num_price" in message for message in setup.messages)


def test_a_task_without_positives_at_first_is_learned_when_it_has_some(
    tmp_path: Path,
) -> None:
    log = GrowingLog(tmp_path)
    log.add_days(range(4))
    assert any(line.startswith("kept: task like is 0") for line in log.lines)
    first = log.train("first", ATTN)
    assert first.model.labels == ("look", "like")

    rate = log.add_days((4, 5, 6), with_likes)["base_rates"]["like"]
    second = log.train("second", ATTN, init="first")
    note = "task like was 0 for all candidates before"
    assert any(note in message for message in second.messages)
    bias = second.model.head.bias[1] + second.model.correction
    assert bias.sigmoid().item() == pytest.approx(rate, abs=1e-6)
    messages = "\n".join(second.messages)
    likes = [name for name in second.catalogue.features if name.startswith("item_like")]
    assert any(name in messages for name in likes)

    log.add_days([7], with_likes)
    third = log.train("third", ATTN, init="second")
    assert not any("before" in message for message in third.messages)


def test_hash_buckets_get_the_vectors_of_their_values() -> None:
    weights = torch.arange(8.0).view(4, 2)

    buckets = assign_by_hash(weights, ["a", "b", "c"], 100)

    assert buckets.shape == (101, 2)
    rows = {tuple(row) for row in buckets.tolist()}
    assert rows == {tuple(row) for row in weights.tolist()}
