"""What the later steps need to know of the events parts, and of their items as integers.

A user is in one part only, so counts per user are local to a part. Counts per item are added up across parts: a part
gives those of its own items alone, and the driver holds one id and one count per item.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from models.storage.tables import UserError, read_parquet
from pipelines.data.engine import Engine

DAY, HOUR = 86_400_000, 3_600_000  # ms
GRAINS = (DAY, 1000)  # of times, in ms, coarsest first


@dataclass(frozen=True)
class Vocabulary:
    """Ids and their integers. In Ray's object store one copy serves all tasks of a node."""

    ids: pa.Array
    """(V,) large strings, sorted, each once."""
    index: np.ndarray | None = None
    """(V,) int32 the integer of each; None where it is its place."""

    @classmethod
    def of(cls, ids: pa.Array) -> Vocabulary:
        """Of ids, each once, whose places are their integers."""
        ids = ids.cast(pa.large_string())
        if pl.Series(pl.from_arrow(ids)).is_sorted():
            return cls(ids)
        order = pc.sort_indices(ids)
        return cls(ids.take(order), order.to_numpy().astype(np.int32))

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, ids: pa.Array) -> np.ndarray:
        """(n,) int32: the place of each id, -1 where it is null or not there."""
        if not len(self) or not len(ids):
            return np.full(len(ids), -1, dtype=np.int32)
        known, ids = (
            pl.Series(pl.from_arrow(each.cast(pa.large_string())))
            for each in (self.ids, ids)
        )
        at = np.minimum(known.search_sorted(ids).to_numpy(), len(known) - 1)
        same = (known.gather(at) == ids).fill_null(False).to_numpy()
        return np.where(same, at if self.index is None else self.index[at], -1).astype(
            np.int32
        )

    def at(self, integers: np.ndarray) -> pa.Array:
        """(n,) the ids of integers."""
        if self.index is not None:
            place = np.empty(len(self), dtype=np.int64)
            place[self.index] = np.arange(len(self))
            integers = place[integers]
        return self.ids.take(pa.array(integers))


@dataclass(frozen=True)
class PartSurvey:
    """What one events part tells of its behaviours."""

    rows: int
    items: pa.Array
    """(N,) ids of its items."""
    counts: np.ndarray
    """(N,) behaviours on each."""
    rests: np.ndarray
    """(2 * GRAINS,) the least and largest remainder of the times by each of GRAINS; empty without behaviours."""
    ends: np.ndarray
    """(2,) the first and the last time."""
    hours: np.ndarray
    """(H,) hours that have behaviours, as their first ms."""
    of_hours: np.ndarray
    """(H,) behaviours in each."""

    def as_row(self) -> dict[str, pa.Array]:
        """As columns of one row."""
        return {"behaviours": pa.array([self.rows])} | {
            name: pa.LargeListArray.from_arrays(
                pa.array([0, len(values)], pa.int64()), pa.array(values)
            )
            for name, values in vars(self).items()
            if name != "rows"
        }

    @classmethod
    def from_row(cls, row: pa.Table) -> PartSurvey:
        """Of the columns of `as_row`."""
        items, *others = (
            row[field.name].combine_chunks().flatten() for field in fields(cls)[1:]
        )
        return cls(
            row["behaviours"][0].as_py(),
            items,
            *(column.to_numpy() for column in others),
        )


@dataclass(frozen=True)
class Survey:
    """All parts of an events table, seen through one choice of behaviours."""

    parts: list[str]
    """Their URIs."""
    behaviour: str | None
    """The label of the events that are behaviours; None where all are."""
    late: bool
    """Whether events say when that label is known."""
    items: pa.Array
    """Ids of all items that have a behaviour, sorted."""
    counts: np.ndarray
    """(N,) behaviours on each of them."""
    users: int
    """Users with an event of any kind."""
    behaviours: int
    """Rows that count as behaviours."""
    first_ms: int
    """Smallest timestamp of a behaviour."""
    last_ms: int
    """Largest timestamp of a behaviour."""
    grain_ms: int
    """The coarsest of a day, a second and a millisecond that all times of behaviours are apart by multiples of."""
    hours: dict[int, int]
    """By the first ms of an hour the behaviours in it, ascending."""


def id_hashes(ids: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """(n,) uint64 hashes of ids, the same in every process."""
    return pl.Series(pl.from_arrow(ids)).hash(seed=0).to_numpy()


def user_keys(users: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """63-bit hashes of the user ids, the same in every process."""
    return (id_hashes(users) >> np.uint64(1)).astype(np.int64)


def read_coded(
    uri: str,
    columns: list[str] | None = None,
    ids: tuple[str, ...] = ("user_id", "item_id"),
) -> pa.Table:
    """An events part with the ids dictionary-coded, each column in one chunk."""
    table = read_parquet(uri, columns, dictionary=ids)
    return table.unify_dictionaries().combine_chunks()


def coded(table: pa.Table, name: str) -> pa.DictionaryArray:
    """The dictionary array of a column of `read_coded`."""
    return (
        table[name].combine_chunks()
        if table[name].num_chunks != 1
        else table[name].chunk(0)
    )


def positions_in(values: pa.DictionaryArray, vocabulary: Vocabulary) -> np.ndarray:
    """(E,) int32: the place of each value in the vocabulary, -1 where it is null or not there."""
    place = vocabulary.positions(values.dictionary)
    index = pc.fill_null(values.indices.cast(pa.int64()), -1).to_numpy()
    return np.append(place, np.int32(-1))[index].astype(
        np.int32
    )  # index -1 is the appended one


def distinct(values: np.ndarray) -> np.ndarray:
    """Each of (n,) integers once, sorted; np.unique hashes them since NumPy 2.3, which takes 7 to 45 times as long."""
    return pl.Series(values).unique().sort().to_numpy()


def count_pairs(users: np.ndarray, items: np.ndarray) -> int:
    """Distinct pairs of (rows,) codes of users and items; parts have no user in common, so theirs add up."""
    return pl.Series(users.astype(np.int64) << 32 | items).n_unique()


def runs(codes: np.ndarray) -> np.ndarray:
    """First index of each run of equal values. codes (E,) -> (runs,)"""
    if not len(codes):
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([[0], np.flatnonzero(codes[1:] != codes[:-1]) + 1])


def behaviour_column(behaviour: str | None) -> list[str]:
    """The label column that says which events are behaviours, if not all are."""
    return [f"label_{behaviour}"] if behaviour else []


def known_column(behaviour: str | None, late: bool) -> list[str]:
    """The column that says from when on the label is known, where events have it."""
    return [f"known_{behaviour}"] if behaviour and late else []


def known_times(table: pa.Table, behaviour: str | None) -> np.ndarray:
    """(E,) from when on each event is known as a behaviour: its label's own time where events have one."""
    time = table["timestamp_ms"]
    if behaviour and f"known_{behaviour}" in table.column_names:
        time = pc.coalesce(table[f"known_{behaviour}"], time)
    return time.to_numpy()


def counted_before(
    user: np.ndarray, known: np.ndarray, who: np.ndarray, time: np.ndarray
) -> np.ndarray:
    """(R,) how many of the (N,) behaviours of `user`, known from `known` on, are of `who` and known strictly before
    `time`. user (N,) never falls."""
    line = np.lexsort(
        (
            np.repeat([1, 0], [len(user), len(who)]),
            np.concatenate([known, time]),
            np.concatenate([user, who]),
        )
    )
    above, place = np.cumsum(line < len(user)), np.empty(len(line), dtype=np.int64)
    place[line] = above
    return place[len(user) :] - np.searchsorted(user, who)


def seen_in(table: pa.Table, behaviour: str | None) -> PartSurvey:
    """What one of the events parts (ids dictionary-coded) tells of its behaviours."""
    if behaviour:
        table = table.filter(
            pc.fill_null(table[f"label_{behaviour}"], False)
        ).combine_chunks()
    if not table.num_rows:
        return PartSurvey(
            0, pa.array([], pa.large_string()), *[np.zeros(0, np.int64)] * 5
        )
    item, time = coded(table, "item_id"), table["timestamp_ms"].to_numpy()
    counts = np.bincount(item.indices.to_numpy(), minlength=len(item.dictionary))
    used = counts > 0  # a filter leaves unused values
    hours = pl.Series(time // HOUR * HOUR).value_counts(name="rows")
    return PartSurvey(
        rows=len(time),
        items=item.dictionary.filter(pa.array(used)).cast(pa.large_string()),
        counts=counts[used],
        rests=np.array(
            [
                end
                for rest in (time % grain for grain in GRAINS)
                for end in (rest.min(), rest.max())
            ]
        ),
        ends=np.array([time.min(), time.max()]),
        hours=hours.to_series(0).to_numpy(),
        of_hours=hours["rows"].to_numpy().astype(np.int64),
    )


def _survey_part(behaviour: str | None, uri: str) -> tuple[PartSurvey, int]:
    table = read_coded(
        uri, ["user_id", "item_id", "timestamp_ms", *behaviour_column(behaviour)]
    )
    return seen_in(table, behaviour), len(coded(table, "user_id").dictionary)


def survey(
    parts: list[str], behaviour: str | None, engine: Engine, late: bool = False
) -> Survey:
    """Reads the parts once; late: whether they say when the behaviour's label is known. UserError if there is no
    behaviour at all."""
    whole = Surveyor(behaviour, late)
    whole.read(parts, engine)
    return whole.survey()


class Surveyor:
    """Parts as they come to be seen: of their items it keeps the union alone."""

    def __init__(self, behaviour: str | None, late: bool) -> None:
        self.behaviour, self.late = behaviour, late
        self.parts: list[str] = []
        self.hours: Counter[int] = Counter()
        self.ends: list[int] = []
        self.rests: list[set[int]] = [set() for _ in GRAINS]
        self.users = 0
        self.items = Union()

    def add(self, uri: str, seen: PartSurvey, users: int) -> None:
        """A part, what was seen in it, and how many users it has."""
        self.parts.append(uri)
        self.users += users
        if seen.rows:
            self.hours.update(
                dict(zip(seen.hours.tolist(), seen.of_hours.tolist(), strict=True))
            )
            self.ends += seen.ends.tolist()
            self.items.add(seen.items, seen.counts)
            for rests, of_part in zip(
                self.rests, seen.rests.reshape(-1, 2).tolist(), strict=True
            ):
                rests.update(of_part)

    def read(self, parts: list[str], engine: Engine) -> None:
        """Adds parts that are there."""
        for number, (seen, users) in engine.each(
            _survey_part, [(uri,) for uri in parts], (self.behaviour,)
        ):
            self.add(parts[number], seen, users)

    def survey(self) -> Survey:
        """Of all parts. UserError if there is no behaviour at all."""
        if not self.ends:
            raise UserError(
                f"no event has label '{self.behaviour}' set, so there are no behaviours; choose another 'behaviour' "
                f"or leave it out to take every event"
            )
        items, counts = self.items.sorted()
        return Survey(
            parts=sorted(self.parts),
            behaviour=self.behaviour,
            late=self.late,
            items=items,
            counts=counts,
            users=self.users,
            behaviours=self.hours.total(),
            first_ms=min(self.ends),
            last_ms=max(self.ends),
            grain_ms=next(
                (
                    grain
                    for grain, rest in zip(GRAINS, self.rests, strict=True)
                    if len(rest) == 1
                ),
                1,
            ),
            hours=dict(sorted(self.hours.items())),
        )


class Union:
    """Ids of many parts with the sums of their counts. What is added waits until it is as much as is known, so that
    each id is hashed a few times, whatever the number of parts."""

    def __init__(self) -> None:
        self.known = pl.DataFrame(schema={"id": pl.String, "count": pl.Int64})
        self.waiting: list[pl.DataFrame] = []

    def add(self, ids: pa.Array, counts: np.ndarray | None = None) -> None:
        """Ids, each once, and a count of each, 0 without."""
        counts = (
            np.zeros(len(ids), np.int64) if counts is None else counts.astype(np.int64)
        )
        self.waiting.append(
            pl.DataFrame(
                {"id": pl.Series(pl.from_arrow(ids), dtype=pl.String), "count": counts}
            )
        )
        if sum(map(len, self.waiting)) >= len(self.known):
            self._merge()

    def _merge(self) -> None:
        self.known = (
            pl.concat([self.known, *self.waiting])
            .group_by("id")
            .agg(pl.col("count").sum())
        )
        self.waiting = []

    def sorted(self) -> tuple[pa.Array, np.ndarray]:
        """All ids, sorted, and their counts."""
        self._merge()
        known = self.known.sort("id")
        return known["id"].to_arrow().cast(pa.large_string()), known["count"].to_numpy()
