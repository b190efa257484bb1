r"""A simulated search log with known causes of clicks.

    python -m jobs.simulate --kind search --output raw --users 1500 --items 400 \
        --events 15000

A search has an intent, which is a cluster of items. It shows ten results: four of the
intent, three of another cluster, and one each of three more clusters. A click has three
causes: the result is of the intent, the user likes its maker, and the user looked at
its position (position bias). Purchases and dwell time follow the taste of the user who
clicked.

`query_driven` is the share of searches whose intent is drawn at random and named by the
query, so that only the query predicts it. In the other searches the intent follows from
the user's previous intent and the query names a random cluster, so that only the
history predicts it.

`taste` determines the makers that a user likes. `user`: some makers, the same in all
clusters, so query and history each predict a part of a click. `class`: makers are cheap
or fine, and a user likes the makers of one class. A few earlier clicks, for any query,
predict clicks also on makers that the user has not clicked yet. `query`: in every
second cluster a user likes exactly the makers that the user dislikes in the other
clusters. Earlier clicks on a maker carry information only if they are read together
with their queries and with the query of the search.

The output is `events-*.parquet` (one row per result: user_id, search_id, timestamp_ms,
query, item_id, position, click, purchase, dwell_ms), `items.parquet` and, written last,
`simulation.json`. Ray is not used. Results on simulated logs are always labelled as
simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import numpy as np
import polars as pl
import pyarrow as pa

from models.ragged import lengths_to_starts
from pipelines.data.simulation import (
    CLUSTERS_PER_USER,
    MAKERS,
    NOUNS,
    POPULARITY_SKEW,
    STYLES,
    Settings,
    World,
    create_log_folder,
    draw_lengths,
    draw_times,
    item_texts,
    make_ids,
    make_world,
    write_log,
)

INTENT_RESULTS = 4
"""Results of a search from the cluster of the intent."""

DECOY_RESULTS = 3
"""Results of a search from one other cluster."""

OTHER_RESULTS = 3
"""Results of a search from further clusters, one each."""

RESULTS = INTENT_RESULTS + DECOY_RESULTS + OTHER_RESULTS
"""Results of a search."""

LIKED_MAKERS = {"user": 6, "class": len(MAKERS) // 2, "query": len(MAKERS) // 2}
"""Number of makers that each user likes, by `taste`."""

IS_FINE = np.arange(len(MAKERS)) % 2 == 1
"""(makers,) whether a maker is of the class of fine makers."""

OFF_INTENT_CLICK = [0.02, 0.06]
"""Probability of a click, given a look, on a result outside the intent: [maker is
liked]."""

LIKED_CLICK = 0.85
"""Probability of a click, given a look, on a result of the intent and a liked maker."""

LOOK = 1 / (1 + 0.3 * np.arange(RESULTS))
"""(P,) probability that a user looks at a position."""

PURCHASE = np.array([0.05, 0.4])
"""Probability of a purchase, given a click: [maker is liked]."""

FOLLOW = 0.8
"""Share of the history-driven searches whose intent follows the previous intent; the
others are in one of the user's clusters."""

MAX_MEASURED = 300_000
"""Approximate number of searches that `best_gauc` measures; it samples whole users."""

STYLED = 0.5
"""Share of the queries that name style and noun; the others name the noun."""


@dataclass(frozen=True)
class SearchSettings(Settings):
    """Size and seed of a simulated search log, and the causes of its clicks."""

    query_driven: float = 1.0
    """Search: share of searches whose clicks follow the query; in the others they
    follow the history."""
    taste: Literal["user", "class", "query"] = "user"
    """Search: the makers that a user likes: some makers in all clusters (`user`), one
    of two classes (`class`), or other makers in every second cluster (`query`)."""
    disliked_click: float = 0.25
    """Search: probability of a click, given a look, on a result of the intent whose
    maker the user does not like; for a liked maker it is 0.85."""

    unit: ClassVar[str] = "searches"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items < 36:
            raise ValueError(
                f"items is {self.items}; it must be at least 36, as a search shows "
                f"items of five clusters"
            )
        if not 0 <= self.query_driven <= 1:
            raise ValueError(
                f"query_driven is {self.query_driven}; it must be between 0 and 1"
            )
        if self.taste not in LIKED_MAKERS:
            raise ValueError(
                f"taste is '{self.taste}'; it must be one of {', '.join(LIKED_MAKERS)}"
            )
        if not 0 < self.disliked_click <= LIKED_CLICK:
            raise ValueError(
                f"disliked_click is {self.disliked_click}; it must be above 0 and at "
                f"most {LIKED_CLICK}, the probability for liked makers"
            )

    def describe(self) -> str:
        """Describe the causes of clicks that differ from the defaults."""
        text = f", {self.query_driven:.0%} query-driven"
        if self.taste != "user":
            text += f", taste by {self.taste}"
        if self.disliked_click != SearchSettings.disliked_click:
            text += f", clicks on disliked makers {self.disliked_click:g}"
        return text

    def click_probability(self) -> np.ndarray:
        """Return the probabilities (2, 2) of a click, given a look.

        The axes are whether the result is of the intent, and whether the user likes its
        maker.
        """
        return np.array([OFF_INTENT_CLICK, [self.disliked_click, LIKED_CLICK]])


@dataclass(frozen=True)
class Searches:
    """A search log as arrays, and the causes of its clicks.

    Shapes: S searches, grouped by user; P = RESULTS positions.
    """

    settings: SearchSettings
    """Settings that the log was drawn with."""
    user: np.ndarray
    """(S,) index of the user."""
    time: np.ndarray
    """(S,) time in ms."""
    intent: np.ndarray
    """(S,) cluster that the user wants."""
    query_cluster: np.ndarray
    """(S,) cluster that the query names."""
    item: np.ndarray
    """(S, P) index of the item at each position."""
    maker: np.ndarray
    """(S, P) index of the item's maker in MAKERS."""
    liked: np.ndarray
    """(S, P) whether the user likes the item's maker, in the item's cluster."""
    click: np.ndarray
    """(S, P) bool."""
    purchase: np.ndarray
    """(S, P) bool."""
    dwell_ms: np.ndarray
    """(S, P) float32 dwell time in ms, NaN without a click."""


def _draw_intents(
    world: World, lengths: np.ndarray, query_driven: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the intent and the query of each search."""
    first = lengths_to_starts(lengths)
    intent = np.empty(int(lengths.sum()), dtype=np.int32)
    query_cluster = np.empty_like(intent)
    num_clusters = len(world.following_cluster)
    previous = np.zeros(0, dtype=np.int32)
    for position in range(int(lengths[0])):
        # lengths descend, so the users with a search at this position come first
        num_users = np.count_nonzero(lengths > position)
        uniform, cause, choice = rng.random((3, num_users))
        is_driven = uniform < query_driven
        random_clusters = num_clusters * rng.random((2, num_users))
        random_intent, noise = random_clusters.astype(np.int32)
        taste = (choice * CLUSTERS_PER_USER).astype(np.int64)
        by_history = world.tastes[np.arange(num_users), taste]
        if position:
            following = world.following_cluster[previous[:num_users]]
            by_history = np.where(cause < FOLLOW, following, by_history)
        drawn = np.where(is_driven, random_intent, by_history).astype(np.int32)
        search = first[:num_users] + position
        intent[search] = drawn
        query_cluster[search] = np.where(is_driven, drawn, noise)
        previous = drawn
    return intent, query_cluster


def _draw_results(
    world: World, intent: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Draw the distinct items (S, P) that searches show, in random order."""
    num_searches, num_clusters = len(intent), len(world.following_cluster)
    # consecutive offsets from 1 give distinct clusters other than the intent
    offset = rng.integers(0, num_clusters - 1, num_searches)
    clusters = [intent]
    for number in range(1 + OTHER_RESULTS):
        other = intent + 1 + (offset + number) % (num_clusters - 1)
        clusters.append(other % num_clusters)
    counts = [INTENT_RESULTS, DECOY_RESULTS, *[1] * OTHER_RESULTS]
    size = np.diff(world.starts)
    items = []
    for cluster, count in zip(clusters, counts, strict=True):
        uniform = rng.random(num_searches)
        first_rank = (size[cluster] * uniform**POPULARITY_SKEW).astype(np.int64)
        rank = (first_rank[:, None] + np.arange(count)) % size[cluster][:, None]
        items.append(world.members[world.starts[cluster][:, None] + rank])
    return rng.permuted(np.concatenate(items, axis=1), axis=1)


def draw_searches(
    settings: SearchSettings, world: World, maker: np.ndarray
) -> Searches:
    """Draw a search log.

    Args:
        settings: Size, seed and causes.
        world: Clusters of items, and tastes of users.
        maker: Index (I,) of each item's maker in MAKERS.
    """
    rng = np.random.default_rng([settings.seed, 2])
    lengths = draw_lengths(settings, rng)
    user = np.repeat(rng.permutation(settings.users).astype(np.int32), lengths)
    intent, query_cluster = _draw_intents(world, lengths, settings.query_driven, rng)
    time = draw_times(lengths, rng)
    item = _draw_results(world, intent, rng)
    rank = np.argsort(rng.random((settings.users, len(MAKERS))), axis=1)
    likes = rank < LIKED_MAKERS[settings.taste]  # (U, makers)
    if settings.taste == "class":
        likes = likes[:, :1] == IS_FINE
    liked = likes[user[:, None], maker[item]]
    if settings.taste == "query":
        liked ^= world.cluster[item] % 2 == 1
    in_intent = (world.cluster[item] == intent[:, None]).astype(int)
    probability = settings.click_probability()[in_intent, liked.astype(int)] * LOOK
    click = rng.random(item.shape) < probability
    purchase = click & (rng.random(item.shape) < PURCHASE[liked.astype(int)])
    # about 13 s, and 36 s on results that the user likes
    dwell = np.exp(rng.normal(9.5 + liked, 0.6))
    return Searches(
        settings,
        user,
        time,
        intent,
        query_cluster,
        item,
        maker[item],
        liked,
        click,
        purchase,
        np.where(click, dwell, np.nan).astype(np.float32),
    )


def best_gauc(world: World, log: Searches, latest: float = 1.0) -> dict[str, float]:
    """Return the best GAUC of rankers that know only some causes of clicks.

    A ranker with `earlier clicks` infers taste from the user's clicks before the
    search, which is about what a model can learn from a history; its figure is an
    estimate, the others are exact. Figures with `intent` are left out unless all
    searches are query-driven: otherwise no ranker knows the intent.

    Args:
        world: Clusters of items.
        log: The log, with the causes of its clicks.
        latest: Share of the searches to measure, the latest ones; 0.1 is the test split
            of `jobs.prepare`.

    Returns:
        The GAUC by known causes.
    """
    since = np.sort(log.time)[-round(latest * len(log.time))]
    log = _sample_users(log)
    is_measured = log.time >= since
    click = log.settings.click_probability()
    in_intent = (world.cluster[log.item] == log.intent[:, None]).astype(int)
    liked = log.liked.astype(int)
    share = LIKED_MAKERS[log.settings.taste] / len(MAKERS)
    taste = taste_from_clicks(world, log, in_intent, share)
    by_clicks = click[in_intent, 0] * (1 - taste) + click[in_intent, 1] * taste
    by_intent = (click @ [1 - share, share])[in_intent]
    by_taste = click.mean(0)[liked]
    probabilities = {
        "all causes": click[in_intent, liked] * LOOK,
        "intent, position and earlier clicks": by_clicks * LOOK,
        "intent and position": by_intent * LOOK,
        "taste and position": by_taste * LOOK,
        "position": np.tile(LOOK, (len(log.click), 1)),
        # causes that can be known when results are ranked
        "intent and taste": click[in_intent, liked],
        "intent and earlier clicks": by_clicks,
        "intent": by_intent,
        "taste": by_taste,
    }
    clicks = log.click[is_measured]
    figures: dict[str, float] = {}
    for name, probability in probabilities.items():
        if "intent" in name and log.settings.query_driven < 1:
            continue
        figures[name] = gauc(probability[is_measured], clicks)
    return figures


def _sample_users(log: Searches) -> Searches:
    """Return the searches of every n-th user, about MAX_MEASURED searches in total."""
    stride = math.ceil(len(log.item) / MAX_MEASURED)
    user_number = np.cumsum(np.diff(log.user, prepend=-1) != 0)  # (S,) from 1
    is_sampled = user_number % stride == 0
    arrays = [field.name for field in fields(log) if field.name != "settings"]
    return replace(log, **{name: getattr(log, name)[is_sampled] for name in arrays})


def gauc(score: np.ndarray, click: np.ndarray) -> float:
    """Return the mean AUC of the searches with clicked and other results.

    The AUC is the share of pairs of a clicked and another result in which the clicked
    one has the higher score; ties count half.

    Args:
        score: Scores (S, P).
        click: Clicks (S, P) bool.
    """
    is_pair = click[:, :, None] & ~click[:, None, :]  # (S, P, P)
    order = np.sign(score[:, :, None] - score[:, None, :])
    num_correct = (is_pair * (1 + order) / 2).sum((1, 2))  # (S,)
    has_both = is_pair.any((1, 2))
    num_pairs = is_pair.sum((1, 2))
    return float((num_correct[has_both] / num_pairs[has_both]).mean())


def taste_from_clicks(
    world: World, log: Searches, in_intent: np.ndarray, share: float
) -> np.ndarray:
    """Estimate whether a user likes a result's maker from clicks in earlier searches.

    Clicks on a maker are modelled as Poisson counts, whose rates for liked and other
    makers have the ratio of the two click probabilities.

    Args:
        world: Clusters of items.
        log: Simulated searches with their clicks.
        in_intent: 1 for results (S, P) of the intent, else 0; only clicks on results of
            the intent are used.
        share: Share of the makers that a user likes.

    Returns:
        The probability (S, P) that the user likes the maker of each result.
    """
    disliked, liked = log.settings.click_probability()[1]
    is_odd = (log.settings.taste == "query") & (world.cluster[log.item] % 2 == 1)
    # makers that are liked in even clusters are disliked in odd clusters
    sign = np.where(is_odd, -1, 1)
    clicks = np.where(log.click & (in_intent == 1), sign, 0)
    counts = np.zeros((len(clicks), len(MAKERS)))
    np.add.at(counts, (np.arange(len(clicks))[:, None], log.maker), clicks)
    mean_click = share * liked + (1 - share) * disliked
    expected = (liked - disliked) / mean_click / len(MAKERS)
    if log.settings.taste == "class":
        # a click is evidence on all makers; both classes are shown equally often
        same_class = np.where(IS_FINE[:, None] == IS_FINE, 1, -1)
        counts, expected = counts @ same_class, 0.0
    total = clicks.sum(1, keepdims=True)
    evidence = np.log(liked / disliked) * counts - expected * total
    earlier = np.cumsum(evidence, axis=0) - evidence  # (S, makers)
    is_first = np.diff(log.user, prepend=-1) != 0
    # subtract the evidence of other users, before the user's first search
    earlier -= earlier[is_first][np.cumsum(is_first) - 1]
    shown = np.take_along_axis(earlier, log.maker.astype(np.int64), axis=1)  # (S, P)
    log_odds = np.log(share / (1 - share)) + sign * shown
    return 1 / (1 + np.exp(-log_odds))


def _query_texts(
    world: World, query_cluster: np.ndarray, rng: np.random.Generator
) -> pa.Array:
    """Return the texts (S,) of queries, from the words of the cluster they name."""
    cluster = np.arange(len(world.following_cluster))
    noun = pl.Series(NOUNS).gather(cluster % len(NOUNS))
    style = pl.Series(STYLES).gather((cluster // len(NOUNS) + cluster) % len(STYLES))
    # with K clusters, text c is the noun of cluster c, text K + c its style and noun
    texts = pl.concat([noun, style + " " + noun])
    is_styled = rng.random(len(query_cluster)) < STYLED
    text_index = query_cluster + len(cluster) * is_styled
    return pa.DictionaryArray.from_arrays(
        pa.array(text_index.astype(np.int32)), texts.to_arrow().cast(pa.string())
    )


def simulate_search(
    output_dir: str, settings: SearchSettings
) -> tuple[World, Searches]:
    """Write a search log into `output_dir`, a local path or URI.

    Returns:
        The clusters and tastes that the log was drawn from, and the log as arrays.

    Raises:
        UserError: If the folder cannot be written, or holds other files.
    """
    create_log_folder(output_dir)
    world = make_world(settings)
    rng = np.random.default_rng([settings.seed, 3])
    user_ids, item_ids = make_ids("u", settings.users), make_ids("i", settings.items)
    search_ids = make_ids("s", settings.events)
    texts = item_texts(world, item_ids, rng)
    maker_index = {name: index for index, name in enumerate(MAKERS)}
    maker = np.array([maker_index[name] for name in texts["brand"].to_pylist()])
    log = draw_searches(settings, world, maker)
    query = _query_texts(world, log.query_cluster, rng)

    def make_rows(searches: np.ndarray, first: int) -> pa.Table:
        # (searches * RESULTS,) per result
        search = np.repeat(searches, RESULTS)
        item = log.item[searches].reshape(-1)
        dwell = log.dwell_ms[searches].reshape(-1)
        search_numbers = np.arange(first, first + len(searches), dtype=np.int32)
        search_number = np.repeat(search_numbers, RESULTS)
        return pa.table(
            {
                "user_id": pa.DictionaryArray.from_arrays(log.user[search], user_ids),
                "search_id": pa.DictionaryArray.from_arrays(search_number, search_ids),
                "timestamp_ms": log.time[search],
                "query": query.take(pa.array(search)),
                "item_id": pa.DictionaryArray.from_arrays(item, item_ids),
                "position": np.tile(np.arange(RESULTS, dtype=np.int32), len(searches)),
                "click": log.click[searches].reshape(-1),
                "purchase": log.purchase[searches].reshape(-1),
                "dwell_ms": pa.array(dwell, mask=np.isnan(dwell)),
            }
        )

    write_log(
        output_dir, "search", settings, log.time, make_rows, lambda: texts, RESULTS
    )
    return world, log
