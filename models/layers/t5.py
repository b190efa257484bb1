"""Blocks of T5 (Raffel et al., 2020) for TIGER: short inputs and four output codes.

Mathematics and parameter names equal `transformers.T5ForConditionalGeneration` (checked
by a test). Features that TIGER does not use are left out, and dropout is fast on a CPU.

Shapes: `B` sequences, `S` encoder positions, `T` positions of the stack itself, `D`
width, `H` heads, `K` width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from core.options import Dropout

BUCKETS = 32
"""Number of relative position buckets."""

MAX_DISTANCE = 128
"""Distance from which on all positions share a bucket."""

EPSILON = 1e-6
"""Epsilon of the root mean square norm."""


@dataclass
class T5Sizes:
    """Sizes of a T5 model; the defaults are from the public code of SID-MLP."""

    d_model: PositiveInt = 128
    """Width of token embeddings and states."""
    d_ff: PositiveInt = 1024
    """Inner width of the feed-forward layers."""
    num_heads: PositiveInt = 6
    """Attention heads."""
    d_kv: PositiveInt = 64
    """Width of a head."""
    num_encoder_layers: PositiveInt = 4
    """Encoder blocks (Sec. 4.1 of SID-MLP: a four-layer T5)."""
    num_decoder_layers: PositiveInt = 4
    """Decoder blocks."""
    dropout: Dropout = 0.1
    """Dropout on embeddings, attention and blocks."""


def dropout(x: Tensor, dropout_p: float) -> Tensor:
    """Apply dropout, with a fast mask on a CPU.

    On a CPU PyTorch draws one random number at a time, which takes a third of a
    training step of TIGER. Here 16-bit pieces of random 64-bit words form the mask.
    """
    if dropout_p == 0.0:
        return x
    if x.device.type != "cpu":
        return functional.dropout(x, dropout_p)
    return x * _draw_mask(x, dropout_p).to(x.dtype).mul_(1 / (1 - dropout_p))


def _draw_mask(x: Tensor, dropout_p: float) -> Tensor:
    """Return a mask like `x` that is false with probability `dropout_p`."""
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    numbers = words.view(torch.int16)[: x.numel()].view(x.shape)
    return numbers >= round(dropout_p * 2**16) - 2**15


class _ReluDropout(torch.autograd.Function):
    """ReLU followed by an unscaled dropout mask, in place.

    The gradient is passed where the result is positive, and is zero elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout_p: float) -> Tensor:
        mask = _draw_mask(x, dropout_p)
        result = x.relu_().masked_fill_(~mask, 0.0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # the result is positive where the input was positive and is not masked
        (result,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grads[0], result, 0), None


class Norm(nn.Module):
    """A root mean square norm with a weight and no bias."""

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(sizes.d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised and weighted states of `x` (..., D)."""
        if x.device.type == "cpu" and not torch.is_grad_enabled():
            # three times faster than torch.rms_norm
            return self.normalize(x) * self.weight
        return functional.rms_norm(x, self.weight.shape, self.weight, EPSILON)

    def normalize(self, x: Tensor) -> Tensor:
        """Divide `x` by its root mean square, without applying the weight."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * norm.square().mul_(1 / x.shape[-1]).add_(EPSILON).rsqrt_()


class Attention(nn.Module):
    """Multi-head attention without biases or scaling.

    The attention of a stack's first block also holds the relative position bias.
    """

    def __init__(self, sizes: T5Sizes, position_bias: bool = False) -> None:
        super().__init__()
        inner = sizes.num_heads * sizes.d_kv
        self.heads = sizes.num_heads
        self.q = nn.Linear(sizes.d_model, inner, bias=False)
        self.k = nn.Linear(sizes.d_model, inner, bias=False)
        self.v = nn.Linear(sizes.d_model, inner, bias=False)
        self.o = nn.Linear(inner, sizes.d_model, bias=False)
        nn.init.normal_(self.q.weight, std=(sizes.d_model * sizes.d_kv) ** -0.5)
        nn.init.normal_(self.k.weight, std=sizes.d_model**-0.5)
        nn.init.normal_(self.v.weight, std=sizes.d_model**-0.5)
        nn.init.normal_(self.o.weight, std=inner**-0.5)
        if position_bias:
            self.relative_attention_bias = nn.Embedding(BUCKETS, sizes.num_heads)
            nn.init.normal_(
                self.relative_attention_bias.weight, std=sizes.d_model**-0.5
            )

    def split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Split (B, T, parts * H * K) into `parts` tensors (B, H, T, K)."""
        return x.unflatten(-1, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def project(self, x: Tensor, names: str) -> tuple[Tensor, ...]:
        """Project `x` (B, T, D) by several weights in one product.

        Args:
            x: (B, T, D) inputs.
            names: Names of the projections, such as "qkv".

        Returns:
            One (B, H, T, K) tensor per name.
        """
        weight = torch.cat([getattr(self, name).weight for name in names])
        return self.split(functional.linear(x, weight), len(names))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float
    ) -> Tensor:
        """Return the attention output (B, T, D).

        Args:
            q: (B, H, T, K) queries.
            k: (B, H, S, K) keys.
            v: (B, H, S, K) values.
            bias: Added to the scores (B, H, T, S), or None.
            dropout_p: Dropout probability of the attention weights.
        """
        # PyTorch's fused kernel for CPUs is ten times slower at these lengths
        if dropout_p == 0.0 and q.device.type != "cpu":
            mixed = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, scale=1.0
            )
        else:
            scores = q @ k.transpose(-1, -2)
            if bias is not None:
                scores = scores + bias if torch.is_grad_enabled() else scores.add_(bias)
            mixed = dropout(scores.softmax(-1), dropout_p) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class DenseReluDense(nn.Module):
    """Two linear layers with a ReLU and dropout between them."""

    def __init__(self, sizes: T5Sizes) -> None:
        super().__init__()
        self.wi = nn.Linear(sizes.d_model, sizes.d_ff, bias=False)
        self.wo = nn.Linear(sizes.d_ff, sizes.d_model, bias=False)
        nn.init.normal_(self.wi.weight, std=sizes.d_model**-0.5)
        nn.init.normal_(self.wo.weight, std=sizes.d_ff**-0.5)

    def forward(self, x: Tensor, dropout_p: float) -> Tensor:
        """Return the outputs (..., D) of `x` (..., D)."""
        inner = self.wi(x)
        if dropout_p == 0.0 or x.device.type != "cpu":
            inner = inner.relu() if torch.is_grad_enabled() else inner.relu_()
            return self.wo(dropout(inner, dropout_p))
        return self.wo(_ReluDropout.apply(inner, dropout_p)) * (1 / (1 - dropout_p))


class Layer(nn.Module):
    """A norm and the module that it precedes, named as in `transformers`.

    Args:
        sizes: Sizes of the model.
        name: Name of the module in the state dict, such as "SelfAttention".
        module: Module that reads the normalised states.
    """

    def __init__(self, sizes: T5Sizes, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)
        self.layer_norm = Norm(sizes)


class Block(nn.Module):
    """Self-attention, cross-attention (decoders only) and feed-forward sub-layers.

    Args:
        sizes: Sizes of the model.
        decoder: Whether the block has cross-attention.
        first: Whether the block's self-attention holds the position bias.
    """

    def __init__(self, sizes: T5Sizes, decoder: bool, first: bool) -> None:
        super().__init__()
        self.has_attention, self.has_cross_attention = True, decoder
        layers = [Layer(sizes, "SelfAttention", Attention(sizes, position_bias=first))]
        if decoder:
            layers.append(Layer(sizes, "EncDecAttention", Attention(sizes)))
        layers.append(Layer(sizes, "DenseReluDense", DenseReluDense(sizes)))
        self.layer = nn.ModuleList(layers)

    @property
    def attention(self) -> Attention:
        """Self-attention of the block."""
        return cast(Attention, self.layer[0].get_submodule("SelfAttention"))

    @property
    def cross_attention(self) -> Attention:
        """Cross-attention of a decoder's block."""
        return cast(Attention, self.layer[1].get_submodule("EncDecAttention"))

    @property
    def feedforward(self) -> DenseReluDense:
        """Feed-forward sub-layer of the block."""
        return cast(DenseReluDense, self.layer[-1].get_submodule("DenseReluDense"))

    def get_norm(self, index: int) -> Norm:
        """Return the norm of the sub-layer `index`."""
        return cast(Norm, self.layer[index].get_submodule("layer_norm"))

    def drop(self, self_attention: bool, cross_attention: bool) -> None:
        """Remove sub-layers from the block (Tables 2 and 9 of SID-MLP).

        Args:
            self_attention: Whether to remove self-attention.
            cross_attention: Whether to remove cross-attention.
        """
        self.has_attention = not self_attention
        self.has_cross_attention = not cross_attention
        if self_attention:
            self.layer[0] = nn.Identity()
        if cross_attention:
            self.layer[1] = nn.Identity()

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        dropout_p: float,
        states: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Return the states (B, T, D) after the block.

        Args:
            x: (B, T, D) states.
            bias: Added to the scores of self-attention: position bias and padding mask.
            dropout_p: Dropout probability.
            states: (B, S, D) encoder states for cross-attention.
            padding: Padding mask of `states`, added to the scores of cross-attention.
        """
        if self.has_attention:
            q, k, v = self.attention.project(self.get_norm(0)(x), "qkv")
            x = x + dropout(self.attention.attend(q, k, v, bias, dropout_p), dropout_p)
        if self.has_cross_attention and states is not None:
            (q,) = self.cross_attention.project(self.get_norm(1)(x), "q")
            k, v = self.cross_attention.project(states, "kv")
            x = x + dropout(
                self.cross_attention.attend(q, k, v, padding, dropout_p), dropout_p
            )
        return x + dropout(self.feedforward(self.get_norm(-1)(x), dropout_p), dropout_p)


class Stack(nn.Module):
    """Blocks and a final norm. All blocks use the position bias of the first block."""

    def __init__(self, sizes: T5Sizes, decoder: bool) -> None:
        super().__init__()
        count = sizes.num_decoder_layers if decoder else sizes.num_encoder_layers
        self.block = nn.ModuleList(
            Block(sizes, decoder, first=i == 0) for i in range(count)
        )
        self.final_layer_norm = Norm(sizes)
        self.sizes, self.decoder = sizes, decoder

    @property
    def blocks(self) -> list[Block]:
        """Blocks of the stack, in order."""
        return cast(list[Block], list(self.block))

    def position_bias(self, length: int) -> Tensor:
        """Return the bias (1, H, length, length) by relative position.

        In a decoder it is -inf for later positions.
        """
        table = cast(nn.Embedding, self.blocks[0].attention.relative_attention_bias)
        position = torch.arange(length, device=table.weight.device)
        distance = position[None] - position[:, None]  # key minus query
        bias = table(_bucket(distance, bidirectional=not self.decoder))
        bias = bias.permute(2, 0, 1).unsqueeze(0)
        return bias.masked_fill(distance > 0, -torch.inf) if self.decoder else bias

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        dropout_p: float,
        states: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Return the states (B, T, D) of embedded tokens `x` (B, T, D).

        The other arguments are as in `Block.forward`.
        """
        x = dropout(x, dropout_p)
        for block in self.blocks:
            x = block(x, bias, dropout_p, states, padding)
        return dropout(self.final_layer_norm(x), dropout_p)


def _bucket(distance: Tensor, bidirectional: bool) -> Tensor:
    """Return T5's bucket of each relative position."""
    count = BUCKETS // 2 if bidirectional else BUCKETS
    offset = (distance > 0).long() * count if bidirectional else 0
    distance = distance.abs() if bidirectional else (-distance).clamp(min=0)
    exact = count // 2
    scale = (count - exact) / math.log(MAX_DISTANCE / exact)
    far = exact + (torch.log(distance.float().clamp(min=1) / exact) * scale).long()
    return offset + torch.where(distance < exact, distance, far.clamp(max=count - 1))
