"""The backbone of SID-MLP++ (equation 4): MLPs instead of the teacher's encoder.

Instead of attention, each layer uses the mean of a request's states and one MLP per
role of a token. Code l of an item has role l; the user and end tokens have the role of
the last code.

Shapes: `B` requests, `T` items and `S = 2 + L * T` tokens of a history, `L` levels
(codes of an item), `D` width, `R` items in the batch, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers.t5 import dropout
from models.retrieval.data import HistoryBatch
from models.retrieval.retriever import Backbone, History, SidTokens, real_positions

CPU_BATCH_TOKENS = 128
"""Tokens per call of an MLP on a CPU, so that activations of the published width fit a
core's cache."""


@dataclass
class EncoderSizes:
    """Sizes of the MLP encoder. Defaults are from the public code."""

    encoder_layers: int = 4
    """Number of encoder layers (Appendix C.2; swept over 1, 2, 4, 6, 8)."""
    encoder_width: int = 2048
    """Inner width of each MLP (swept from 256 to 8192, Appendix C.2)."""
    encoder_dropout: float = 0.1
    """Dropout on the inner width."""
    shared_mlp: bool = False
    """Whether all roles share one MLP per layer (Table 14, Shared MLP)."""


class RoleMlp(nn.Module):
    """F of equation 4: Linear, LayerNorm, GELU, dropout, Linear (public code)."""

    def __init__(self, dim: int, width: int, dropout_p: float) -> None:
        """Build the MLP for states of width `dim`; `width` is the inner width."""
        super().__init__()
        self.inner = nn.Linear(2 * dim, width)
        self.norm = nn.LayerNorm(width)
        self.outer = nn.Linear(width, dim)
        self.dropout_p = dropout_p

    def forward(self, x: Tensor, mean: Tensor, owner: Tensor) -> Tensor:
        """Return F([x; mean of the request]) for each token.

        Args:
            x: (n, D) states of tokens.
            mean: (B, D) mean state of each request.
            owner: (n,) request of each token.

        Returns:
            (n, D)
        """
        with_autograd = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        if x.device.type == "cpu" and not with_autograd:
            return self._infer_on_cpu(x, mean, owner)
        means = functional.embedding(owner, mean)
        hidden = self.inner(torch.cat([x, means], 1))  # (n, width)
        dropout_p = self.dropout_p if self.training else 0.0
        return self.outer(dropout(functional.gelu(self.norm(hidden)), dropout_p))

    def _infer_on_cpu(self, x: Tensor, mean: Tensor, owner: Tensor) -> Tensor:
        """Return the result of `forward` without dropout, with less work."""
        x_weight, mean_weight = self.inner.weight.tensor_split(2, 1)
        # per request: (B, width)
        request_hidden = functional.linear(mean, mean_weight, self.inner.bias)
        outputs = []
        for piece, request in zip(
            x.split(CPU_BATCH_TOKENS), owner.split(CPU_BATCH_TOKENS), strict=True
        ):
            hidden = torch.addmm(request_hidden[request], piece, x_weight.T)
            outputs.append(self.outer(functional.gelu(self.norm(hidden))))
        return torch.cat(outputs)


@dataclass(frozen=True)
class RoleTokens:
    """Tokens of a batch by role.

    Entry l of each list has the codes of level l; the last entry also has the user and
    end tokens. If packed, R counts real items only, and padding costs no work.
    Otherwise R = B * T, padding is masked, and all shapes depend on the shape of the
    batch only.
    """

    tokens: list[Tensor]
    """(R,) tokens of each role; (R + 2 B,) for the last role: codes, users, ends."""
    owners: list[Tensor]
    """Request of each token, in the shapes of `tokens`."""
    positions: list[Tensor]
    """Position of each token in its history, in the shapes of `tokens`."""
    counts: Tensor
    """(B, 1) number of real tokens of each request."""
    real: Tensor | None
    """(B, T) mask of real items, or None if packed."""

    @classmethod
    def from_batch(
        cls, batch: HistoryBatch, vocabulary: SidTokens, packed: bool
    ) -> Self:
        """Group the tokens of a batch by role.

        Args:
            batch: Batch of requests.
            vocabulary: Tokens of the semantic IDs.
            packed: Whether to leave out padding.
        """
        history, length = batch.history, batch.history_length
        rows, items = history.shape
        levels = vocabulary.levels
        request = torch.arange(rows, device=history.device)
        is_real = real_positions(length, items)  # (B, T)
        if packed:
            owner, item = is_real.nonzero(as_tuple=True)
            codes = vocabulary.items[history[owner, item]]  # (R, L)
        else:
            owner = request.repeat_interleave(items)
            item = torch.arange(items, device=history.device).repeat(rows)
            codes = vocabulary.items[torch.where(is_real, history, 0).flatten()]
        user = vocabulary.first_user + batch.user % vocabulary.n_user_tokens
        tokens = list(codes.unbind(1))
        tokens[-1] = torch.cat(
            [tokens[-1], user, torch.full_like(user, vocabulary.end)]
        )
        positions = [1 + level + levels * item for level in range(levels)]
        end = 1 + levels * length
        positions[-1] = torch.cat([positions[-1], torch.zeros_like(user), end])
        owners = [owner] * (levels - 1) + [torch.cat([owner, request, request])]
        return cls(
            tokens=tokens,
            owners=owners,
            positions=positions,
            counts=(2 + levels * length).unsqueeze(1),
            real=None if packed else is_real,
        )

    def mean(self, states: list[Tensor]) -> Tensor:
        """Return g (B, D) of equation 4: the mean state of each request's real tokens.

        Args:
            states: (n, D) states of the tokens of each role.
        """
        rows = self.counts.shape[0]
        num_items = self.owners[-1].shape[0] - 2 * rows
        items, users, ends = states[-1].split([num_items, rows, rows])
        for role_states in states[:-1]:
            items = items + role_states  # (R, D): sum over the codes of an item
        total = users + ends
        if self.real is None:
            total = total.index_add(0, self.owners[-1][:num_items], items)
        else:  # unlike index_add, this sum has a fixed order on a GPU
            padding = ~self.real.unsqueeze(-1)
            by_request = items.unflatten(0, self.real.shape)  # (B, T, D)
            total = total + by_request.masked_fill(padding, 0.0).sum(1)
        return total / self.counts

    def scatter_to_positions(self, states: list[Tensor], length: int) -> Tensor:
        """Write the states to their positions; padding is zero.

        Args:
            states: (n, D) states of the tokens of each role.
            length: Number S of positions.

        Returns:
            (B, S, D)
        """
        if self.real is not None:
            is_real = self.real.flatten().unsqueeze(-1)  # (R, 1)
            num_items = is_real.shape[0]
            *codes, last = states
            states = [state * is_real for state in codes]
            states.append(torch.cat([last[:num_items] * is_real, last[num_items:]]))
        owners, positions = torch.cat(self.owners), torch.cat(self.positions)
        all_states = torch.cat(states)
        flat = all_states.new_zeros(
            (self.counts.shape[0] * length, all_states.shape[1])
        )
        # a padded code may share its index with an end token, to which it adds zeros
        flat = flat.index_add(0, owners * length + positions, all_states)
        return flat.unflatten(0, (-1, length))


class MlpBackbone(Backbone):
    """Equation 4: x <- x + F_role([x; g]) in every layer, then a layer norm.

    g is the mean of the request's states. x starts as the frozen token embedding of the
    teacher plus a learned position embedding. A token goes through the MLP of its role
    only.
    """

    def __init__(self, teacher: Backbone, sizes: EncoderSizes) -> None:
        """Build the backbone on the vocabulary and the embedding of `teacher`."""
        super().__init__()
        self.tokens = teacher.tokens
        self.embedding = teacher.embedding
        self.max_history = teacher.max_history
        self.embedding.requires_grad_(False)
        dim, levels = self.embedding.embedding_dim, self.tokens.levels
        self.shared = sizes.shared_mlp
        self.positions = nn.Embedding(2 + levels * self.max_history, dim)
        roles = 1 if self.shared else levels
        self.layers = nn.ModuleList(
            nn.ModuleList(
                RoleMlp(dim, sizes.encoder_width, sizes.encoder_dropout)
                for _ in range(roles)
            )
            for _ in range(sizes.encoder_layers)
        )
        self.norm = nn.LayerNorm(dim)

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states (B, S, D), zero at padding."""
        items = batch.history.shape[1]
        # a GPU would have to synchronise to know the number of items
        packed = batch.history.device.type == "cpu"
        layout = RoleTokens.from_batch(batch, self.tokens, packed)
        states = [
            self.embedding(token) + self.positions(position)
            for token, position in zip(layout.tokens, layout.positions, strict=True)
        ]
        for layer in self.layers:
            mean = layout.mean(states)
            mlps = list(cast(nn.ModuleList, layer))
            if self.shared:
                mlps = mlps * len(states)
            roles = zip(mlps, states, layout.owners, strict=True)
            states = [x + mlp(x, mean, owner) for mlp, x, owner in roles]
        normed = [self.norm(x) for x in states]
        padded = layout.scatter_to_positions(normed, 2 + self.tokens.levels * items)
        return History(padded, self.tokens.lengths(batch))
