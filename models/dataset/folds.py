"""Folds of a table that is split by time: several test windows, each with its own training window.

    number = resolve_fold(manifest.info, None, "tables/sequences")  # the last fold
    split = assign_fold(manifest.info["split"], number, columns["request_time"])

The table's column `split` is the split of the last fold. The cut times of the others
are in the manifest, as `info["split"]["folds"]`, oldest first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.storage.tables import UserError

NO_SPLIT = -1
"""Split of a request after the test window of its fold."""


def count_folds(info: Mapping[str, Any]) -> int:
    """Return the number of folds in the `info` of a manifest of sequences; 0 without folds."""
    return len(info.get("split", {}).get("folds", ()))


def resolve_fold(info: Mapping[str, Any], fold: int | None, uri: str) -> int | None:
    """Return the number of a fold, from 1: the last one by default, None without folds.

    Args:
        info: `info` of the manifest of sequences.
        fold: Number of the fold, or None.
        uri: Where the table is, for messages.

    Raises:
        UserError: if the table does not have the fold.
    """
    folds = count_folds(info)
    if fold is None:
        return folds or None
    if not folds:
        raise UserError(
            f"fold {fold} is asked for, and {uri} is not cut into folds; make the tables with --split.folds, or leave "
            f"fit.fold out"
        )
    if not 1 <= fold <= folds:
        raise UserError(
            f"fold {fold} is asked for, and {uri} has {folds} folds; choose fit.fold from 1 to {folds}"
        )
    return fold


def find_train_end(info: Mapping[str, Any], fold: int | None) -> int | None:
    """Return the time in ms before which training requests lie; None if the split is not by time."""
    split = info.get("split", {})
    if fold is not None:
        split = split["folds"][fold - 1]
    end = split.get("val_start_ms")
    return None if end is None else int(end)


def describe_windows(info: Mapping[str, Any], fold: int | None) -> dict[str, int]:
    """Return the number of folds and the starts of a fold's windows in ms; empty without folds."""
    if fold is None:
        return {}
    window = info["split"]["folds"][fold - 1]
    starts = {name: window[name] for name in ("val_start_ms", "test_start_ms")}
    return {"folds": count_folds(info), **starts}


def assign_fold(
    split: Mapping[str, Any], fold: int, time: NDArray[np.int64]
) -> NDArray[np.int8]:
    """Return the index into `SPLITS` of each request in a fold, or `NO_SPLIT` after its test window.

    Args:
        split: The split as manifests record it.
        fold: Number of the fold, from 1.
        time: (R,) ms of each request.
    """
    window = split["folds"][fold - 1]
    code = np.digitize(time, [window["val_start_ms"], window["test_start_ms"]])
    if fold < len(split["folds"]):
        code = np.where(time < window["test_end_ms"], code, NO_SPLIT)
    return code.astype(np.int8)
