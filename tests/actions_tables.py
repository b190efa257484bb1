"""Small tables of kind `actions` for tests: half of the users like dogs and pass over
cats, the others the reverse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from models.storage.tables import join
from tests.training_tables import lists, write

TASKS = ("long_dwell", "contribution", "like")
ACTIONS = ("like", "share", "dwell")
FEATURES = ("item_likes", "user_events")


DEVICES = ("tablet", None, "phone", "watch")
SEEN = ["phone", "tablet"]
"""Devices that count as seen in training."""


SCHEMA = pa.schema(
    [
        ("user_id", pa.string()),
        ("item_index", lists(pa.int32())),
        ("timestamp_ms", lists(pa.int64())),
        ("cat_device", lists(pa.string())),
        ("tasks", lists(pa.list_(pa.bool_(), len(TASKS)))),
        ("actions", lists(pa.list_(pa.float32(), len(ACTIONS)))),
        ("features", lists(pa.list_(pa.float32(), len(FEATURES)))),
        ("train_end", pa.int32()),
        ("val_end", pa.int32()),
    ]
)


def user(
    name: str,
    items: list[int],
    times: list[int],
    liked: list[bool],
    cuts: tuple[int, int],
    rng: np.random.Generator,
) -> dict[str, Any]:
    """One row; a user shares some of what is liked, and dwells on it and now and then
    on other things.
    """
    like = np.asarray(liked, bool)
    share = like & (rng.random(len(like)) < 0.3)
    dwell = np.where(like, 0.9, 0.2) * rng.random(len(like))
    return {
        "user_id": name,
        "item_index": items,
        "timestamp_ms": times,
        "cat_device": [DEVICES[time % len(DEVICES)] for time in times],
        "tasks": np.stack([dwell > 0.15, like | share, like], 1).tolist(),
        "actions": np.stack([like, share, dwell], 1).astype(np.float32).tolist(),
        "features": rng.random((len(like), len(FEATURES))).astype(np.float32).tolist(),
        "train_end": sum(time < cuts[0] for time in times),
        "val_end": sum(time < cuts[1] for time in times),
    }


BREEDS = ("beagle", "manx", "collie", "siamese", "husky", "bengal")


def write_rows(
    folder: Path,
    rows: list[dict[str, Any]],
    items: int,
    *,
    viewers: bool = False,
    content: bool = False,
    parts: int = 1,
) -> str:
    """TABLES with these rows of `sequences`; even items are dogs. With `viewers` models
    read the device, with `content` items have a title and a price too."""
    tables = str(folder / "tables")
    more = {
        "text_title": [
            f"{BREEDS[i % 6]} number{i % 4} {'cat' if i % 2 else 'dog'}"
            for i in range(items)
        ],
        "num_price": pa.array(
            [None if i == 3 else i * 1.5 for i in range(items)], pa.float32()
        ),
    }
    catalogue = pa.table(
        (more if content else {})
        | {
            "item_index": np.arange(items, dtype=np.int32),
            "item_id": [f"item-{i:03d}" for i in range(items)],
            "cat_kind": ["cat" if i % 2 else "dog" for i in range(items)],
            "cat_author": [None if i == 0 else f"author-{i % 5}" for i in range(items)],
        }
    )
    made = write(join(tables, "items"), "items", catalogue, {}, {})
    train = [event for row in rows for event in row["tasks"][: row["train_end"]]]
    rates = np.mean(train, 0) if train else np.full(len(TASKS), 0.5)
    info = {
        "kind": "actions",
        "tasks": list(TASKS),
        "actions": list(ACTIONS),
        "features": list(FEATURES),
        "feature_mean": [0.5] * len(FEATURES),
        "feature_std": [0.3] * len(FEATURES),
        "dataset": "actions-test",
        "viewers": {"device": SEEN} if viewers else {},
        "definitions": {
            "inputs": {
                name: {"label": name, "range": None, "log_unit": None}
                for name in ACTIONS
            }
        },
        "base_rates": dict(zip(TASKS, rates.tolist(), strict=True)),
    }
    write(
        join(tables, "sequences"),
        "sequences",
        pa.Table.from_pylist(rows, SCHEMA),
        info,
        {"items": made.hash},
        parts,
    )
    return tables


def write_actions(
    folder: Path,
    users: int = 60,
    items: int = 12,
    longest: int = 30,
    seed: int = 0,
    *,
    viewers: bool = False,
    content: bool = False,
    parts: int = 1,
) -> str:
    """A log of 100 ms, cut at 60 and 80, in which some events share a millisecond.

    User 0 has candidates alone, user 1 nothing to be evaluated on.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(users):
        times = np.sort(rng.integers(0, 100, 4 + int(rng.integers(longest - 3))))
        times = {0: times[times >= 60], 1: times[times < 60]}.get(number, times)
        times = times if len(times) else np.array([70 if number == 0 else 10])
        item = rng.integers(
            items - content, size=len(times)
        )  # the last one is shown to nobody
        liked = (item % 2 == 0) == (number % 2 == 0)
        rows.append(
            user(
                f"user-{number:03d}",
                item.tolist(),
                times.tolist(),
                liked.tolist(),
                (60, 80),
                rng,
            )
        )
    return write_rows(
        folder, rows, items, viewers=viewers, content=content, parts=parts
    )
