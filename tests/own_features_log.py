"""A small search log with features of its own that decide clicks, beside counts that do
not: a number, a category, and a table of the items' prices with its own time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml

from models.storage.tables import read_manifest, read_table
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import load_source
from pipelines.data.settings import read_config
from tests.search_tables import WIDTH, write_text

SOURCE: dict[str, Any] = {
    "files": "events.csv",
    "user": "user",
    "item": "item",
    "request": "search",
    "query": "query",
    "time": {"column": "at", "unit": "ms"},
    "position": "position",
    "labels": {"click": {"column": "click"}},
    "numbers": ["bm25"],
    "categories": ["city"],
    "items": {
        "files": "items.csv",
        "item": "item",
        "texts": ["title"],
        "attributes": ["brand"],
        "numbers": ["weight"],
    },
}
AS_OF: dict[str, Any] = {
    "prices": {
        "files": "prices.csv",
        "item": "id",
        "time": {"column": "since", "unit": "ms"},
        "numbers": ["price"],
        "categories": ["state"],
    }
}
PREPARE: dict[str, Any] = {
    "kind": "search",
    "core": 0,
    "behaviour": "click",
    "split": {"kind": "temporal"},
    "search": {"windows_days": [7]},
}
CITIES, ITEMS, QUERIES = ("Oslo", "Rome", "Lima"), 30, 5
BEGIN, HOUR = 1_700_000_000_000, 3_600_000


def write_log(
    folder: Path, users: int = 250, searches: int = 8, shown: int = 5, seed: int = 0
) -> None:
    """Clicks follow bm25, which some results lack, and whether the item's last sale
    state is `sale`; the city of a search says whether high or low scores count. One
    city is of the last days alone."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    days = [
        (BEGIN + day * 24 * HOUR, item)
        for day in range(0, 30, 3)
        for item in range(ITEMS)
    ]
    state = rng.random(len(days)) < 0.5
    prices = pl.DataFrame(
        {
            "id": [f"i{item}" for _, item in days],
            "since": [time for time, _ in days],
            "price": np.where(state, 5.0, 10.0) + rng.normal(size=len(days)),
            "state": np.where(state, "sale", "usual"),
        }
    )
    of = {(item, time): on for (time, item), on in zip(days, state, strict=True)}
    rows = []
    for user in range(users):
        for number, hour in enumerate(
            rng.choice(30 * 24 - 2, searches, replace=False).tolist()
        ):
            at = BEGIN + (hour + 1) * HOUR + user
            city = (
                CITIES[int(rng.integers(len(CITIES)))]
                if at < BEGIN + 28 * 24 * HOUR
                else "Kyiv"
            )
            query = int(rng.integers(QUERIES))
            for position, item in enumerate(
                rng.choice(ITEMS, shown, replace=False).tolist()
            ):
                bm25 = float(rng.normal())
                last = (
                    BEGIN + (at - BEGIN - 1) // (72 * HOUR) * 72 * HOUR
                )  # the latest row strictly before
                sign = -1 if city == "Rome" else 1
                click = rng.random() < 1 / (
                    1 + np.exp(-(3 * sign * bm25 + 3 * of[item, last] - 3))
                )
                rows.append(
                    {
                        "user": f"u{user}",
                        "item": f"i{item}",
                        "search": f"s{user}-{number}",
                        "query": f"q{query}",
                        "at": at,
                        "position": position,
                        "click": int(click),
                        "bm25": None if rng.random() < 0.1 else bm25,
                        "city": city,
                    }
                )
    pl.DataFrame(rows).write_csv(folder / "events.csv")
    prices.write_csv(folder / "prices.csv")
    items = {
        "item": [f"i{item}" for item in range(ITEMS)],
        "title": [f"thing {item}" for item in range(ITEMS)],
        "brand": [None if item == 0 else f"b{item % 4}" for item in range(ITEMS)],
        "weight": [item / 10 for item in range(ITEMS)],
    }
    pl.DataFrame(items).write_csv(folder / "items.csv")


FEED: dict[str, Any] = {
    "files": "feed.csv",
    "user": "user",
    "item": "item",
    "time": {"column": "at", "unit": "ms"},
    "labels": {"like": {"column": "like"}, "share": {"column": "share"}},
    "numbers": ["score"],
    "categories": ["device"],
    "as_of": AS_OF,
}
FEED_PREPARE: dict[str, Any] = {
    "kind": "actions",
    "core": 0,
    "split": {"kind": "temporal"},
    "actions": {"counts": {"windows_days": [7]}},
}


def write_feed(folder: Path, users: int = 60, events: int = 40, seed: int = 0) -> None:
    """A feed whose likes follow a score and the item's last sale state; `write_log` in
    the folder first.
    """
    rng = np.random.default_rng(seed)
    states = {
        (id_, since): state == "sale"
        for id_, since, _, state in pl.read_csv(folder / "prices.csv").rows()
    }
    rows = []
    for user in range(users):
        for hour in sorted(rng.choice(30 * 24 - 2, events, replace=False).tolist()):
            at, item, score = (
                BEGIN + (hour + 1) * HOUR + user,
                int(rng.integers(ITEMS)),
                float(rng.normal()),
            )
            last = BEGIN + (at - BEGIN - 1) // (72 * HOUR) * 72 * HOUR
            like = rng.random() < 1 / (
                1 + np.exp(-(3 * score + 3 * states[f"i{item}", last] - 3))
            )
            rows.append(
                {
                    "user": f"u{user}",
                    "item": f"i{item}",
                    "at": at,
                    "like": int(like),
                    "share": int(like and rng.random() < 0.5),
                    "score": None if rng.random() < 0.1 else score,
                    "device": "phone" if user % 2 else "tablet",
                }
            )
    pl.DataFrame(rows).write_csv(folder / "feed.csv")


def make(
    folder: Path,
    raw: Path,
    source: dict[str, Any] = SOURCE,
    settings: dict[str, Any] | None = None,
    of_kind: dict[str, Any] = PREPARE,
) -> str:
    """Tables of the log in `raw`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "source.yaml"
    path.write_text(yaml.safe_dump({**source, "prepare": of_kind}))
    read, defaults = load_source(str(path))
    config = read_config(defaults, settings or {})
    prepare(read, str(raw), str(folder / "tables"), config, report=lambda line: None)
    return str(folder / "tables")


def make_text(folder: Path, tables: str) -> str:
    """Random text of the tables."""
    rng = np.random.default_rng(0)
    hashes = {
        name: read_manifest(f"{tables}/{name}").hash
        for name in ("items", "queries", "sequences")
    }
    count = {name: len(read_table(f"{tables}/{name}")) for name in ("items", "queries")}
    vectors = (
        rng.standard_normal((count[name], WIDTH)) for name in ("items", "queries")
    )
    write_text(str(folder / "text"), hashes, *vectors)
    return str(folder / "text")
