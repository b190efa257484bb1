"""A simulated feed with a known answer: the dog and cat users of AttnMVP (Fig. 4), scaled up.

    python -m jobs.simulate --kind feed --output raw --users 1500 --items 400 --events 30000
    python -m jobs.simulate --kind feed --output raw --users 1500 --items 6000 --events 30000 --shown_days 7

Half of the items show dogs, half cats. Half of the users like dogs and not cats, the other half the reverse.
What is shown is drawn the same way for everyone, so neither the items that a user saw nor what an item got
from all users tells the two kinds apart: only the user's own actions do. A model that does not read actions
cannot beat the base rate (normalised entropy near 1); one that reads them can come down to `best_entropy`,
because what a user does is drawn with the chances of CHANCE. With `shown_days` items come and go over the whole log and
each is shown for so many days, so that those of validation and test are ones that training has hardly seen: their ids
say nothing, their kind, author and text do.

Written are `events-*.parquet` (user_id, item_id, timestamp_ms, like, comment, share, follow, hide, dwell_ms),
`items.parquet` (item_id, title, description, author, kind) and, last, `simulation.json`. No Ray. A result on
one is always labelled simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.data.simulation import (
    SKEW,
    START_MS,
    Settings,
    draw_lengths,
    draw_times,
    numbered,
    open_log,
    write_log,
)

KINDS = ("dog", "cat")
CHANCE = {
    "like": (0.1, 0.9),
    "comment": (0.02, 0.2),
    "share": (0.01, 0.1),
    "follow": (0.005, 0.05),
    "hide": (0.3, 0.02),
}
"""Chance of each action: on an item of the kind that the user does not like, and on one of the other."""
DWELL = (np.log(4_000), np.log(25_000))
"""Means of the logarithm of the dwell time in ms, in the same order."""
DAY_MS = 86_400_000
DWELL_SPREAD = 0.7
"""Standard deviation of that logarithm."""
ITEMS_PER_AUTHOR = 8
BREEDS = {
    "dog": [
        "beagle",
        "collie",
        "dachshund",
        "greyhound",
        "husky",
        "labrador",
        "poodle",
        "spaniel",
        "terrier",
        "whippet",
    ],
    "cat": [
        "abyssinian",
        "bengal",
        "birman",
        "burmese",
        "manx",
        "persian",
        "ragdoll",
        "siamese",
        "sphynx",
        "tabby",
    ],
}
DOES = [
    "asleep",
    "bathing",
    "climbing",
    "hiding",
    "hunting",
    "jumping",
    "playing",
    "running",
    "stretching",
    "yawning",
]
PLACES = [
    "attic",
    "balcony",
    "beach",
    "forest",
    "garden",
    "kitchen",
    "meadow",
    "rooftop",
    "sofa",
    "staircase",
]


@dataclass(frozen=True)
class FeedSettings(Settings):
    """Size, seed and causes of a feed."""

    shown_days: float = 0.0
    """Feed: days that each item is shown for, so that later ones are new; 0: as long as the log is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.shown_days < np.inf:
            raise ValueError(
                f"shown_days is {self.shown_days}; give days of 0 or more, such as 7"
            )

    def describe(self) -> str:
        return f", each shown for {self.shown_days:g} days" if self.shown_days else ""


@dataclass(frozen=True)
class Feed:
    """The log as arrays, and its causes. E impressions, user after user; I items; U users."""

    kind: np.ndarray
    """(I,) the kind that an item shows, as an index into KINDS."""
    taste: np.ndarray
    """(U,) the kind that a user likes."""
    user: np.ndarray
    """(E,) the user, as numbered in the log."""
    time: np.ndarray
    """(E,) milliseconds."""
    item: np.ndarray
    """(E,) what was shown."""
    actions: dict[str, np.ndarray]
    """(E,) bool each."""
    dwell_ms: np.ndarray
    """(E,) float32."""


def best_entropy(action: str) -> float:
    """Normalised entropy of a model that knows which kind each user likes: the least that can be reached.

    The mean entropy of the two chances over the entropy of their mean, which is the base rate.
    """

    def entropy(chance: float) -> float:
        return float(-chance * np.log(chance) - (1 - chance) * np.log(1 - chance))

    chances = CHANCE[action]
    return float(np.mean([entropy(chance) for chance in chances])) / entropy(
        float(np.mean(chances))
    )


def draw_feed(settings: FeedSettings) -> Feed:
    """Draws the log."""
    rng = np.random.default_rng([settings.seed, 2])
    kind = rng.permutation(np.arange(settings.items) % len(KINDS))
    taste = rng.permutation(np.arange(settings.users) % len(KINDS))
    lengths = draw_lengths(settings, rng)
    user = np.repeat(rng.permutation(settings.users).astype(np.int32), lengths)
    draw, time = rng.random(settings.events), None
    if settings.shown_days:  # items are shown one after the other, as many at any time
        time, shown = (
            draw_times(lengths, np.random.default_rng([settings.seed, 4])),
            settings.shown_days * DAY_MS,
        )
        moment = (time - START_MS + shown * draw) / (time.max() - START_MS + shown + 1)
        item = (settings.items * moment).astype(np.int32)
    else:
        item = (settings.items * draw**SKEW).astype(np.int32)  # low numbers are popular
    liked = (kind[item] == taste[user]).astype(np.int64)
    actions = {
        name: rng.random(settings.events) < np.array(chance)[liked]
        for name, chance in CHANCE.items()
    }
    dwell = np.exp(rng.normal(np.array(DWELL)[liked], DWELL_SPREAD)).astype(np.float32)
    return Feed(
        kind,
        taste,
        user,
        draw_times(lengths, rng) if time is None else time,
        item,
        actions,
        dwell,
    )


def _items(kind: np.ndarray, rng: np.random.Generator) -> pa.Table:
    """Titles of breeds, and authors who show one kind only."""
    count = len(kind)
    authors = max(1, count // ITEMS_PER_AUTHOR // len(KINDS))
    author = kind * authors + rng.integers(0, authors, count)
    breeds = np.array([BREEDS[name] for name in KINDS])[
        kind, rng.integers(0, 10, count)
    ]
    frame = pl.DataFrame(
        {
            "item_id": pl.Series(numbered("i", count)),
            "kind": np.array(KINDS)[kind],
            "author": pl.Series(numbered("a", authors * len(KINDS))).gather(author),
            "breed": breeds,
            "does": np.array(DOES)[rng.integers(0, 10, count)],
            "place": np.array(PLACES)[rng.integers(0, 10, count)],
        }
    ).select(
        "item_id",
        pl.format("{} {}", pl.col("breed").str.to_titlecase(), "does").alias("title"),
        pl.format("A {} {} in the {}.", "kind", "does", "place").alias("description"),
        "author",
        "kind",
    )
    return frame.to_arrow().cast(
        pa.schema([(name, pa.string()) for name in frame.columns])
    )


def simulate_feed(output_dir: str, settings: FeedSettings) -> Feed:
    """Writes a feed log into `output_dir` (a local path or URI) and returns its causes; UserError as `open_log`."""
    open_log(output_dir)
    feed = draw_feed(settings)
    user_ids, item_ids = numbered("u", settings.users), numbered("i", settings.items)

    def rows_of(which: np.ndarray, first: int) -> pa.Table:
        return pa.table(
            {
                "user_id": pa.DictionaryArray.from_arrays(feed.user[which], user_ids),
                "item_id": pa.DictionaryArray.from_arrays(feed.item[which], item_ids),
                "timestamp_ms": feed.time[which],
                **{name: taken[which] for name, taken in feed.actions.items()},
                "dwell_ms": feed.dwell_ms[which],
            }
        )

    texts = _items(feed.kind, np.random.default_rng([settings.seed, 3]))
    write_log(output_dir, "feed", settings, feed.time, rows_of, lambda: texts)
    return feed
