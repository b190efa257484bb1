"""Search models read custom features as the tables have them, read values that training
did not have as missing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from core.files import join
from core.schemas import Category, CustomFeatures, Inputs, Number
from core.tables import read_manifest
from models.custom_features import CustomInputs, read_features
from models.dataset.dataset import Dataset
from models.search.catalogue import SearchCatalogue
from models.search.requests import SEARCH, SearchBatch
from models.training.fit_config import FitConfig
from tests.fixtures.commands import load_split, read_rows
from tests.fixtures.custom_features_log import prepare_tables, write_random_text
from tests.fixtures.trainings import CASES, build_training

FIT = FitConfig(batch_size=16, metric="gauc")


FEATURES = CustomFeatures(
    (Number("num_a", 2.0, 4.0, True), Number("num_b", 0.0, 1.0, False)),
    (Category("cat_c", ("x", "y")), Category("cat_d", (), buckets=7)),
)
COLUMNS = {
    "num_a": pa.array([10, None, 2], pa.float32()),
    "cat_c": pa.array(["y", "new", None]),
    "cat_d": pa.array(["y", "new", None]),
}


def test_a_model_reads_standardized_numbers_and_embeddings_of_categories():
    inputs = CustomInputs(FEATURES, width=3, dropout=0.0)
    embeddings = ["cat_c"] * 3 + ["cat_d"] * 3
    assert inputs.columns == ["num_a", "num_b", "num_a", *embeddings]

    vectors = inputs(torch.from_numpy(read_features(FEATURES, COLUMNS, 3)))

    assert vectors[:, 0].tolist() == [2.0, 0.0, 0.0]  # (10 - 2) / 4, and 0 if missing
    assert vectors[:, 1].tolist() == [0.0, 0.0, 0.0]
    assert vectors[:, 2].tolist() == [1.0, 0.0, 1.0]  # whether num_a has a value
    assert torch.equal(vectors[0, 3:6], inputs.tables[0].weight[2])
    assert torch.equal(vectors[1, 3:6], vectors[2, 3:6])  # new and missing


def test_batches_have_the_features_of_candidates_and_behaviours_as_in_the_tables(
    tables, text
):
    info = read_manifest(join(tables, "sequences")).info
    bm25_column = len(info["features"])
    city_column = bm25_column + 1
    catalogue = SearchCatalogue.load(Inputs(tables, text=text))
    assert catalogue.features[bm25_column:] == ("num_bm25", "cat_city")
    assert catalogue.feature_mean.shape == (bm25_column,)
    examples = load_split(
        SEARCH,
        join(tables, "sequences"),
        "test",
        unit="request",
        max_history=8,
    )

    batch = examples.collate(np.arange(len(examples)))

    cities = info["custom"]["categories"][0]["values"]
    code = {city: index for index, city in enumerate(cities, 1)}
    bm25: list[float | None] = []
    codes: list[int] = []
    number = 0
    for row in read_rows(tables, "sequences"):
        for request in row["requests"]:
            if request["split"] != "test":
                continue
            bm25 += request["num_bm25"]
            codes += [code.get(city, 0) for city in request["cat_city"]]
            end = request["history_end"]
            past = row["num_bm25"][max(0, end - 8) : end]
            length = int(batch.request_end[number])
            history = batch.history_features[
                int(batch.request_row[number]), length - len(past) : length, bm25_column
            ]
            np.testing.assert_array_equal(history, np.array(past, np.float32))
            number += 1
    assert number == len(batch.request_end)
    np.testing.assert_array_equal(
        batch.features[:, bm25_column], np.array(bm25, np.float32)
    )
    assert batch.features[:, city_column].tolist() == codes
    assert 0 in codes  # a city that training did not have


BM25, CITY = -2, -1
"""Columns of the custom features in a batch."""


def build_qgs(inputs: Inputs) -> tuple[Any, SearchBatch]:
    """Build an untrained QGS and a batch of 10 test requests."""
    run = build_training(CASES["qgs"], FIT, inputs)
    examples = Dataset.load(run.model, run.catalogue, "test", max_history=8)
    return run.model.eval(), examples.collate(np.arange(10))


@torch.no_grad()
def find_changed(module: Any, batch: SearchBatch, **changes: torch.Tensor) -> Any:
    """Return which candidates have another score with other tensors of the batch."""
    other_scores = module.score(replace(batch, **changes))
    return (other_scores != module.score(batch)).any(1)


def test_features_change_the_scores_of_their_candidate_or_of_later_requests(
    tables, text
):
    module, batch = build_qgs(Inputs(tables, text=text))
    for column, value in ((BM25, 1.5), (CITY, 2.0)):
        features = batch.features.clone()
        features[3, column] = value if features[3, column] != value else 0.0
        changed = find_changed(module, batch, features=features)
        assert changed.nonzero().ravel().tolist() == [3]

    history_features = batch.history_features.clone()
    history_features[..., BM25] += 1.0
    has_history = batch.request_end[batch.candidate_request] > 0
    changed = find_changed(module, batch, history_features=history_features)
    assert torch.equal(changed, has_history)


def test_a_feature_unknown_when_ranking_is_read_of_behaviours_only(raw, tmp_path):
    settings = {"search": {"unknown_when_ranking": ["city"]}}
    tables = prepare_tables(tmp_path, raw, settings=settings)
    text = write_random_text(tmp_path, tables)
    module, batch = build_qgs(Inputs(tables, text=text))
    features, history_features = batch.features.clone(), batch.history_features.clone()
    features[:, CITY] = 3 - features[:, CITY]
    history_features[..., CITY] = 3 - history_features[..., CITY]

    assert not find_changed(module, batch, features=features).any()
    assert find_changed(module, batch, history_features=history_features).any()
