"""HLLM (Chen et al., 2024) as the QGS paper compares with it: a tower over the text of items, a tower over users.

    python -m jobs.train --config jobs/configs/search/hllm.yaml --tables TABLES --text TEXT --storage runs --name hllm

The item tower is the pretrained text encoder, frozen (its output comes with the catalogue), and a trained
projection; the paper trains it too. The user tower is a causal BERT that starts from `pretrained` where that
is given. A token carries text alone, no features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.search.sequence import SequenceConfig, SequenceRanker


@dataclass
class HLLMConfig(SequenceConfig):
    """Settings of HLLM (Sec. 4.1 of QGS: 12 layers, 12 heads, 768)."""

    encoder: Literal["linear_hstu", "hstu", "transformer"] = "transformer"
    """The user tower."""
    width: int = 768
    """Width of the user tower."""
    num_heads: int = 12
    """Heads of the user tower."""
    ffn: int = 3072
    """Inner width of its feed-forward blocks."""
    token: Literal["pair", "item"] = "item"
    """Text of a behaviour: the document alone."""
    context_features: bool = False
    """No features in a token."""
    query_condition: Literal["query", "joint", "none"] = "none"
    """The next item is predicted from the past alone."""


class HLLM(SequenceRanker):
    """See the module."""
