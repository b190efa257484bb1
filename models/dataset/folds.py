"""Folds of a table that is split by time: test windows with their training windows.

    fold = resolve_fold(manifest.info, None, "tables/sequences")  # the last fold
    split = assign_fold(manifest.info["split"], fold, columns["request_time"])

The column `split` of the table is the split of the last fold. The manifest has the
times that delimit all folds, oldest first, as `info["split"]["folds"]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.storage.tables import UserError

NO_SPLIT = -1
"""Split index of a request after the test window of the fold."""


def count_folds(info: Mapping[str, Any]) -> int:
    """Return the number of folds of a table, given the `info` of its manifest."""
    return len(info.get("split", {}).get("folds", ()))


def resolve_fold(info: Mapping[str, Any], fold: int | None, uri: str) -> int | None:
    """Return the number of the fold to use, from 1; None for a table without folds.

    Args:
        info: `info` of the manifest of sequences.
        fold: Number of the requested fold; None for the last fold.
        uri: Folder of the table, for messages.

    Raises:
        UserError: If the table does not have the fold.
    """
    folds = count_folds(info)
    if fold is None:
        return folds or None
    if not folds:
        raise UserError(
            f"fit.fold is {fold}, but {uri} has no folds; make the tables with "
            "--split.folds, or leave fit.fold out"
        )
    if not 1 <= fold <= folds:
        raise UserError(
            f"fit.fold is {fold}, but {uri} has {folds} folds; choose fit.fold from 1 "
            f"to {folds}"
        )
    return fold


def find_train_end(info: Mapping[str, Any], fold: int | None) -> int | None:
    """Return the end of the training window in ms, or None without a split by time.

    The training window ends where the validation window starts.

    Args:
        info: `info` of the manifest of sequences.
        fold: Number of the fold, from 1; None for a table without folds.
    """
    split = info.get("split", {})
    if fold is not None:
        split = split["folds"][fold - 1]
    end = split.get("val_start_ms")
    return None if end is None else int(end)


def describe_windows(info: Mapping[str, Any], fold: int | None) -> dict[str, int]:
    """Return the number of folds, and the start of a fold's windows in ms, by name.

    Args:
        info: `info` of the manifest of sequences.
        fold: Number of the fold, from 1; None for a table without folds, for which the
            result is empty.
    """
    if fold is None:
        return {}
    window = info["split"]["folds"][fold - 1]
    starts = {name: window[name] for name in ("val_start_ms", "test_start_ms")}
    return {"folds": count_folds(info), **starts}


def assign_fold(
    split: Mapping[str, Any], fold: int, time: NDArray[np.int64]
) -> NDArray[np.int8]:
    """Assign the requests of a table to the splits of one fold.

    Args:
        split: Description of the split in the manifest.
        fold: Number of the fold, from 1.
        time: (R,) time of each request in ms.

    Returns:
        (R,) index into `SPLITS` of each request, or `NO_SPLIT` after the test window.
    """
    window = split["folds"][fold - 1]
    index = np.digitize(time, [window["val_start_ms"], window["test_start_ms"]])
    if fold < len(split["folds"]):
        index = np.where(time < window["test_end_ms"], index, NO_SPLIT)
    return index.astype(np.int8)
