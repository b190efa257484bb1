"""Mamba2 (Dao and Gu, 2024) as decoder of a frozen TIGER: a row of Tables 3 and 11 of SID-MLP.

    python -m jobs.train --config jobs/configs/mamba2.yaml --tables TABLES --sids SIDS --storage runs \\
        --name mamba2 --model.teacher runs/tiger

The paper names no sizes (Appendix D.3: the authors' recommendations, but for what TIGER asks otherwise). Blocks are the
authors': a mixer alone, heads of 64, a state of 128, inner width twice the outer, convolutions of 4, chunks of 256. As
a block of TIGER's width has 0.13 million parameters, the stack is twice as wide, 5 blocks: 2.6 million, as many as the
teacher's decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.config import check_positive
from models.layers.mamba2 import Mamba2
from models.retrieval.decoders.recurrent import RecurrentConfig, RecurrentDecoder
from models.retrieval.parts import Backbone
from models.tables import UserError


@dataclass
class Mamba2Config(RecurrentConfig):
    """A student whose state forgets."""

    num_layers: int = 5
    """Blocks of the stack, as many as make the teacher's decoder in parameters."""
    width: int = 256
    """Width of the stack; 0: the backbone's, and its states are read as they are, else by a linear layer."""
    chunk: int = 256
    """Positions that are computed at once in training (the authors'); it changes no result but by rounding."""
    head_width: int = 64
    """Width of a head (the authors')."""
    state: int = 128
    """Width of the state of each of a head's channels (the authors')."""
    expand: int = 2
    """Inner width over that of the stack (the authors')."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("head_width", "state", "expand"))


def mamba2(config: Mamba2Config, backbone: Backbone) -> RecurrentDecoder:
    """The decoder on a backbone; UserError where its heads do not fill the inner width."""
    inner = config.expand * (config.width or backbone.embedding.embedding_dim)
    if inner % config.head_width:
        raise UserError(
            f"the inner width {inner} of mamba2 does not divide by head_width {config.head_width}; give one that "
            "divides expand times width"
        )

    def mixer(width: int) -> Mamba2:
        return Mamba2(width, config.head_width, config.state, config.expand, config.conv, config.chunk)

    return RecurrentDecoder(config, backbone, mixer)
