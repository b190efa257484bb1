"""Search batches: each request with its own past and candidates, as a slow reading of
the table says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.dataset.encoding import request_number
from models.search.catalogue import SearchCatalogue, pair_key
from models.search.data import MAX_REQUESTS, SearchBatch, SearchDataset
from models.storage.tables import UserError, join, read_table
from tests.fixtures.search_tables import FEATURES, LABELS, WIDTH, request, write_tables


def seen(batch: SearchBatch) -> dict[int, dict]:
    """By request number: what a batch says of it."""
    found = {}
    for r, number in enumerate(batch.request.tolist()):
        row, end = int(batch.request_row[r]), int(batch.request_end[r])
        mine = batch.candidate_request == r
        found[number] = {
            "user_row": int(batch.user_row[row]),
            "history": batch.history[row, :end].tolist(),
            "queries": batch.history_query[row, :end].tolist(),
            "times": batch.history_time[row, :end].tolist(),
            "past": batch.history_features[row, :end],
            "query": int(batch.request_query[r]),
            "time": int(batch.request_time[r]),
            "candidates": batch.candidate[mine].tolist(),
            "positions": batch.candidate_position[mine].tolist(),
            "labels": batch.labels[mine].tolist(),
            "features": batch.features[mine],
        }
    return found


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("unit", "limit"), [("request", 100), ("request", 4), ("user", 4), ("user", 100)]
)
def test_batches_hold_what_the_table_says(search, split, unit, limit):
    uri = join(search[0], "sequences")
    examples = SearchDataset.load(uri, split, unit=unit, max_history=limit)
    assert examples.request_unit == "requests"  # those without a history too
    found = {}
    for rows in examples.evaluation_batches(7):
        batch = examples.collate(rows)
        assert batch.history.shape[1] <= limit
        padding = torch.arange(batch.history.shape[1]) >= batch.history_length[:, None]
        assert (batch.history[padding] == -1).all()
        assert (batch.history_query[padding] == -1).all()
        assert (batch.history_features[padding] == 0).all()
        found |= seen(batch)
    wanted = 0
    for row, user in enumerate(read_table(uri).to_pylist()):
        for place, asked in enumerate(user["requests"]):
            number = int(request_number(row, place))
            if asked["split"] != split:
                assert number not in found
                continue
            wanted += 1
            got, end = found[number], asked["history_end"]
            kept = len(got["history"])
            if unit == "request" or end <= limit:
                assert kept == min(end, limit)  # exactly the latest
            assert min(end, limit // 2) <= kept <= limit
            begin = end - kept
            assert got["history"] == user["item_index"][begin:end]
            assert got["queries"] == user["query_index"][begin:end]
            assert got["times"] == user["timestamp_ms"][begin:end]
            assert all(time < asked["timestamp_ms"] for time in got["times"])
            want = np.array(user["features"][begin:end], np.float32).reshape(
                kept, len(FEATURES)
            )
            assert np.array_equal(got["past"], want)
            assert (got["user_row"], got["query"], got["time"]) == (
                row,
                asked["query_index"],
                asked["timestamp_ms"],
            )
            assert got["candidates"] == asked["candidates"]
            assert got["positions"] == asked["positions"]
            labels = [asked[f"label_{name}"] for name in LABELS]
            assert got["labels"] == [list(pair) for pair in zip(*labels, strict=True)]
            assert got["features"].flatten().tolist() == asked["features"]
    assert len(found) == wanted == examples.num_requests


def test_one_row_serves_all_requests_of_a_user_with_a_short_history(search):
    examples = SearchDataset.load(
        join(search[0], "sequences"), "train", unit="user", max_history=100
    )
    assert len(examples) == 40
    assert examples.num_requests == 320
    longer = SearchDataset.load(
        join(search[0], "sequences"), "train", unit="request", max_history=4
    )
    windows = SearchDataset.load(
        join(search[0], "sequences"),
        "train",
        unit="user",
        max_history=4,
        window_overlap=0.5,
    )
    assert 40 < len(windows) < len(longer) < longer.num_requests


def test_many_searches_without_a_click_are_several_rows(tmp_path):
    count = 2 * MAX_REQUESTS + 5
    asked = [
        request(5 + t, 0, 0, "train", [0, 1], [False, True], np.zeros((2, 6)))
        for t in range(count)
    ]
    empty = {
        "item_index": [],
        "timestamp_ms": [],
        "query_index": [],
        "position": [],
        "features": [],
    }
    others = [{"user_id": user, **empty, "requests": asked[:3]} for user in "ac"]
    users = [others[0], {"user_id": "b", **empty, "requests": asked}, others[1]]
    tables, _ = write_tables(tmp_path, users, 2, 1)
    for unit in ("user", "request"):
        examples = SearchDataset.load(join(tables, "sequences"), "train", unit=unit)
        batch = examples.collate(np.arange(len(examples)))
        assert batch.user_row.tolist() == [0, 1, 1, 1, 2]
        sizes = torch.bincount(batch.request_row).tolist()
        assert sizes == [3, MAX_REQUESTS, MAX_REQUESTS, 5, 3]
        assert len(seen(batch)) == count + 6  # each request once


@pytest.mark.parametrize(
    ("limit", "overlap"), [(8, 0.75), (8, 0.5), (7, 1.0), (3, 0.0), (100, 0.75)]
)
def test_windows_overlap_and_nothing_is_learned_twice(search, limit, overlap):
    """Each search is in one row and reads its share of a history; each behaviour but a
    user's first is learned once.
    """
    uri = join(search[0], "sequences")
    examples = SearchDataset.load(
        uri, "train", unit="user", max_history=limit, window_overlap=overlap
    )
    asked, learned, wanted = Counter(), Counter(), Counter()
    users = read_table(uri).to_pylist()
    for rows in examples.epoch_rows(20, seed=3):
        batch = examples.collate(rows)
        asked.update(batch.request.tolist())
        for row, user in enumerate(batch.user_row.tolist()):
            places = range(int(batch.history_new[row]), int(batch.history_length[row]))
            learned.update(
                (
                    user,
                    int(batch.history_time[row, t]),
                    int(batch.history[row, t]),
                )
                for t in places
            )
    for row, user in enumerate(users):
        train = [
            request["history_end"]
            for request in user["requests"]
            if request["split"] == "train"
        ]
        past = list(zip(user["timestamp_ms"], user["item_index"], strict=True))[
            1 : max(train)
        ]
        wanted.update((row, *behaviour) for behaviour in past)
    assert set(asked.values()) == {1}
    assert len(asked) == examples.num_requests
    if (
        overlap > 0 and limit > 3
    ):  # rows that only touch have behaviours with nothing before them
        assert learned == wanted
    assert learned.keys() <= wanted.keys()
    assert max(learned.values()) == 1
    for found in seen(examples.collate(np.arange(len(examples)))).values():
        end = next(
            request["history_end"]
            for request in users[found["user_row"]]["requests"]
            if request["timestamp_ms"] == found["time"]
        )
        assert min(end, overlap * limit) <= len(found["history"]) <= min(end, limit)


def test_a_table_in_which_nobody_clicked(tmp_path):
    asked = [
        request(5, 0, 0, split, [0, 1], [False, False], np.zeros((2, 6)))
        for split in ("train", "val")
    ]
    empty = {
        "item_index": [],
        "timestamp_ms": [],
        "query_index": [],
        "position": [],
        "features": [],
    }
    tables, text = write_tables(
        tmp_path, [{"user_id": "u", **empty, "requests": asked}], 2, 1
    )
    batch = SearchDataset.load(join(tables, "sequences"), "train").collate(
        np.array([0])
    )
    assert batch.history_features.shape == (1, 1, 6)
    assert SearchCatalogue.load(tables, text).feature_std.tolist() == [0.0] * 6


def test_the_catalogue_reads_text_and_scale(search):
    catalogue = SearchCatalogue.load(*search)
    assert (catalogue.num_items, catalogue.num_queries) == (24, 8)
    assert (catalogue.labels, catalogue.features) == (LABELS, FEATURES)
    text = catalogue.text
    assert text.pairs.shape == text.joint.shape == (24 * 9, WIDTH)
    (row,), _ = text.find_pairs(np.array([pair_key(5, 3, 8)]))
    mean = (text.items[5].numpy() + text.queries[3]) / 2
    assert np.allclose(text.pairs[row], mean)
    train = [
        asked["features"]
        for user in read_table(join(search[0], "sequences")).to_pylist()
        for asked in user["requests"]
        if asked["split"] == "train"
    ]
    values = np.array(train).reshape(-1, len(FEATURES))
    assert np.allclose(catalogue.feature_mean, values.mean(0), atol=1e-5)
    assert np.allclose(catalogue.feature_std, values.std(0), atol=1e-5)


def test_tables_that_do_not_belong_are_refused(search, tmp_path):
    other, _ = write_tables(tmp_path, [], 2, 1)
    with pytest.raises(
        UserError, match=r"was made from other items .* or run jobs.encode again"
    ):
        SearchCatalogue.load(other, search[1])
    with pytest.raises(UserError, match="no split 'next'"):
        SearchDataset.load(join(search[0], "sequences"), "next")


@pytest.mark.parametrize("reads_history_queries", [True, False])
def test_batches_bring_the_text_of_their_queries_and_pairs(
    search, reads_history_queries
):
    text = SearchCatalogue.load(*search).text
    examples = SearchDataset.load(
        join(search[0], "sequences"),
        "train",
        max_history=8,
        text=text,
        reads_history_queries=reads_history_queries,
    )

    def check(query: int, item: int, query_row: int, pair_row: int) -> None:
        """The rows of a use hold the vectors of its query and its pair."""
        has_query = query >= 0
        assert (query_row >= 0) == (pair_row >= 0) == has_query
        if has_query:
            (row,), _ = text.find_pairs(np.array([pair_key(item, query, 8)]))
            assert np.array_equal(batch.query_text[query_row], text.queries[query])
            assert np.array_equal(batch.pair_text[pair_row], text.pairs[row])
            assert np.array_equal(batch.joint_text[pair_row], text.joint[row])

    for rows in examples.evaluation_batches(7):
        batch = examples.collate(rows)
        request = batch.candidate_request
        uses = zip(
            batch.request_query[request].tolist(),
            batch.candidate.tolist(),
            batch.request_query_text[request].tolist(),
            batch.candidate_pair_text.tolist(),
            strict=True,
        )
        for use in uses:
            check(*use)
        if not reads_history_queries:
            assert (batch.history_query_text == -1).all()
            assert (batch.history_pair_text == -1).all()
            continue
        for row, length in enumerate(batch.history_length.tolist()):
            for t in range(length):
                check(
                    int(batch.history_query[row, t]),
                    int(batch.history[row, t]),
                    int(batch.history_query_text[row, t]),
                    int(batch.history_pair_text[row, t]),
                )
        distinct = {tuple(vector) for vector in batch.pair_text.tolist()}
        assert len(distinct) == len(batch.pair_text)


def test_a_pair_without_text_is_an_error(search):
    text = SearchCatalogue.load(*search).text
    few = replace(text, pairs=text.pairs[:5], pair_keys=text.pair_keys[:5])
    uri = join(search[0], "sequences")
    examples = SearchDataset.load(uri, "train", max_history=8, text=few)

    with pytest.raises(
        UserError, match=r"the text has no embedding of item \d+ with query \d+"
    ):
        examples.collate(np.arange(len(examples)))
