"""Shared by the simulators: sizes and seed, clusters of items with texts, times, and the writing of a log.

A result on a simulated log is always labelled simulated. No Ray.
"""

from __future__ import annotations

import json
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
"""File with the settings of a simulated log, which is written last."""

VERSION = 1
"""Version of the log that a seed gives."""

FOLLOWERS = 3
"""Items that follow an item."""

TASTES = 3
"""Clusters of a user."""

SKEW = 2.0
"""Items are drawn by rank n * u**SKEW, u uniform: above 1, low ranks are more
popular."""

START_MS = 1_704_067_200_000
"""Begin of the log: 1 January 2024, UTC."""

SPAN_MS = 90 * 86_400_000
"""Length of the log."""

ROWS_PER_FILE = 1 << 20

# Split from text: eighty words in quotes of their own are harder to read.
NOUNS = """lamp kettle drill notebook backpack headphones blanket skillet keyboard tripod jacket racket puzzle
mirror planter thermos wrench speaker candle charger hammock pillow camera sandal guitar toaster helmet ruler
vase stapler monitor scarf bicycle telescope grinder tent paintbrush mattress microphone watch shelf razor
printer glove violin blender harness compass teapot router ladder brush easel curtain kayak drone anvil
stroller binoculars whistle""".split()  # noqa: SIM905
STYLES = """alpine vintage cordless ceramic bamboo marine velvet titanium organic nordic tactical desert retro
carbon rustic studio compact orbital botanical electric woolen copper coastal urban feather granite magnetic
solar linen thermal""".split()  # noqa: SIM905
TRAITS = """durable washable foldable lightweight waterproof adjustable rechargeable quiet insulated portable
handmade scratchproof breathable reusable wireless heavyduty slim flexible antislip dimmable recycled stackable
polished padded""".split()  # noqa: SIM905
MAKERS = """Arden Bexley Corvia Dunmore Elwood Farrow Glenhart Harrick Ivara Jorvik Kestrel Lunden Marlowe
Norvane Oakridge Penrose Quillon Rowanta Silvern Tamsin""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Settings:
    """Size and seed of a simulated log."""

    users: int = 1500
    """Users, each with at least one event or search."""
    items: int = 400
    """Items of the catalogue; rare ones may have no event."""
    events: int = 15_000
    """Events or searches, exactly."""
    seed: int = 42
    """The same seed and sizes give the same log, byte for byte."""
    files: int = field(default=1, kw_only=True)
    """Files of equally many events, in the order of time, such as 14 days; more of a
    large log."""

    unit: ClassVar[str] = "events"
    """Unit of `events`."""

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ValueError(
                f"users is {self.users}, the least is 1; give a positive number"
            )
        if self.items < 8:
            raise ValueError(
                f"items is {self.items}, the least is 8; a catalogue needs some clusters"
            )
        if self.events < self.users:
            raise ValueError(
                f"events is {self.events} for {self.users} users; give at least one event per user"
            )
        if not 1 <= self.files <= self.events:
            raise ValueError(
                f"files is {self.files}; give from 1 to as many as there are events, {self.events}"
            )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; give 0 or more")

    def describe(self) -> str:
        """Return a description of the causes, which follows the sizes."""
        return ""


@dataclass(frozen=True)
class World:
    """Causes of a simulated log. K clusters, N items, U users."""

    cluster: np.ndarray
    """(N,) the cluster of each item."""
    members: np.ndarray
    """(N,) items grouped by cluster, the more popular first."""
    starts: np.ndarray
    """(K + 1,) first of each cluster's members."""
    following_cluster: np.ndarray
    """(K,) the cluster that follows: one cycle through all of them."""
    following: np.ndarray
    """(N, FOLLOWERS) the items that follow each item, the likeliest first."""
    tastes: np.ndarray
    """(U, TASTES) the clusters of each user."""


def make_world(settings: Settings) -> World:
    """Draw the causes."""
    rng = np.random.default_rng([settings.seed, 1])
    clusters = int(np.clip(np.sqrt(settings.items), 4, len(NOUNS) * len(STYLES)))
    members = rng.permutation(settings.items).astype(np.int32)
    starts = np.arange(clusters + 1) * settings.items // clusters
    cluster = np.empty(settings.items, dtype=np.int32)
    cluster[members] = np.repeat(np.arange(clusters), np.diff(starts))
    cycle = rng.permutation(clusters)
    following_cluster = np.empty(clusters, dtype=np.int32)
    following_cluster[cycle] = np.roll(cycle, -1)
    goal = following_cluster[cluster]
    draw = rng.random((settings.items, FOLLOWERS))
    following = members[
        starts[goal, None] + (draw * np.diff(starts)[goal, None]).astype(np.int64)
    ]
    tastes = (clusters * rng.random((settings.users, TASTES)) ** 1.5).astype(
        np.int32
    )  # some clusters are liked more
    return World(cluster, members, starts, following_cluster, following, tastes)


def draw_lengths(settings: Settings, rng: np.random.Generator) -> np.ndarray:
    """Return (U,) events per user: long-tailed, descending, of the exact sum, at least 5 if the log has enough."""
    least = min(5, settings.events // settings.users)
    weight = rng.lognormal(0.0, 0.8, settings.users)
    rest = rng.multinomial(
        settings.events - least * settings.users, weight / weight.sum()
    )
    return -np.sort(-(least + rest))


def draw_times(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return (E,) ms, strictly increasing per user: bursts within a part of the log's span."""
    total = int(lengths.sum())
    first = lengths_to_starts(lengths)
    # heavy-tailed gaps: sessions, then days of nothing
    elapsed = np.cumsum(rng.lognormal(0.0, 2.0, total))
    begin = np.repeat(elapsed[first], lengths)
    duration = np.repeat(elapsed[first + lengths - 1], lengths) - begin
    share = (elapsed - begin) / np.maximum(duration, 1e-9)
    start = rng.random(len(lengths)) * 0.7
    length = (1 - start) * rng.uniform(0.2, 1.0, len(lengths))
    moment = np.repeat(start, lengths) + share * np.repeat(length, lengths)
    number = np.arange(total) - np.repeat(first, lengths)
    return START_MS + (moment * SPAN_MS).astype(np.int64) + number


def make_ids(prefix: str, count: int) -> pa.Array:
    """Return ids of the prefix and a number of fixed width, from 0."""
    numbers = pl.int_range(count, eager=True).cast(pl.String)
    ids = prefix + numbers.str.zfill(len(str(count - 1)))
    return ids.to_arrow().cast(pa.string())


def item_texts(world: World, ids: pa.Array, rng: np.random.Generator) -> pa.Table:
    """Return titles and descriptions of the words of each item's cluster, with a maker and a model number."""
    count, clusters = len(world.cluster), len(world.starts) - 1
    noun = np.arange(clusters) % len(NOUNS)
    style = (np.arange(clusters) // len(NOUNS) + np.arange(clusters)) % len(STYLES)
    makers = rng.integers(0, len(MAKERS), (clusters, 3))  # a cluster's three makers
    traits = np.array([rng.permutation(len(TRAITS))[:6] for _ in range(clusters)])
    cluster = world.cluster
    # three of the cluster's six traits
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
    """Write one file of a raw log."""
    filesystem, path = open_uri(uri)
    with filesystem.open_output_stream(path) as stream:
        pq.write_table(
            table, stream, compression="zstd", compression_level=1, store_schema=False
        )


def is_simulated(output_dir: str, settings: Settings, kind: str = "retrieval") -> bool:
    """Return whether the folder holds the finished log of these settings."""
    filesystem, path = open_uri(join(output_dir, RECORD))
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return False
    with filesystem.open_input_stream(path) as stream:
        return bool(stream.read().decode() == to_record(settings, kind))


def to_record(settings: Settings, kind: str) -> str:
    """Return the content of `simulation.json`: the settings that give this log again."""
    return json.dumps(
        {"simulated": kind, "version": VERSION, **asdict(settings)},
        indent=2,
        sort_keys=True,
    )


def clear_log(output_dir: str) -> None:
    """Remove an earlier simulated log. Raise UserError if the folder holds other files."""
    filesystem, root = open_uri(output_dir)
    entries = filesystem.get_file_info(fs.FileSelector(root))
    for entry in entries:
        name = entry.base_name
        if name not in (RECORD, "items.parquet") and not name.startswith("events-"):
            raise UserError(
                f"{output_dir} holds '{name}', which is no simulated log; choose a new or empty folder"
            )
    # The record goes first: without it the rest is an unfinished log.
    for entry in sorted(entries, key=lambda entry: entry.base_name != RECORD):
        filesystem.delete_file(entry.path)


def open_log(output_dir: str) -> None:
    """Make an empty folder, a local path or URI.

    Raises:
        UserError: for a folder that holds other files or cannot be written.
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
    """Write `events-*.parquet` in the order of time, `items.parquet` and, last, the record of the settings.

    Args:
        output_dir: The folder.
        kind: Name of the kind of log.
        settings: Settings of the log.
        time: (E,) ms of each event or search.
        make_rows: Called with the numbers of events or searches and the rank in time of
            the first one. Returns their rows.
        make_items: Returns the rows of the item file.
        width: Rows of each event or search.
    """
    order = np.argsort(time, kind="stable")
    per_file = min(max(1, ROWS_PER_FILE // width), -(-len(order) // settings.files))
    for number, first in enumerate(range(0, len(order), per_file)):
        table = make_rows(order[first : first + per_file], first)
        write_parquet(join(output_dir, f"events-{number:05d}.parquet"), table)
    write_parquet(join(output_dir, "items.parquet"), make_items())
    write_file(join(output_dir, RECORD), to_record(settings, kind).encode())
