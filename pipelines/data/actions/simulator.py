"""A simulated feed with a known answer: the dog and cat users of AttnMVP (Fig. 4), scaled up.

    python -m jobs.simulate --kind feed --output raw --users 1500 --items 400 --events 30000
    python -m jobs.simulate --kind feed --output raw --users 1500 --items 6000 --events 30000 --shown_days 7

Half of the items show dogs, half cats. Half of the users like dogs and not cats, the
other half the reverse. Items are drawn in the same way for everyone, so neither the
items that a user saw nor the actions that an item got from all users tell the two kinds
apart: only the user's actions do. A model that does not read actions cannot beat the
base rate (normalised entropy near 1). A model that reads them can come down to
`best_entropy`, because actions are drawn with the probabilities PROBABILITY. With
`shown_days` items come and go over the whole log and each is shown for this number of
days. Training has then hardly seen the items of validation and test: their ids say
nothing, their kind, author and text do.

Written are `events-*.parquet` (user_id, item_id, timestamp_ms, like, comment, share,
follow, hide, dwell_ms), `items.parquet` (item_id, title, description, author, kind)
and, last, `simulation.json`. No Ray. A result on one is always labelled simulated.
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
    make_ids,
    open_log,
    write_log,
)

ITEM_KINDS = ("dog", "cat")

PROBABILITY = {
    "like": (0.1, 0.9),
    "comment": (0.02, 0.2),
    "share": (0.01, 0.1),
    "follow": (0.005, 0.05),
    "hide": (0.3, 0.02),
}
"""Probability of each action on an item of the kind that the user does not like, and of
the other kind."""

LOG_DWELL = (np.log(4_000), np.log(25_000))
"""Means of the logarithm of the dwell time in ms, in the same order."""

LOG_DWELL_STD = 0.7
"""Standard deviation of that logarithm."""

DAY_MS = 86_400_000
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
ACTIVITIES = [
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
    """Feed: days that each item is shown for, so that later items are new; 0: for the
    whole log."""

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
    """A feed as arrays, and its causes. E impressions, user after user; I items; U users."""

    kind: np.ndarray
    """(I,) the kind that an item shows, as an index into ITEM_KINDS."""
    taste: np.ndarray
    """(U,) the kind that a user likes, as an index into ITEM_KINDS."""
    user: np.ndarray
    """(E,) number of the user."""
    time: np.ndarray
    """(E,) ms."""
    item: np.ndarray
    """(E,) number of the item."""
    actions: dict[str, np.ndarray]
    """(E,) bool by action."""
    dwell_ms: np.ndarray
    """(E,) float32."""


def best_entropy(action: str) -> float:
    """Return the normalised entropy of a model that knows which kind each user likes: the least possible.

    It is the mean entropy of the two probabilities over the entropy of their mean, the
    base rate.
    """

    def entropy(p: float) -> float:
        return float(-p * np.log(p) - (1 - p) * np.log(1 - p))

    probabilities = PROBABILITY[action]
    mean_entropy = float(np.mean([entropy(p) for p in probabilities]))
    return mean_entropy / entropy(float(np.mean(probabilities)))


def draw_feed(settings: FeedSettings) -> Feed:
    """Draw a feed."""
    rng = np.random.default_rng([settings.seed, 2])
    kind = rng.permutation(np.arange(settings.items) % len(ITEM_KINDS))
    taste = rng.permutation(np.arange(settings.users) % len(ITEM_KINDS))
    lengths = draw_lengths(settings, rng)
    user = np.repeat(rng.permutation(settings.users).astype(np.int32), lengths)
    draw, time = rng.random(settings.events), None
    # Low numbers are popular.
    item = (settings.items * draw**SKEW).astype(np.int32)
    if settings.shown_days:
        # Items are shown one after the other, equally many at any time.
        time = draw_times(lengths, np.random.default_rng([settings.seed, 4]))
        shown_ms = settings.shown_days * DAY_MS
        since_start, span = time - START_MS, time.max() - START_MS + shown_ms + 1
        item = settings.items * ((since_start + shown_ms * draw) / span)
        item = item.astype(np.int32)
    is_liked = (kind[item] == taste[user]).astype(np.int64)
    actions = {
        name: rng.random(settings.events) < np.array(probability)[is_liked]
        for name, probability in PROBABILITY.items()
    }
    log_dwell = rng.normal(np.array(LOG_DWELL)[is_liked], LOG_DWELL_STD)
    dwell = np.exp(log_dwell).astype(np.float32)
    if time is None:
        time = draw_times(lengths, rng)
    return Feed(kind, taste, user, time, item, actions, dwell)


def _make_items(kind: np.ndarray, rng: np.random.Generator) -> pa.Table:
    """Return titles and descriptions of items (I,), and authors who show one kind only."""
    count = len(kind)
    authors = max(1, count // ITEMS_PER_AUTHOR // len(ITEM_KINDS))
    author = kind * authors + rng.integers(0, authors, count)
    breeds = np.array([BREEDS[name] for name in ITEM_KINDS])
    breed = breeds[kind, rng.integers(0, 10, count)]
    frame = pl.DataFrame(
        {
            "item_id": pl.Series(make_ids("i", count)),
            "kind": np.array(ITEM_KINDS)[kind],
            "author": pl.Series(make_ids("a", authors * len(ITEM_KINDS))).gather(
                author
            ),
            "breed": breed,
            "does": np.array(ACTIVITIES)[rng.integers(0, 10, count)],
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
    """Write a feed into `output_dir` (a local path or URI) and return its causes. Raises as `open_log`."""
    open_log(output_dir)
    feed = draw_feed(settings)
    user_ids, item_ids = make_ids("u", settings.users), make_ids("i", settings.items)

    def make_rows(which: np.ndarray, first: int) -> pa.Table:
        return pa.table(
            {
                "user_id": pa.DictionaryArray.from_arrays(feed.user[which], user_ids),
                "item_id": pa.DictionaryArray.from_arrays(feed.item[which], item_ids),
                "timestamp_ms": feed.time[which],
                **{name: taken[which] for name, taken in feed.actions.items()},
                "dwell_ms": feed.dwell_ms[which],
            }
        )

    texts = _make_items(feed.kind, np.random.default_rng([settings.seed, 3]))
    write_log(output_dir, "feed", settings, feed.time, make_rows, lambda: texts)
    return feed
