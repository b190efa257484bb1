"""Requests that a log can hold and a model has nothing to go by: kept, defined,
counted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from models.search import metrics
from models.search.catalogue import NO_QUERY, SearchCatalogue
from models.search.data import SearchDataset
from models.search.qgs import QGS, QGSConfig
from models.storage.tables import UserError, add_seal, check_seal, join
from tests.fixtures.search_tables import request, write_tables


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """One user without history or query, one whose first search shows nothing, one who
    clicks all or nothing.
    """
    folder: Path = tmp_path_factory.mktemp("odd")
    features = np.zeros((3, 6))

    def row(user: str, past: list[int], requests: list[dict]) -> dict:
        times = list(range(1, len(past) + 1))
        columns = {
            "item_index": past,
            "timestamp_ms": times,
            "query_index": [0] * len(past),
        }
        lists = {"position": [0] * len(past), "features": [[0.0] * 6] * len(past)}
        return {"user_id": user, **columns, **lists, "requests": requests}

    rows = [
        row(
            "a",
            [],
            [
                request(
                    9, NO_QUERY, 0, "train", [0, 1, 2], [True, False, False], features
                )
            ],
        ),
        row(
            "b",
            [3],
            [
                request(9, 1, 1, "train", [], [], features[:0]),
                request(10, 1, 1, "train", [4], [True], features[:1]),
            ],
        ),
        row(
            "c",
            [5, 6],
            [
                request(9, 2, 2, "train", [0, 1, 2], [True] * 3, features),
                request(10, 2, 2, "train", [0, 1, 2], [False] * 3, features),
                request(11, 3, 2, "train", [], [], features[:0]),
            ],
        ),
    ]
    return write_tables(folder, rows, 8, 4)


def test_a_log_without_queries_is_trained_on(tmp_path: Path) -> None:
    rows = [
        {
            "user_id": user,
            "item_index": [3],
            "timestamp_ms": [1],
            "query_index": [NO_QUERY],
            "position": [0],
            "features": [[0.0] * 6],
            "requests": [
                request(
                    9,
                    NO_QUERY,
                    1,
                    "train",
                    [0, 1, 2],
                    [True, False, False],
                    np.zeros((3, 6)),
                )
            ],
        }
        for user in "ab"
    ]
    catalogue = SearchCatalogue.load(*write_tables(tmp_path, rows, 8, 0))
    assert catalogue.text.queries.shape == (0, catalogue.text.width)
    examples = SearchDataset.load(
        join(str(tmp_path / "tables"), "sequences"), "train", unit="user", max_history=4
    )
    options = {
        "width": 16,
        "num_layers": 1,
        "max_history": 4,
        "dnn_width": 16,
        "tower_width": 8,
        "text_width": 8,
    }
    model = QGS(QGSConfig(**options, infonce_weight=0), catalogue)
    model(examples.collate(np.arange(2)))["loss"].backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert without == []  # what DDP wants


def test_text_of_several_encoders_is_refused(
    odd: tuple[str, str], tmp_path: Path
) -> None:
    tables, text = odd
    shutil.copytree(text, tmp_path / "text")
    for name in ("tokens", "pairs"):
        path = tmp_path / "text" / name / "manifest.json"
        before = path.read_text()
        path.write_text(
            add_seal({**check_seal(before), "config": {"encoder": "another"}})
        )
        with pytest.raises(UserError, match="were encoded with different settings"):
            SearchCatalogue.load(tables, str(tmp_path / "text"))
        path.write_text(before)
    SearchCatalogue.load(tables, str(tmp_path / "text"))


def test_nothing_is_lost_and_what_has_no_auc_is_counted(odd: tuple[str, str]) -> None:
    tables, text = odd
    examples = SearchDataset.load(
        join(tables, "sequences"), "train", unit="user", max_history=4
    )
    batch = examples.collate(np.arange(len(examples)))
    assert len(batch.request_row) == 6
    assert len(batch.candidate) == 10
    assert np.bincount(batch.candidate_request, minlength=6).tolist().count(0) == 2
    options = {
        "width": 16,
        "num_layers": 1,
        "max_history": 4,
        "dnn_width": 16,
        "tower_width": 8,
        "text_width": 8,
    }
    torch.manual_seed(0)
    model = QGS(QGSConfig(**options), SearchCatalogue.load(tables, text))
    loss = model(batch)["loss"]
    loss.backward()
    assert torch.isfinite(loss)
    assert all(
        torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None
    )
    with torch.no_grad():
        found = metrics.means(metrics.measure(model.eval(), batch))
    assert (found["requests"], found["candidates"]) == (
        4,
        10,
    )  # two searches showed nothing
    assert found["requests_one_class"] == 3
    assert 0 <= found["gauc"] <= 1
    assert (
        found["gauc"] == found["gauc_by_impressions"]
    )  # of the one request that has both


def test_a_batch_of_searches_that_showed_nothing(odd: tuple[str, str]) -> None:
    tables, text = odd
    examples = SearchDataset.load(
        join(tables, "sequences"), "train", unit="user", max_history=4
    )
    batch = examples.collate(np.arange(len(examples)))
    batch = batch.select("N", slice(0))
    model = QGS(
        QGSConfig(width=16, num_layers=1, max_history=4),
        SearchCatalogue.load(tables, text),
    ).eval()
    with torch.no_grad():
        assert model.score(batch).shape == (0, 2)
        sums = metrics.measure(model, batch)
        assert torch.isfinite(model(batch)["loss"])
    with pytest.warns(UserWarning, match="there are no candidates"):
        found = metrics.means(sums)
    assert found["candidates"] == 0
    assert np.isnan(found["gauc"])
