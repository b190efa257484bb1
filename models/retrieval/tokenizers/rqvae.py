"""RQ-VAE (Sec. 3.1 of TIGER): an autoencoder whose latent is residually quantised.

Shapes: N items, B batch, E embedding width, D latent width, C levels, K codes per level.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.retrieval.tokenizers.residual import (
    ROWS,
    Progress,
    Quantized,
    encode,
    finished,
    kmeans_steps,
    nearest,
    unexplained_variance,
    within,
)
from models.retrieval.tokenizers.sinkhorn import spread, transport
from models.words import number_of


@dataclass(frozen=True)
class RqvaeConfig:
    """Residual-quantised autoencoder."""

    levels: int = 3
    """Codes per item before the conflict code (TIGER, Sec. 4)."""
    codebook_size: int = 256
    """Codes per level (TIGER, Sec. 4)."""
    latent: int = 32
    """Width of the quantised latent and of the codes (TIGER, Sec. 4)."""
    hidden: list[int] = field(default_factory=lambda: [512, 256, 128])
    """Widths of the encoder's hidden layers, ReLU; the decoder mirrors them (TIGER, Sec. 4)."""
    commitment: float = 0.25
    """Weight of the commitment loss, beta (TIGER, Sec. 3.1)."""
    lr: float = 1e-3
    """AdamW learning rate, as followers of TIGER use; TIGER itself takes Adagrad at 0.4."""
    weight_decay: float = 0.0
    """AdamW weight decay of encoder and decoder; codebooks have none."""
    batch_size: int = 1024
    """Items per step (TIGER, Sec. 4)."""
    epochs: int = 1000
    """Passes over the items; TIGER trains 20,000, for a use of codes that k-means centres have at once."""
    restart_every: int = 10
    """Epochs between restarts of codes that no item has; 0 turns restarts off."""
    kmeans_init: bool = True
    """Start each level's codes at the k-means centres of the first latents' residuals (TIGER, Sec. 3.1)."""
    sinkhorn: float = 0.0
    """Epsilon of the transport that spreads the items of a batch evenly over the last level's codes, after which no two
    items share all codes: LC-Rec's uniform semantic mapping (its Sec. 3.1.2; published 0.003). 0: nearest codes, as in
    TIGER."""
    seed: int = 0
    """Seed of weights, batches and restarts."""

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 16:
            raise ValueError(f"rqvae.levels is {self.levels}; it must be from 1 to 16")
        if not 2 <= self.codebook_size <= 65536:
            raise ValueError(f"rqvae.codebook_size is {self.codebook_size}; codes are uint16: use 2 to 65536")
        for name in ("latent", "batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"rqvae.{name} is {getattr(self, name)}; it must be 1 or more")
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"rqvae.hidden is {self.hidden}; each width must be 1 or more")
        if self.sinkhorn < 0:
            raise ValueError(f"rqvae.sinkhorn is {self.sinkhorn}; it must be 0 (off) or more, published 0.003")
        if self.lr <= 0 or self.commitment < 0 or self.weight_decay < 0 or self.restart_every < 0:
            raise ValueError(
                f"rqvae.lr {self.lr} must be above 0; commitment {self.commitment}, weight_decay "
                f"{self.weight_decay} and restart_every {self.restart_every} 0 or more"
            )


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for source, target in itertools.pairwise(widths):
        layers += [nn.Linear(source, target), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Rqvae(nn.Module):
    """Encoder, codebooks (C, K, D) and decoder."""

    def __init__(self, width: int, config: RqvaeConfig) -> None:
        super().__init__()
        self.config = config
        widths = [width, *config.hidden, config.latent]
        self.encoder = _mlp(widths)
        self.decoder = _mlp(widths[::-1])
        self.codebooks = nn.Parameter(torch.randn(config.levels, config.codebook_size, config.latent) * 0.1)

    def forward(self, embeddings: Tensor) -> dict[str, Tensor]:
        """Losses of a batch (B, E).

        loss = mse(x, x') + sum over levels of mse(sg(r), e) + beta mse(r, sg(e))

        TIGER's squared norms are sums over the width, these are means over all elements; levels are added up as in
        TIGER, where LC-Rec takes their mean, so the quantization weighs `levels` times as much as there.
        """
        latent = self.encoder(embeddings)  # (B, D)
        residual, quantization = latent, latent.new_zeros(())
        for level, codebook in enumerate(self.codebooks):
            with torch.no_grad():
                even = self.config.sinkhorn and level == self.config.levels - 1
                code = transport(residual, codebook, self.config.sinkhorn) if even else nearest(residual, codebook)[0]
            chosen = codebook[code]  # (B, D)
            quantization = quantization + F.mse_loss(chosen, residual.detach())
            quantization = quantization + self.config.commitment * F.mse_loss(residual, chosen.detach())
            # the residual keeps its gradient to the encoder, not to the code: each code answers for its own level
            residual = residual - chosen.detach()
        quantized = latent - residual  # (B, D): the sum of the chosen codes
        straight = latent + (quantized - latent).detach()  # forward the codes, backward to the encoder
        reconstruction = F.mse_loss(self.decoder(straight), embeddings)
        return {"loss": reconstruction + quantization, "reconstruction": reconstruction, "quantization": quantization}

    @torch.no_grad()
    def latents(self, embeddings: Tensor) -> Tensor:
        """Latents (N, D) of all items, in chunks."""
        return torch.cat([self.encoder(rows) for rows in embeddings.split(ROWS)])

    def initialise_codebooks(self, embeddings: Tensor, generator: torch.Generator) -> None:
        """Sets level l's codes to the k-means centres, one per row, of what levels 0..l-1 leave over."""
        finished(self.initialising(embeddings, generator))

    def initialising(self, embeddings: Tensor, generator: torch.Generator) -> Generator[Progress, None, None]:
        """As `initialise_codebooks`, saying what it does."""
        residual = self.latents(embeddings)
        for level, codebook in enumerate(self.codebooks.data):
            training = kmeans_steps(residual, self.config.codebook_size, generator)
            centres = yield from within(training, 0, self.config.epochs, f"first codes of level {level + 1}: ")
            codebook.copy_(centres)  # (K, D), the codebook's own layout
            code, _ = nearest(residual, centres)
            residual = residual - centres[code]

    @torch.no_grad()
    def restart_dead_codes(
        self, embeddings: Tensor, generator: torch.Generator, optimizer: torch.optim.Optimizer | None = None
    ) -> list[int]:
        """Moves codes that no item uses to the residuals of items drawn at random; how many per level.

        Level by level, so that a moved code is in use when the next level's residuals are taken. Adam's
        moments of moved codes are cleared.
        """
        moments = optimizer.state.get(self.codebooks, {}) if optimizer else {}
        residual, restarted = self.latents(embeddings), []
        for level, codebook in enumerate(self.codebooks):
            code, distances = nearest(residual, codebook)
            counts = torch.bincount(code, minlength=len(codebook))
            if self.config.sinkhorn and level == self.config.levels - 1:
                restarted.append(0)  # a batch's items use them all
                continue
            dead = (counts == 0).nonzero().flatten()
            # only items that are off their code can give a dead one work
            off = (distances > 1e-12).nonzero().flatten()
            drawn = off[torch.randperm(len(off), generator=generator)[: len(dead)].to(off.device)]
            dead = dead[: len(drawn)]
            codebook[dead] = residual[drawn]
            for name in ("exp_avg", "exp_avg_sq"):
                if name in moments:
                    moments[name][level, dead] = 0
            code, _ = nearest(residual, codebook)
            residual = residual - codebook[code]
            restarted.append(len(dead))
        return restarted


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    yield from torch.randperm(count, generator=generator).split(size)


def fit(embeddings: Tensor, config: RqvaeConfig, report_every: int = 50) -> Generator[Progress, None, Quantized]:
    """Trains an RQ-VAE on `embeddings` (N, E), on their device; yields every `report_every` epochs, and within.

    Equal seeds give equal codes on the same hardware. With `kmeans_init` it raises UserError if there are fewer
    items than codes per level.
    """
    generator = torch.Generator().manual_seed(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Rqvae(embeddings.shape[1], config)
    model.to(embeddings.device)
    if config.kmeans_init:
        yield from model.initialising(embeddings, generator)
    layers = [*model.encoder.parameters(), *model.decoder.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": layers, "weight_decay": config.weight_decay}, {"params": [model.codebooks], "weight_decay": 0.0}],
        lr=config.lr,
    )
    for epoch in range(1, config.epochs + 1):
        sums = dict.fromkeys(("reconstruction", "quantization"), 0.0)
        for number, rows in enumerate(_batches(len(embeddings), config.batch_size, generator)):
            losses = model(embeddings[rows.to(embeddings.device)])
            optimizer.zero_grad(set_to_none=True)
            losses["loss"].backward()
            optimizer.step()
            for name in sums:
                sums[name] += float(losses[name].detach()) * len(rows) / len(embeddings)
            yield Progress(epoch - 1, config.epochs, f"{number_of(number + 1, 'step')} of epoch {epoch}", within=True)
        # no restart at the very end: a moved code needs some epochs to settle
        if config.restart_every and epoch % config.restart_every == 0 and epoch <= 0.9 * config.epochs:
            model.restart_dead_codes(embeddings, generator, optimizer)
        if epoch % report_every == 0 or epoch == config.epochs:
            yield Progress(epoch, config.epochs, ", ".join(f"{name} {value:.4f}" for name, value in sums.items()))
    with torch.no_grad():
        latents, codebooks = model.latents(embeddings), model.codebooks.detach()
        codes, quantized = encode(latents, codebooks)
        if config.sinkhorn:
            codes = spread(latents, codebooks, codes)
            quantized = codebooks[torch.arange(config.levels, device=codes.device), codes].sum(1)
        decoded = torch.cat([model.decoder(rows) for rows in quantized.split(ROWS)])
        error = unexplained_variance(embeddings, decoded)
    return Quantized(latents.cpu(), codebooks.cpu(), codes.cpu(), error)
