"""Simulated logs of three kinds with known causes.

    settings = Settings(users=200, items=120, events=2400)
    write_log("raw", "search", settings, draw_searches)

A log is `events-*.parquet` in the order of time, `items.parquet` and, written last,
`simulation.json`. Results on a simulated log are always labelled as simulated.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import asdict, field
from functools import partial
from typing import Self

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.random import Generator, default_rng
from pyarrow import fs

from core.errors import UserError
from core.files import join, open_uri, read_json, write_file
from core.ragged import lengths_to_starts
from core.splits import DAY_MS
from pipelines.prepare.settings.simulation import Settings

RECORD = "simulation.json"
"""Name of the file with the settings of a simulated log, which is written last."""

POPULARITY_SKEW = 2.0
"""Exponent of the popularity of items: of n items, the one at index n * u**skew is
drawn, u uniform, so that values above 1 favour low indices."""


START_MS = 1_704_067_200_000
"""Start of simulated logs in epoch ms: 1 January 2024, UTC."""

SPAN_MS = 90 * DAY_MS
"""Length of simulated logs in ms."""

EVENTS_PER_FILE = 1 << 20

# Split from text: eighty words in quotes of their own are harder to read.
NOUNS = """
lamp kettle drill notebook backpack headphones blanket skillet keyboard tripod
jacket racket puzzle mirror planter thermos wrench speaker candle charger hammock
pillow camera sandal guitar toaster helmet ruler vase stapler monitor scarf bicycle
telescope grinder tent paintbrush mattress microphone watch shelf razor printer
glove violin blender harness compass teapot router ladder brush easel curtain kayak
drone anvil stroller binoculars whistle
""".split()  # noqa: SIM905
STYLES = """
alpine vintage cordless ceramic bamboo marine velvet titanium organic nordic
tactical desert retro carbon rustic studio compact orbital botanical electric woolen
copper coastal urban feather granite magnetic solar linen thermal
""".split()  # noqa: SIM905
TRAITS = """
durable washable foldable lightweight waterproof adjustable rechargeable quiet
insulated portable handmade scratchproof breathable reusable wireless heavyduty slim
flexible antislip dimmable recycled stackable polished padded
""".split()  # noqa: SIM905
MAKERS = """
Arden Bexley Corvia Dunmore Elwood Farrow Glenhart Harrick Ivara Jorvik Kestrel
Lunden Marlowe Norvane Oakridge Penrose Quillon Rowanta Silvern Tamsin
""".split()  # noqa: SIM905


@dataclasses.dataclass(frozen=True)
class SimulatedLog:
    """Rows of a simulated log: E events or searches, with W rows each."""

    columns: dict[str, np.ndarray]
    """(E,) or (E, W) values of each column; one of them is `timestamp_ms`."""
    items: pl.DataFrame
    """Rows of the item file."""
    labels: dict[str, pl.Series] = field(default_factory=dict)
    """Texts of the columns, beside `user_id` and `item_id`, that index texts."""
    rows_per_event: int = 1


@dataclasses.dataclass(frozen=True)
class Clusters:
    """Latent clusters of items: K clusters, N items."""

    cluster: np.ndarray
    """(N,) cluster of each item."""
    members: np.ndarray
    """(N,) items grouped by cluster, popular items first."""
    starts: np.ndarray
    """(K + 1,) offset of each cluster's first item in `members`."""

    @classmethod
    def draw(cls, num_items: int, rng: Generator) -> Self:
        """Draw clusters of equal size, about as many as items per cluster."""
        num_clusters = max(4, math.isqrt(num_items))
        members = rng.permutation(num_items)
        starts = np.arange(num_clusters + 1) * num_items // num_clusters
        cluster = np.empty_like(members)
        cluster[members] = np.repeat(np.arange(num_clusters), np.diff(starts))
        return cls(cluster, members, starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def popular_items(
        self, cluster: np.ndarray, uniform: np.ndarray, count: int = 1
    ) -> np.ndarray:
        """Return items (n, count) of clusters (n,), consecutive ones by popularity."""
        size = np.diff(self.starts)[cluster][:, None]
        first = (size * uniform[:, None] ** POPULARITY_SKEW).astype(int)
        rank = (first + np.arange(count)) % size
        return self.members[self.starts[cluster][:, None] + rank]


def draw_lengths(settings: Settings, rng: Generator) -> np.ndarray:
    """Draw the number of events of each user from a long-tailed distribution.

    Returns:
        (U,) descending numbers that sum to `settings.events`, each at least 5 if there
        are enough events.
    """
    minimum = min(5, settings.events // settings.users)
    weight = rng.lognormal(0.0, 0.8, settings.users)
    remaining = settings.events - minimum * settings.users
    lengths = minimum + rng.multinomial(remaining, weight / weight.sum())
    return np.sort(lengths)[::-1]


def draw_times(lengths: np.ndarray, rng: Generator) -> np.ndarray:
    """Draw the times of events: sessions within a part of the log's span.

    Args:
        lengths: (U,) number of events of each user.
        rng: Random generator.

    Returns:
        (E,) epoch ms of the events, grouped by user and strictly increasing per user.
    """
    total = int(lengths.sum())
    first = lengths_to_starts(lengths)  # (U,)
    # heavy-tailed gaps: sessions, then days without an event
    elapsed = np.cumsum(rng.lognormal(0.0, 2.0, total))  # (E,)
    begin = np.repeat(elapsed[first], lengths)
    duration = np.repeat(elapsed[first + lengths - 1], lengths) - begin
    share = (elapsed - begin) / np.maximum(duration, 1e-9)  # of the user's time
    # (U,) part of the log's span in which a user is active
    user_start = rng.random(len(lengths)) * 0.7
    user_span = (1 - user_start) * rng.uniform(0.2, 1.0, len(lengths))
    relative_time = np.repeat(user_start, lengths) + share * np.repeat(
        user_span, lengths
    )
    index = np.arange(total) - np.repeat(first, lengths)  # within the user
    return START_MS + (relative_time * SPAN_MS).astype(int) + index


def make_ids(prefix: str, count: int) -> pl.Series:
    """Return (count,) ids: the prefix and a number from 0, padded to a fixed width."""
    numbers = pl.int_range(count, eager=True).cast(pl.String)
    return prefix + numbers.str.zfill(len(str(count - 1)))


def cluster_words(cluster: int) -> tuple[str, str]:
    """Return the style and the noun of a cluster; no other cluster has both."""
    style = STYLES[(cluster // len(NOUNS) + cluster) % len(STYLES)]
    return style, NOUNS[cluster % len(NOUNS)]


def item_texts(clusters: Clusters, rng: Generator) -> pl.DataFrame:
    """Return ids, titles, brands and descriptions, made of the words of clusters."""
    count = len(clusters.cluster)
    # (K, 3) makers and (K, 6) traits of each cluster, three of the six for each item
    makers = rng.integers(0, len(MAKERS), (len(clusters), 3))
    traits = np.array([rng.permutation(len(TRAITS))[:6] for _ in clusters.starts[1:]])
    chosen = np.argsort(rng.random((count, 6)), axis=1)[:, :3]
    maker = makers[clusters.cluster, rng.integers(0, 3, count)]
    trait = traits[clusters.cluster[:, None], chosen]
    model = rng.integers(100, 1000, count)
    titles, descriptions = [], []
    for item, cluster in enumerate(clusters.cluster.tolist()):
        style, noun = cluster_words(cluster)
        brand = MAKERS[maker[item]]
        a, b, c = (TRAITS[index] for index in trait[item])
        titles.append(f"{brand} {style.title()} {noun} {model[item]}, {a}")
        descriptions.append(f"{b.title()} {style} {noun}, {c}, made by {brand}.")
    return pl.DataFrame(
        {
            "item_id": make_ids("i", count),
            "title": titles,
            "brand": pl.Series(MAKERS).gather(maker),
            "description": descriptions,
        }
    )


def write_log(
    output: str,
    kind: str,
    settings: Settings,
    draw_log: Callable[[Settings], SimulatedLog],
) -> bool:
    """Write a log into a new or empty folder.

    Args:
        output: Local path or URI of the folder.
        kind: Kind of the log.
        settings: Settings of the log.
        draw_log: Draws the log.

    Returns:
        False if the folder already holds the log of these settings.
    """
    record = {"simulated": kind, **asdict(settings)}
    if read_json(join(output, RECORD)) == record:
        return False
    filesystem, root = open_uri(output)
    if filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True)):
        raise UserError(f"{output} holds other files")
    filesystem.create_dir(root)
    log = draw_log(settings)
    write_table = partial(
        pq.write_table,
        filesystem=filesystem,
        compression="zstd",
        compression_level=1,
        store_schema=False,
    )
    labels = {
        "user_id": make_ids("u", settings.users),
        "item_id": log.items["item_id"],
        **log.labels,
    }
    order = np.argsort(log.columns["timestamp_ms"], kind="stable")
    per_file = min(EVENTS_PER_FILE, math.ceil(len(order) / settings.files))
    for number, first in enumerate(range(0, len(order), per_file)):
        columns = {}
        for name, values in log.columns.items():
            rows = values[order[first : first + per_file]]
            if rows.ndim == 1:
                rows = np.repeat(rows, log.rows_per_event)
            column = pa.array(rows.reshape(-1), from_pandas=True)  # NaN becomes null
            if name in labels:
                column = pa.DictionaryArray.from_arrays(column, labels[name])
            columns[name] = column
        write_table(pa.table(columns), f"{root}/events-{number:05d}.parquet")
    write_table(log.items.to_arrow(), f"{root}/items.parquet")
    write_file(join(output, RECORD), json.dumps(record).encode())
    return True


CLUSTERS_PER_USER = 3
"""Number of clusters that a user likes."""

FOLLOW = 0.6
"""Share of the events that follow the user's previous item."""

TASTE = 0.3
"""Share of the events in one of the user's clusters."""

SHARES = (0.6, 0.3, 0.1)
"""Probabilities of the items that follow an item."""


def draw_interactions(settings: Settings) -> SimulatedLog:
    """Draw a retrieval log, in which the next item follows from the history.

    Items fall into latent clusters. Each cluster has a following cluster, and each item
    a few following items in it. A user has a few clusters. An event is drawn from one
    of three sources: the items that follow the user's previous item, the items of the
    user's clusters, or all items.
    """
    rng = default_rng([settings.seed, 1])
    clusters = Clusters.draw(settings.items, rng)
    cycle = rng.permutation(len(clusters))
    next_cluster = np.empty_like(cycle)
    next_cluster[cycle] = np.roll(cycle, -1)
    # (N, SHARES) items that follow each item, the likeliest first
    uniform = rng.random((settings.items, len(SHARES)))
    offset = uniform * np.diff(clusters.starts)[next_cluster][clusters.cluster, None]
    start = clusters.starts[next_cluster][clusters.cluster, None]
    following = clusters.members[start + offset.astype(int)]
    # the exponent makes some clusters more popular than others
    uniform = rng.random((settings.users, CLUSTERS_PER_USER))
    tastes = (len(clusters) * uniform**1.5).astype(int)

    rng = default_rng([settings.seed, 2])
    lengths = draw_lengths(settings, rng)
    first = lengths_to_starts(lengths)
    item = np.empty(settings.events, dtype=int)
    for position in range(lengths[0]):
        # lengths descend, so the users with an event at this position come first
        num_users = np.count_nonzero(lengths > position)
        event = first[:num_users] + position
        cause, uniform, choice = rng.random((3, num_users))
        taste = (choice * CLUSTERS_PER_USER).astype(int)
        cluster = tastes[np.arange(num_users), taste]
        liked = clusters.popular_items(cluster, uniform)[:, 0]
        any_item = clusters.members[(settings.items * uniform).astype(int)]
        item[event] = np.where(cause < FOLLOW + TASTE, liked, any_item)
        if position:
            follower = np.searchsorted(np.cumsum(SHARES)[:-1], choice, side="right")
            followers = following[item[event - 1], follower]
            item[event] = np.where(cause < FOLLOW, followers, item[event])
    time = draw_times(lengths, rng)
    user = np.repeat(rng.permutation(settings.users), lengths)
    items = item_texts(clusters, rng)
    columns = {"user_id": user, "item_id": item, "timestamp_ms": time}
    return SimulatedLog(columns, items)


RESULTS_BY_CLUSTER = (4, 3, 1, 1, 1)
"""Results of a search from each of five clusters, of which the first is the intent."""

RESULTS = sum(RESULTS_BY_CLUSTER)
"""Results of a search."""

LIKED_MAKERS = 6
"""Number of makers that each user likes, with `taste` `user`."""

LOOK = 1 / (1 + 0.3 * np.arange(RESULTS))
"""(P,) probability that a user looks at a position."""

PURCHASE = np.array([0.05, 0.4])
"""Probability of a purchase, given a click: [maker is liked]."""

STYLED = 0.5
"""Share of the queries that name style and noun; the others name the noun."""


def draw_searches(settings: Settings) -> SimulatedLog:
    """Draw S searches with P results, whose clicks follow the query and the taste.

    A search has an intent, which is a cluster of items that the query names. It shows
    results of the intent and of four other clusters. A click has three causes: the
    result is of the intent, the user likes its maker, and the user looked at its
    position (position bias). Purchases and dwell time follow the taste of the user who
    clicked. With `taste` `class` makers are cheap or fine, and a user likes the makers
    of one class: a few earlier clicks, for any query, predict clicks also on makers
    that the user has not clicked yet.
    """
    if settings.items < 36:
        raise UserError(f"items is {settings.items}, a search log has at least 36")
    clusters = Clusters.draw(settings.items, default_rng([settings.seed, 1]))
    rng = default_rng([settings.seed, 3])
    items = item_texts(clusters, rng)
    maker = np.array([MAKERS.index(brand) for brand in items["brand"]])  # (N,)
    is_styled = rng.random(settings.events) < STYLED

    rng = default_rng([settings.seed, 2])
    lengths = draw_lengths(settings, rng)
    user = np.repeat(rng.permutation(settings.users), lengths)
    first = lengths_to_starts(lengths)
    intent = np.empty(settings.events, dtype=int)
    for position in range(lengths[0]):
        # lengths descend, so the users with a search at this position come first
        num_users = np.count_nonzero(lengths > position)
        uniform = rng.random((5, num_users))[3]
        intent[first[:num_users] + position] = len(clusters) * uniform
    time = draw_times(lengths, rng)

    # consecutive offsets from 1 give distinct clusters other than the intent
    offset = rng.integers(0, len(clusters) - 1, (settings.events, 1))
    other = (offset + np.arange(len(RESULTS_BY_CLUSTER) - 1)) % (len(clusters) - 1)
    cluster = np.hstack(
        [intent[:, None], (intent[:, None] + 1 + other) % len(clusters)]
    )
    shown = [
        clusters.popular_items(cluster[:, index], rng.random(settings.events), count)
        for index, count in enumerate(RESULTS_BY_CLUSTER)
    ]
    item = rng.permuted(np.hstack(shown), axis=1)  # (S, P)

    rank = np.argsort(rng.random((settings.users, len(MAKERS))), axis=1)
    likes = rank < LIKED_MAKERS  # (U, makers)
    if settings.taste == "class":
        # every second maker is fine
        likes_cheap = rank[:, :1] < len(MAKERS) // 2
        likes = likes_cheap == (np.arange(len(MAKERS)) % 2 == 1)
    liked = likes[user[:, None], maker[item]].astype(int)
    in_intent = (clusters.cluster[item] == intent[:, None]).astype(int)
    # given a look: [result is of the intent][maker is liked]
    chance = np.array([[0.02, 0.06], [settings.disliked_click, 0.85]])
    click = rng.random(item.shape) < chance[in_intent, liked] * LOOK
    purchase = click & (rng.random(item.shape) < PURCHASE[liked])
    # about 13 s, and 36 s on results that the user likes
    dwell = np.exp(rng.normal(9.5 + liked, 0.6))

    # of K clusters, text c is the noun of cluster c, text K + c its style and noun
    words = [cluster_words(cluster) for cluster in range(len(clusters))]
    queries = [noun for _, noun in words] + [" ".join(pair) for pair in words]
    labels = {
        "search_id": make_ids("s", settings.events),
        "query": pl.Series(queries),
    }
    # searches are numbered in the order of time
    number = np.argsort(np.argsort(time, kind="stable"))
    columns = {
        "user_id": user,
        "search_id": number,
        "timestamp_ms": time,
        "query": intent + len(clusters) * is_styled,
        "item_id": item,
        "position": np.broadcast_to(np.arange(RESULTS, dtype=np.int32), item.shape),
        "click": click,
        "purchase": purchase,
        "dwell_ms": np.where(click, dwell, np.nan).astype(np.float32),
    }
    return SimulatedLog(columns, items, labels, RESULTS)


PROBABILITY = {
    "like": (0.1, 0.9),
    "comment": (0.02, 0.2),
    "share": (0.01, 0.1),
    "follow": (0.005, 0.05),
    "hide": (0.3, 0.02),
}
"""Probabilities of each action: on an item of the kind that the user does not like, and
on an item of the kind that the user likes."""

DWELL_MS = (4_000, 25_000)
"""Medians of the dwell time: for a kind that the user does not like, and for a kind
that the user likes."""

LOG_DWELL_STD = 0.7
"""Standard deviation of the logarithm of the dwell time."""

ITEMS_PER_AUTHOR = 8
"""Mean number of items per author."""
BREEDS = {
    "dog": "beagle collie dachshund greyhound husky labrador poodle spaniel terrier "
    "whippet",
    "cat": "abyssinian bengal birman burmese manx persian ragdoll siamese sphynx tabby",
}
ACTIVITIES = """
asleep bathing climbing hiding hunting jumping playing running stretching yawning
""".split()  # noqa: SIM905
PLACES = """
attic balcony beach forest garden kitchen meadow rooftop sofa staircase
""".split()  # noqa: SIM905


def draw_feed(settings: Settings) -> SimulatedLog:
    """Draw a feed of E impressions: the dog and cat users of AttnMVP (Fig. 4).

    Half of the N items show dogs, half cats. Half of the users like dogs and not cats,
    the other half the reverse. Items are drawn from the same distribution for every
    user, so the two kinds of users differ neither in the items they saw nor in the
    items' total actions, only in their own actions. With `shown_days` each item is
    shown for this number of days only, and items are spread over the whole log. Most
    items of validation and test are then new: their ids carry no information, but
    their kind, author and text do.
    """
    rng = default_rng([settings.seed, 2])
    kind = rng.permutation(np.arange(settings.items) % 2)  # (N,) dog, cat
    taste = rng.permutation(
        np.arange(settings.users) % 2
    )  # (U,) the kind that a user likes
    lengths = draw_lengths(settings, rng)
    user = np.repeat(rng.permutation(settings.users), lengths)
    uniform = rng.random(settings.events)
    if settings.shown_days:
        time = draw_times(lengths, default_rng([settings.seed, 4]))
        shown_ms = settings.shown_days * DAY_MS
        span_ms = time.max() - START_MS + shown_ms + 1
        age = (time - START_MS + shown_ms * uniform) / span_ms
        item = (settings.items * age).astype(int)
    else:
        item = (settings.items * uniform**POPULARITY_SKEW).astype(int)
    liked = (kind[item] == taste[user]).astype(int)
    actions = {
        name: rng.random(settings.events) < np.array(probability)[liked]
        for name, probability in PROBABILITY.items()
    }
    log_dwell = rng.normal(np.log(DWELL_MS)[liked], LOG_DWELL_STD)
    if not settings.shown_days:
        time = draw_times(lengths, rng)
    items = make_items(kind, default_rng([settings.seed, 3]))
    columns = {
        "user_id": user,
        "item_id": item,
        "timestamp_ms": time,
        **actions,
        "dwell_ms": np.exp(log_dwell).astype(np.float32),
    }
    return SimulatedLog(columns, items)


def make_items(kind: np.ndarray, rng: Generator) -> pl.DataFrame:
    """Return the titles, descriptions and authors of items of kinds (N,)."""
    num_items = len(kind)
    num_authors = max(1, num_items // ITEMS_PER_AUTHOR // 2)  # per kind
    author = kind * num_authors + rng.integers(0, num_authors, num_items)
    author_ids = make_ids("a", num_authors * 2)
    breed, activity, place = rng.integers(0, 10, (3, num_items))
    kinds = [("dog", "cat")[index] for index in kind]
    titles, descriptions = [], []
    for item, name in enumerate(kinds):
        action = ACTIVITIES[activity[item]]
        titles.append(f"{BREEDS[name].split()[breed[item]].title()} {action}")
        descriptions.append(f"A {name} {action} in the {PLACES[place[item]]}.")
    return pl.DataFrame(
        {
            "item_id": make_ids("i", num_items),
            "title": titles,
            "description": descriptions,
            "author": author_ids.gather(author),
            "kind": kinds,
        }
    )
