"""What a model has learned or fixed on its first day, when a later day first has more:
three days of each kind.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from models.custom_features import CustomFeatures, adopt_scales
from models.loaded_model import LoadedModel
from models.search.catalogue import SearchCatalogue
from models.search.inputs import FeatureScaler
from models.storage import checkpoint
from models.storage.checkpoint import Checkpoint, OtherTablesError
from models.storage.inputs import Inputs
from models.storage.tables import read_manifest
from models.training.fit import FitConfig
from models.training_run import TrainingRun
from models.warm_start import (
    assign_by_hash,
    collect_row_names,
    fill_constant_scales,
    pair_row_names,
)
from pipelines.data.audit.rules import audit
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import parse_log
from pipelines.data.sequences import custom_features
from pipelines.data.settings import read_config
from tests.fixtures.trainings import build_training

pytestmark = pytest.mark.exhaustive

BEGIN, DAY = 1_700_000_000, 86_400
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
    "split": {"kind": "temporal", "val_days": 1, "test_days": 1},
    "actions": {"counts": {"keys": ["item"]}},
    "min_matched": 0,
}
SEARCH = {
    **{name: value for name, value in ACTIONS.items() if name != "users"},
    "request": "s",
    "query": "q",
    "position": "p",
    "labels": {"click": "a = 1"},
}
SEARCH_SETTINGS = {
    **{name: value for name, value in ACTIONS_SETTINGS.items() if name != "actions"},
    "kind": "search",
    "behaviour": "click",
}
SMALL = {"width": 16, "num_layers": 1, "num_heads": 2, "ffn": 16, "max_history": 12}
ATTN = {"name": "attn_mvp", **SMALL, "experts": 2, "expert_width": 8, "tower_width": 8}
Row = dict[str, Any]


class Growing:
    """A log by days, the last two of which are for validation and test, and a model
    that goes on.
    """

    def __init__(self, folder: Path, source: Row, settings: Row) -> None:
        self.folder, self.settings = folder, settings
        self.source = parse_log(source)
        self.tables = Inputs(str(folder / "tables"))
        users = "".join(f"u{n},{'gold' if n % 2 else 'tin'}\n" for n in range(12))
        (folder / "users.csv").write_text("u,tier\n" + users)
        self.lines: list[str] = []

    def add(self, day: int, change: Callable[[Row], Row], items: int = 8) -> None:
        """Append a day of 120 events, each changed by `change`."""
        draw = random.Random(day)
        catalogue = [
            {"i": f"i{n}", "author": f"a{n % 3}", "weight": None} for n in range(items)
        ]
        pl.DataFrame([change(row) for row in catalogue]).write_ndjson(
            self.folder / "items.jsonl"
        )
        rows = [
            {
                "u": f"u{n % 12}",
                "i": f"i{draw.randrange(items)}",
                "t": BEGIN + day * DAY + n * 600,
                "a": int(draw.random() < 0.4),
                "b": 0,
                "s": f"s{day}-{n // 4}",
                "q": f"q{n // 4 % 5}",
                "p": n % 4,
                "price": None,
                "city": f"c{n % 3}",
            }
            for n in range(120)
        ]
        for row in rows:  # four results are one search of one user
            row["u"] = f"u{int(row['s'].split('-')[1]) % 12}"
        pl.DataFrame(
            [change(row) for row in rows], infer_schema_length=None
        ).write_ndjson(self.folder / f"day-{day}.jsonl")

    def prepare(self) -> Row:
        """Append the files that are new; return what the manifest of sequences says."""
        tables = str(self.folder / "tables")
        prepare(
            self.source,
            str(self.folder),
            tables,
            read_config(self.settings),
            report=self.lines.append,
            existing="append",
        )
        assert not any(rule.violations for rule in audit(tables))
        return read_manifest(f"{tables}/sequences").info

    def train(self, name: str, model: Row, init: str | None = None) -> TrainingRun:
        """Set a training up, save its weights as they are before the first step, and
        return it.
        """
        fit = FitConfig(batch_size=4)
        place = str(self.folder / init) if init else None
        setup = build_training(model, fit, self.tables, init=place)
        where = str(self.folder / name)
        checkpoint.save(where, setup.model, setup.checkpoint(epoch=1))
        return setup


def first_days(growing: Growing, change: Callable[[Row], Row] = dict) -> None:
    for day in range(4):
        growing.add(day, change)
    growing.prepare()


def with_price(row: Row) -> Row:
    return row | ({"price": 100.0 + row["t"] % 7} if "price" in row else {})


def with_likes(row: Row) -> Row:
    return row | ({"b": row["t"] // 600 % 2} if "b" in row else {})


@pytest.mark.parametrize("constant", [None, 3.0], ids=["empty", "constant"])
def test_a_number_without_spread_takes_the_scale_of_the_day_that_has_some(
    tmp_path: Path, constant: float | None
) -> None:
    growing = Growing(tmp_path, ACTIONS, ACTIONS_SETTINGS)
    first_days(
        growing, lambda row: row | ({"price": constant} if "price" in row else {})
    )
    first = growing.train("first", ATTN).model.items.own
    assert first.std.isinf().all()

    for day in (4, 5, 6):
        growing.add(day, with_price)
    info = growing.prepare()
    setup = growing.train("second", ATTN, init="first")
    (number,) = info["own"]["numbers"]
    second = setup.model.items.own
    assert second.std.tolist() == pytest.approx([number["std"]])
    assert second.mean.tolist() == pytest.approx([number["mean"]])
    assert any(
        "num_price had no values or was constant" in note for note in setup.messages
    )

    growing.add(7, with_price)
    growing.prepare()
    setup = growing.train("third", ATTN, init="second")
    third = setup.model.items.own
    assert third.std.tolist() == second.std.tolist()  # kept from then on
    assert not any("num_price" in note for note in setup.messages)


@pytest.mark.parametrize("constant", [None, 3.0], ids=["empty", "constant"])
def test_features_of_searches_take_the_scale_of_the_day_that_has_some(
    tmp_path: Path, constant: float | None
) -> None:
    growing = Growing(tmp_path, SEARCH, SEARCH_SETTINGS)
    first_days(
        growing, lambda row: row | ({"price": constant} if "price" in row else {})
    )
    catalogue = SearchCatalogue.load(growing.tables.tables, None)
    first = nn.ModuleDict({"scale": FeatureScaler(catalogue, 8, 0.0)})
    assert first["scale"].own.std.isinf().all()
    for day in (4, 5, 6):
        growing.add(day, with_price)
    info = growing.prepare()

    scales, _ = adopt_scales(catalogue.scales(), info)
    later = SearchCatalogue.load(growing.tables.tables, None, scales=scales)
    second = nn.ModuleDict({"scale": FeatureScaler(later, 8, 0.0)})
    old = first.state_dict()
    notes = fill_constant_scales(second, old)

    (number,) = info["own"]["numbers"]
    assert old["scale.own.std"].tolist() == pytest.approx([number["std"]])
    assert any("num_price had no values or was constant" in note for note in notes)


def test_a_checkpoint_reads_nothing_from_a_number_that_it_never_saw(
    tmp_path: Path,
) -> None:
    growing = Growing(tmp_path, ACTIONS, ACTIONS_SETTINGS)
    first_days(growing)
    growing.train("first", ATTN)
    growing.add(4, with_price)
    growing.prepare()

    loaded = LoadedModel.load(str(tmp_path / "first"), growing.tables)

    values = torch.tensor([[100.0], [5000.0], [torch.nan]])
    read = loaded.model.items.own(values)
    assert (read[:, 0] == 0).all()


def test_a_number_that_moves_far_from_its_scale_is_warned_of(tmp_path: Path) -> None:
    growing = Growing(tmp_path, ACTIONS, ACTIONS_SETTINGS)
    first_days(
        growing,
        lambda row: row | ({"price": row["t"] // 600 % 2} if "price" in row else {}),
    )
    growing.train("first", ATTN)
    for day in (4, 5, 6):
        growing.add(day, lambda row: with_price(row))
    growing.prepare()
    setup = growing.train("second", ATTN, init="first")
    assert any(
        "num_price" in n and "most values are clipped" in n for n in setup.messages
    )


def test_a_task_that_appears_later_was_a_task_from_the_first_day(
    tmp_path: Path,
) -> None:
    growing = Growing(tmp_path, ACTIONS, ACTIONS_SETTINGS)
    first_days(growing)
    assert any(line.startswith("kept: task like is 0") for line in growing.lines)
    first = growing.train("first", ATTN)
    assert first.model.labels == ("look", "like")

    for day in (4, 5, 6):
        growing.add(day, with_likes)
    rate = growing.prepare()["base_rates"]["like"]
    LoadedModel.load(str(tmp_path / "first"), growing.tables)
    second = growing.train("second", ATTN, init="first")
    assert any(
        "task like was 0 for all candidates before" in note for note in second.messages
    )
    bias = second.model.head.bias[1] + second.model.correction
    assert bias.sigmoid().item() == pytest.approx(rate, abs=1e-6)
    likes = [name for name in second.catalogue.features if name.startswith("item_like")]
    assert any(name in note for note in second.messages for name in likes)

    growing.add(7, with_likes)
    growing.prepare()
    third = growing.train("third", ATTN, init="second")
    assert not any("before" in note for note in third.messages)


def test_tasks_of_tables_that_were_not_to_grow_are_refused_in_a_line(
    tmp_path: Path,
) -> None:
    growing = Growing(tmp_path, ACTIONS, ACTIONS_SETTINGS)
    for day in range(4):
        growing.add(day, dict)
    settings = read_config(ACTIONS_SETTINGS)
    prepare(growing.source, str(tmp_path), growing.tables.tables, settings)
    growing.train("first", ATTN)
    growing.add(4, with_likes)
    growing.prepare()
    with pytest.raises(OtherTablesError, match="such as like: train a new model"):
        growing.train("second", ATTN, init="first")
    with pytest.raises(OtherTablesError, match="such as like: train a new model"):
        LoadedModel.load(str(tmp_path / "first"), growing.tables)


def test_numbers_of_items_without_spread_take_the_scale_of_later_items(
    tmp_path: Path,
) -> None:
    growing = Growing(tmp_path, ACTIONS, ACTIONS_SETTINGS)
    first_days(growing)
    assert growing.train("first", ATTN).catalogue.attributes.numbers == {
        "num_weight": (0.0, 0.0)
    }
    growing.add(
        4,
        lambda row: row | ({"weight": float(row["i"][1:])} if "weight" in row else {}),
    )
    growing.prepare()
    second = growing.train("second", ATTN, init="first").catalogue.attributes
    assert second.numbers["num_weight"] == pytest.approx((3.5, np.std(range(8))))
    loaded = LoadedModel.load(str(tmp_path / "first"), growing.tables)
    assert (loaded.catalogue.numbers == 0).all()


def new_city(row: Row) -> Row:
    return row | ({"city": f"d{row['t'] // 600 % 9}"} if "city" in row else {})


def test_new_values_begin_as_the_unknown_one(tmp_path: Path) -> None:
    growing = Growing(tmp_path, ACTIONS, ACTIONS_SETTINGS)
    first_days(growing)
    first = growing.train("first", ATTN)
    for day in (4, 5, 6):
        growing.add(day, new_city, items=10)
    growing.prepare()
    second = growing.train("second", ATTN, init="first")
    place = [
        bool(names) and "c1" in names for names in second.model.items.row_names
    ].index(True)
    old, new = (each.model.items.tables[place].weight for each in (first, second))
    assert len(new) > len(old)
    names = second.model.items.row_names[place]
    assert torch.equal(new[1 + names.index("c1")], old[1 + 1])
    assert torch.equal(new[1 + names.index("d0")], old[0])
    assert len(second.model.items.tables[0].weight) == 10


def test_a_category_that_gets_too_many_values_to_list_keeps_its_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_features, "MAX_VALUES", 5)
    growing = Growing(tmp_path, SEARCH, SEARCH_SETTINGS)
    first_days(growing)
    catalogue = SearchCatalogue.load(growing.tables.tables, None)
    first = nn.ModuleDict({"scale": FeatureScaler(catalogue, 8, 0.0)})
    about = Checkpoint(model={}, learned={"names": collect_row_names(first)})
    for day in (4, 5, 6):
        growing.add(day, new_city)
    (category,) = CustomFeatures.from_info(growing.prepare()).categories
    later = SearchCatalogue.load(growing.tables.tables, None)
    second = nn.ModuleDict({"scale": FeatureScaler(later, 8, 0.0)})

    [(name, (before, now))] = pair_row_names(second, about)

    assert (name, now) == ("scale.own.tables.0.weight", None)
    old = first["scale"].own.tables[0].weight
    new = assign_by_hash(old, before, category.buckets)
    assert new.shape == second["scale"].own.tables[0].weight.shape
    codes = category.codes(pl.Series(["c1", "never"]).to_arrow())
    assert torch.equal(new[codes[0]], old[1 + 1])
    assert torch.equal(new[codes[1]], old[0])


def test_users_attributes_that_get_too_many_values_are_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = Growing(tmp_path, ACTIONS, ACTIONS_SETTINGS)
    first_days(growing)
    growing.train("first", ATTN)
    monkeypatch.setattr(custom_features, "MAX_VALUES", 1)
    growing.add(4, dict)
    growing.prepare()
    with pytest.raises(OtherTablesError, match="train a new model"):
        growing.train("second", ATTN, init="first")


def test_rows_by_hash_hold_the_vectors_of_their_values() -> None:
    weights = torch.arange(8.0).view(4, 2)
    found = assign_by_hash(weights, ["a", "b", "c"], 100)
    assert found.shape == (101, 2)
    rows = {tuple(row) for row in found.tolist()}
    assert rows == {tuple(row) for row in weights.tolist()}


def test_the_split_moves_with_the_days(tmp_path: Path) -> None:
    growing = Growing(tmp_path, ACTIONS, ACTIONS_SETTINGS)
    first_days(growing)
    starts = []
    for day in (4, 5, 6):
        growing.add(day, dict)
        info = growing.prepare()
        starts.append(info["split"]["test_start_ms"])
        assert min(info["events"].values()) > 0
    assert np.diff(starts).tolist() == [DAY * 1000] * 2
