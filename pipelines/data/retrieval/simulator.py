"""A simulated retrieval log with known causes. A result on one is always labelled simulated.

    python -m jobs.simulate --output raw --users 1500 --items 400 --events 15000

Items fall into latent clusters; each cluster has one that follows it, and each item a
few items there that follow it. A user has a few clusters that he always comes back to.
An event is, by chance, one of three: an item that follows the user's last one, an item
of one of his clusters, or any item. So a model that reads the history can know most of
what popularity cannot. Item texts are made of their cluster's words, so that text
embeddings cluster too. Times are clock times, in bursts.

Written are `events-*.parquet` (user_id, item_id, timestamp_ms) in time order,
`items.parquet` (item_id, title, brand, description) and, last, `simulation.json`. No
Ray.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from models.ragged import lengths_to_starts
from pipelines.data.simulation import (
    SKEW,
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

FOLLOW, TASTE = 0.6, 0.3
"""Shares of the events that follow the last item, and that come from a user's
clusters."""

SHARES = (0.6, 0.3, 0.1)
"""Shares of the items that follow an item."""


def _walk(world: World, lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return (E,) items, user after user. One pass per position in the history, over all users with one."""
    first = lengths_to_starts(lengths)
    items = np.empty(int(lengths.sum()), dtype=np.int32)
    count, bounds = len(world.cluster), np.cumsum(SHARES)[:-1]
    last = np.zeros(0, dtype=np.int32)
    for position in range(int(lengths[0])):
        # Lengths descend, so the users that are longer come first.
        active = int(np.searchsorted(-lengths, -position, side="left"))
        cause, draw, which = rng.random((3, active))
        liked = world.tastes[np.arange(active), (which * TASTES).astype(np.int64)]
        begin, size = world.starts[liked], np.diff(world.starts)[liked]
        chosen = world.members[begin + (size * draw**SKEW).astype(np.int64)]
        anything = world.members[(count * draw).astype(np.int64)]
        chosen = np.where(cause < FOLLOW + TASTE, chosen, anything)
        if position:
            follower = np.searchsorted(bounds, which, side="right")
            follows = world.following[last[:active], follower]
            chosen = np.where(cause < FOLLOW, follows, chosen)
        items[first[:active] + position] = last = chosen
    return items


def simulate_retrieval(output_dir: str, settings: Settings) -> World:
    """Write a retrieval log into `output_dir` (a local path or URI) and return its causes. Raises as `open_log`."""
    open_log(output_dir)
    world = make_world(settings)
    rng = np.random.default_rng([settings.seed, 2])
    lengths = draw_lengths(settings, rng)
    item = _walk(world, lengths, rng)
    time = draw_times(lengths, rng)
    # Users are numbered at random: lengths descend, and an id must not tell a user's
    # activity.
    user = np.repeat(rng.permutation(settings.users).astype(np.int32), lengths)
    user_ids, item_ids = make_ids("u", settings.users), make_ids("i", settings.items)

    def make_rows(which: np.ndarray, first: int) -> pa.Table:
        return pa.table(
            {
                "user_id": pa.DictionaryArray.from_arrays(user[which], user_ids),
                "item_id": pa.DictionaryArray.from_arrays(item[which], item_ids),
                "timestamp_ms": time[which],
            }
        )

    write_log(
        output_dir,
        "retrieval",
        settings,
        time,
        make_rows,
        lambda: item_texts(world, item_ids, rng),
    )
    return world
