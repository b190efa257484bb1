"""A simulated retrieval log with known causes.

    python -m jobs.simulate --output raw --users 1500 --items 400 --events 15000

Items fall into latent clusters. Each cluster has a following cluster, and each item a
few following items in it. A user has a few clusters. An event is drawn from one of
three sources: the items that follow the user's previous item, the items of the user's
clusters, or all items. A model that reads the history can therefore predict most of
what popularity cannot. Item texts consist of words of their cluster, so text embeddings
form clusters too. Times are clock times, in bursts.

The output is `events-*.parquet` (user_id, item_id, timestamp_ms) in time order,
`items.parquet` (item_id, title, brand, description) and, written last,
`simulation.json`. Ray is not used. Results on simulated logs are always labelled as
simulated.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from models.ragged import lengths_to_starts
from pipelines.data.simulation import (
    CLUSTERS_PER_USER,
    POPULARITY_SKEW,
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

FOLLOW = 0.6
"""Share of the events that follow the user's previous item."""

TASTE = 0.3
"""Share of the events in one of the user's clusters."""

SHARES = (0.6, 0.3, 0.1)
"""Probabilities of the items that follow an item."""


def _draw_items(
    world: World, lengths: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Draw the items of all users' events."""
    first = lengths_to_starts(lengths)
    items = np.empty(int(lengths.sum()), dtype=np.int32)
    num_items = len(world.cluster)
    bounds = np.cumsum(SHARES)[:-1]
    previous = np.zeros(0, dtype=np.int32)
    for position in range(int(lengths[0])):
        # lengths descend, so the users with an event at this position come first
        num_users = np.count_nonzero(lengths > position)
        cause, uniform, choice = rng.random((3, num_users))
        taste = (choice * CLUSTERS_PER_USER).astype(np.int64)
        cluster = world.tastes[np.arange(num_users), taste]
        cluster_start = world.starts[cluster]
        cluster_size = np.diff(world.starts)[cluster]
        rank = (cluster_size * uniform**POPULARITY_SKEW).astype(np.int64)
        liked = world.members[cluster_start + rank]
        any_item = world.members[(num_items * uniform).astype(np.int64)]
        drawn = np.where(cause < FOLLOW + TASTE, liked, any_item)
        if position:
            follower = np.searchsorted(bounds, choice, side="right")
            following = world.following[previous[:num_users], follower]
            drawn = np.where(cause < FOLLOW, following, drawn)
        items[first[:num_users] + position] = drawn
        previous = drawn
    return items


def simulate_retrieval(output_dir: str, settings: Settings) -> World:
    """Write a retrieval log into `output_dir`, a local path or URI.

    Returns:
        The clusters and tastes that the log was drawn from.

    Raises:
        UserError: If the folder cannot be written, or holds other files.
    """
    create_log_folder(output_dir)
    world = make_world(settings)
    rng = np.random.default_rng([settings.seed, 2])
    lengths = draw_lengths(settings, rng)
    item = _draw_items(world, lengths, rng)
    time = draw_times(lengths, rng)
    # users are numbered at random, as lengths descend and ids must not reveal activity
    user = np.repeat(rng.permutation(settings.users).astype(np.int32), lengths)
    user_ids, item_ids = make_ids("u", settings.users), make_ids("i", settings.items)

    def make_rows(events: np.ndarray, first: int) -> pa.Table:
        return pa.table(
            {
                "user_id": pa.DictionaryArray.from_arrays(user[events], user_ids),
                "item_id": pa.DictionaryArray.from_arrays(item[events], item_ids),
                "timestamp_ms": time[events],
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
