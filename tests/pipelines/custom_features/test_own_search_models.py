"""Search models read the log's own features: as tables have them, unknown ones as
unknown, and they learn from them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from models.custom_features import Category, CustomFeatures, CustomInputs, Number
from models.search.catalogue import SearchCatalogue
from models.search.data import SearchDataset
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join, read_manifest, read_table
from models.training.fit import EpochEvent, FitConfig, fit
from models.training_run import TrainingRun
from tests.fixtures.custom_features_log import SOURCE, make, make_text
from tests.fixtures.trainings import build_training

SMALL = {
    "width": 16,
    "num_layers": 1,
    "max_history": 8,
    "dnn_width": 32,
    "tower_width": 16,
    "text_width": 8,
}
FIT = FitConfig(
    optimizer="adagrad",
    lr=0.05,
    weight_decay=0,
    batch_size=16,
    max_epochs=12,
    metric="gauc",
    schedule="constant",
)


def trained(tables: str, text: str, model: dict[str, Any]) -> tuple[TrainingRun, float]:
    """The model after training, and its best GAUC of validation."""
    setup = build_training(model, FIT, Inputs(tables, text=text))
    ends = [
        event.metrics["gauc"]
        for event in fit(
            setup.model, setup.train, setup.validate, setup.fit, means=setup.means
        )
        if isinstance(event, EpochEvent)
    ]
    return setup, max(ends)


def test_values_are_told_by_the_manifest() -> None:
    own = CustomFeatures(
        (Number("num_a", 2.0, 4.0, True), Number("num_b", 0.0, 1.0, False)),
        (Category("cat_c", ("x", "y")), Category("cat_d", (), buckets=7)),
    )
    columns = {
        "num_a": pa.array([10, None, 2], pa.float32()),
        "cat_c": pa.array(["y", "new", None]),
        "cat_d": pa.array(["y", "new", None]),
    }
    found = own.matrix(columns, 3)
    np.testing.assert_array_equal(
        found[:, :3], [[10, np.nan, 2], [np.nan, np.nan, 0], [2, np.nan, 0]]
    )
    assert found[2, 3] == 0  # of no value
    assert set(found[:2, 3]) <= set(range(1, 8))
    again = own.matrix({"cat_d": pa.array(["new", "y"]).dictionary_encode()}, 2)
    assert again[:, 3].tolist() == found[[1, 0], 3].tolist()  # whatever else is there
    inputs = CustomInputs(own, width=3, dropout=0.0)
    assert inputs.columns == ["num_a", "num_b", "num_a", *["cat_c"] * 3, *["cat_d"] * 3]
    read = inputs(torch.from_numpy(found))
    assert read[:, 0].tolist() == [2.0, 0.0, 0.0]
    assert read[:, 1].tolist() == [0.0] * 3
    assert read[:, 2].tolist() == [1.0, 0.0, 1.0]  # whether num_a is there
    assert torch.equal(read[1, 3:6], read[2, 3:6])  # a new value is as none
    assert torch.equal(read[0, 3:6], inputs.tables[0].weight[2])


def test_batches_hold_what_the_tables_say_of_candidates_and_behaviours(
    tables: str, text: str
) -> None:
    catalogue = SearchCatalogue.load(tables, text)
    info = read_manifest(join(tables, "sequences")).info
    count = len(info["features"])
    assert catalogue.features[count:] == ("num_bm25", "cat_city")
    assert catalogue.feature_mean.shape == (count,)
    values = info["own"]["categories"][0]["values"]
    examples = SearchDataset.load(
        join(tables, "sequences"), "test", unit="request", max_history=8
    )
    rows = read_table(join(tables, "sequences")).to_pylist()
    batch = examples.collate(np.arange(len(examples)))
    asked = [
        (row, place)
        for row in rows
        for place, request in enumerate(row["requests"])
        if request["split"] == "test"
    ]
    bm25, city = [], []
    for row, place in asked:
        request = row["requests"][place]
        bm25 += [np.nan if value is None else value for value in request["num_bm25"]]
        city += [
            values.index(value) + 1 if value in values else 0
            for value in request["cat_city"]
        ]
    np.testing.assert_array_equal(batch.features[:, count], np.array(bm25, np.float32))
    assert batch.features[:, count + 1].tolist() == city
    assert 0 in city  # of a city that training has not seen
    for number, (row, place) in enumerate(asked):
        end = row["requests"][place]["history_end"]
        past = row["num_bm25"][max(0, end - 8) : end]
        where = int(batch.request_row[number])
        length = int(batch.request_end[number])
        found = batch.history_features[where, :length, count].numpy()
        np.testing.assert_array_equal(
            found[-len(past) or length :], np.array(past, np.float32)
        )


@pytest.mark.parametrize("name", ["base", "qgs"])
def test_a_candidate_is_ranked_by_its_own_features_alone(
    tables: str, text: str, name: str
) -> None:
    setup = build_training(
        {"name": name, **(SMALL if name == "qgs" else {})},
        FIT,
        Inputs(tables, text=text),
    )
    model: Any = setup.model.eval()
    options = SearchDataset.dataset_options(setup.config, setup.catalogue)
    examples = SearchDataset.load(
        join(tables, "sequences"), "test", unit="request", max_history=8, **options
    )
    batch = examples.collate(np.arange(10))
    places = [len(setup.catalogue.features) - 2, len(setup.catalogue.features) - 1]
    with torch.no_grad():
        before = model.score(batch)
        for place, value in zip(places, (1.5, 2.0), strict=True):
            other = batch.features.clone()
            other[3, place] = value if other[3, place] != value else 0.0
            changed = (model.score(replace(batch, features=other)) != before).any(1)
            assert changed.nonzero().ravel().tolist() == [3]
        if name == "qgs":
            past = batch.history_features.clone()
            past[..., places[0]] += 1.0
            moved = (model.score(replace(batch, history_features=past)) != before).any(
                1
            )
            with_past = batch.request_end[batch.candidate_request] > 0
            assert torch.equal(moved, with_past)


def test_what_is_unknown_when_ranking_is_not_read_then(
    raw: Path, tmp_path: Path
) -> None:
    tables = make(
        tmp_path, raw, settings={"search": {"unknown_when_ranking": ["city"]}}
    )
    text = make_text(tmp_path, tables)
    setup = build_training(
        {"name": "qgs", **SMALL, "position": "dropout"}, FIT, Inputs(tables, text=text)
    )
    model: Any = setup.model.eval()
    options = SearchDataset.dataset_options(setup.config, setup.catalogue)
    examples = SearchDataset.load(
        join(tables, "sequences"), "test", unit="request", max_history=8, **options
    )
    batch = examples.collate(np.arange(10))
    other = batch.features.clone()
    other[:, -1] = 3 - other[:, -1]
    with torch.no_grad():
        assert torch.equal(
            model.score(replace(batch, features=other)), model.score(batch)
        )
        shown = [
            model.score(replace(batch, features=values), shown=True)
            for values in (other, batch.features)
        ]
        assert not torch.equal(*shown)
        past = batch.history_features.clone()
        past[..., -1] = 3 - past[..., -1]  # of what was shown before it is known
        assert not torch.equal(
            model.score(replace(batch, history_features=past)), model.score(batch)
        )
    with pytest.raises(
        UserError,
        match="unknown_when_ranking has 'town', which is not a custom feature of the log",
    ):
        make(
            tmp_path / "wrong",
            raw,
            settings={"search": {"unknown_when_ranking": ["town"]}},
        )


@pytest.mark.long
def test_models_learn_from_the_features_of_the_log(
    tables: str, text: str, raw: Path, tmp_path: Path
) -> None:
    _, own = trained(tables, text, {"name": "base", "category_width": 4})
    plain = {
        key: value
        for key, value in SOURCE.items()
        if key not in ("numbers", "categories")
    }
    without = make(tmp_path, raw, plain)
    assert (
        own > trained(without, make_text(tmp_path, without), {"name": "base"})[1] + 0.1
    )
