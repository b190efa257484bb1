"""Requests without history, query, results or clicks are used, and counted where they have
no AUC.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.search import metrics
from models.search.catalogue import NO_QUERY, SearchCatalogue
from models.search.data import SearchDataset
from models.search.qgs import QGS, QGSConfig
from models.storage.tables import join
from tests.fixtures.search_tables import make_request, write_tables

OPTIONS: dict[str, Any] = {
    "width": 16,
    "num_layers": 1,
    "max_history": 4,
    "dnn_width": 16,
    "tower_width": 8,
    "text_width": 8,
}
NO_FEATURES = np.zeros((3, 6))
ALL, FIRST, NONE = [True] * 3, [True, False, False], [False] * 3
"""Clicks on three results."""


def make_row(
    user: str, history: list[int], requests: list[dict], query: int = 0
) -> dict:
    """Make a user's row with clicks on the items of `history`."""
    return {
        "user_id": user,
        "item_index": history,
        "timestamp_ms": list(range(1, len(history) + 1)),
        "query_index": [query] * len(history),
        "position": [0] * len(history),
        "features": [[0.0] * 6] * len(history),
        "requests": requests,
    }


def make_search(
    time: int, query: int, history_end: int, clicks: list[bool], first_item: int = 0
) -> dict:
    """Make a training request with one result per entry of `clicks`."""
    items = [first_item + n for n in range(len(clicks))]
    features = NO_FEATURES[: len(clicks)]
    return make_request(time, query, history_end, "train", items, clicks, features)


@pytest.fixture(scope="module")
def odd_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of tables and text of three users: one without history and query, one whose
    first search has no results, one who clicks all results or none.
    """
    rows = [
        make_row("a", [], [make_search(9, NO_QUERY, 0, FIRST)]),
        make_row(
            "b", [3], [make_search(9, 1, 1, []), make_search(10, 1, 1, [True], 4)]
        ),
        make_row(
            "c",
            [5, 6],
            [
                make_search(9, 2, 2, ALL),
                make_search(10, 2, 2, NONE),
                make_search(11, 3, 2, []),
            ],
        ),
    ]
    return write_tables(tmp_path_factory.mktemp("odd"), rows, 8, 4)


def load_examples(tables: str) -> SearchDataset:
    uri = join(tables, "sequences")
    return SearchDataset.load(uri, "train", unit="user", max_history=4)


def test_a_log_without_queries_trains_every_weight(tmp_path: Path) -> None:
    requests = [make_search(9, NO_QUERY, 1, FIRST)]
    rows = [make_row(user, [3], requests, query=NO_QUERY) for user in "ab"]
    tables, text = write_tables(tmp_path, rows, 8, 0)
    catalogue = SearchCatalogue.load(tables, text)
    assert catalogue.text.queries.shape == (0, catalogue.text.width)
    model = QGS(QGSConfig(**OPTIONS, infonce_weight=0), catalogue)

    model(load_examples(tables).collate(np.arange(2)))["loss"].backward()

    # DistributedDataParallel needs a gradient of every weight
    without = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert without == []


def test_all_requests_and_candidates_are_in_the_batch(
    odd_log: tuple[str, str],
) -> None:
    examples = load_examples(odd_log[0])
    batch = examples.collate(np.arange(len(examples)))
    assert len(batch.request_row) == 6
    assert len(batch.candidate) == 10
    num_candidates = np.bincount(batch.candidate_request, minlength=6)
    assert (num_candidates == 0).sum() == 2


def test_requests_without_an_auc_are_counted(odd_log: tuple[str, str]) -> None:
    examples = load_examples(odd_log[0])
    batch = examples.collate(np.arange(len(examples)))
    torch.manual_seed(0)
    model = QGS(QGSConfig(**OPTIONS), SearchCatalogue.load(*odd_log))

    loss = model(batch)["loss"]
    loss.backward()
    with torch.no_grad():
        values = metrics.means(metrics.measure(model.eval(), batch))

    assert torch.isfinite(loss)
    for parameter in model.parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()
    assert values["requests"] == 4  # two searches have no results
    assert values["candidates"] == 10
    assert values["requests_one_class"] == 3
    assert 0 <= values["gauc"] <= 1
    # both are the AUC of the one request with both classes
    assert values["gauc"] == values["gauc_by_impressions"]


def test_a_batch_of_searches_without_results_has_a_loss_and_no_gauc(
    odd_log: tuple[str, str],
) -> None:
    examples = load_examples(odd_log[0])
    batch = examples.collate(np.arange(len(examples))).select("N", slice(0))
    config = QGSConfig(width=16, num_layers=1, max_history=4)
    model = QGS(config, SearchCatalogue.load(*odd_log)).eval()

    with torch.no_grad():
        assert model.score(batch).shape == (0, 2)
        sums = metrics.measure(model, batch)
        assert torch.isfinite(model(batch)["loss"])
    with pytest.warns(UserWarning, match="there are no candidates"):
        values = metrics.means(sums)

    assert values["candidates"] == 0
    assert np.isnan(values["gauc"])
