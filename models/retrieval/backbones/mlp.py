"""SID-MLP++'s backbone (equation 4): MLPs in place of the teacher's encoder.

Instead of attention each layer has the mean of a request's states and one MLP per role. Roles follow positions: code l
of an item has role l, and the last code's role also serves user and end.

Shapes: `B` requests, `T` items and `S = 2 + L * T` tokens of a history, `L` levels (codes of an item), `D`
width, `R` items in the batch, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import check_dropout, check_positive
from models.layers.t5 import dropout
from models.retrieval.parts import Backbone, History, SidTokens, real_positions

IN_CACHE = 128
"""Tokens that an MLP takes at once on a CPU: at the published width their activations stay in the core's cache."""


@dataclass
class EncoderSizes:
    """Sizes of the MLP encoder; the defaults are those of the public code."""

    encoder_layers: int = 4
    """Layers (Appendix C.2; swept over 1, 2, 4, 6, 8)."""
    encoder_width: int = 2048
    """Inner width of each MLP (swept from 256 to 8192, Appendix C.2)."""
    encoder_dropout: float = 0.1
    """Dropout on the inner width."""
    shared_mlp: bool = False
    """One MLP per layer for all roles (Table 14, Shared MLP)."""

    def __post_init__(self) -> None:
        check_positive(self, ("encoder_layers", "encoder_width"))
        check_dropout(self, "encoder_dropout")


def on_cpu(x: Tensor) -> bool:
    """Whether sizes can be read without waiting for a device, and be other ones at the next call."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class RoleMlp(nn.Module):
    """F of equation 4: Linear, LayerNorm, GELU, dropout, Linear (the public code's)."""

    def __init__(self, dim: int, width: int, dropout_p: float) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(2 * dim, width), nn.LayerNorm(width)
        self.outer, self.dropout_p = nn.Linear(width, dim), dropout_p

    def forward(self, x: Tensor, mean: Tensor, owner: Tensor) -> Tensor:
        """(n, D): F([x; mean of its request]) of tokens x (n, D) of the requests `owner` (n,); mean (B, D)."""
        if not on_cpu(x) or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            hidden = self.inner(torch.cat([x, mean[owner]], 1))  # (n, width)
            return self.outer(
                dropout(
                    functional.gelu(self.norm(hidden)),
                    self.dropout_p if self.training else 0.0,
                )
            )
        own, given = self.inner.weight.tensor_split(
            2, 1
        )  # [x; mean] W = x W_own + mean W_given
        shared = functional.linear(
            mean, given, self.inner.bias
        )  # (B, width), once per request
        pieces = [
            self.outer(
                functional.gelu(self.norm(torch.addmm(shared[request], piece, own.T)))
            )
            for piece, request in zip(
                x.split(IN_CACHE), owner.split(IN_CACHE), strict=True
            )
        ]
        return torch.cat(pieces)


@dataclass(frozen=True)
class Layout:
    """The tokens of a batch by role, level l at index l; the last role has a user and an end per request too.

    Packed, it has real items only, R of them, so nothing is done for padding. Otherwise it has all R = B * T
    places, those of padding marked, and its shapes follow from the batch's.
    """

    tokens: list[Tensor]
    """(R,) tokens of each role, the last (R + 2 B,): codes, users, ends."""
    owners: list[Tensor]
    """Of each token, its request."""
    positions: list[Tensor]
    """Of each token, its position."""
    counts: Tensor
    """(B, 1) real tokens of each request."""
    real: Tensor | None
    """(B, T) which items are no padding, where padding is in it."""

    @classmethod
    def of(cls, batch: dict[str, Tensor], vocabulary: SidTokens, packed: bool) -> Self:
        history, length = batch["history"], batch["history_length"]
        rows, items = history.shape
        levels = vocabulary.levels
        request = torch.arange(rows, device=history.device)
        real: Tensor | None = real_positions(length, items)  # (B, T)
        if packed:
            owner, item = cast(Tensor, real).nonzero(as_tuple=True)
            codes, real = vocabulary.items[history[owner, item]], None  # (R, L)
        else:
            owner = request.repeat_interleave(items)
            item = torch.arange(items, device=history.device).repeat(rows)
            codes = vocabulary.items[
                torch.where(cast(Tensor, real), history, 0).flatten()
            ]
        tokens, positions = (
            list(codes.unbind(1)),
            [1 + level + levels * item for level in range(levels)],
        )
        user = vocabulary.first_user + batch["user"] % vocabulary.n_user_tokens
        tokens[-1] = torch.cat(
            [tokens[-1], user, torch.full_like(user, vocabulary.end)]
        )
        positions[-1] = torch.cat(
            [positions[-1], torch.zeros_like(user), 1 + levels * length]
        )
        owners = [owner] * (levels - 1) + [torch.cat([owner, request, request])]
        return cls(tokens, owners, positions, (2 + levels * length).unsqueeze(1), real)

    def mean(self, states: list[Tensor]) -> Tensor:
        """(B, D): g of equation 4, the mean over the real tokens of each request of their states."""
        rows, last = self.counts.shape[0], self.owners[-1].shape[0]
        codes, ends = states[-1].split([last - 2 * rows, 2 * rows])
        for other in states[:-1]:
            codes = codes + other  # (R, D)
        total = ends[:rows] + ends[rows:]
        if self.real is None:
            total = total.index_add(0, self.owners[-1][: codes.shape[0]], codes)
        else:  # summed in a fixed order, which adding by index on a GPU is not
            total = total + codes.unflatten(0, self.real.shape).masked_fill(
                ~self.real.unsqueeze(-1), 0.0
            ).sum(1)
        return total / self.counts

    def padded(self, states: list[Tensor], length: int) -> Tensor:
        """(B, S, D): the states at their positions, zero at padding."""
        states = list(states)
        if self.real is not None:
            real = self.real.flatten().unsqueeze(-1)
            states = [state * real for state in states[:-1]] + [
                torch.cat(
                    [states[-1][: real.shape[0]] * real, states[-1][real.shape[0] :]]
                )
            ]
        index = torch.cat(
            [
                owner * length + at
                for owner, at in zip(self.owners, self.positions, strict=True)
            ]
        )
        joined = torch.cat(states)
        flat = joined.new_zeros((self.counts.shape[0] * length, joined.shape[1]))
        return flat.index_add(0, index, joined).unflatten(
            0, (-1, length)
        )  # padding adds zeros where an end is


class MlpBackbone(Backbone):
    """Equation 4: x <- x + F_role([x; g]), g the mean of the request's states; then a layer norm.

    x starts as the teacher's token embedding, frozen, plus a learned one of the position. Every token goes
    through the MLP of its own role only.
    """

    def __init__(self, teacher: Backbone, sizes: EncoderSizes) -> None:
        """`teacher` gives the vocabulary and the embedding."""
        super().__init__()
        self.tokens, self.embedding, self.max_history = (
            teacher.tokens,
            teacher.embedding,
            teacher.max_history,
        )
        self.embedding.requires_grad_(False)
        dim, levels = self.embedding.embedding_dim, self.tokens.levels
        self.shared = sizes.shared_mlp
        self.pack: bool | None = None
        """Whether nothing is done for padding; None: on a CPU, where real items are counted without waiting."""
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

    def encode(self, batch: dict[str, Tensor]) -> History:
        """States (B, S, D), zero at padding."""
        items = batch["history"].shape[1]
        layout = Layout.of(
            batch,
            self.tokens,
            on_cpu(batch["history"]) if self.pack is None else self.pack,
        )
        states = [
            self.embedding(token) + self.positions(position)
            for token, position in zip(layout.tokens, layout.positions, strict=True)
        ]
        for layer in self.layers:
            mean = layout.mean(states)
            updates = self._updates(
                cast(nn.ModuleList, layer), states, mean, layout.owners
            )
            states = [x + update for x, update in zip(states, updates, strict=True)]
        padded = layout.padded(
            [self.norm(x) for x in states], 2 + self.tokens.levels * items
        )
        return History(padded, self.tokens.lengths(batch))

    def _updates(
        self,
        layer: nn.ModuleList,
        states: list[Tensor],
        mean: Tensor,
        owners: list[Tensor],
    ) -> list[Tensor]:
        """F_role of the states of each role."""
        if self.shared:
            return list(
                layer[0](torch.cat(states), mean, torch.cat(owners)).split(
                    [x.shape[0] for x in states]
                )
            )
        return [
            mlp(x, mean, owner)
            for mlp, x, owner in zip(layer, states, owners, strict=True)
        ]
