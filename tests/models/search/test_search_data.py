"""Batches of searches: each request has its history and candidates, as a slow reading of
the table gives them.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from core.files import join
from core.schemas import Inputs
from models.dataset.batch import request_number
from models.search.catalogue import SearchCatalogue, pair_key
from models.search.requests import MAX_REQUESTS, SEARCH, SearchBatch
from tests.fixtures.commands import load_split, read_rows, read_table
from tests.fixtures.search_tables import FEATURES, LABELS, make_request, write_tables

NO_HISTORY: dict[str, list] = {
    "item_index": [],
    "timestamp_ms": [],
    "query_index": [],
    "position": [],
    "features": [],
}
"""Columns of a user without behaviours."""


def get_requests(batch: SearchBatch) -> dict[int, dict]:
    """Return the content of each request of a batch by its number."""
    requests = {}
    for r, number in enumerate(batch.request.tolist()):
        row, end = int(batch.request_row[r]), int(batch.request_end[r])
        candidates = batch.candidate_request == r
        requests[number] = {
            "user_row": int(batch.user_row[row]),
            "history": batch.history[row, :end].tolist(),
            "queries": batch.history_query[row, :end].tolist(),
            "times": batch.history_time[row, :end].tolist(),
            "history_features": batch.history_features[row, :end],
            "query": int(batch.request_query[r]),
            "time": int(batch.request_time[r]),
            "candidates": batch.candidate[candidates].tolist(),
            "positions": batch.candidate_position[candidates].tolist(),
            "labels": batch.labels[candidates].tolist(),
            "features": batch.features[candidates],
        }
    return requests


def assert_equals_table(
    content: dict, user_row: int, user: dict, request: dict
) -> None:
    """Assert that the content of a request in a batch equals that in the table."""
    end = request["history_end"]
    begin = end - len(content["history"])
    assert content["history"] == user["item_index"][begin:end]
    assert content["queries"] == user["query_index"][begin:end]
    assert content["times"] == user["timestamp_ms"][begin:end]
    assert all(time < request["timestamp_ms"] for time in content["times"])
    history_features = np.array(user["features"][begin:end], np.float32)
    assert np.array_equal(
        content["history_features"], history_features.reshape(-1, len(FEATURES))
    )
    assert content["user_row"] == user_row
    assert content["query"] == request["query_index"]
    assert content["time"] == request["timestamp_ms"]
    assert content["candidates"] == request["candidates"]
    assert content["positions"] == request["positions"]
    labels = [request[f"label_{name}"] for name in LABELS]
    assert content["labels"] == [list(pair) for pair in zip(*labels, strict=True)]
    assert content["features"].flatten().tolist() == request["features"]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("unit", "limit"), [("request", 100), ("request", 4), ("user", 4), ("user", 100)]
)
def test_batches_have_all_requests_of_a_split_with_their_history(
    search, split, unit, limit
):
    uri = join(search[0], "sequences")
    examples = load_split(SEARCH, uri, split, unit=unit, max_history=limit)
    assert examples.kind.request_unit == "requests"  # also those without a history

    contents = {}
    for rows in examples.evaluation_batches(7):
        batch = examples.collate(rows)
        assert batch.history.shape[1] <= limit
        padding = torch.arange(batch.history.shape[1]) >= batch.history_length[:, None]
        assert (batch.history[padding] == -1).all()
        assert (batch.history_query[padding] == -1).all()
        assert (batch.history_features[padding] == 0).all()
        contents |= get_requests(batch)

    num_expected = 0
    for user_row, user in enumerate(read_table(uri).to_pylist()):
        for index, request in enumerate(user["requests"]):
            number = int(request_number(user_row, index))
            if request["split"] != split:
                assert number not in contents
                continue
            num_expected += 1
            assert_equals_table(contents[number], user_row, user, request)
            end, length = request["history_end"], len(contents[number]["history"])
            if unit == "request" or end <= limit:
                assert length == min(end, limit)  # exactly the latest behaviours
            assert min(end, limit // 2) <= length <= limit
    assert len(contents) == num_expected == examples.examples.num_requests


@pytest.mark.parametrize("unit", ["user", "request"])
def test_many_searches_without_a_click_are_several_rows(unit, tmp_path):
    count = 2 * MAX_REQUESTS + 5
    requests = [
        make_request(5 + t, 0, 0, "train", [0, 1], [False, True], np.zeros((2, 6)))
        for t in range(count)
    ]
    users = [
        {"user_id": "a", **NO_HISTORY, "requests": requests[:3]},
        {"user_id": "b", **NO_HISTORY, "requests": requests},
        {"user_id": "c", **NO_HISTORY, "requests": requests[:3]},
    ]
    tables, _ = write_tables(tmp_path, users, 2, 1)

    examples = load_split(SEARCH, join(tables, "sequences"), "train", unit=unit)
    batch = examples.collate(np.arange(len(examples)))

    assert batch.user_row.tolist() == [0, 1, 1, 1, 2]
    sizes = torch.bincount(batch.request_row).tolist()
    assert sizes == [3, MAX_REQUESTS, MAX_REQUESTS, 5, 3]
    assert len(get_requests(batch)) == count + 6  # each request once


def get_learned_behaviours(batch: SearchBatch) -> list[tuple[int, int, int]]:
    """Return (user, time, item) of the behaviours that a batch trains on."""
    behaviours = []
    for row, user in enumerate(batch.user_row.tolist()):
        begin, end = int(batch.history_new[row]), int(batch.history_length[row])
        times = batch.history_time[row, begin:end].tolist()
        items = batch.history[row, begin:end].tolist()
        behaviours += [(user, *pair) for pair in zip(times, items, strict=True)]
    return behaviours


@pytest.mark.parametrize(
    ("limit", "overlap"), [(8, 0.75), (8, 0.5), (7, 1.0), (3, 0.0), (100, 0.75)]
)
def test_overlapping_windows_train_on_each_search_and_behaviour_once(
    search, limit, overlap
):
    """The first behaviour of a user has no history to be predicted from."""
    uri = join(search[0], "sequences")
    examples = load_split(
        SEARCH,
        uri,
        "train",
        unit="user",
        max_history=limit,
        window_overlap=overlap,
    )

    requests, learned = Counter(), Counter()
    for batch in examples.epoch(20, seed=3, epoch=0):
        requests.update(batch.request.tolist())
        learned.update(get_learned_behaviours(batch))

    expected = Counter()
    for user_row, user in enumerate(read_table(uri).to_pylist()):
        train = [r for r in user["requests"] if r["split"] == "train"]
        end = max(request["history_end"] for request in train)
        times, items = user["timestamp_ms"][1:end], user["item_index"][1:end]
        expected.update((user_row, *pair) for pair in zip(times, items, strict=True))
    assert set(requests.values()) == {1}
    assert len(requests) == examples.examples.num_requests
    assert learned.keys() <= expected.keys()
    assert max(learned.values()) == 1
    # rows without an overlap have first behaviours without a history
    if overlap > 0 and limit > 3:
        assert learned == expected


def test_the_catalogue_has_mean_and_standard_deviation_of_train_features(search):
    catalogue = SearchCatalogue.load(Inputs(search[0], text=search[1]))
    features = []
    for user in read_rows(search[0], "sequences"):
        for request in user["requests"]:
            if request["split"] == "train":
                features.append(request["features"])
    values = np.array(features).reshape(-1, len(FEATURES))
    assert np.allclose(catalogue.feature_mean, values.mean(0), atol=1e-5)
    assert np.allclose(catalogue.feature_std, values.std(0), atol=1e-5)


@pytest.mark.parametrize("reads_history_queries", [True, False])
def test_batches_have_the_text_of_candidates(search, reads_history_queries):
    """Rows of a batch's text are negative without a query."""
    text = SearchCatalogue.load(Inputs(search[0], text=search[1])).text
    examples = load_split(
        SEARCH,
        join(search[0], "sequences"),
        "train",
        max_history=8,
        text=text,
        reads_history_queries=reads_history_queries,
    )
    for rows in examples.evaluation_batches(7):
        batch = examples.collate(rows)
        request = batch.candidate_request
        columns = torch.stack(
            [
                batch.request_query[request],
                batch.candidate,
                batch.request_query_text[request],
                batch.candidate_pair_text,
            ],
            1,
        )
        for query, item, query_row, pair_row in columns.tolist():
            assert (query_row < 0) == (pair_row < 0) == (query < 0)
            if query >= 0:
                [row] = np.searchsorted(text.pair_keys, [pair_key(item, query, 8)])
                assert np.array_equal(batch.query_text[query_row], text.queries[query])
                assert np.array_equal(batch.pair_text[pair_row], text.pairs[row])
        if not reads_history_queries:
            assert (batch.history_query_text == -1).all()
            assert (batch.history_pair_text == -1).all()
