"""Options of the tokenizers, without PyTorch, to parse command lines quickly."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from core.options import STRICT, NamedConfig, Seed

Levels = Annotated[int, Field(ge=1, le=16)]
CodebookSize = Annotated[int, Field(ge=2, le=65536)]
"""Codes are stored as uint16."""


@dataclass(config=STRICT)
class RqkmeansConfig(NamedConfig):
    """Options of residual k-means."""

    levels: Levels = 3
    """Codes per item before the conflict code (Sec. 2.1 of SID-MLP)."""
    codebook_size: CodebookSize = 256
    """Codes per level (Sec. 2.1 of SID-MLP)."""
    iterations: PositiveInt = 100
    """Most k-means iterations per level; a level stops early if no item changes its
    cluster."""
    seed: Seed = 0
    """Seed of the k-means++ draws."""
    train_items: bool = False
    """Whether to fit codebooks on the items of training requests only; other items get
    their nearest codes."""


@dataclass(config=STRICT)
class RqvaeConfig(NamedConfig):
    """Options of the residual-quantised autoencoder."""

    levels: Levels = 3
    """Codes per item before the conflict code (TIGER, Sec. 4)."""
    codebook_size: CodebookSize = 256
    """Codes per level (TIGER, Sec. 4)."""
    latent: PositiveInt = 32
    """Width of the quantised latent and of the codes (TIGER, Sec. 4)."""
    hidden: list[PositiveInt] = field(default_factory=lambda: [512, 256, 128])
    """Widths of the encoder's hidden layers, ReLU; the decoder mirrors them (TIGER,
    Sec. 4)."""
    lr: PositiveFloat = 1e-3
    """AdamW learning rate, as in implementations after TIGER; TIGER uses Adagrad at
    0.4."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW weight decay of encoder and decoder; codebooks have none."""
    batch_size: PositiveInt = 1024
    """Items per step (TIGER, Sec. 4)."""
    epochs: PositiveInt = 1000
    """Passes over the items. TIGER trains 20,000 epochs to use most codes, which the
    k-means initialisation does from the start."""
    seed: Seed = 0
    """Seed of weights, batches and restarts."""
