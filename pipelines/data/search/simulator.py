"""A simulated search log with known causes. A result on one is always labelled simulated.

    python -m jobs.simulate --kind search --output raw --users 1500 --items 400 --events 15000

A search has an intent, which is a cluster of items; it shows ten results, four of the
intent, three of another cluster, and three of three more. Whether a result is clicked
has three causes: it is of the intent, its maker is one that the user likes, and the
user looked that far down (position bias). Purchases and dwell time follow the taste of
those who clicked.

`query_driven` says where the intent comes from. In a query-driven search it is drawn
anew and the query names it: the history cannot tell it, the query does. In the others
it follows from the user's last intent and the query names any cluster: the history
tells it, the query is noise.

`taste` says which makers a user likes. `user`: some makers, equal in all clusters, so
query and history each tell a part of a click. `class`: every second maker is a cheap
one, the others are fine ones, and a user likes the makers of one class alone. A few
earlier clicks, whatever was searched, tell what the user will click, also on makers
without a click. `query`: in every second cluster a user likes exactly the makers that
he does not like in the other clusters. A history says nothing of a maker unless it is
read together with the queries, and the query of a search decides which of it counts.

Written are `events-*.parquet` (one row per result: user_id, search_id, timestamp_ms,
query, item_id, position, click, purchase, dwell_ms), `items.parquet` and, last,
`simulation.json`. No Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import numpy as np
import polars as pl
import pyarrow as pa

from models.ragged import lengths_to_starts
from pipelines.data.simulation import (
    MAKERS,
    NOUNS,
    SKEW,
    STYLES,
    TASTES,
    Settings,
    World,
    draw_lengths,
    draw_times,
    item_texts,
    make_ids,
    make_world,
    open_log,
    write_log,
)

INTENT_RESULTS, DECOY_RESULTS, OTHER_RESULTS = 4, 3, 3
"""Results of a search by cluster: of the intent, of one other cluster, of further
clusters."""

RESULTS = INTENT_RESULTS + DECOY_RESULTS + OTHER_RESULTS

LIKED_MAKERS = {"user": 6, "class": len(MAKERS) // 2, "query": len(MAKERS) // 2}
"""Makers that each user likes, by `taste`."""

IS_FINE = np.arange(len(MAKERS)) % 2 == 1
"""(makers,) the class of each maker."""

OFF_INTENT_CLICK = [0.02, 0.06]
"""Probability of a click on a result outside the intent that was looked at: [maker is
liked]."""

LIKED_CLICK = 0.85
"""Probability of a click on a result of the intent and of a liked maker that was looked
at."""

LOOK = 1 / (1 + 0.3 * np.arange(RESULTS))
"""(P,) probability that a user looks at a position."""

PURCHASE = np.array([0.05, 0.4])
"""Probability of a purchase on a click: [maker is liked]."""

FOLLOW = 0.8
"""Share of the searches without query-driven intent whose intent follows the last
one."""

MAX_MEASURED = 300_000
"""Searches that `best_gauc` looks at, about: whole users, spread over the log."""

STYLED = 0.5
"""Share of the queries that name style and noun; the others name the noun."""


@dataclass(frozen=True)
class SearchSettings(Settings):
    """Size, seed and causes of a simulated search log; each search shows ten results."""

    query_driven: float = 1.0
    """Search: share of searches whose clicks follow the query; in the others they
    follow the history."""
    taste: Literal["user", "class", "query"] = "user"
    """Search: whether a user likes some makers everywhere, those of one of two classes,
    or others in every second cluster of items."""
    disliked_click: float = 0.25
    """Search: probability of a click on a fitting result of a maker that the user does
    not like, if looked at; of a liked maker it is 0.85."""

    unit: ClassVar[str] = "searches"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items < 36:
            raise ValueError(
                f"items is {self.items}, the least of a search log is 36; a search shows five clusters"
            )
        if not 0 <= self.query_driven <= 1:
            raise ValueError(
                f"query_driven is {self.query_driven}; it is a share between 0 and 1"
            )
        if self.taste not in LIKED_MAKERS:
            raise ValueError(
                f"taste is '{self.taste}', it must be one of {', '.join(LIKED_MAKERS)}"
            )
        if not 0 < self.disliked_click <= LIKED_CLICK:
            raise ValueError(
                f"disliked_click is {self.disliked_click}; it must be above 0 and at most {LIKED_CLICK}, that of liked"
            )

    def describe(self) -> str:
        text = f", {self.query_driven:.0%} query-driven"
        if self.taste != "user":
            text += f", taste by {self.taste}"
        if self.disliked_click != SearchSettings.disliked_click:
            text += f", clicks on disliked makers {self.disliked_click:g}"
        return text

    def click_probability(self) -> np.ndarray:
        """Return (2, 2) the probability of a click on a result that was looked at: [of the intent][maker is liked]."""
        return np.array([OFF_INTENT_CLICK, [self.disliked_click, LIKED_CLICK]])


@dataclass(frozen=True)
class Searches:
    """A search log as arrays, and its causes. S searches, user after user; P = RESULTS positions."""

    settings: SearchSettings
    user: np.ndarray
    """(S,) number of the user."""
    time: np.ndarray
    """(S,) ms."""
    intent: np.ndarray
    """(S,) the cluster that is sought."""
    query_cluster: np.ndarray
    """(S,) the cluster that the query names."""
    item: np.ndarray
    """(S, P) number of the item, by position."""
    maker: np.ndarray
    """(S, P) the item's maker, as an index into MAKERS."""
    liked: np.ndarray
    """(S, P) whether the user likes the item's maker, in the item's cluster."""
    click: np.ndarray
    """(S, P)"""
    purchase: np.ndarray
    """(S, P)"""
    dwell_ms: np.ndarray
    """(S, P) float32, NaN without a click."""


def _draw_intents(
    world: World, lengths: np.ndarray, share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return (S,) intents and (S,) clusters of queries, user after user.

    One pass per position in the history, over all users with one. `share` of the
    searches are query-driven.
    """
    first = lengths_to_starts(lengths)
    intent = np.empty(int(lengths.sum()), dtype=np.int32)
    query_cluster = np.empty_like(intent)
    clusters = len(world.following_cluster)
    last = np.zeros(0, dtype=np.int32)
    for position in range(int(lengths[0])):
        # Lengths descend, so the users that are longer come first.
        active = int(np.searchsorted(-lengths, -position, side="left"))
        draw, cause, which = rng.random((3, active))
        is_driven = draw < share
        random, noise = (clusters * rng.random((2, active))).astype(np.int32)
        by_history = world.tastes[np.arange(active), (which * TASTES).astype(np.int64)]
        if position:
            following = world.following_cluster[last[:active]]
            by_history = np.where(cause < FOLLOW, following, by_history)
        chosen = np.where(is_driven, random, by_history).astype(np.int32)
        search = first[:active] + position
        intent[search] = last = chosen
        query_cluster[search] = np.where(is_driven, chosen, noise)
    return intent, query_cluster


def _draw_results(
    world: World, intent: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return (S, P) distinct items: neighbours in popularity of each cluster, shuffled."""
    searches, clusters = len(intent), len(world.following_cluster)
    # Clusters other than the intent, each another one.
    offset = rng.integers(0, clusters - 1, searches)
    chosen = [intent]
    for number in range(1 + OTHER_RESULTS):
        other = intent + 1 + (offset + number) % (clusters - 1)
        chosen.append(other % clusters)
    counts = [INTENT_RESULTS, DECOY_RESULTS, *[1] * OTHER_RESULTS]
    size = np.diff(world.starts)
    shown = []
    for cluster, count in zip(chosen, counts, strict=True):
        begin = (size[cluster] * rng.random(searches) ** SKEW).astype(np.int64)
        rank = (begin[:, None] + np.arange(count)) % size[cluster][:, None]
        shown.append(world.members[world.starts[cluster][:, None] + rank])
    return rng.permuted(np.concatenate(shown, axis=1), axis=1)


def draw_searches(
    settings: SearchSettings, world: World, brand: np.ndarray
) -> Searches:
    """Draw a search log. brand (N,) is each item's maker, as an index into MAKERS."""
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
    liked = likes[user[:, None], brand[item]]
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
        brand[item],
        liked,
        click,
        purchase,
        np.where(click, dwell, np.nan).astype(np.float32),
    )


def best_gauc(world: World, log: Searches, latest: float = 1.0) -> dict[str, float]:
    """Return the GAUC of clicks by ranking with their true probabilities, by the causes that a ranker knows.

    A ranker of `earlier clicks` knows taste only as far as the user's clicks before the
    search tell it, which is about as much as a model can learn from a history; this
    figure is an estimate, the others are exact. Nobody knows the intent of a log whose
    queries name any cluster, so figures with intent are those of query-driven logs.

    Args:
        world: Causes of the log.
        log: The log.
        latest: Share of the searches that are measured, the latest ones: a tenth for
            the test split of `jobs.prepare`.
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
    clicks, figures = log.click[is_measured], {}
    for name, probability in probabilities.items():
        if "intent" in name and log.settings.query_driven < 1:
            continue
        figures[name] = gauc(probability[is_measured], clicks)
    return figures


def _sample_users(log: Searches) -> Searches:
    """Return the searches of whole users, spread over the log: about MAX_MEASURED of them."""
    stride = -(-len(log.item) // MAX_MEASURED)
    user_number = np.cumsum(np.diff(log.user, prepend=-1) != 0)  # (S,) from 1
    is_kept = user_number % stride == 0
    arrays = {each.name: getattr(log, each.name) for each in fields(log)[1:]}
    kept = {name: values[is_kept] for name, values in arrays.items()}
    return replace(log, **kept)


def gauc(score: np.ndarray, click: np.ndarray) -> float:
    """Return the mean AUC of the searches with results of both classes.

    The AUC is the share of pairs of a clicked and another result that are in order;
    ties count half. score and click are (S, P).
    """
    pairs = click[:, :, None] & ~click[:, None, :]
    order = np.sign(score[:, :, None] - score[:, None, :])
    in_order = (pairs * (1 + order) / 2).sum((1, 2))
    has_both = pairs.any((1, 2))
    return float((in_order[has_both] / pairs.sum((1, 2))[has_both]).mean())


def taste_from_clicks(
    world: World, log: Searches, in_intent: np.ndarray, share: float
) -> np.ndarray:
    """Return (S, P) the probability that the user likes a result's maker, given his clicks in earlier searches.

    Clicks on a maker are taken as Poisson counts, higher by the ratio of the two click
    probabilities if the user likes it.

    Args:
        world: Causes of the log.
        log: The log.
        in_intent: (S, P) 1 for results of the intent; only clicks on them count.
        share: Share of the makers that a user likes.
    """
    disliked, liked = log.settings.click_probability()[1]
    is_odd = (log.settings.taste == "query") & (world.cluster[log.item] % 2 == 1)
    # A maker that is liked in even clusters is not liked in odd ones.
    sign = np.where(is_odd, -1, 1)
    clicks = np.where(log.click & (in_intent == 1), sign, 0)
    counts = np.zeros((len(clicks), len(MAKERS)))
    np.add.at(counts, (np.arange(len(clicks))[:, None], log.maker), clicks)
    mean_click = share * liked + (1 - share) * disliked
    expected = (liked - disliked) / mean_click / len(MAKERS)
    if log.settings.taste == "class":
        # A click tells of all makers; equally many of both classes are shown.
        same_class = np.where(IS_FINE[:, None] == IS_FINE, 1, -1)
        counts, expected = counts @ same_class, 0.0
    total = clicks.sum(1, keepdims=True)
    evidence = np.log(liked / disliked) * counts - expected * total
    before = np.cumsum(evidence, axis=0) - evidence  # (S, makers)
    is_first = np.diff(log.user, prepend=-1) != 0
    before -= before[is_first][np.cumsum(is_first) - 1]  # since the user's first search
    of_maker = np.take_along_axis(before, log.maker.astype(np.int64), axis=1)
    log_odds = np.log(share / (1 - share)) + sign * of_maker
    return 1 / (1 + np.exp(-log_odds))


def _query_texts(
    world: World, query_cluster: np.ndarray, rng: np.random.Generator
) -> pa.Array:
    """Return (S,) texts of the words of each query's cluster, by the rule of item texts."""
    number = np.arange(len(world.following_cluster))
    noun = pl.Series(NOUNS).gather(number % len(NOUNS))
    style = pl.Series(STYLES).gather((number // len(NOUNS) + number) % len(STYLES))
    # Text c is the noun of cluster c, text c + K its style and noun.
    texts = pl.concat([noun, style + " " + noun])
    is_styled = rng.random(len(query_cluster)) < STYLED
    chosen = query_cluster + len(number) * is_styled
    return pa.DictionaryArray.from_arrays(
        pa.array(chosen.astype(np.int32)), texts.to_arrow().cast(pa.string())
    )


def simulate_search(
    output_dir: str, settings: SearchSettings
) -> tuple[World, Searches]:
    """Write a search log into `output_dir` (a local path or URI) and return its causes. Raises as `open_log`."""
    open_log(output_dir)
    world = make_world(settings)
    rng = np.random.default_rng([settings.seed, 3])
    user_ids, item_ids = make_ids("u", settings.users), make_ids("i", settings.items)
    search_ids = make_ids("s", settings.events)
    texts = item_texts(world, item_ids, rng)
    makers = {maker: index for index, maker in enumerate(MAKERS)}
    brand = np.array([makers[name] for name in texts["brand"].to_pylist()])
    log = draw_searches(settings, world, brand)
    query = _query_texts(world, log.query_cluster, rng)

    def make_rows(which: np.ndarray, first: int) -> pa.Table:
        search, dwell = np.repeat(which, RESULTS), log.dwell_ms[which].reshape(-1)
        numbers = np.arange(first, first + len(which), dtype=np.int32)
        number = np.repeat(numbers, RESULTS)
        return pa.table(
            {
                "user_id": pa.DictionaryArray.from_arrays(log.user[search], user_ids),
                "search_id": pa.DictionaryArray.from_arrays(number, search_ids),
                "timestamp_ms": log.time[search],
                "query": query.take(pa.array(search)),
                "item_id": pa.DictionaryArray.from_arrays(
                    log.item[which].reshape(-1), item_ids
                ),
                "position": np.tile(np.arange(RESULTS, dtype=np.int32), len(which)),
                "click": log.click[which].reshape(-1),
                "purchase": log.purchase[which].reshape(-1),
                "dwell_ms": pa.array(dwell, mask=np.isnan(dwell)),
            }
        )

    write_log(
        output_dir, "search", settings, log.time, make_rows, lambda: texts, RESULTS
    )
    return world, log
