"""The tables as a slow and obvious program makes them: dicts and loops, nothing shared with the pipeline."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

Row = dict[str, Any]
KEY = ("user_id", "timestamp_ms", "request_id", "position", "item_id")
REST = ("query", "label_click", "label_dwell", "num_price", "cat_tab")  # in the order of the schema


def events(rows: list[Row], log_order: bool = False) -> list[Row]:
    """Duplicates dropped, sorted by the key and then by everything else, nulls first."""
    seen: set[tuple] = set()
    kept = []
    for row in rows:
        content = tuple(sorted(row.items(), key=lambda pair: pair[0]))
        if content not in seen:
            seen.add(content)
            kept.append(dict(row))
    if not log_order:
        rest = [name for name in REST if name in rows[0]]
        return sorted(
            kept,
            key=lambda row: (
                *(row[name] for name in KEY),
                *((row[name] is not None, 0 if row[name] is None else row[name]) for name in rest),
            ),
        )
    ranks: Counter = Counter()
    for row in kept:  # still in the log's order
        group = (row["user_id"], row["timestamp_ms"])
        row["position"] = ranks[group]
        ranks[group] += 1
    return sorted(kept, key=lambda row: (row["user_id"], row["timestamp_ms"], row["position"]))


def core(rows: list[Row], k: int) -> tuple[set[str], set[str]]:
    """(users, items) of the k-core."""
    users, items = {row["user_id"] for row in rows}, {row["item_id"] for row in rows}
    while True:
        left = [row for row in rows if row["user_id"] in users and row["item_id"] in items]
        per_user = Counter(row["user_id"] for row in left)
        users_left = {user for user in users if per_user[user] >= max(k, 1)}
        per_item = Counter(row["item_id"] for row in left if row["user_id"] in users_left)
        items_left = {item for item in items if per_item[item] >= max(k, 1)}
        if (users_left, items_left) == (users, items):
            return users, items
        users, items = users_left, items_left


def cuts(rows: list[Row], val: float, test: float) -> tuple[int, int]:
    """First timestamps of the validation and test windows."""
    times = sorted(row["timestamp_ms"] for row in rows)
    return times[int(len(times) * (1 - val - test))], times[int(len(times) * (1 - test))]


def sequences(
    rows: list[Row],
    k: int = 0,
    split: tuple[int, int] | None = None,
    train_core: bool = False,
    max_events: int = 10_000,
    log_order: bool = False,
    behaviour: str | None = None,
) -> tuple[list[str], dict[str, dict[str, list]]]:
    """(item ids of the catalogue, {user: lists}). `split` holds the cut times, None is leave-last-out."""
    rows = [row for row in events(rows, log_order) if behaviour is None or row[behaviour]]
    window = [row for row in rows if row["timestamp_ms"] < split[0]] if train_core and split else rows
    users, items = core(window, k)
    catalogue = sorted(items)
    by_user: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["user_id"] in users and row["item_id"] in items:
            by_user[row["user_id"]].append(row)
    result = {}
    for user, all_rows in by_user.items():
        mine = all_rows[-max_events:]
        lists: dict[str, list] = {
            "item_index": [catalogue.index(row["item_id"]) for row in mine],
            "timestamp_ms": [row["timestamp_ms"] for row in mine],
            "history_end": [],
            "split": [],
        }
        for name in mine[0]:
            if name.startswith(("label_", "num_", "cat_")) or name == "query":
                lists[name] = [row[name] for row in mine]
        for i, row in enumerate(mine):
            earlier = sum(other["timestamp_ms"] < row["timestamp_ms"] for other in mine)
            lists["history_end"].append(i if log_order else earlier)
            if split is not None:
                lists["split"].append(
                    "train" if row["timestamp_ms"] < split[0] else "val" if row["timestamp_ms"] < split[1] else "test"
                )
            else:
                last = len(mine) - 1
                name = "train" if len(mine) < 3 else "test" if i == last else "val" if i == last - 1 else "train"
                lists["split"].append(name)
        result[user] = lists
    return catalogue, result
