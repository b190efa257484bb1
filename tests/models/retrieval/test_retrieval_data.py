"""Examples hold exactly the histories and targets of the tables, on any number of
workers.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.dataset.encoding import hash_strings
from models.retrieval.data import Catalogue, RetrievalDataset, find_repeats
from models.storage.tables import UserError

LOG = st.dictionaries(
    st.text("abcé", min_size=1, max_size=5),
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=12
    ).map(lambda rows: sorted(rows, key=lambda r: r[0])),
    min_size=1,
    max_size=9,
)
SHARED = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def expected(log, split, max_history):
    """(user row, history, target) of each request of the split with a history, one by
    one; in val and test also whether the target is anywhere before."""
    found = []
    for row, behaviours in enumerate(log.values()):
        for at, (time, item) in enumerate(behaviours):
            count = len(behaviours)
            mine = (
                "train"
                if count < 3
                else {count - 1: "test", count - 2: "val"}.get(at, "train")
            )
            history = [i for t, i in behaviours if t < time]
            if mine == split and history:
                repeats = () if split == "train" else (item in history,)
                found.append((row, tuple(history[-max_history:]), item, *repeats))
    return sorted(found)


def unpack(examples, seed=None):
    """The same of what the batches hold."""
    found = []
    order = (
        examples.evaluation_batches(4)
        if seed is None
        else examples.epoch_rows(4, seed=seed, epoch=1)
    )
    for rows in order:
        batch = examples.collate(rows)
        histories = batch.history.tolist()
        targets = batch.target.tolist()
        if examples.unit == "request":
            for i, length in enumerate(batch.history_length.tolist()):
                assert set(histories[i][length:]) <= {-1}
                repeats = (bool(batch.repeats[i]),)
                if examples.split in ("train", "next"):
                    repeats = ()
                history = tuple(histories[i][:length])
                found.append((int(batch.user_row[i]), history, targets[i], *repeats))
        else:
            for i, row in enumerate(batch.target_row.tolist()):
                end = int(batch.target_position[i]) + 1
                history = tuple(histories[row][:end])
                found.append((int(batch.user_row[row]), history, targets[i]))
    return sorted(found)


@SHARED
@given(log=LOG, max_history=st.integers(1, 6), world=st.integers(1, 3))
def test_requests_are_those_of_the_tables(write_tables, log, max_history, world):
    uri = str(write_tables(log, 10) / "sequences")
    for split in ("train", "val", "test"):
        ranks = [
            RetrievalDataset.load(
                uri, split, max_history=max_history, rank=r, world=world
            )
            for r in range(world)
        ]
        wanted = expected(log, split, max_history)
        assert sorted(chain.from_iterable(map(unpack, ranks))) == wanted
        assert sum(rank.count_users() for rank in ranks) == len(
            {row for row, *_ in wanted}
        )


@given(st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=5), st.data())
def test_what_was_seen_before_is_what_a_loop_finds(users, data):
    """With several requests of a user, in any order, and targets that nobody has."""
    lengths = np.array([len(items) for items in users], np.int64)
    owners = [user for user, items in enumerate(users) if items]
    requests = (
        data.draw(
            st.lists(
                st.sampled_from(owners).flatmap(
                    lambda u: st.tuples(
                        st.just(u), st.integers(1, lengths[u]), st.integers(0, 6)
                    )
                ),
            )
        )
        if owners
        else []
    )
    requests.sort(key=lambda request: request[0])  # as the table has them, user by user
    owner, end, target = np.array(requests, np.int64).reshape(-1, 3).T
    items = np.array(list(chain.from_iterable(users)), np.int64)
    counts = np.bincount(owner, minlength=len(users))
    found = find_repeats(items, lengths, counts, end, target)
    assert found.tolist() == [
        target in users[user][:end] for user, end, target in requests
    ]


@SHARED
@given(log=LOG, max_history=st.integers(1, 14), world=st.integers(1, 3))
def test_one_pass_per_user_serves_each_train_request_once(
    write_tables, log, max_history, world
):
    uri = str(write_tables(log, 10) / "sequences")
    ranks = [
        RetrievalDataset.load(
            uri, "train", unit="user", max_history=max_history, rank=r, world=world
        )
        for r in range(world)
    ]
    found = sorted((row, target) for rank in ranks for row, _, target in unpack(rank))
    assert found == sorted(
        (row, target) for row, _, target in expected(log, "train", 99)
    )
    full = {
        (row, target): history for row, history, target in expected(log, "train", 99)
    }
    for row, history, _ in chain.from_iterable(map(unpack, ranks)):
        behaviours = [item for _, item in list(log.values())[row]]
        assert history in {
            tuple(behaviours[a:b]) for b in range(len(behaviours) + 1) for a in range(b)
        }
    if all(
        len(h) <= max_history for h in full.values()
    ):  # nobody needs a second window: histories are whole
        assert sorted(chain.from_iterable(map(unpack, ranks))) == expected(
            log, "train", 99
        )
        assert sum(len(rank.evaluation_rows()) for rank in ranks) == len(
            {row for row, _, _ in expected(log, "train", 99)}
        )


def test_windows_keep_half_the_history(write_tables):
    uri = str(write_tables({"u": [(t, t % 10) for t in range(40)]}, 10) / "sequences")
    examples = RetrievalDataset.load(uri, "train", unit="user", max_history=8)
    histories = {history for _, history, _ in unpack(examples)}
    assert (
        examples.num_requests == 37
    )  # of 38 train behaviours the first has no history
    assert min(len(h) for h in histories if h[-1] >= 4) >= 4
    assert max(map(len, histories)) <= 8


def test_shuffling_is_deterministic_and_even_across_workers(write_tables):
    log = {f"u{i}": [(t, (i + t) % 10) for t in range(3 + i)] for i in range(11)}
    uri = str(write_tables(log, 10) / "sequences")
    ranks = [RetrievalDataset.load(uri, "train", rank=r, world=2) for r in range(2)]
    orders = [
        [b.tolist() for b in rank.epoch_rows(4, seed=3, epoch=e)]
        for rank in ranks
        for e in (0, 1)
    ]
    again = [
        [b.tolist() for b in rank.epoch_rows(4, seed=3, epoch=e)]
        for rank in ranks
        for e in (0, 1)
    ]
    assert orders == again
    assert orders[0] != orders[1]
    assert {len(order) for order in orders} == {rank.num_steps(4) for rank in ranks}
    assert {len(batch) for order in orders for batch in order} == {
        2,
        1,
    }  # of 4 over both; one batch has 3
    assert sorted(chain.from_iterable(map(unpack, ranks, (5, 5)))) == expected(
        log, "train", 20
    )


def test_next_follows_all_behaviours_and_skipped_are_counted(write_tables):
    uri = str(
        write_tables({"a": [(1, 4)], "b": [(1, 2), (1, 3), (2, 5)]}, 10) / "sequences"
    )
    assert unpack(RetrievalDataset.load(uri, "next")) == [
        (0, (4,), -1),
        (1, (2, 3, 5), -1),
    ]
    assert RetrievalDataset.load(uri, "train").num_skipped == 2
    assert (
        RetrievalDataset.load(uri, "val").num_skipped == 1
    )  # tied with the first, so nothing is strictly earlier


def test_user_hashes_are_stable_distinct_and_spread():
    ids = pa.array([f"user{i}" for i in range(5000)] + ["", "é", "日本"])
    hashes = hash_strings(ids)
    assert len(set(hashes.tolist())) == 5003
    assert hashes.min() >= 0
    assert np.bincount(hashes % 10, minlength=10).min() > 400
    assert (hash_strings(ids.slice(100, 7)) == hashes[100:107]).all()


def test_tables_that_do_not_belong_together_are_refused(write_tables, write_sids):
    tables = write_tables({"a": [(1, 0), (2, 1)]}, 2)
    sizes, codes = [2, 2], [(0, 1), (1, 0)]
    catalogue = Catalogue.load(str(tables), str(write_sids(codes, sizes, tables)))
    assert catalogue.sids.tolist() == [[0, 1], [1, 0]]
    assert catalogue.trie.leaves.tolist() == [0, 1]
    assert set(catalogue.hashes) == {"sequences", "items", "sids", "trie"}
    for name, wrong in (("items", "sids"), ("sids", "trie")):
        sids = write_sids(
            codes, sizes, tables, name=f"wrong_{name}", **{name: "0" * 64}
        )
        with pytest.raises(UserError, match=f"{wrong} was made from other {name}"):
            Catalogue.load(str(tables), str(sids))
    with pytest.raises(
        UserError, match="code 2 at level 1 is outside of its codebook of 2"
    ):
        Catalogue.load(
            str(tables), str(write_sids([(0, 1), (1, 2)], sizes, tables, name="over"))
        )
    with pytest.raises(UserError, match=r"run jobs.tokenize"):
        Catalogue.load(
            str(tables), str(write_sids(codes[:1], sizes, tables, name="few"))
        )
    other = write_tables({"a": [(1, 0), (2, 1)]}, 3, name="other")
    (tables / "items").rename(tables / "old")
    (other / "items").rename(tables / "items")
    with pytest.raises(UserError, match="sequences was made from other items"):
        Catalogue.load(str(tables))


def test_missing_table_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="is not a table"):
        RetrievalDataset.load(str(tmp_path), "train")
