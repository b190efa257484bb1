"""What simulators share: sizes and seed, clusters of items with texts, times, and how a log is written.

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

from models.storage.tables import UserError, join, open_uri
from models.storage.uri import check_writable, write_file

RECORD = "simulation.json"
VERSION = 1  # of the log that a seed gives
FOLLOWERS = 3  # items that follow an item
TASTES = 3  # clusters of a user
SKEW = 2.0  # items are drawn by rank n * u**SKEW, u uniform: above 1, low ranks are more popular
START_MS = 1_704_067_200_000  # 1 January 2024, UTC
SPAN_MS = 90 * 86_400_000  # length of the log
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
    """Files of equally many events, in the order of time, such as 14 days; more of a large log."""

    unit: ClassVar[str] = "events"
    """What `events` counts."""

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
        """What is said of the causes, after the sizes."""
        return ""


@dataclass(frozen=True)
class World:
    """The causes: what a model can learn at most. K clusters, N items, U users."""

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
    """Draws the causes."""
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
    """(U,) events per user: long-tailed, descending, of the exact sum, at least 5 where there are so many."""
    least = min(5, settings.events // settings.users)
    weight = rng.lognormal(0.0, 0.8, settings.users)
    rest = rng.multinomial(
        settings.events - least * settings.users, weight / weight.sum()
    )
    return -np.sort(-(least + rest))


def draw_times(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(E,) milliseconds, strictly increasing per user: bursts within a stretch of the log's span."""
    total = int(lengths.sum())
    first = np.cumsum(lengths) - lengths
    passed = np.cumsum(
        rng.lognormal(0.0, 2.0, total)
    )  # heavy-tailed gaps: sessions, then days of nothing
    base = np.repeat(passed[first], lengths)
    stretch = np.repeat(passed[first + lengths - 1], lengths) - base
    share = (passed - base) / np.maximum(stretch, 1e-9)
    start = rng.random(len(lengths)) * 0.7
    length = (1 - start) * rng.uniform(0.2, 1.0, len(lengths))
    moment = np.repeat(start, lengths) + share * np.repeat(length, lengths)
    place = np.arange(total) - np.repeat(first, lengths)
    return START_MS + (moment * SPAN_MS).astype(np.int64) + place


def numbered(prefix: str, count: int) -> pa.Array:
    """Ids: the prefix and a number of fixed width, from 0."""
    width = len(str(count - 1))
    return (
        pl.int_range(count, eager=True)
        .cast(pl.String)
        .str.zfill(width)
        .rename("n")
        .to_frame()
        .select(pl.concat_str(pl.lit(prefix), "n"))
        .to_series()
        .to_arrow()
        .cast(pa.string())
    )


def item_texts(world: World, ids: pa.Array, rng: np.random.Generator) -> pa.Table:
    """Titles and descriptions of the words of each item's cluster, with a maker and a model number."""
    count, clusters = len(world.cluster), len(world.starts) - 1
    noun = np.arange(clusters) % len(NOUNS)
    style = (np.arange(clusters) // len(NOUNS) + np.arange(clusters)) % len(STYLES)
    makers = rng.integers(0, len(MAKERS), (clusters, 3))  # a cluster's three makers
    traits = np.array([rng.permutation(len(TRAITS))[:6] for _ in range(clusters)])
    own = world.cluster
    picked = np.argsort(rng.random((count, 6)), axis=1)[
        :, :3
    ]  # three of the cluster's six traits

    def words(vocabulary: list[str], index: np.ndarray) -> pl.Series:
        return pl.Series(vocabulary).gather(index)

    trait = [words(TRAITS, traits[own, picked[:, i]]) for i in range(3)]
    frame = pl.DataFrame(
        {
            "item_id": pl.Series(ids),
            "brand": words(MAKERS, makers[own, rng.integers(0, 3, count)]),
            "style": words(STYLES, style[own]),
            "noun": words(NOUNS, noun[own]),
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
    """One file of a raw log."""
    filesystem, path = open_uri(uri)
    with filesystem.open_output_stream(path) as stream:
        pq.write_table(
            table, stream, compression="zstd", compression_level=1, store_schema=False
        )


def is_simulated(output_dir: str, settings: Settings, kind: str = "retrieval") -> bool:
    """Whether the folder holds the finished log of these settings."""
    filesystem, path = open_uri(join(output_dir, RECORD))
    if filesystem.get_file_info(path).type != fs.FileType.File:
        return False
    with filesystem.open_input_stream(path) as stream:
        return bool(stream.read().decode() == record(settings, kind))


def record(settings: Settings, kind: str) -> str:
    """What `simulation.json` holds: the settings that give this log again."""
    return json.dumps(
        {"simulated": kind, "version": VERSION, **asdict(settings)},
        indent=2,
        sort_keys=True,
    )


def clear(output_dir: str) -> None:
    """Removes an earlier simulated log; UserError if the folder holds other things."""
    filesystem, root = open_uri(output_dir)
    entries = filesystem.get_file_info(fs.FileSelector(root))
    ours = [
        e
        for e in entries
        if e.base_name in (RECORD, "items.parquet") or e.base_name.startswith("events-")
    ]
    if len(ours) < len(entries):
        other = next(e.base_name for e in entries if e not in ours)
        raise UserError(
            f"{output_dir} holds '{other}', which is no simulated log; choose a new or empty folder"
        )
    for entry in sorted(
        ours, key=lambda e: e.base_name != RECORD
    ):  # the record first: what is left is unfinished
        filesystem.delete_file(entry.path)


def open_log(output_dir: str) -> None:
    """Makes an empty folder, a local path or URI. UserError for one that holds other files or cannot be written."""
    check_writable(output_dir)
    filesystem, root = open_uri(output_dir)
    filesystem.create_dir(root, recursive=True)
    clear(output_dir)


def write_log(
    output_dir: str,
    kind: str,
    settings: Settings,
    time: np.ndarray,
    rows_of: Callable[[np.ndarray, int], pa.Table],
    items: Callable[[], pa.Table],
    width: int = 1,
) -> None:
    """Writes `events-*.parquet` in the order of time, `items.parquet` and, last, the record of the settings.

    time (E,) ms of what was drawn; `rows_of(which, first)` are the rows of some of it, the first-th in time and on;
    width: rows that each of it gives.
    """
    order = np.argsort(time, kind="stable")
    per_file = min(max(1, ROWS_PER_FILE // width), -(-len(order) // settings.files))
    for number, first in enumerate(range(0, len(order), per_file)):
        table = rows_of(order[first : first + per_file], first)
        write_parquet(join(output_dir, f"events-{number:05d}.parquet"), table)
    write_parquet(join(output_dir, "items.parquet"), items())
    write_file(join(output_dir, RECORD), record(settings, kind).encode())
