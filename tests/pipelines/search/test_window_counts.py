"""Windowed counts against brute force, and across partitions."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import plain_search as plain
import pyarrow as pa
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tables import join, write_part
from pipelines.data.counts import UNSEEN, count_in_buckets, window_counts
from pipelines.data.engine import Engine
from pipelines.data.schemas import events_schema
from pipelines.data.search.config import SearchConfig
from pipelines.data.search.features import SearchWindows, feature_names, features, gather
from pipelines.data.survey import Vocabulary

SCHEMA = events_schema({"click": "bool"}, known=["click"])


@settings(max_examples=150)
@given(
    events=st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.integers(0, 12), st.sampled_from([2**62, 2**62 + 5])), st.booleans()),
        max_size=40,
    ),
    windows=st.lists(st.integers(1, 15), min_size=1, max_size=3, unique=True).map(sorted),
    delay=st.integers(0, 4),
)
def test_counts_and_gap_equal_brute_force(events: list[tuple[int, int, bool]], windows: list[int], delay: int) -> None:
    windows = [delay + window for window in windows]
    key, when = (np.array([e[i] for e in events], dtype=np.int64) for i in (0, 1))
    marks = np.array([[1, e[2]] for e in events], dtype=np.int32).reshape(-1, 2)
    counts, gap = window_counts(key, when, marks, windows, delay)
    for i, (k, t, _) in enumerate(events):
        for w, window in enumerate(windows):
            inside = [e for e in events if e[0] == k and t - window <= e[1] < t - delay]
            assert counts[i, w].tolist() == [len(inside), sum(e[2] for e in inside)]
        before = [e[1] for e in events if e[0] == k and e[1] < t - delay]
        assert gap[i] == (t - max(before) if before else UNSEEN)


def test_events_of_one_moment_do_not_count_for_each_other() -> None:
    counts, gap = window_counts(np.zeros(3, np.int64), np.full(3, 100), np.ones((3, 1), np.int32), [50], 0)
    assert not counts.any()
    assert (gap == UNSEEN).all()


def test_the_future_changes_no_count() -> None:
    rng = np.random.default_rng(0)
    key, when = rng.integers(0, 9, 500), np.sort(rng.integers(0, 1000, 500))
    marks = rng.integers(0, 2, (500, 2)).astype(np.int32)
    whole, _ = window_counts(key, when, marks, [100, 300], 10)
    for cut in (100, 250, 400):
        past = when < when[cut] + 1
        part, _ = window_counts(key[past], when[past], marks[past], [100, 300], 10)
        assert (part == whole[past]).all()


def test_cost_grows_with_the_log_and_not_with_the_windows() -> None:
    """A key with everything in one window is quadratic for a program that walks the windows."""

    def seconds(events: int) -> float:
        marks = np.ones((events, 2), np.int32)
        begin = time.process_time()
        window_counts(np.zeros(events, np.int64), np.arange(events), marks, [10**9], 0)
        return time.process_time() - begin

    small = min(seconds(50_000) for _ in range(3))
    assert min(seconds(400_000) for _ in range(2)) < 30 * small


rows_strategy = st.lists(
    st.fixed_dictionaries(
        {
            "user_id": st.sampled_from(["u1", "u2", "u3", "u4", "u5"]),
            "request_id": st.sampled_from(["r1", "r2"]),
            "timestamp_ms": st.integers(0, 30).map(lambda n: n * plain.HOUR),
            "item_id": st.sampled_from(["a", "b", "c"]),
            "query": st.sampled_from([None, "p", "q", "r"]),
            "position": st.integers(0, 12),
            "label_click": st.sampled_from([None, True, False]),
            "known_click": st.integers(31, 60).map(lambda n: n * plain.HOUR // 2),
        }
    ),
    min_size=1,
    max_size=40,
    unique_by=lambda row: tuple(row[name] for name in plain.KEY),
)


@pytest.mark.usefixtures("ray_local")
@settings(max_examples=8)
@given(rows=rows_strategy, parts=st.integers(1, 3), late=st.booleans())
def test_features_across_partitions_equal_the_reference(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict], parts: int, late: bool
) -> None:
    for row in rows:  # from half a day to a day on
        known = max(row["timestamp_ms"], row["known_click"])
        row["known_click"] = known if late and row["label_click"] else None
    folder = str(tmp_path_factory.mktemp("events"))
    config = SearchConfig(windows_days=[0.25, 1.0], delay_minutes=90, page_size=5, max_request_minutes=1800)
    users = sorted({row["user_id"] for row in rows})
    of_part = [[row for row in rows if users.index(row["user_id"]) % parts == number] for number in range(parts)]
    of_part = [sorted(part, key=lambda row: tuple(row[k] for k in plain.KEY)) for part in of_part if part]
    uris = [join(folder, write_part(folder, pa.Table.from_pylist(part, schema=SCHEMA)).path) for part in of_part]
    queries = pa.array(sorted({row["query"] for row in rows} - {None}), pa.large_string())
    catalogue = pa.array(sorted({row["item_id"] for row in rows}), pa.large_string())
    given = (ray.put(Vocabulary.of(catalogue)), Vocabulary.of(queries))
    names = feature_names(config, clock=True)
    position = [np.array([row["position"] for row in part]) for part in of_part]
    when = [np.array([plain.request_time(rows, row) for row in part]) for part in of_part]

    def build(uri: str, pieces: list) -> tuple[None, Counter[str], list]:
        number = uris.index(uri)
        counts = gather(len(position[number]), config, pieces)
        found = features(counts, position[number], when[number], config, clock=True)
        assert found.dtype == np.float32
        return None, Counter(), found.tolist()

    found_of = dict(count_in_buckets(Engine(), uris, len(rows), SearchWindows(config, "click", late), given, build))
    assert len(found_of) == len(of_part)
    for number, part in enumerate(of_part):
        found = found_of[number][2]
        assert np.shape(found) == (len(part), len(names))
        for row, values in zip(part, found, strict=True):
            expected = plain.features(rows, row, config, "label_click")
            assert sorted(expected) == sorted(names)
            np.testing.assert_allclose(values, [expected[name] for name in names], rtol=1e-6, atol=1e-6)


def test_a_log_without_clock_times_has_its_places_only() -> None:
    config = SearchConfig()
    assert feature_names(config, clock=False) == ["position", "page"]
    found = features(None, np.array([0, 9, 10]), np.arange(3), config, clock=False)
    np.testing.assert_allclose(found, np.log1p([[0, 0], [9, 0], [10, 1]]), rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"windows_days": [7, 1]}, "ascending"),
        ({"delay_minutes": -1}, "0 or more"),
        ({"windows_days": [0.5], "delay_minutes": 800}, "longer windows"),
        ({"ctr_prior": 1.5}, "between 0 and 1"),
        ({"ctr_strength": 0}, "above 0"),
        ({"page_size": 0}, "at least 1"),
    ],
)
def test_impossible_settings_are_refused(values: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SearchConfig(**values)
