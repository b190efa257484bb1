"""Test the split of a log without timestamps into days, and the page of policies."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

from papers.days import BEGIN, DAY, read_beauty_days, summarize


def test_users_are_ordered_by_their_newest_item_in_days_of_equal_size(
    tmp_path: Path,
) -> None:
    rows = [
        f"u{user},B{item:02d},{order}"
        for user in range(20)
        for order, item in enumerate((19 - user, 3, 0))
    ]
    with gzip.open(tmp_path / "interactions.csv.gz", "wt") as file:
        file.write("\n".join(["user_id,item_id,order", *rows]) + "\n")

    days = [day[1:] for day in read_beauty_days(tmp_path)]

    assert [len(day) for day in days] == [3] * 20
    events = [(int(ms), user, item) for day in days for user, item, ms in day]
    assert all(before[0] < after[0] for before, after in pairwise(events))
    assert [int(ms - BEGIN) // DAY for ms, _, _ in events] == [
        day for day in range(20) for _ in range(3)
    ]
    items_by_user: dict[str, list[str]] = {}
    for _, user, item in events:
        items_by_user.setdefault(user, []).append(item)
    newest = [max(items_by_user[user]) for _, user, _ in events]
    assert newest == sorted(newest)
    assert items_by_user["u0"] == ["B19", "B03", "B00"]


def build_line(
    policy: str, day: int, recall: float, recall_new: float, share_new: float
) -> dict[str, Any]:
    """Build a policy's result of one day, as `papers.days` writes it."""
    metrics = {
        "requests": 10,
        "share new": share_new,
        "recall@10": recall,
        "recall@10 new": recall_new,
        "recall@10 old": recall,
    }
    return {
        "policy": policy,
        "day": day,
        "seed": 1,
        "steps": 5,
        "metrics": metrics,
        "hardware": "cpu",
        "command": "c",
    }


def test_policies_are_compared_on_the_days_that_all_have() -> None:
    lines = [
        build_line("daily", 2, 0.1, 0.0, 0.1),
        build_line("daily", 3, 0.3, 0.4, 0.3),
        build_line("daily", 4, 0.2, 0.2, 0.1),
        build_line("anew, in full", 2, 0.2, 0.1, 0.1),
        build_line("anew, in full", 3, 0.2, 0.2, 0.3),
    ]

    tables, plot = summarize("beauty", lines)

    # All days, then days 2 and 3. The recall of new items is weighted by the number of
    # requests for new items.
    assert tables[0].cells == [
        ["daily", "15", "0.2000", "0.2800", "0.2000", "0.2000", "0.3000", "0.2000"],
        ["anew, in full", "10", "-", "-", "-", "0.2000", "0.1750", "0.2000"],
    ]
    assert tables[1].cells[1] == ["anew, in full", "0.2000", "0.2000", "-"]
    assert "daily" in plot.svg
