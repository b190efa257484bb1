"""T5's encoder for inference on histories of different lengths, without padding.

    states = PackedEncoder(embedding, encoder)(tokens, lengths)

The states equal the states of `T5Backbone.encode` up to float32 rounding. On a CPU the
histories are stored end to end, in chunks whose activations fit into the processor's
cache, and a compiled kernel computes attention within each history (`kernels.py`). A
GPU, and a CPU without the kernels, encode all histories padded. The weights of queries,
keys and values are concatenated, the norms' weights are folded into the next layer, and
the projections of the first block are a table by token.

Shapes: `B` requests, `S` tokens of the longest history, `n` tokens of a chunk, `D`
width, `H` heads, `K` width of a head, `V` vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cpu import kernels
from models.cpu.matmul import PackedLinear
from models.layers.t5 import Stack
from models.retrieval.parts import padding_mask, real_positions

MAX_CHUNK_TOKENS = 768
"""Maximum tokens of a chunk. Larger chunks do not fit into the cache and take twice the
time per token (measured)."""


class PackedEncoder:
    """A T5 encoder with its current weights, concatenated and folded for inference.

    Args:
        embedding: (V, D) embeddings of tokens.
        encoder: Stack whose weights are used.
    """

    @torch.no_grad()
    def __init__(self, embedding: nn.Embedding, encoder: Stack) -> None:
        self.embedding = embedding
        self.encoder = encoder
        self.sizes = encoder.sizes
        blocks = encoder.blocks
        self.normalize = blocks[0].get_norm(0).normalize
        self.qkv = []
        for block in blocks:
            attention = block.attention
            projections = (attention.q, attention.k, attention.v)
            weight = torch.cat([projection.weight for projection in projections])
            self.qkv.append(PackedLinear(weight * block.get_norm(0).weight))
        self.o = [PackedLinear(block.attention.o.weight) for block in blocks]
        self.wi = [
            PackedLinear(block.feedforward.wi.weight * block.get_norm(-1).weight)
            for block in blocks
        ]
        self.wo = [PackedLinear(block.feedforward.wo.weight) for block in blocks]
        # (V, 3 * H * K): queries, keys and values of the first block by token
        self.first_qkv = self.qkv[0](self.normalize(embedding.weight))

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the states (B, S, D) of padded histories.

        States at padding are finite but have no meaning.

        Args:
            tokens: (B, S) tokens, padded on the right.
            lengths: (B,) number of tokens of each history.
        """
        weight = self.embedding.weight
        if not kernels.ready(weight):
            return self.encode_padded(
                tokens, padding_mask(lengths, tokens.shape[1], weight.dtype)
            )
        states = weight.new_zeros((*tokens.shape, self.sizes.d_model))
        real = real_positions(lengths, tokens.shape[1])
        states[real] = self.encode_packed(tokens[real], lengths)
        return states

    def encode_packed(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the states (n, D) of histories that are stored end to end.

        Args:
            tokens: (n,) tokens of all histories, n = sum of lengths.
            lengths: (B,) number of tokens of each history.
        """
        if not len(lengths):
            return self.embedding.weight.new_zeros((0, self.sizes.d_model))
        bias = self.encoder.position_bias(int(lengths.max()))[0]
        heads = self.sizes.num_heads
        offsets = functional.pad(lengths.cumsum(0), (1, 0))  # (B + 1,)
        num_chunks = math.ceil(len(tokens) / MAX_CHUNK_TOKENS)
        # chunks of whole requests with about equal numbers of tokens
        chunk = offsets[:-1] * num_chunks // len(tokens)  # (B,)
        requests_per_chunk = torch.bincount(chunk)
        requests_per_chunk = requests_per_chunk[requests_per_chunk > 0]
        edges = functional.pad(requests_per_chunk.cumsum(0), (1, 0)).tolist()
        states = []
        for first, last in itertools.pairwise(edges):
            chunk_offsets = offsets[first : last + 1]
            begin, end = chunk_offsets[0], chunk_offsets[-1]
            attend = partial(
                kernels.packed_attention,
                begin=chunk_offsets - begin,
                bias=bias,
                heads=heads,
            )
            states.append(self.run_blocks(tokens[begin:end], attend))
        return torch.cat(states)

    def encode_padded(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Return the states (B, S, D) of padded histories, computed at padding too.

        Args:
            tokens: (B, S) tokens.
            padding: (B, 1, 1, S), -inf at padding, or None.
        """
        bias = self.encoder.position_bias(tokens.shape[1])
        if padding is not None:
            bias = bias + padding
        attention = self.encoder.blocks[0].attention  # all blocks split heads alike

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = attention.split(qkv, 3)
            return attention.heads_output(q, k, v, bias, 0.0)

        return self.run_blocks(tokens, attend)

    def run_blocks(self, tokens: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Run all blocks over embedded tokens.

        Args:
            tokens: (...) tokens.
            attend: Maps queries, keys and values (..., 3 * H * K) to the mixed values
                (..., H * K).

        Returns:
            (..., D)
        """
        x = self.embedding(tokens)
        blocks = zip(self.qkv, self.o, self.wi, self.wo, strict=True)
        for i, (qkv, o, wi, wo) in enumerate(blocks):
            if i == 0:
                projected = functional.embedding(tokens, self.first_qkv)
            else:
                projected = qkv(self.norm(x))
            x = o(attend(projected), add=x)
            x = wo(wi(self.norm(x), relu=True), add=x)
        return self.norm(x) * self.encoder.final_layer_norm.weight

    def norm(self, x: Tensor) -> Tensor:
        """Divide `x` (..., D) by its root mean square.

        The weights of norms are folded into the layers after them.
        """
        if x.dim() == 2 and kernels.ready(x):
            return kernels.scaled_rows(x, self.sizes.epsilon)
        return self.normalize(x)
