"""RQ-VAE (Sec. 3.1 of TIGER): an autoencoder with a residually quantised latent.

With `sinkhorn`, optimal transport makes the codes of the last level equally frequent:
LC-Rec's uniform semantic mapping (Zheng et al., 2024, Sec. 3.1.2),

    min over Q of sum Q_bk ||x_b - e_k||^2, rows of Q sum to 1/B, columns to 1/K

solved by Sinkhorn iterations on exp(-cost / epsilon). Each item gets the code with the
most mass in its row. Costs are first scaled to [-1, 1], so that epsilon does not depend
on the scale of the vectors; this is from LC-Rec's code, not the paper. For items with
equal codes after training, LC-Rec repeats Sinkhorn iterations among them; here
`separate_equal_codes` solves an assignment problem.

Shapes: N items, B batch, E embedding width, D latent width, C levels, K codes per
level.
"""

from __future__ import annotations

import itertools
import math

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

SINKHORN_ITERATIONS = 50
"""Number of Sinkhorn iterations per batch."""


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
        self.config = config
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
        for level, codebook in enumerate(self.codebooks):
            with torch.no_grad():
                if self.config.sinkhorn and level == self.config.levels - 1:
                    code = assign_evenly(residual, codebook, self.config.sinkhorn)
                else:
                    code = nearest_centres(residual, codebook)[0]
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
            if self.config.sinkhorn and level == self.config.levels - 1:
                return  # transport uses all codes
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
        config = self.config
        latents, codebooks = self.latents(embeddings), self.codebooks.detach()
        codes, quantized = quantize_vectors(latents, codebooks)
        if config.sinkhorn:
            codes = separate_equal_codes(latents, codebooks, codes)
            level = torch.arange(config.levels, device=codes.device)
            quantized = codebooks[level, codes].sum(1)
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

    @property
    def separates_items(self) -> bool:
        """Whether optimal transport and `separate_equal_codes` spread the items."""
        return self.config.sinkhorn > 0

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


def assign_evenly(points: Tensor, centres: Tensor, epsilon: float) -> Tensor:
    """Assign points to centres so that all centres are about equally frequent.

    Args:
        points: (B, D) points.
        centres: (K, D) centres.
        epsilon: Entropic regularisation of the transport, for costs scaled to [-1, 1].

    Returns:
        (B,) index of each point's centre.
    """
    cost = torch.cdist(points.double(), centres.double()).square()
    middle, half = (cost.max() + cost.min()) / 2, (cost.max() - cost.min()) / 2
    # (B, K) logarithm of the plan Q, as Q itself would overflow
    log_plan = -(cost - middle) / (half.clamp(min=1e-12) * epsilon)
    log_row_mass, log_column_mass = -math.log(len(points)), -math.log(len(centres))
    for _ in range(SINKHORN_ITERATIONS):
        log_plan = log_plan - log_plan.logsumexp(0, keepdim=True) + log_column_mass
        log_plan = log_plan - log_plan.logsumexp(1, keepdim=True) + log_row_mass
    return log_plan.argmax(1)


def separate_equal_codes(vectors: Tensor, codebooks: Tensor, codes: Tensor) -> Tensor:
    """Give items with equal codes distinct last codes.

    Among the items that share all codes but the last, the new last codes minimise the
    total squared distance (an assignment problem). Groups with more items than codes do
    not change.

    Args:
        vectors: (N, D) vectors to quantise.
        codebooks: (C, K, D) centroids.
        codes: (N, C) nearest codes.

    Returns:
        (N, C) codes.
    """
    # imported here, as ranking models do not need SciPy
    from scipy.optimize import linear_sum_assignment

    codes = codes.clone()
    level = torch.arange(codes.shape[1] - 1, device=codes.device)
    quantized_above = codebooks[level, codes[:, :-1]].sum(1)
    residual = (vectors - quantized_above).cpu()  # (N, D)
    last_codebook = codebooks[-1].cpu()
    _, group, counts = codes[:, :-1].unique(
        dim=0, return_inverse=True, return_counts=True
    )
    order = group.argsort(stable=True)
    for items in order.split(counts.tolist()):
        has_equal_codes = len(codes[items, -1].unique()) < len(items)
        if has_equal_codes and len(items) <= len(last_codebook):
            group_residual = residual[items.cpu()].double()
            cost = torch.cdist(group_residual, last_codebook.double()).square()
            _, assigned = linear_sum_assignment(cost.numpy())
            codes[items, -1] = torch.from_numpy(assigned).to(codes.device)
    return codes
