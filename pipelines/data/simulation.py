"""Parts that all simulators of logs share: settings, item texts, times and writing.

Results on a simulated log are always labelled as simulated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from models.ragged import lengths_to_starts
from models.storage.tables import UserError, join, open_uri
from models.storage.uri import check_writable, write_file

RECORD = "simulation.json"
"""Name of the file with the settings of a simulated log, which is written last."""

VERSION = 1
"""Version of the simulators; raised when a seed gives another log."""

NEXT_ITEMS = 3
"""Number of items that are likely to follow an item."""

CLUSTERS_PER_USER = 3
"""Number of clusters that a user likes."""

POPULARITY_SKEW = 2.0
"""Exponent of the popularity of items: of n items, the one at index n * u**skew is
drawn, u uniform, so that values above 1 favour low indices."""

START_MS = 1_704_067_200_000
"""Start of simulated logs in epoch ms: 1 January 2024, UTC."""

SPAN_MS = 90 * 86_400_000
"""Length of simulated logs in ms."""

ROWS_PER_FILE = 1 << 20

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


@dataclass(frozen=True)
class Settings:
    """Size and seed of a simulated log."""

    users: int = 1500
    """Number of users, each with at least one event or search."""
    items: int = 400
    """Number of items in the catalogue; rare items may have no event."""
    events: int = 15_000
    """Exact number of events or searches."""
    seed: int = 42
    """Seed; the same seed and sizes give the same log, byte for byte."""
    files: int = field(default=1, kw_only=True)
    """Minimum number of files with equally many events, in the order of time; a large
    log has more files."""

    unit: ClassVar[str] = "events"
    """Plural noun for what `events` counts."""

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ValueError(
                f"users is {self.users}, but must be at least 1; use a positive number"
            )
        if self.items < 8:
            raise ValueError(
                f"items is {self.items}, but must be at least 8 to form clusters; use "
                f"a larger catalogue"
            )
        if self.events < self.users:
            raise ValueError(
                f"events is {self.events} for {self.users} users; use at least one "
                f"event per user"
            )
        if not 1 <= self.files <= self.events:
            raise ValueError(
                f"files is {self.files}; use 1 to {self.events}, the number of events"
            )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; use 0 or more")

    def describe(self) -> str:
        """Return the text that `jobs.simulate` prints after the sizes of the log."""
        return ""


@dataclass(frozen=True)
class World:
    """Ground truth of a simulated log: K clusters, N items, U users."""

    cluster: np.ndarray
    """(N,) cluster of each item."""
    members: np.ndarray
    """(N,) items grouped by cluster, popular items first."""
    starts: np.ndarray
    """(K + 1,) offset of each cluster's first item in `members`."""
    following_cluster: np.ndarray
    """(K,) cluster that follows each cluster, in one cycle through all clusters."""
    following: np.ndarray
    """(N, NEXT_ITEMS) items that follow each item, the likeliest first."""
    tastes: np.ndarray
    """(U, CLUSTERS_PER_USER) clusters that each user likes."""


def make_world(settings: Settings) -> World:
    """Draw clusters of items, successors of items and tastes of users."""
    rng = np.random.default_rng([settings.seed, 1])
    clusters = int(np.clip(np.sqrt(settings.items), 4, len(NOUNS) * len(STYLES)))
    members = rng.permutation(settings.items).astype(np.int32)
    starts = np.arange(clusters + 1) * settings.items // clusters
    cluster = np.empty(settings.items, dtype=np.int32)
    cluster[members] = np.repeat(np.arange(clusters), np.diff(starts))
    cycle = rng.permutation(clusters)
    following_cluster = np.empty(clusters, dtype=np.int32)
    following_cluster[cycle] = np.roll(cycle, -1)
    # (N, 1) next cluster of each item, and (N, NEXT_ITEMS) offsets of items in it
    next_cluster = following_cluster[cluster][:, None]
    sizes = np.diff(starts)
    uniform = rng.random((settings.items, NEXT_ITEMS))
    offset = (uniform * sizes[next_cluster]).astype(np.int64)
    following = members[starts[next_cluster] + offset]
    # the exponent makes some clusters more popular than others
    uniform = rng.random((settings.users, CLUSTERS_PER_USER))
    tastes = (clusters * uniform**1.5).astype(np.int32)
    return World(cluster, members, starts, following_cluster, following, tastes)


def draw_lengths(settings: Settings, rng: np.random.Generator) -> np.ndarray:
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


def draw_times(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw the times of events: sessions within a part of the log's span.

    Args:
        lengths: (U,) number of events of each user.
        rng: Random generator.

    Returns:
        (E,) epoch ms of the events, grouped by user and strictly increasing per user.
    """
    total = int(lengths.sum())
    first = lengths_to_starts(lengths)
    # heavy-tailed gaps: sessions, then days without an event
    elapsed = np.cumsum(rng.lognormal(0.0, 2.0, total))
    begin = np.repeat(elapsed[first], lengths)
    duration = np.repeat(elapsed[first + lengths - 1], lengths) - begin
    share = (elapsed - begin) / np.maximum(duration, 1e-9)
    start = rng.random(len(lengths)) * 0.7
    length = (1 - start) * rng.uniform(0.2, 1.0, len(lengths))
    relative_time = np.repeat(start, lengths) + share * np.repeat(length, lengths)
    index = np.arange(total) - np.repeat(first, lengths)  # within the user
    return START_MS + (relative_time * SPAN_MS).astype(np.int64) + index


def make_ids(prefix: str, count: int) -> pa.Array:
    """Return (count,) ids: the prefix and a number from 0, padded to a fixed width."""
    numbers = pl.int_range(count, eager=True).cast(pl.String)
    ids = prefix + numbers.str.zfill(len(str(count - 1)))
    return ids.to_arrow().cast(pa.string())


def item_texts(world: World, ids: pa.Array, rng: np.random.Generator) -> pa.Table:
    """Return titles, brands and descriptions made of the words of each item's cluster.

    Args:
        world: Clusters of the items.
        ids: (N,) ids of the items.
        rng: Random generator.

    Returns:
        Table with the columns item_id, title, brand and description.
    """
    count, clusters = len(world.cluster), len(world.starts) - 1
    noun = np.arange(clusters) % len(NOUNS)
    style = (np.arange(clusters) // len(NOUNS) + np.arange(clusters)) % len(STYLES)
    # (K, 3) makers and (K, 6) traits of each cluster
    makers = rng.integers(0, len(MAKERS), (clusters, 3))
    traits = np.array([rng.permutation(len(TRAITS))[:6] for _ in range(clusters)])
    cluster = world.cluster
    # (N, 3) three of the six traits for each item
    chosen = np.argsort(rng.random((count, 6)), axis=1)[:, :3]

    def words(vocabulary: list[str], index: np.ndarray) -> pl.Series:
        return pl.Series(vocabulary).gather(index)

    trait = [words(TRAITS, traits[cluster, chosen[:, i]]) for i in range(3)]
    frame = pl.DataFrame(
        {
            "item_id": pl.Series(ids),
            "brand": words(MAKERS, makers[cluster, rng.integers(0, 3, count)]),
            "style": words(STYLES, style[cluster]),
            "noun": words(NOUNS, noun[cluster]),
            "a": trait[0],
            "b": trait[1],
            "c": trait[2],
            "model": pl.Series(rng.integers(100, 1000, count)),
        }
    )
    texts = frame.select(
        "item_id",
        pl.format(
            "{} {} {} {}, {}",
            "brand",
            pl.col("style").str.to_titlecase(),
            "noun",
            "model",
            "a",
        ).alias("title"),
        "brand",
        pl.format(
            "{} {} {}, {}, made by {}.",
            pl.col("b").str.to_titlecase(),
            "style",
            "noun",
            "c",
            "brand",
        ).alias("description"),
    )
    return texts.to_arrow().cast(
        pa.schema([(name, pa.string()) for name in texts.columns])
    )


def write_parquet(uri: str, table: pa.Table) -> None:
    """Write a table as a Parquet file of a raw log."""
    filesystem, path = open_uri(uri)
    with filesystem.open_output_stream(path) as stream:
        pq.write_table(
            table, stream, compression="zstd", compression_level=1, store_schema=False
        )


def is_simulated(output_dir: str, settings: Settings, kind: str = "retrieval") -> bool:
    """Return whether the folder holds the finished log of these settings.

    Args:
        output_dir: Folder of the log.
        settings: Settings of the log.
        kind: Name of the simulator, as in `jobs.simulate --kind`.
    """
    filesystem, path = open_uri(join(output_dir, RECORD))
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return False
    with filesystem.open_input_stream(path) as stream:
        return bool(stream.read().decode() == to_record(settings, kind))


def to_record(settings: Settings, kind: str) -> str:
    """Return the content of `simulation.json`: the settings that reproduce the log."""
    return json.dumps(
        {"simulated": kind, "version": VERSION, **asdict(settings)},
        indent=2,
        sort_keys=True,
    )


def clear_log(output_dir: str) -> None:
    """Remove an earlier simulated log.

    Raises:
        UserError: if the folder holds other files.
    """
    filesystem, root = open_uri(output_dir)
    entries = filesystem.get_file_info(fs.FileSelector(root))
    for entry in entries:
        name = entry.base_name
        if name not in (RECORD, "items.parquet") and not name.startswith("events-"):
            raise UserError(
                f"{output_dir} holds '{name}', which is not a file of a simulated log; "
                f"choose a new or empty folder"
            )
    # Without the record, which is removed first, the other files are an unfinished log.
    for entry in sorted(entries, key=lambda entry: entry.base_name != RECORD):
        filesystem.delete_file(entry.path)


def create_log_folder(output_dir: str) -> None:
    """Create an empty folder for a log, at a local path or URI.

    Raises:
        UserError: if the folder holds other files or cannot be written.
    """
    check_writable(output_dir)
    filesystem, root = open_uri(output_dir)
    filesystem.create_dir(root, recursive=True)
    clear_log(output_dir)


def write_log(
    output_dir: str,
    kind: str,
    settings: Settings,
    time: np.ndarray,
    make_rows: Callable[[np.ndarray, int], pa.Table],
    make_items: Callable[[], pa.Table],
    width: int = 1,
) -> None:
    """Write `events-*.parquet` in the order of time, `items.parquet`, and the settings.

    Args:
        output_dir: Folder of the log.
        kind: Name of the simulator, as in `jobs.simulate --kind`.
        settings: Settings of the log.
        time: (E,) epoch ms of each event or search.
        make_rows: Returns the rows of a file, given the indices of its events or
            searches and the rank in time of the first one.
        make_items: Returns the rows of the item file.
        width: Number of rows of each event or search.
    """
    order = np.argsort(time, kind="stable")
    max_per_file = max(1, ROWS_PER_FILE // width)
    per_file = min(max_per_file, math.ceil(len(order) / settings.files))
    for file_index, first in enumerate(range(0, len(order), per_file)):
        table = make_rows(order[first : first + per_file], first)
        write_parquet(join(output_dir, f"events-{file_index:05d}.parquet"), table)
    write_parquet(join(output_dir, "items.parquet"), make_items())
    write_file(join(output_dir, RECORD), to_record(settings, kind).encode())
