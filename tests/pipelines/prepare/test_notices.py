"""`prepare` warns of logs that it can read but whose metrics would mislead."""

from __future__ import annotations

import random

import pytest

from tests.fixtures.commands import LOG, prepare_log, write_rows

DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("users", "events", "settings", "fragments"),
    [
        (80, 8, {}, []),
        (80, 12, {"max_events": 9}, ["oldest 240"]),
        (10, 8, {"split.by": "leave_last_out"}, ["later than"]),
    ],
)
def test_what_makes_metrics_worse_is_warned_of(
    tmp_path, capsys, users, events, settings, fragments
):
    """Each user has an event every three days."""
    rows = [
        {
            "user": f"u{user:02}",
            "item": f"{1000 + (user * n + n) % 15}",
            "ms": 1_600_000_000_000 + n * 3 * DAY_MS + user * 977_777,
        }
        for user in range(users)
        for n in range(events)
    ]
    write_rows(tmp_path / "log.csv", rows)

    prepare_log(LOG, tmp_path, tmp_path / "tables", **settings)

    lines = capsys.readouterr().out.splitlines()
    warnings = [line for line in lines if line.startswith("warning")]
    assert len(warnings) == len(fragments)
    for line, fragment in zip(warnings, fragments, strict=True):
        assert fragment in line


@pytest.mark.parametrize("is_sorted", [True, False])
def test_histories_that_ascend_by_item_id_are_noted(tmp_path, capsys, is_sorted):
    draw, rows = random.Random(3), []
    for user in range(120):
        items = draw.sample(range(100, 200), 12)
        items = sorted(items) if is_sorted else items
        rows += [{"user": f"u{user}", "item": f"i{item}"} for item in items]
    write_rows(tmp_path / "log.csv", rows)
    source = LOG | {"time": {"unit": "order"}, "prepare": {"core": 0}}

    prepare_log(source, tmp_path, tmp_path / "tables")

    output = capsys.readouterr().out
    assert output.count("100% of adjacent behaviours") == is_sorted
