"""The catalogue: which items stay after the iterative k-core, without any table of users on the driver."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from models.tables import UserError
from pipelines.data.survey import Arrays, Survey
from pipelines.data.tasks import run_tasks


def surviving_rows(
    item: np.ndarray, alive: np.ndarray, user_start: np.ndarray, counted: np.ndarray | None, core: int
) -> np.ndarray:
    """Rows that belong to the core: of a living item and of a user who has `core` such rows.

    item (E,) index into alive (N,); user_start (V,) first row of each user; counted (E,) rows within the
    window that membership is computed on, or None for all. Returns (E,) bool.
    """
    if not len(item):
        return np.zeros(0, dtype=bool)
    rows = alive[item]
    if counted is not None:
        rows &= counted
    per_user = np.add.reduceat(rows, user_start, dtype=np.int64)
    lengths = np.diff(np.append(user_start, len(item)))
    rows &= np.repeat(per_user >= core, lengths)
    return rows


def _events_of(arrays: Arrays, mapping: np.ndarray, items: int) -> np.ndarray:
    return np.bincount(mapping[arrays["item"]], minlength=items)


def events_of(survey: Survey, catalogue: pa.Array) -> np.ndarray:
    """(catalogue,) behaviours on each item of the catalogue."""
    calls = [
        (arrays, mapping, len(survey.items)) for arrays, mapping in zip(survey.arrays, survey.mappings, strict=True)
    ]
    counts = np.zeros(len(survey.items), dtype=np.int64)
    for _, partial in run_tasks(_events_of, calls):
        counts += partial
    return counts[pc.is_in(survey.items, catalogue).to_numpy(zero_copy_only=False)]  # both are sorted


def _count(arrays: Arrays, mapping: np.ndarray, alive: np.ndarray, core: int, before_ms: int | None) -> np.ndarray:
    item = mapping[arrays["item"]]
    counted = None if before_ms is None else arrays["known"] < before_ms
    rows = surviving_rows(item, alive, arrays["user_start"], counted, core)
    return np.bincount(item[rows], minlength=len(alive))


def core_items(survey: Survey, core: int, before_ms: int | None) -> tuple[pa.Array, int]:
    """Ids of the items in the k-core, sorted, and the number of rounds it took.

    Repeats until nothing changes: users with fewer than `core` behaviours on living items drop out, then
    items with fewer than `core` behaviours by the users that stay. `before_ms` counts only behaviours
    known earlier than that (membership on the training window). The driver holds one count per item.
    """
    core = max(core, 1)
    if core == 1 and before_ms is None:
        return survey.items, 0
    alive = np.ones(len(survey.items), dtype=bool)
    rounds = 0
    while True:
        shared = ray.put(alive)
        calls = [
            (arrays, mapping, shared, core, before_ms)
            for arrays, mapping in zip(survey.arrays, survey.mappings, strict=True)
        ]
        counts = np.zeros(len(alive), dtype=np.int64)
        for _, partial in run_tasks(_count, calls):
            counts += partial
        rounds += 1
        left = counts >= core
        if not left.any():
            raise UserError(
                f"no item is left in the {core}-core of {survey.behaviours:,} behaviours; set a lower --core"
            )
        if (left == alive).all():
            return survey.items.filter(pa.array(alive)), rounds
        alive = left
