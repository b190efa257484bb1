"""A simulated search log with known causes. A result on one is always labelled simulated.

    python -m jobs.simulate --kind search --output raw --users 1500 --items 400 --events 15000

A search has an intent, which is a cluster of items; it shows ten results, four of the intent, three of
another cluster, and three of three more. Whether a result is clicked has three causes: it is of the intent,
its maker is one that the user likes, and the user looked that far down (position bias). Purchases and dwell
time follow the taste of those who clicked.

`query_driven` says where the intent comes from. In a query-driven search it is drawn anew and the query
names it: the history cannot tell it, the query does. In the others it follows from the user's last intent
and the query names any cluster: the history tells it, the query is noise.

`taste` says which makers a user likes. `user`: some, the same everywhere, so query and history each tell
their part of a click. `class`: every second maker is a cheap one, the others are fine ones, and a user likes
those of one class alone: a few earlier clicks, whatever was searched, tell what he will click, on makers too
of which he has clicked nothing. `query`: in every second cluster he likes exactly those makers that he does
not like in the others, so that a history says nothing of a maker unless it is read together with the queries,
and the query of a search decides what of it counts.

Written are `events-*.parquet` (one row per result: user_id, search_id, timestamp_ms, query, item_id,
position, click, purchase, dwell_ms), `items.parquet` and, last, `simulation.json`. No Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import numpy as np
import polars as pl
import pyarrow as pa

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
    make_world,
    numbered,
    open_log,
    write_log,
)

OF_INTENT, OF_DECOY, OTHERS = 4, 3, 3  # results of a search by cluster
RESULTS = OF_INTENT + OF_DECOY + OTHERS
LIKED_MAKERS = {
    "user": 6,
    "class": len(MAKERS) // 2,
    "query": len(MAKERS) // 2,
}  # of each user, by `taste`
FINE = np.arange(len(MAKERS)) % 2 == 1  # the class of each maker
NOT_SOUGHT = [
    0.02,
    0.06,
]  # chance of a click on what was looked at and is not of the intent: [liked maker]
LIKED_CLICK = 0.85  # and on what is, of a liked maker; of others `disliked_click`
LOOK = 1 / (1 + 0.3 * np.arange(RESULTS))  # chance that a user looks at a position
PURCHASE = np.array([0.05, 0.4])  # chance of a purchase on a click: [liked maker]
FOLLOW = 0.8  # share of the searches without query-driven intent whose intent follows the last one
MEASURED = 300_000  # searches, about, that `best_gauc` looks at: those of users spread over the log
STYLED = 0.5  # share of the queries that name style and noun; the others name the noun


@dataclass(frozen=True)
class SearchSettings(Settings):
    """Size, seed and causes of a simulated search log; each search shows ten results."""

    query_driven: float = 1.0
    """Search: share of searches whose clicks follow the query; in the others they follow the history."""
    taste: Literal["user", "class", "query"] = "user"
    """Search: whether a user likes some makers everywhere, those of one of two classes, or others in every second
    cluster of items."""
    disliked_click: float = 0.25
    """Search: chance of a click on a fitting result of a maker that the user does not like, if looked at; else 0.85."""

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
        said = f", {self.query_driven:.0%} query-driven" + (
            f", taste by {self.taste}" if self.taste != "user" else ""
        )
        if self.disliked_click != SearchSettings.disliked_click:
            said += f", clicks on disliked makers {self.disliked_click:g}"
        return said

    def click(self) -> np.ndarray:
        """(2, 2): the chance of a click on what was looked at, by [of the intent][liked maker]."""
        return np.array([NOT_SOUGHT, [self.disliked_click, LIKED_CLICK]])


@dataclass(frozen=True)
class Searches:
    """The log as arrays, and its causes. S searches, user after user; P = RESULTS positions."""

    settings: SearchSettings
    user: np.ndarray
    """(S,) the user, as numbered in the log."""
    time: np.ndarray
    """(S,) milliseconds."""
    intent: np.ndarray
    """(S,) the cluster that is sought."""
    asked: np.ndarray
    """(S,) the cluster that the query names."""
    item: np.ndarray
    """(S, P) what was shown, by position."""
    maker: np.ndarray
    """(S, P) the item's maker, as an index into MAKERS."""
    liked: np.ndarray
    """(S, P) whether the item's maker is one that the user likes, in the item's cluster."""
    click: np.ndarray
    """(S, P)"""
    purchase: np.ndarray
    """(S, P)"""
    dwell_ms: np.ndarray
    """(S, P) float32, NaN without a click."""


def _intents(
    world: World, lengths: np.ndarray, share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(S,) the intents and the clusters that queries name, user after user: one pass per place in the history."""
    first = np.cumsum(lengths) - lengths
    intent, asked = (np.empty(int(lengths.sum()), dtype=np.int32) for _ in range(2))
    clusters = len(world.following_cluster)
    last = np.zeros(0, dtype=np.int32)
    for place in range(int(lengths[0])):
        active = int(np.searchsorted(-lengths, -place, side="left"))
        driven, cause, which = rng.random((3, active))
        drawn, noise = (clusters * rng.random((2, active))).astype(np.int32)
        remembered = world.tastes[np.arange(active), (which * TASTES).astype(np.int64)]
        if place:
            remembered = np.where(
                cause < FOLLOW, world.following_cluster[last[:active]], remembered
            )
        chosen = np.where(driven < share, drawn, remembered).astype(np.int32)
        intent[first[:active] + place] = last = chosen
        asked[first[:active] + place] = np.where(driven < share, chosen, noise)
    return intent, asked


def _results(world: World, intent: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(S, P) distinct items: neighbours in popularity of each cluster, shuffled."""
    searches, clusters = len(intent), len(world.following_cluster)
    offset = rng.integers(
        0, clusters - 1, searches
    )  # clusters other than the intent, each another one
    picked = [
        intent,
        *(
            (intent + 1 + (offset + j) % (clusters - 1)) % clusters
            for j in range(1 + OTHERS)
        ),
    ]
    size = np.diff(world.starts)
    shown = []
    for cluster, count in zip(
        picked, [OF_INTENT, OF_DECOY, *[1] * OTHERS], strict=True
    ):
        begin = (size[cluster] * rng.random(searches) ** SKEW).astype(np.int64)
        place = (begin[:, None] + np.arange(count)) % size[cluster][:, None]
        shown.append(world.members[world.starts[cluster][:, None] + place])
    return rng.permuted(np.concatenate(shown, axis=1), axis=1)


def draw_searches(
    settings: SearchSettings, world: World, brand: np.ndarray
) -> Searches:
    """Draws the log. brand (N,) each item's maker, as an index into MAKERS."""
    rng = np.random.default_rng([settings.seed, 2])
    lengths = draw_lengths(settings, rng)
    user = np.repeat(rng.permutation(settings.users).astype(np.int32), lengths)
    intent, asked = _intents(world, lengths, settings.query_driven, rng)
    time = draw_times(lengths, rng)
    item = _results(world, intent, rng)
    likes = (
        np.argsort(rng.random((settings.users, len(MAKERS))), axis=1)
        < LIKED_MAKERS[settings.taste]
    )  # (U, makers)
    if settings.taste == "class":
        likes = likes[:, :1] == FINE
    liked = likes[user[:, None], brand[item]]
    if settings.taste == "query":
        liked ^= world.cluster[item] % 2 == 1
    chance = (
        settings.click()[
            (world.cluster[item] == intent[:, None]).astype(int), liked.astype(int)
        ]
        * LOOK
    )
    click = rng.random(item.shape) < chance
    purchase = click & (rng.random(item.shape) < PURCHASE[liked.astype(int)])
    dwell = np.exp(
        rng.normal(9.5 + liked, 0.6)
    )  # about 13 s, and 36 s on what the user likes
    return Searches(
        settings,
        user,
        time,
        intent,
        asked,
        item,
        brand[item],
        liked,
        click,
        purchase,
        np.where(click, dwell, np.nan).astype(np.float32),
    )


def best_gauc(world: World, log: Searches, latest: float = 1.0) -> dict[str, float]:
    """GAUC of the clicks by ranking with their true chances: of `all causes`, and of those that one reader knows.

    `latest` is the share of the searches that are measured, by time: a tenth for those that `jobs.prepare` tests on.
    A reader of `earlier clicks` knows taste only as far as the user's clicks before the search tell it, which is
    about what a model can make of a history; it is an estimate, the others are exact. Nobody knows the intent of a
    log whose queries name any cluster, so that figures with it are those of query-driven logs.
    """
    since = np.sort(log.time)[-round(latest * len(log.time))]
    place = np.cumsum(np.diff(log.user, prepend=-1) != 0)  # (S,) of the user, from 1
    kept = (
        place % -(-len(log.item) // MEASURED) == 0
    )  # whole users, whose earlier clicks count
    log = replace(
        log, **{each.name: getattr(log, each.name)[kept] for each in fields(log)[1:]}
    )
    measured = log.time >= since
    click = log.settings.click()
    of_intent, liked = (
        (world.cluster[log.item] == log.intent[:, None]).astype(int),
        log.liked.astype(int),
    )
    share = LIKED_MAKERS[log.settings.taste] / len(MAKERS)
    told = taste_from_clicks(world, log, of_intent, share)
    by_clicks = click[of_intent, 0] * (1 - told) + click[of_intent, 1] * told
    by_intent, by_taste = (click @ [1 - share, share])[of_intent], click.mean(0)[liked]
    chances = {
        "all causes": click[of_intent, liked] * LOOK,
        "intent, position and earlier clicks": by_clicks * LOOK,
        "intent and position": by_intent * LOOK,
        "taste and position": by_taste * LOOK,
        "position": np.tile(LOOK, (len(log.click), 1)),
        # what can be known when results are ranked
        "intent and taste": click[of_intent, liked],
        "intent and earlier clicks": by_clicks,
        "intent": by_intent,
        "taste": by_taste,
    }
    clicks, found = log.click[measured], {}
    for name, chance in chances.items():
        if "intent" in name and log.settings.query_driven < 1:
            continue
        found[name] = gauc(chance[measured], clicks)
    return found


def gauc(chance: np.ndarray, click: np.ndarray) -> float:
    """The mean AUC of the searches with results of both classes: the share of pairs of a clicked and another result
    that are in order, ties half. chance, click (S, P)"""
    pairs = click[:, :, None] & ~click[:, None, :]
    right = (pairs * (1 + np.sign(chance[:, :, None] - chance[:, None, :])) / 2).sum(
        (1, 2)
    )
    both = pairs.any((1, 2))
    return float((right[both] / pairs.sum((1, 2))[both]).mean())


def taste_from_clicks(
    world: World, log: Searches, of_intent: np.ndarray, share: float
) -> np.ndarray:
    """(S, P) the chance that the user likes a result's maker, by his clicks in earlier searches of what he sought.

    Clicks on a maker are taken as Poisson counts that are higher by the ratio of the two chances if he likes it.
    `share` of the makers are liked.
    """
    disliked, liked = log.settings.click()[1]
    odd = (log.settings.taste == "query") & (world.cluster[log.item] % 2 == 1)
    sign = np.where(odd, -1, 1)  # who is liked in the one is not in the other
    clicks = np.where(log.click & (of_intent == 1), sign, 0)
    counts = np.zeros((len(clicks), len(MAKERS)))
    np.add.at(counts, (np.arange(len(clicks))[:, None], log.maker), clicks)
    expected = (
        (liked - disliked) / (share * liked + (1 - share) * disliked) / len(MAKERS)
    )
    if (
        log.settings.taste == "class"
    ):  # a click tells of all makers; as many of both classes are shown
        counts, expected = counts @ np.where(FINE[:, None] == FINE, 1, -1), 0.0
    odds = np.log(liked / disliked) * counts - expected * clicks.sum(1, keepdims=True)
    before = np.cumsum(odds, axis=0) - odds  # (S, makers)
    begins = np.diff(log.user, prepend=-1) != 0
    before -= before[begins][np.cumsum(begins) - 1]  # since the user's first search
    told = np.log(share / (1 - share)) + sign * np.take_along_axis(
        before, log.maker.astype(np.int64), axis=1
    )
    return 1 / (1 + np.exp(-told))


def _query_texts(world: World, asked: np.ndarray, rng: np.random.Generator) -> pa.Array:
    """(S,) the words of each cluster, by the same rule as item texts."""
    number = np.arange(len(world.following_cluster))
    noun = pl.Series(NOUNS).gather(number % len(NOUNS))
    style = pl.Series(STYLES).gather((number // len(NOUNS) + number) % len(STYLES))
    texts = pl.concat(
        [noun, style + " " + noun]
    )  # of cluster c: c the noun, c + K style and noun
    chosen = asked + len(number) * (rng.random(len(asked)) < STYLED)
    return pa.DictionaryArray.from_arrays(
        pa.array(chosen.astype(np.int32)), texts.to_arrow().cast(pa.string())
    )


def simulate_search(
    output_dir: str, settings: SearchSettings
) -> tuple[World, Searches]:
    """Writes a search log into `output_dir` (a local path or URI) and returns its causes; UserError as `open_log`."""
    open_log(output_dir)
    world = make_world(settings)
    rng = np.random.default_rng([settings.seed, 3])
    user_ids, item_ids = numbered("u", settings.users), numbered("i", settings.items)
    search_ids = numbered("s", settings.events)
    texts = item_texts(world, item_ids, rng)
    makers = {maker: index for index, maker in enumerate(MAKERS)}
    log = draw_searches(
        settings, world, np.array([makers[name] for name in texts["brand"].to_pylist()])
    )
    query = _query_texts(world, log.asked, rng)

    def rows_of(which: np.ndarray, first: int) -> pa.Table:
        each, dwell = np.repeat(which, RESULTS), log.dwell_ms[which].reshape(-1)
        number = np.repeat(
            np.arange(first, first + len(which), dtype=np.int32), RESULTS
        )
        return pa.table(
            {
                "user_id": pa.DictionaryArray.from_arrays(log.user[each], user_ids),
                "search_id": pa.DictionaryArray.from_arrays(number, search_ids),
                "timestamp_ms": log.time[each],
                "query": query.take(pa.array(each)),
                "item_id": pa.DictionaryArray.from_arrays(
                    log.item[which].reshape(-1), item_ids
                ),
                "position": np.tile(np.arange(RESULTS, dtype=np.int32), len(which)),
                "click": log.click[which].reshape(-1),
                "purchase": log.purchase[which].reshape(-1),
                "dwell_ms": pa.array(dwell, mask=np.isnan(dwell)),
            }
        )

    write_log(output_dir, "search", settings, log.time, rows_of, lambda: texts, RESULTS)
    return world, log
