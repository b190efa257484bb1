"""Options of the tokenizers, without PyTorch, to parse command lines quickly."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.options import NamedConfig, check_least


@dataclass
class RqkmeansConfig(NamedConfig):
    """Options of residual k-means."""

    levels: int = 3
    """Codes per item before the conflict code (Sec. 2.1 of SID-MLP)."""
    codebook_size: int = 256
    """Codes per level (Sec. 2.1 of SID-MLP)."""
    iterations: int = 100
    """Most k-means iterations per level; a level stops early if no item changes its
    cluster."""
    seed: int = 0
    """Seed of the k-means++ draws."""
    train_items: bool = False
    """Whether to fit codebooks on the items of training requests only; other items get
    their nearest codes."""

    def __post_init__(self) -> None:
        check_codebooks(self)
        check_least(self, ["iterations"], 1, f"{self.name}.")


@dataclass
class RqvaeConfig(NamedConfig):
    """Options of the residual-quantised autoencoder."""

    levels: int = 3
    """Codes per item before the conflict code (TIGER, Sec. 4)."""
    codebook_size: int = 256
    """Codes per level (TIGER, Sec. 4)."""
    latent: int = 32
    """Width of the quantised latent and of the codes (TIGER, Sec. 4)."""
    hidden: list[int] = field(default_factory=lambda: [512, 256, 128])
    """Widths of the encoder's hidden layers, ReLU; the decoder mirrors them (TIGER,
    Sec. 4)."""
    lr: float = 1e-3
    """AdamW learning rate, as in implementations after TIGER; TIGER uses Adagrad at
    0.4."""
    weight_decay: float = 0.0
    """AdamW weight decay of encoder and decoder; codebooks have none."""
    batch_size: int = 1024
    """Items per step (TIGER, Sec. 4)."""
    epochs: int = 1000
    """Passes over the items. TIGER trains 20,000 epochs to use most codes, which the
    k-means initialisation does from the start."""
    sinkhorn: float = 0.0
    """Epsilon of the optimal transport that spreads a batch evenly over the codes of
    the last level, so that items rarely share all codes: LC-Rec's uniform semantic
    mapping (Sec. 3.1.2 of LC-Rec; published 0.003). 0 for nearest codes, as in
    TIGER."""
    seed: int = 0
    """Seed of weights, batches and restarts."""

    def __post_init__(self) -> None:
        check_codebooks(self)
        check_least(self, ("batch_size", "epochs"), 1, "rqvae.")
        check_least(self, ("weight_decay", "sinkhorn"), 0, "rqvae.")


def check_codebooks(config: RqkmeansConfig | RqvaeConfig) -> None:
    """Raise a ValueError if a table of semantic IDs cannot hold the codebooks."""
    if not 1 <= config.levels <= 16:
        raise ValueError(
            f"{config.name}.levels is {config.levels}; it must be from 1 to 16"
        )
    if not 2 <= config.codebook_size <= 65536:
        raise ValueError(
            f"{config.name}.codebook_size is {config.codebook_size}; codes are uint16: "
            f"use 2 to 65536"
        )
