r"""A simulated feed with a known optimum: the dog and cat users of AttnMVP (Fig. 4).

    python -m jobs.simulate --kind feed --output raw --users 1500 --items 400 \
        --events 30000
    python -m jobs.simulate --kind feed --output raw --users 1500 --items 6000 \
        --events 30000 --shown_days 7

Half of the items show dogs, half cats. Half of the users like dogs and not cats, the
other half the reverse. Items are drawn from the same distribution for every user, so
the two kinds of users differ neither in the items they saw nor in the items' total
actions, only in their own actions. A model that does not read actions cannot beat the
base rate (normalised entropy near 1). A model that reads them can reach `best_entropy`,
because actions are drawn with the probabilities PROBABILITY. With `shown_days` each
item is shown for this number of days only, and items are spread over the whole log.
Most items of validation and test are then new: their ids carry no information, but
their kind, author and text do.

The output is `events-*.parquet` (user_id, item_id, timestamp_ms, like, comment, share,
follow, hide, dwell_ms), `items.parquet` (item_id, title, description, author, kind)
and, written last, `simulation.json`. Ray is not used. Results on simulated logs are
always labelled as simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.data.simulation import (
    POPULARITY_SKEW,
    START_MS,
    Settings,
    create_log_folder,
    draw_lengths,
    draw_times,
    make_ids,
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
"""Probabilities of each action: on an item of the kind that the user does not like, and
on an item of the kind that the user likes."""

LOG_DWELL = (np.log(4_000), np.log(25_000))
"""Means of the logarithm of the dwell time in ms: for a kind that the user does not
like, and for a kind that the user likes."""

LOG_DWELL_STD = 0.7
"""Standard deviation of the logarithm of the dwell time."""

DAY_MS = 86_400_000
ITEMS_PER_AUTHOR = 8
"""Mean number of items per author."""
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
    """Size and seed of a feed, and how long it shows an item."""

    shown_days: float = 0.0
    """Feed: days for which an item is shown, so that later items are new; 0: the whole
    log."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.shown_days < np.inf:
            raise ValueError(
                f"shown_days is {self.shown_days}; give days of 0 or more, such as 7"
            )

    def describe(self) -> str:
        """Describe for how long items are shown."""
        return f", each shown for {self.shown_days:g} days" if self.shown_days else ""


@dataclass(frozen=True)
class Feed:
    """A feed as arrays, and the tastes that caused it.

    Shapes: E impressions, grouped by user; I items; U users.
    """

    kind: np.ndarray
    """(I,) kind that an item shows, as an index into ITEM_KINDS."""
    taste: np.ndarray
    """(U,) kind that a user likes, as an index into ITEM_KINDS."""
    user: np.ndarray
    """(E,) index of the user."""
    time: np.ndarray
    """(E,) time in ms."""
    item: np.ndarray
    """(E,) index of the item."""
    actions: dict[str, np.ndarray]
    """(E,) bool for each action."""
    dwell_ms: np.ndarray
    """(E,) float32 dwell time in ms."""


def best_entropy(action: str) -> float:
    """Return the lowest normalised entropy that a model can reach for an action.

    A model that knows which kind each user likes reaches it: the mean entropy of the
    action's two probabilities, divided by the entropy of their mean, the base rate.
    """

    def entropy(p: float) -> float:
        return float(-p * np.log(p) - (1 - p) * np.log(1 - p))

    probabilities = PROBABILITY[action]
    mean_entropy = float(np.mean([entropy(p) for p in probabilities]))
    return mean_entropy / entropy(float(np.mean(probabilities)))


def draw_feed(settings: FeedSettings) -> Feed:
    """Draw tastes, impressions and actions from the seed of the settings."""
    rng = np.random.default_rng([settings.seed, 2])
    kind = rng.permutation(np.arange(settings.items) % len(ITEM_KINDS))
    taste = rng.permutation(np.arange(settings.users) % len(ITEM_KINDS))
    lengths = draw_lengths(settings, rng)
    user = np.repeat(rng.permutation(settings.users).astype(np.int32), lengths)
    uniform = rng.random(settings.events)
    time = None
    if settings.shown_days:
        time = draw_times(lengths, np.random.default_rng([settings.seed, 4]))
    item = _select_shown_items(settings, time, uniform)
    is_liked = (kind[item] == taste[user]).astype(np.int64)
    actions = {
        name: rng.random(settings.events) < np.array(probability)[is_liked]
        for name, probability in PROBABILITY.items()
    }
    log_dwell = rng.normal(np.array(LOG_DWELL)[is_liked], LOG_DWELL_STD)
    dwell = np.exp(log_dwell).astype(np.float32)
    # The logs of existing seeds depend on the order of draws from `rng`: without
    # `shown_days`, times are drawn last.
    if time is None:
        time = draw_times(lengths, rng)
    return Feed(kind, taste, user, time, item, actions, dwell)


def _select_shown_items(
    settings: FeedSettings, time: np.ndarray | None, uniform: np.ndarray
) -> np.ndarray:
    """Return the item of each impression, (E,) int32."""
    if time is None:
        return (settings.items * uniform**POPULARITY_SKEW).astype(np.int32)
    shown_ms = settings.shown_days * DAY_MS
    since_start = time - START_MS
    span = time.max() - START_MS + shown_ms + 1
    item = settings.items * ((since_start + shown_ms * uniform) / span)
    return item.astype(np.int32)


def _make_items(kind: np.ndarray, rng: np.random.Generator) -> pa.Table:
    """Return the `items` file: titles, descriptions, authors of items of kinds (I,)."""
    num_items = len(kind)
    num_authors = max(1, num_items // ITEMS_PER_AUTHOR // len(ITEM_KINDS))  # per kind
    author = kind * num_authors + rng.integers(0, num_authors, num_items)
    author_ids = pl.Series(make_ids("a", num_authors * len(ITEM_KINDS)))
    breeds = np.array([BREEDS[name] for name in ITEM_KINDS])
    breed = breeds[kind, rng.integers(0, 10, num_items)]
    activity = np.array(ACTIVITIES)[rng.integers(0, 10, num_items)]
    place = np.array(PLACES)[rng.integers(0, 10, num_items)]
    frame = pl.DataFrame(
        {
            "item_id": pl.Series(make_ids("i", num_items)),
            "kind": np.array(ITEM_KINDS)[kind],
            "author": author_ids.gather(author),
            "breed": breed,
            "activity": activity,
            "place": place,
        }
    )
    title = pl.format("{} {}", pl.col("breed").str.to_titlecase(), "activity")
    description = pl.format("A {} {} in the {}.", "kind", "activity", "place")
    frame = frame.select(
        "item_id",
        title.alias("title"),
        description.alias("description"),
        "author",
        "kind",
    )
    return frame.to_arrow().cast(
        pa.schema([(name, pa.string()) for name in frame.columns])
    )


def simulate_feed(output_dir: str, settings: FeedSettings) -> Feed:
    """Write a feed into `output_dir`, a local path or URI, and return its arrays.

    Raises:
        UserError: If the folder cannot be written, or holds other files.
    """
    create_log_folder(output_dir)
    feed = draw_feed(settings)
    user_ids, item_ids = make_ids("u", settings.users), make_ids("i", settings.items)

    def make_rows(events: np.ndarray, first: int) -> pa.Table:
        return pa.table(
            {
                "user_id": pa.DictionaryArray.from_arrays(feed.user[events], user_ids),
                "item_id": pa.DictionaryArray.from_arrays(feed.item[events], item_ids),
                "timestamp_ms": feed.time[events],
                **{name: flags[events] for name, flags in feed.actions.items()},
                "dwell_ms": feed.dwell_ms[events],
            }
        )

    texts = _make_items(feed.kind, np.random.default_rng([settings.seed, 3]))
    write_log(output_dir, "feed", settings, feed.time, make_rows, lambda: texts)
    return feed
