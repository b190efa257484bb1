"""RQ-VAE (Sec. 3.1 of TIGER): an autoencoder with a residually quantised latent.

Shapes: N items, B batch, E embedding width, D latent width, C levels, K codes per
level.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.retrieval.tokenizers.config import RqvaeConfig
from models.retrieval.tokenizers.rqkmeans import (
    CHUNK_ROWS,
    kmeans,
    nearest_centres,
    quantize_vectors,
    unexplained_variance,
)
from models.retrieval.tokenizers.tokenizer import Quantized, Tokenizer, Training

COMMITMENT = 0.25
"""Weight of the commitment loss, beta (TIGER, Sec. 3.1)."""

REPORT_EVERY = 50
"""Epochs between messages with the losses."""

RESTART_EVERY = 10
"""Epochs between restarts of unused codes."""


def _mlp(widths: list[int]) -> nn.Sequential:
    """Return linear layers of these widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for source, target in itertools.pairwise(widths):
        layers += [nn.Linear(source, target), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Rqvae(nn.Module):
    """An autoencoder of embeddings (N, E) with codebooks (C, K, D)."""

    def __init__(self, width: int, config: RqvaeConfig) -> None:
        super().__init__()
        widths = [width, *config.hidden, config.latent]
        self.encoder = _mlp(widths)
        self.decoder = _mlp(widths[::-1])
        self.codebooks = nn.Parameter(
            torch.randn(config.levels, config.codebook_size, config.latent) * 0.1
        )

    def forward(self, embeddings: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch (B, E).

            loss = mse(x, x') + sum over levels of mse(sg(r), e) + beta mse(r, sg(e))

        sg stops gradients, r is a residual, and e its code. TIGER sums squared errors
        over the width; here they are means over all elements. Levels are summed as in
        TIGER. LC-Rec takes the mean over levels, a `levels` times lower weight.
        """
        latent = self.encoder(embeddings)  # (B, D)
        residual, quantization = latent, latent.new_zeros(())
        for codebook in self.codebooks:
            with torch.no_grad():
                code, _ = nearest_centres(residual, codebook)
            chosen = F.embedding(code, codebook)  # (B, D)
            quantization = quantization + F.mse_loss(chosen, residual.detach())
            quantization = quantization + COMMITMENT * F.mse_loss(
                residual, chosen.detach()
            )
            # the residual passes gradients to the encoder, not to codes of other levels
            residual = residual - chosen.detach()
        quantized = latent - residual  # (B, D): the sum of the chosen codes
        # straight-through: forward the codes, backward to the encoder
        straight = latent + (quantized - latent).detach()
        reconstruction = F.mse_loss(self.decoder(straight), embeddings)
        return {
            "loss": reconstruction + quantization,
            "reconstruction": reconstruction,
            "quantization": quantization,
        }

    @torch.no_grad()
    def latents(self, embeddings: Tensor) -> Tensor:
        """Return the latents (N, D) of all items, computed in chunks."""
        return torch.cat([self.encoder(rows) for rows in embeddings.split(CHUNK_ROWS)])

    @torch.no_grad()
    def restart_dead_codes(
        self,
        embeddings: Tensor,
        generator: torch.Generator,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Move unused codes to the residuals of random items.

        Levels are restarted in order, so the residuals of a level account for the moved
        codes of the levels above. Adam's moments of moved codes are cleared.

        Args:
            embeddings: (N, E) embeddings of all items.
            generator: CPU generator, which draws the items.
            optimizer: Optimizer of the codebooks.
        """
        moments = optimizer.state.get(self.codebooks, {})
        residual = self.latents(embeddings)
        for level, codebook in enumerate(self.codebooks):
            code, distances = nearest_centres(residual, codebook)
            counts = torch.bincount(code, minlength=len(codebook))
            unused = (counts == 0).nonzero().flatten()
            # a code at an item that equals its code would stay unused
            inexact = (distances > 1e-12).nonzero().flatten()
            order = torch.randperm(len(inexact), generator=generator)
            items = inexact[order[: len(unused)].to(inexact.device)]
            unused = unused[: len(items)]
            codebook[unused] = residual[items]
            for name in ("exp_avg", "exp_avg_sq"):
                if name in moments:
                    moments[name][level, unused] = 0
            code, _ = nearest_centres(residual, codebook)
            residual = residual - codebook[code]

    @torch.no_grad()
    def quantize(self, embeddings: Tensor) -> Quantized:
        """Quantise all items, by embeddings (N, E)."""
        latents, codebooks = self.latents(embeddings), self.codebooks.detach()
        codes, quantized = quantize_vectors(latents, codebooks)
        decoded = torch.cat(
            [self.decoder(rows) for rows in quantized.split(CHUNK_ROWS)]
        )
        error = unexplained_variance(embeddings, decoded)
        return Quantized(latents.cpu(), codebooks.cpu(), codes.cpu(), error)


class RqvaeTokenizer(Tokenizer):
    """RQ-VAE: codes of the latents of an autoencoder."""

    name = "rqvae"
    config_class = RqvaeConfig
    config: RqvaeConfig

    def fit(self, embeddings: Tensor, chosen: Tensor | None = None) -> Training:
        """Train an RQ-VAE, and yield its progress.

        Equal seeds give equal codes on the same hardware.
        """
        config = self.config
        generator = torch.Generator().manual_seed(config.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = Rqvae(embeddings.shape[1], config)
        model.to(embeddings.device)
        residual = model.latents(embeddings)
        for codebook in model.codebooks.data:  # TIGER, Sec. 3.1
            centres = kmeans(residual, config.codebook_size, config.seed)
            codebook.copy_(centres)  # (K, D), keeps the layout of the codebook
            code, _ = nearest_centres(residual, centres)
            residual = residual - centres[code]
        layers = [*model.encoder.parameters(), *model.decoder.parameters()]
        optimizer = torch.optim.AdamW(
            [
                {"params": layers, "weight_decay": config.weight_decay},
                {"params": [model.codebooks], "weight_decay": 0.0},
            ],
            lr=config.lr,
        )
        for epoch in range(1, config.epochs + 1):
            sums = dict.fromkeys(("reconstruction", "quantization"), 0.0)
            order = torch.randperm(len(embeddings), generator=generator)
            for rows in order.split(config.batch_size):
                losses = model(embeddings[rows.to(embeddings.device)])
                optimizer.zero_grad(set_to_none=True)
                losses["loss"].backward()
                optimizer.step()
                for name in sums:
                    sums[name] += (
                        float(losses[name].detach()) * len(rows) / len(embeddings)
                    )
            # no restart near the end: a moved code needs some epochs to settle
            if epoch <= 0.9 * config.epochs and epoch % RESTART_EVERY == 0:
                model.restart_dead_codes(embeddings, generator, optimizer)
            if epoch == config.epochs or epoch % REPORT_EVERY == 0:
                losses_of_epoch = (f"{name} {sums[name]:.4f}" for name in sums)
                yield f"{epoch}/{config.epochs}: {', '.join(losses_of_epoch)}"
        weights = model.encoder.state_dict()
        self.arrays = {name: weight.cpu() for name, weight in weights.items()}
        return model.quantize(embeddings)

    def assign(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents and their nearest codes."""
        weights = dict(self.arrays)
        codebooks = weights.pop("codebooks")
        model = Rqvae(embeddings.shape[1], self.config)
        model.encoder.load_state_dict(weights)
        latents = model.latents(embeddings)
        return latents, quantize_vectors(latents, codebooks)[0]
