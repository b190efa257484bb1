"""HSTU (Zhai et al., 2024) as the QGS paper compares with it: item tokens, quadratic attention, no query condition.

python -m jobs.train --config jobs/configs/qgs.yaml --config jobs/configs/search/hstu.yaml ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.search.sequence import SequenceConfig, SequenceRanker


@dataclass
class HSTUConfig(SequenceConfig):
    """Settings of the HSTU baseline (Sec. 4.1 of QGS: 12 layers, 8 heads, 768)."""

    encoder: Literal["linear_hstu", "hstu", "transformer"] = "hstu"
    """How behaviours are read."""
    width: int = 768
    """Width of the encoder."""
    token: Literal["pair", "item"] = "item"
    """Text of a behaviour: the document alone."""
    query_condition: Literal["query", "joint", "none"] = "none"
    """The next item is predicted from the past alone."""


class HSTURanker(SequenceRanker):
    """See the module."""
