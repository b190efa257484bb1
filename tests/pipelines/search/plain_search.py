"""Search sequences and windowed counts as a slow and obvious program makes them: dicts and loops."""

from __future__ import annotations

import math
from typing import Any

Row = dict[str, Any]
HOUR, DAY = 3_600_000, 86_400_000
KEY = ("user_id", "timestamp_ms", "request_id", "position", "item_id")


def id_key(row: Row) -> tuple:
    """The user and the request id, or the time where there is none."""
    return row["user_id"], row["request_id"] or row["timestamp_ms"]


def request_key(row: Row) -> tuple:
    """What makes a request: that, and the query."""
    return *id_key(row), row["query"]


def request_time(rows: list[Row], row: Row) -> int:
    """Time of the earliest result of the row's request id, whatever its query."""
    return min(other["timestamp_ms"] for other in rows if id_key(other) == id_key(row))


def search_time(rows: list[Row], row: Row) -> int:
    """Time of the earliest result of the row's request, of its query: when the search is counted."""
    return min(other["timestamp_ms"] for other in rows if request_key(other) == request_key(row))


def known_time(row: Row, label: str = "label_click") -> int:
    """From when on the row's label is known."""
    known = row.get(label.replace("label_", "known_", 1))
    return row["timestamp_ms"] if known is None else known


def windowed(
    rows: list[Row], names: tuple[str, ...], row: Row, window: int, delay: int, label: str
) -> tuple[int, int, int]:
    """(exposures, clicks, searches) of events with the row's values of `names` in [t - window, t - delay), where t is
    the time of the row's request; a search is at the time of its own first result."""
    t = request_time(rows, row)
    found = [
        other
        for other in rows
        if all(other[name] == row[name] for name in names) and t - window <= other["timestamp_ms"] < t - delay
    ]
    searches = {request_key(r) for r in found if r["timestamp_ms"] == search_time(rows, r)}
    same = [other for other in rows if all(other[name] == row[name] for name in names)]
    clicks = sum(bool(r[label]) and t - window <= known_time(r, label) < t - delay for r in same)
    return len(found), clicks, len(searches)


def features(rows: list[Row], row: Row, config: Any, label: str) -> dict[str, float]:
    """The features of one impression by name, for a log with clock times."""
    found: dict[str, float] = {}
    keys = {"pair": ("query", "item_id"), "item": ("item_id",), "query": ("query",)}
    for kind, names in keys.items():
        for days in config.windows_days:
            known = "query" not in names or row["query"] is not None
            window, delay = round(days * DAY), round(config.delay_minutes * 60_000)
            shown, clicks, searches = windowed(rows, names, row, window, delay, label) if known else (0, 0, 0)
            found[f"{kind}_exposures_{days:g}d"] = math.log1p(shown)
            found[f"{kind}_clicks_{days:g}d"] = math.log1p(clicks)
            if kind == "query":
                found[f"query_searches_{days:g}d"] = math.log1p(searches)
            smooth = config.ctr_strength
            found[f"{kind}_ctr_{days:g}d"] = (clicks + config.ctr_prior * smooth) / (shown + smooth)
    t = request_time(rows, row)
    before = [
        other["timestamp_ms"]
        for other in rows
        if row["query"] is not None
        and (other["query"], other["item_id"]) == (row["query"], row["item_id"])
        and other["timestamp_ms"] < t - round(config.delay_minutes * 60_000)
    ]
    found["pair_gap"] = math.log1p((t - max(before)) / HOUR) if before else 0.0
    found["pair_seen"] = float(bool(before))
    found["position"] = math.log1p(row["position"])
    found["page"] = math.log1p(row["position"] // config.page_size)
    hour, weekday = t // HOUR % 24, (t // DAY + 3) % 7
    found |= {"hour_sin": math.sin(2 * math.pi * hour / 24), "hour_cos": math.cos(2 * math.pi * hour / 24)}
    found |= {"weekday_sin": math.sin(2 * math.pi * weekday / 7), "weekday_cos": math.cos(2 * math.pi * weekday / 7)}
    return found


def sequences(
    rows: list[Row],
    catalogue: list[str],
    labels: list[str],
    split: tuple[int, int] | None = None,
    max_events: int = 10_000,
) -> dict[str, Row]:
    """{user: {column: list, requests: [...]}} of rows without duplicates. Items and queries are ids and texts.

    `labels` are column names, the first makes a behaviour; `split` holds the cut times, None is leave-last-out.
    """
    users: dict[str, Row] = {}
    for user in sorted({row["user_id"] for row in rows}):
        mine = sorted((row for row in rows if row["user_id"] == user), key=lambda row: tuple(row[k] for k in KEY))
        engaged = [row for row in mine if row[labels[0]] and row["item_id"] in catalogue]
        engaged.sort(key=lambda row: known_time(row, labels[0]))
        kept = engaged[-max_events:]
        oldest = known_time(kept[0], labels[0]) if len(kept) < len(engaged) else None
        asked: dict[tuple, list[Row]] = {}
        for row in mine:
            time = request_time(mine, row)
            asked.setdefault((time, row["request_id"], row["query"] is not None, row["query"] or ""), []).append(row)
        requests = []
        for (time, _, has_query, query), shown in sorted(asked.items()):
            shown = [row for row in shown if row["item_id"] in catalogue]
            shown.sort(key=lambda row: (row["position"], row["timestamp_ms"], row["item_id"]))
            if not shown or (oldest is not None and time < oldest):
                continue
            request = {
                "timestamp_ms": time,
                "query": query if has_query else None,
                "history_end": sum(known_time(row, labels[0]) < time for row in kept),
                "candidates": [row["item_id"] for row in shown],
                "positions": [row["position"] for row in shown],
                "rows": shown,
            }
            request |= {name: [bool(row[name]) for row in shown] for name in labels}
            requests.append(request)
        if not requests:
            continue
        for place, request in enumerate(requests):
            if split is not None:
                time = request["timestamp_ms"]
                request["split"] = "train" if time < split[0] else "val" if time < split[1] else "test"
            else:
                left = len(requests) - 1 - place
                request["split"] = "train" if len(requests) < 3 or left > 1 else ("test", "val")[left]
        users[user] = {"behaviours": kept, "requests": requests}
    return users
