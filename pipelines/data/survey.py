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
import pyarrow.parquet as pq
import ray

from models.tables import UserError, open_uri
from pipelines.data.shuffle import user_keys
from pipelines.data.tasks import run_all, run_tasks

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Survey:
    """All parts of an events table, seen through one choice of behaviours."""

    arrays: list[ray.ObjectRef]
    """Per part: `user_keys` (U,) sorted; `user_start` (V,) first row of each user with behaviours;
    `item` (E,) index into `items`; `items` the item ids; `timestamp` (E,)."""
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


def read_coded(uri: str, columns: list[str] | None = None, ids: tuple[str, ...] = ("user_id", "item_id")) -> pa.Table:
    """An events part with the ids dictionary-coded, each column in one chunk."""
    filesystem, path = open_uri(uri)
    try:
        with filesystem.open_input_file(path) as file:
            table = pq.ParquetFile(file, read_dictionary=list(ids)).read(columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{uri} is not a readable Parquet file ({first}); run again with --overwrite") from error
    return table.unify_dictionaries().combine_chunks()


def coded(table: pa.Table, name: str) -> pa.DictionaryArray:
    """The dictionary array of a column of `read_coded`."""
    return table[name].combine_chunks() if table[name].num_chunks != 1 else table[name].chunk(0)


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
    }
    return arrays, len(keys)


def _extent(arrays: Arrays) -> tuple[int, int, int]:
    time = arrays["timestamp"]
    return (len(time), int(time.min()), int(time.max())) if len(time) else (0, 2**63 - 1, -(2**63))


def _mapping(arrays: Arrays, items: pa.Array) -> np.ndarray:
    return pc.index_in(arrays["items"], items).to_numpy().astype(np.int32)


def _items(*parts: Arrays) -> pa.Array:
    return pc.unique(pa.concat_arrays([part["items"] for part in parts]))


def _survey_part(uri: str, behaviour: str | None) -> tuple[int, Arrays]:
    table = read_coded(uri, ["user_id", "item_id", "timestamp_ms", *behaviour_column(behaviour)])
    arrays, users = arrays_of(table, behaviour)
    return users, arrays


def survey(parts: list[str], behaviour: str | None) -> Survey:
    """Reads the parts once. UserError if there is no behaviour at all."""
    counted = sorted(run_tasks(_survey_part, [(uri, behaviour) for uri in parts], num_returns=2), key=itemgetter(0))
    return merge([arrays for _, (_, arrays) in counted], sum(users for _, (users, _) in counted), behaviour)


def merge(arrays: list[ray.ObjectRef], users: int, behaviour: str | None) -> Survey:
    """The survey of parts whose arrays are there. UserError if there is no behaviour at all."""
    extents = run_all(_extent, [(ref,) for ref in arrays])
    behaviours = sum(rows for rows, _, _ in extents)
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
        first_ms=min(first for _, first, _ in extents),
        last_ms=max(last for _, _, last in extents),
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
