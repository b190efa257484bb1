"""HLLM (Chen et al., 2024), a baseline of QGS: an item tower and a user tower.

    python -m jobs.train --config jobs/configs/search/qgs.yaml
        --config jobs/configs/search/ablations/hllm.yaml ...

The item tower is the frozen text encoder of jobs.encode with a trained projection. The
paper trains the encoder too. The user tower is a causal BERT, initialised from
`pretrained` if this option is set. A token carries the text of a document and no
features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from core.options import STRICT
from models.search.qgs import QGS, QGSConfig


@dataclass(config=STRICT)
class HLLMConfig(QGSConfig):
    """Settings of HLLM (Sec. 4.1 of QGS: 12 layers, 12 heads, 768)."""

    encoder: Literal["linear_hstu", "hstu", "transformer"] = "transformer"
    """Encoder of the user tower."""
    width: PositiveInt = 768
    """Width of the user tower."""
    num_heads: PositiveInt = 12
    """Heads of the user tower."""
    ffn: PositiveInt = 3072
    """Inner width of the user tower's feed-forward blocks."""
    token: Literal["pair", "item"] = "item"
    """Text of a behaviour: the document alone."""
    context_features: bool = False
    """Whether a behaviour's token has its features; HLLM has none."""
    group_attention: bool = False
    """HFG-Attention over groups of features; HLLM has none."""
    query_condition: Literal["query", "none"] = "none"
    """Inputs of the prediction head about the next query: none in HLLM."""


class HLLM(QGS):
    """A user tower over the document vectors of an item tower (see the module)."""

    name = "hllm"
    config_class = HLLMConfig
    extra_inputs: ClassVar[Mapping[str, bool]] = {"text": True}
    config: HLLMConfig
