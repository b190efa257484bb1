"""Check the names and ranges that a mapping file gives."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
MAX_NAME_LENGTH = 80
"""Maximum length of a name. MLflow allows 250, and a metric may contain two names."""
METRIC_CUTOFF = re.compile(r"_at_\d+$")
"""Suffix that stands for the @10 of ndcg@10 in the names of MLflow metrics."""
METRIC_WORDS = ("mean",)
"""First parts of metrics that do not belong to a single label."""


def check_range(span: list[float]) -> None:
    """Raise a ValueError unless `span` is [low, high]."""
    if len(span) != 2 or not -math.inf < span[0] < span[1] < math.inf:
        raise ValueError(
            f"range is {span!r}; use the smallest and the largest value, such as "
            f"[0.5, 5]"
        )


def check_names(names: Iterable[Any], key: str) -> None:
    """Raise a ValueError for a name that cannot be part of a column or a metric.

    Args:
        names: Names of labels, features or other keys.
        key: Key of the mapping that has the names.
    """
    for name in names:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"'{name}' in '{key}' is not a valid name; use letters, digits and _, "
                f"beginning with a letter"
            )
        if len(name) > MAX_NAME_LENGTH:
            raise ValueError(
                f"the name '{name[:20]}...' in '{key}' has {len(name)} characters, too "
                f"many for the name of a metric; use at most {MAX_NAME_LENGTH}"
            )
        if METRIC_CUTOFF.search(name):
            raise ValueError(
                f"'{name}' in '{key}' ends like the cutoff of a metric such as "
                f"ndcg_at_10"
            )
        if key in ("labels", "tasks") and name in METRIC_WORDS:
            raise ValueError(
                f"'{name}' in '{key}' is reserved for metrics such as {name}/gauc"
            )
