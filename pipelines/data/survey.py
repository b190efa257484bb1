"""What the later steps need to know of each events part, as integer arrays in Ray's object store.

A user is in one part only, so counts per user are local to a part, and only counts per item are added
up across parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import ray

from models.tables import UserError, read_parquet
from pipelines.data.shuffle import user_keys
from pipelines.data.tasks import run_all, run_tasks

Arrays = dict[str, Any]
DAY = 86_400_000  # ms
GRAINS = (DAY, 1000)  # of times, in ms, coarsest first


@dataclass(frozen=True)
class Survey:
    """All parts of an events table, seen through one choice of behaviours."""

    arrays: list[ray.ObjectRef]
    """Per part: `user_keys` (U,) sorted; `user_start` (V,) first row of each user with behaviours;
    `item` (E,) index into `items`; `items` the item ids; `timestamp` (E,); `known` (E,) of `known_times`."""
    mappings: list[ray.ObjectRef]
    """Per part: (len(items),) int32, the part's items as indices into `items` below."""
    items: pa.Array
    """Ids of all items that have a behaviour, sorted."""
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


def read_coded(uri: str, columns: list[str] | None = None, ids: tuple[str, ...] = ("user_id", "item_id")) -> pa.Table:
    """An events part with the ids dictionary-coded, each column in one chunk."""
    table = read_parquet(uri, columns, dictionary=ids)
    return table.unify_dictionaries().combine_chunks()


def coded(table: pa.Table, name: str) -> pa.DictionaryArray:
    """The dictionary array of a column of `read_coded`."""
    return table[name].combine_chunks() if table[name].num_chunks != 1 else table[name].chunk(0)


def positions_in(values: pa.DictionaryArray, table: pa.Array) -> np.ndarray:
    """(E,) int32: the place of each value in `table`, -1 where it is null or not there."""
    place = pc.fill_null(pc.index_in(values.dictionary.cast(pa.large_string()), table), -1).to_numpy()
    index = pc.fill_null(values.indices.cast(pa.int64()), -1).to_numpy()
    return np.append(place, -1)[index].astype(np.int32)  # index -1 is the appended one


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


def counted_before(user: np.ndarray, known: np.ndarray, who: np.ndarray, time: np.ndarray) -> np.ndarray:
    """(R,) how many of the (N,) behaviours of `user`, known from `known` on, are of `who` and known strictly before
    `time`. user (N,) never falls."""
    line = np.lexsort(
        (np.repeat([1, 0], [len(user), len(who)]), np.concatenate([known, time]), np.concatenate([user, who]))
    )
    above, place = np.cumsum(line < len(user)), np.empty(len(line), dtype=np.int64)
    place[line] = above
    return place[len(user) :] - np.searchsorted(user, who)


def arrays_of(table: pa.Table, behaviour: str | None) -> tuple[Arrays, int]:
    """The arrays of one events part (sorted, ids dictionary-coded), and its number of users."""
    # Every user of the part counts for the check that none is in two parts, with or without behaviours.
    # Users whose ids share a hash share the part too.
    keys = distinct(user_keys(coded(table, "user_id").dictionary))
    if behaviour:
        table = table.filter(pc.fill_null(table[f"label_{behaviour}"], False)).combine_chunks()
    item = coded(table, "item_id") if table.num_rows else pa.array([], pa.string()).dictionary_encode()
    user = coded(table, "user_id").indices.to_numpy() if table.num_rows else np.zeros(0, dtype=np.int32)
    used = np.bincount(item.indices.to_numpy(), minlength=len(item.dictionary)) > 0  # a filter leaves unused values
    arrays: Arrays = {
        "user_keys": keys,
        "user_start": runs(user),
        "item": (np.cumsum(used, dtype=np.int32) - 1)[item.indices.to_numpy()],
        "items": item.dictionary.filter(pa.array(used)).cast(pa.large_string()),
        "timestamp": table["timestamp_ms"].to_numpy(),
        "known": known_times(table, behaviour),
    }
    return arrays, len(keys)


def _extent(arrays: Arrays) -> tuple[int, int, int, list[set[int]]]:
    """Rows, first and last time, and for each of GRAINS the least and largest remainder of the times."""
    time = arrays["timestamp"]
    if not len(time):
        return 0, 2**63 - 1, -(2**63), [set() for _ in GRAINS]
    left = (time % grain for grain in GRAINS)
    return len(time), int(time.min()), int(time.max()), [{int(rest.min()), int(rest.max())} for rest in left]


def _mapping(arrays: Arrays, items: pa.Array) -> np.ndarray:
    return pc.index_in(arrays["items"], items).to_numpy().astype(np.int32)


def _items(*parts: Arrays) -> pa.Array:
    return pc.unique(pa.concat_arrays([part["items"] for part in parts]))


def _survey_part(uri: str, behaviour: str | None, late: bool) -> tuple[int, Arrays]:
    columns = ["user_id", "item_id", "timestamp_ms", *behaviour_column(behaviour), *known_column(behaviour, late)]
    table = read_coded(uri, columns)
    arrays, users = arrays_of(table, behaviour)
    return users, arrays


def survey(parts: list[str], behaviour: str | None, late: bool = False) -> Survey:
    """Reads the parts once; late: whether they say when the behaviour's label is known. UserError if there is no
    behaviour at all."""
    calls = [(uri, behaviour, late) for uri in parts]
    counted = sorted(run_tasks(_survey_part, calls, num_returns=2), key=itemgetter(0))
    return merge([arrays for _, (_, arrays) in counted], sum(users for _, (users, _) in counted), behaviour)


def merge(arrays: list[ray.ObjectRef], users: int, behaviour: str | None) -> Survey:
    """The survey of parts whose arrays are there. UserError if there is no behaviour at all."""
    extents = run_all(_extent, [(ref,) for ref in arrays])
    behaviours = sum(rows for rows, *_ in extents)
    rests = [set().union(*(of_part[grain] for *_, of_part in extents)) for grain in range(len(GRAINS))]
    if behaviours == 0:
        raise UserError(
            f"no event has label '{behaviour}' set, so there are no behaviours; choose another 'behaviour' or leave "
            f"it out to take every event"
        )
    items = pa.array([], pa.large_string())
    unions = run_all(_items, [tuple(arrays[i : i + 8]) for i in range(0, len(arrays), 8)])
    for union in unions:
        items = pc.unique(pa.concat_arrays([items, union]))
    items = items.take(pc.sort_indices(items))
    shared = ray.put(items)
    map_part = ray.remote(_mapping)
    return Survey(
        arrays=arrays,
        mappings=[map_part.remote(ref, shared) for ref in arrays],
        items=items,
        users=users,
        behaviours=behaviours,
        first_ms=min(first for _, first, _, _ in extents),
        last_ms=max(last for _, _, last, _ in extents),
        grain_ms=next((grain for grain, rest in zip(GRAINS, rests, strict=True) if len(rest) == 1), 1),
    )


USERS_PER_CHECK = 4_000_000


def _key_ranges(arrays: Arrays, edges: list[int]) -> list[np.ndarray]:
    keys = arrays["user_keys"]
    return [keys[low:high] for low, high in pairwise(np.searchsorted(keys, edges))]


def _repeated(*parts: list[np.ndarray] | np.ndarray) -> int:
    keys = np.concatenate([np.ravel(part) for part in parts])
    return len(keys) - pl.Series(keys).n_unique()


def check_users_once(arrays: list[ray.ObjectRef], users: int) -> None:
    """RuntimeError unless each user is in exactly one part. Works on ranges of the hashed ids, so that no
    task holds more than some millions of them."""
    ranges = max(1, -(-users // USERS_PER_CHECK))
    edges = [(2**63 - 1) // ranges * i for i in range(ranges)] + [2**63 - 1]
    cut: Any = ray.remote(num_returns=ranges)(_key_ranges)
    cuts = [cut.remote(part, edges) for part in arrays]  # per part: one reference for each range
    repeated = sum(run_all(_repeated, list(zip(*cuts, strict=True)) if ranges > 1 else [tuple(cuts)]))
    if repeated:
        raise RuntimeError(f"the shuffle put {repeated} users into more than one part of events; nothing was committed")
