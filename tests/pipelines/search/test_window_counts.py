"""Counts of earlier events in time windows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.prepare.sequences.counts import NO_GAP, window_counts


@settings(max_examples=150)
@given(
    events=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.one_of(st.integers(0, 12), st.sampled_from([2**62, 2**62 + 5])),
            st.booleans(),
        ),
        max_size=40,
    ),
    windows=st.lists(st.integers(1, 15), min_size=1, max_size=3, unique=True).map(
        sorted
    ),
    delay=st.integers(0, 4),
)
def test_counts_and_gap_equal_brute_force(events, windows, delay):
    windows = [delay + window for window in windows]
    key = np.array([event[0] for event in events], dtype=np.int64)
    times = np.array([event[1] for event in events], dtype=np.int64)
    # two columns to count: all events, and marked events
    marks = np.array([[1, event[2]] for event in events], dtype=np.int32).reshape(-1, 2)

    counts, gap = window_counts(key, times, marks, windows, delay, times)

    for i, (event_key, event_time, _) in enumerate(events):
        earlier = [e for e in events if e[0] == event_key and e[1] < event_time - delay]
        for w, window in enumerate(windows):
            inside = [e for e in earlier if event_time - window <= e[1]]
            assert counts[i, w].tolist() == [len(inside), sum(e[2] for e in inside)]
        if earlier:
            assert gap[i] == event_time - max(e[1] for e in earlier)
        else:
            assert gap[i] == NO_GAP
