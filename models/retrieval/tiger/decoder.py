"""T5's decoder, used by TIGER and its students with T5 layers.

Training reads all codes at once. Search computes the keys and values of cross-attention
once per user. The user's beams share them, as queries of one matrix product. The query
projection is folded into the keys and the output projection into the values:
`(x Wq)(s Wk)' = x (s Wk Wq')'`. The keys and values of self-attention are stored once
per code, and a beam looks them up by its ancestors. In contrast, the cache of
`transformers` holds cross-attention once per beam and copies it at every step.

Shapes: `B` users, `L` levels, `W` beams, `N = B * W`, `S` source positions, `D` width,
`H` heads, `K` width of a head, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cpu import kernels
from models.cpu.weights import PackedLinear, cache_until_changed
from models.layers.t5 import Stack, T5Sizes
from models.retrieval.retriever import Decoder, History
from models.retrieval.tiger.encoder import T5Backbone


class T5Decoder(Decoder):
    """T5 blocks over the backbone's token embeddings, also used as output layer."""

    def __init__(
        self,
        backbone: T5Backbone,
        sizes: T5Sizes | None = None,
        *,
        self_attention: bool = True,
        cross_attention: bool = True,
        codebooks: bool = False,
        first_level: int = 0,
    ) -> None:
        """Build the decoder.

        Args:
            backbone: Encoder of T5.
            sizes: Sizes of T5; None for the encoder's.
            self_attention: Whether blocks attend to the prefix.
            cross_attention: Whether blocks attend to the history.
            codebooks: Whether the logits of a level cover its codes; otherwise the
                whole vocabulary, as in `transformers`. Log-probabilities in search are
                normalised over the same tokens.
            first_level: First level that the decoder predicts.
        """
        super().__init__(backbone, first_level)
        self.stack = Stack(sizes or backbone.sizes, decoder=True)
        for block in self.stack.blocks:
            block.drop(not self_attention, not cross_attention)
        self.codebooks = codebooks

    def span(self, level: int) -> tuple[int, int]:
        """Return the first token and the number of tokens of a level's logits.

        They cover the level's codebook, or the whole vocabulary.
        """
        if self.codebooks:
            return super().span(level)
        return 0, self.tokens.vocabulary

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """Return the states (B, L - first_level, D) before each code, in one pass."""
        inputs = self.tokens.shift_right(codes)
        bias = None
        if self.stack.blocks[0].has_attention:
            bias = self.stack.position_bias(inputs.shape[1])
        dropout_p = self.stack.sizes.dropout if self.training else 0.0
        states = self.stack(
            self.embedding(inputs), bias, dropout_p, history.states, history.padding
        )
        return states[:, self.first_level :]

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        """Return each level's logits (B, O_l), scaled as in T5 with tied weights."""
        scaled = hidden * self.stack.sizes.d_model**-0.5
        if not self.codebooks:
            return functional.linear(scaled, self.embedding.weight).unbind(1)
        logits = []
        for level, x in enumerate(scaled.unbind(1), self.first_level):
            weight = self.embedding.weight.narrow(0, *self.span(level))
            logits.append(functional.linear(x, weight))
        return logits

    def scorer(self, history: History) -> SharedKV:
        """Return a scorer whose beams share keys and values of cross-attention."""
        return SharedKV(self, history)


class PackedDecoder:
    """The decoder's weights for search: projections are joined and norms folded in."""

    @torch.no_grad()
    def __init__(self, embedding: nn.Embedding, stack: Stack) -> None:
        """Pack the weights; `embedding` is the token embedding and the output layer."""
        self.embedding = embedding
        sizes, blocks = stack.sizes, stack.blocks
        self.normalize = stack.final_layer_norm.normalize
        self.heads = sizes.num_heads
        self.has_attention = blocks[0].has_attention
        self.has_cross_attention = blocks[0].has_cross_attention
        # per block: queries, keys with values, and outputs of self-attention
        self.q: list[PackedLinear] = []
        self.kv: list[PackedLinear] = []
        self.o: list[PackedLinear] = []
        # (H * D, D) per block: projections to keys and values of the history, with the
        # projections of q and o folded in
        self.keys: list[PackedLinear] = []
        self.values: list[PackedLinear] = []
        self.wi: list[PackedLinear] = []
        self.wo: list[PackedLinear] = []
        for block in blocks:
            if self.has_attention:
                attention, norm = block.attention, block.get_norm(0).weight
                self.q.append(PackedLinear(attention.q.weight * norm))
                kv = torch.cat([attention.k.weight, attention.v.weight])
                self.kv.append(PackedLinear(kv * norm))
                self.o.append(PackedLinear(attention.o.weight))
            if self.has_cross_attention:
                cross, heads = block.cross_attention, (self.heads, -1)
                norm = block.get_norm(1).weight
                q = cross.q.weight.unflatten(0, heads) * norm  # (H, K, D)
                k = cross.k.weight.unflatten(0, heads)
                v = cross.v.weight.unflatten(0, heads)
                o = cross.o.weight.unflatten(1, heads)  # (D, H, K)
                keys = torch.einsum("hkd,hke->hde", q, k).flatten(0, 1)
                values = torch.einsum("dhk,hke->hde", o, v).flatten(0, 1)
                self.keys.append(PackedLinear(keys))
                self.values.append(PackedLinear(values))
            inner, norm = block.feedforward, block.get_norm(-1).weight
            self.wi.append(PackedLinear(inner.wi.weight * norm))
            self.wo.append(PackedLinear(inner.wo.weight))
        if self.has_attention:
            # (V, ...): queries, keys and values of every token in block 0
            token = self.normalize(embedding.weight)
            self.first_q, self.first_kv = self.q[0](token), self.kv[0](token)
        scale = stack.final_layer_norm.weight * sizes.d_model**-0.5
        self.logits = PackedLinear(embedding.weight * scale)


class SharedKV:
    """A `Scorer` of T5 whose beams share keys and values of cross-attention."""

    def __init__(self, model: T5Decoder, history: History) -> None:
        self.decoder = decoder = cache_until_changed(
            model,
            "packed_decoder",
            lambda: PackedDecoder(model.embedding, model.stack),
            model.embedding,
        )
        self.tokens, self.codebooks = model.tokens, model.codebooks
        self.padding = history.padding
        self.batch, self.device = len(history.states), history.states.device
        # per block: keys and values (B, H * S, D) of the history
        self.cross = [
            (
                self._project_heads(keys, history.states),
                self._project_heads(values, history.states),
            )
            for keys, values in zip(decoder.keys, decoder.values, strict=True)
        ]
        if decoder.has_attention:
            self.bias = model.stack.position_bias(self.tokens.levels)[0]  # (H, L, L)
        # per block and level: keys and values (n, 2 * H * K) of the level's codes
        self.codes: list[list[Tensor]] = [[] for _ in decoder.wi]
        # per level (N,): row of each beam's ancestor among the rows of that level
        self.ancestors: list[Tensor] = []

    def _project_heads(self, weight: PackedLinear, states: Tensor) -> Tensor:
        """Return keys or values (B, H * S, D) of `states` (B, S, D)."""
        heads = weight(states).unflatten(-1, (self.decoder.heads, -1))
        return heads.transpose(1, 2).flatten(1, 2)

    def start(self) -> Tensor:
        """Return the log-probabilities (B, C_0) of the first code."""
        # T5's start token is padding, 0
        start = torch.zeros((self.batch, 1), dtype=torch.long, device=self.device)
        return self._advance(start, 0)[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (B, W, C_l) of each beam's next code."""
        level = len(self.ancestors)
        user = torch.arange(self.batch, device=parents.device).unsqueeze(1)
        num_beams = len(self.ancestors[-1]) // self.batch
        parent_rows = (parents + user * num_beams).flatten()
        self.ancestors = [rows[parent_rows] for rows in self.ancestors]
        return self._advance(tokens + self.tokens.first[level - 1], level)

    def _advance(self, tokens: Tensor, level: int) -> Tensor:
        """Return the log-probabilities (B, W, C_level) after the last tokens (B, W)."""
        decoder, shape = self.decoder, tokens.shape
        self.ancestors.append(torch.arange(tokens.numel(), device=tokens.device))
        tokens = tokens.flatten()
        x = functional.embedding(tokens, decoder.embedding.weight)  # (N, D)
        for block in range(len(self.codes)):
            if decoder.has_attention:
                if block == 0:
                    q = functional.embedding(tokens, decoder.first_q)
                    kv = functional.embedding(tokens, decoder.first_kv)
                else:
                    normed = decoder.normalize(x)
                    q, kv = decoder.q[block](normed), decoder.kv[block](normed)
                codes = [*self.codes[block], kv]
                if level < self.tokens.levels - 1:
                    self.codes[block] = codes
                bias = self.bias[:, level, : level + 1]
                x = decoder.o[block](self._attend_to_codes(q, codes, bias), add=x)
            if decoder.has_cross_attention:
                keys, values = self.cross[block]
                x = x.unflatten(0, shape)  # (B, W, D)
                scores = decoder.normalize(x) @ keys.transpose(1, 2)
                scores = scores.unflatten(-1, (decoder.heads, -1))  # (B, W, H, S)
                if self.padding is not None:
                    scores = scores.add_(self.padding)
                x = (x + scores.softmax(-1).flatten(2) @ values).flatten(0, 1)
            inner = decoder.wi[block](decoder.normalize(x), relu=True)
            x = decoder.wo[block](inner, add=x)
        logits = decoder.logits(decoder.normalize(x))  # (N, V)
        codebook = self.tokens.first[level], self.tokens.sizes[level]
        if self.codebooks:
            log_probs = logits.narrow(1, *codebook).float().log_softmax(1)
        elif kernels.ready(logits):
            log_probs = kernels.log_softmax_part(logits, *codebook)
        else:
            logits = logits.float()
            log_probs = logits.narrow(1, *codebook) - logits.logsumexp(1, keepdim=True)
        return log_probs.unflatten(0, shape)

    def _attend_to_codes(self, q: Tensor, codes: list[Tensor], bias: Tensor) -> Tensor:
        """Attend from the newest code of each beam to all codes of the beam."""
        heads = self.decoder.heads
        if kernels.ready(q):
            return kernels.beam_attention(q, codes, self.ancestors, bias, heads)
        query = q.unflatten(-1, (heads, -1))  # (N, H, K)
        keys, values = [], []  # per level (N, H, K)
        for kv, rows in zip(codes, self.ancestors, strict=True):
            key_value = kv.index_select(0, rows).unflatten(-1, (2, heads, -1))
            key, value = key_value.unbind(1)
            keys.append(key)
            values.append(value)
        scores = torch.stack([(query * key).sum(-1) for key in keys], -1)
        weights = (scores + bias).softmax(-1).unsqueeze(-2)  # (N, H, 1, level + 1)
        mixed = weights[..., 0] * values[0]
        for level, value in enumerate(values[1:], start=1):
            mixed = mixed + weights[..., level] * value
        return mixed.flatten(1)
