"""Gated DeltaNet (Yang et al., 2025) as decoder of a frozen TIGER: a row of Tables 3 and 11 of SID-MLP.

    python -m jobs.train --config jobs/configs/gdn.yaml --tables TABLES --sids SIDS --storage runs \\
        --name gdn --model.teacher runs/tiger

The paper names no sizes (Appendix D.3: the authors' recommendations, but for what TIGER asks otherwise). Blocks are the
authors': a mixer and a SwiGLU, 6 heads, values twice as wide as keys, convolutions of 4. In place of their head width
of 256, which alone would make one block of more than half of TIGER's decoder, it has the teacher's depth and widths: 4
blocks of its width, with heads of 64. That is 2.5 million parameters beside the 2.6 million of the teacher's decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.config import check_least, check_positive
from models.layers.gated_deltanet import GatedDeltaNet
from models.retrieval.decoders.recurrent import RecurrentConfig, RecurrentDecoder
from models.retrieval.parts import Backbone


@dataclass
class GdnConfig(RecurrentConfig):
    """A student whose state forgets and corrects."""

    heads: int = 6
    """Heads (the authors', and TIGER's)."""
    head_width: int = 64
    """Width of a head's keys and queries (TIGER's; the authors' is 256)."""
    expand_v: int = 2
    """Width of a head's values over that of its keys (the authors')."""
    ffn_width: int = 512
    """Inner width of the SwiGLU after each mixer; 0: none. The authors' rule: 8/3 of the width, up to a multiple of
    256."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("heads", "head_width", "expand_v"))
        check_least(self, ["ffn_width"], 0)


def gdn(config: GdnConfig, backbone: Backbone) -> RecurrentDecoder:
    """The decoder on a backbone."""

    def mixer(width: int) -> GatedDeltaNet:
        return GatedDeltaNet(width, config.heads, config.head_width, config.expand_v, config.conv, config.chunk)

    return RecurrentDecoder(config, backbone, mixer, config.ffn_width)
