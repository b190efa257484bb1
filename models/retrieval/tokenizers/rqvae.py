"""RQ-VAE (Sec. 3.1 of TIGER): an autoencoder whose latent is residually quantised.

With `sinkhorn` the last level's codes are of equal use by optimal transport: LC-Rec's uniform semantic mapping (Zheng
et al., 2024, Sec. 3.1.2),

    min over Q of sum Q_bk ||x_b - e_k||^2, with rows of Q that sum to 1/B and columns that sum to 1/K

solved by Sinkhorn's iterations on exp(-cost / epsilon); each item takes the code with the most of its row. That costs
are scaled to [-1, 1] first, which gives epsilon a meaning, is not in the paper but in LC-Rec's code. What happens to
items with equal codes after training, where LC-Rec runs Sinkhorn among them again and again, is our choice: `spread`.

Shapes: N items, B batch, E embedding width, D latent width, C levels, K codes per level.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import pluralize
from models.retrieval.tokenizers.config import RqvaeConfig
from models.retrieval.tokenizers.rqkmeans import (
    ROWS,
    Progress,
    Quantized,
    Training,
    encode,
    kmeans,
    nearest,
    unexplained_variance,
)

ITERATIONS = 50
"""Sinkhorn's iterations."""


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
        self.codebooks = nn.Parameter(
            torch.randn(config.levels, config.codebook_size, config.latent) * 0.1
        )

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
                code = (
                    transport(residual, codebook, self.config.sinkhorn)
                    if even
                    else nearest(residual, codebook)[0]
                )
            chosen = codebook[code]  # (B, D)
            quantization = quantization + F.mse_loss(chosen, residual.detach())
            quantization = quantization + self.config.commitment * F.mse_loss(
                residual, chosen.detach()
            )
            # the residual keeps its gradient to the encoder, not to the code: each code answers for its own level
            residual = residual - chosen.detach()
        quantized = latent - residual  # (B, D): the sum of the chosen codes
        straight = (
            latent + (quantized - latent).detach()
        )  # forward the codes, backward to the encoder
        reconstruction = F.mse_loss(self.decoder(straight), embeddings)
        return {
            "loss": reconstruction + quantization,
            "reconstruction": reconstruction,
            "quantization": quantization,
        }

    @torch.no_grad()
    def latents(self, embeddings: Tensor) -> Tensor:
        """Latents (N, D) of all items, in chunks."""
        return torch.cat([self.encoder(rows) for rows in embeddings.split(ROWS)])

    def initialise_codebooks(
        self, embeddings: Tensor, generator: torch.Generator
    ) -> Training[None]:
        """Sets level l's codes to the k-means centres, one per row, of what levels 0..l-1 leave over (TIGER, Sec.
        3.1)."""
        residual = self.latents(embeddings)
        for level, codebook in enumerate(self.codebooks.data):
            at = (0, self.config.epochs, f"first codes of level {level + 1}: ")
            centres = yield from kmeans(
                residual, self.config.codebook_size, generator, at=at
            )
            codebook.copy_(centres)  # (K, D), the codebook's own layout
            code, _ = nearest(residual, centres)
            residual = residual - centres[code]

    @torch.no_grad()
    def restart_dead_codes(
        self,
        embeddings: Tensor,
        generator: torch.Generator,
        optimizer: torch.optim.Optimizer,
    ) -> list[int]:
        """Moves codes that no item uses to the residuals of items drawn at random; how many per level.

        Level by level, so that a moved code is in use when the next level's residuals are taken. Adam's
        moments of moved codes are cleared.
        """
        moments = optimizer.state.get(self.codebooks, {})
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
            drawn = off[
                torch.randperm(len(off), generator=generator)[: len(dead)].to(
                    off.device
                )
            ]
            dead = dead[: len(drawn)]
            codebook[dead] = residual[drawn]
            for name in ("exp_avg", "exp_avg_sq"):
                if name in moments:
                    moments[name][level, dead] = 0
            code, _ = nearest(residual, codebook)
            residual = residual - codebook[code]
            restarted.append(len(dead))
        return restarted


def fit(
    embeddings: Tensor, config: RqvaeConfig, report_every: int = 50
) -> Training[Quantized]:
    """Trains an RQ-VAE on `embeddings` (N, E), on their device; yields every `report_every` epochs, and within.

    Equal seeds give equal codes on the same hardware. Raises UserError if there are fewer items than codes per level.
    """
    generator = torch.Generator().manual_seed(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Rqvae(embeddings.shape[1], config)
    model.to(embeddings.device)
    yield from model.initialise_codebooks(embeddings, generator)
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
        for number, rows in enumerate(order.split(config.batch_size)):
            losses = model(embeddings[rows.to(embeddings.device)])
            optimizer.zero_grad(set_to_none=True)
            losses["loss"].backward()
            optimizer.step()
            for name in sums:
                sums[name] += float(losses[name].detach()) * len(rows) / len(embeddings)
            yield Progress(
                epoch - 1,
                config.epochs,
                f"{pluralize(number + 1, 'step')} of epoch {epoch}",
                within=True,
            )
        # no restart at the very end: a moved code needs some epochs to settle
        if (
            config.restart_every
            and epoch % config.restart_every == 0
            and epoch <= 0.9 * config.epochs
        ):
            model.restart_dead_codes(embeddings, generator, optimizer)
        if epoch % report_every == 0 or epoch == config.epochs:
            yield Progress(
                epoch,
                config.epochs,
                ", ".join(f"{name} {value:.4f}" for name, value in sums.items()),
            )
    with torch.no_grad():
        latents, codebooks = model.latents(embeddings), model.codebooks.detach()
        codes, quantized = encode(latents, codebooks)
        if config.sinkhorn:
            codes = spread(latents, codebooks, codes)
            quantized = codebooks[
                torch.arange(config.levels, device=codes.device), codes
            ].sum(1)
        decoded = torch.cat([model.decoder(rows) for rows in quantized.split(ROWS)])
        error = unexplained_variance(embeddings, decoded)
    encoder = {
        name: weight.cpu() for name, weight in model.encoder.state_dict().items()
    }
    return Quantized(latents.cpu(), codebooks.cpu(), codes.cpu(), error, encoder)


def transport(points: Tensor, centres: Tensor, epsilon: float) -> Tensor:
    """(B,) codes of `points` (B, D) among `centres` (K, D), each used about equally often."""
    cost = torch.cdist(points.double(), centres.double()).square()
    middle, half = (cost.max() + cost.min()) / 2, (cost.max() - cost.min()) / 2
    plan = -(cost - middle) / (
        half.clamp(min=1e-12) * epsilon
    )  # logarithms, as exp of them overflows
    rows, columns = -math.log(len(points)), -math.log(len(centres))
    for _ in range(ITERATIONS):
        plan = plan - plan.logsumexp(0, keepdim=True) + columns
        plan = plan - plan.logsumexp(1, keepdim=True) + rows
    return plan.argmax(1)


def spread(vectors: Tensor, codebooks: Tensor, codes: Tensor) -> Tensor:
    """(N, C) codes where no two items that share all but the last code share that too, where there are codes enough.

    Of such items the last codes are those of the least total cost that differ (an assignment problem); more of them
    than codes stay as they are. `vectors` (N, D) are what the codes stand for.
    """
    from scipy.optimize import (
        linear_sum_assignment,
    )  # models that rank need PyTorch alone

    codes = codes.clone()
    above = codebooks[
        torch.arange(codes.shape[1] - 1, device=codes.device), codes[:, :-1]
    ].sum(1)
    left = (vectors - above).cpu()  # (N, D): what the last level stands for
    last = codebooks[-1].cpu()
    _, group, counts = codes[:, :-1].unique(
        dim=0, return_inverse=True, return_counts=True
    )
    order, ends = group.argsort(stable=True), counts.cumsum(0)
    for number in range(len(counts)):
        items = order[ends[number] - counts[number] : ends[number]]
        if len(items) <= len(last) and len(codes[items, -1].unique()) < len(items):
            cost = torch.cdist(left[items.cpu()].double(), last.double()).square()
            codes[items, -1] = torch.from_numpy(
                linear_sum_assignment(cost.numpy())[1]
            ).to(codes.device)
    return codes
