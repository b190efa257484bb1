"""T5's decoder, which TIGER and its one-layer student decode with. In training it reads all codes at once.

In search cross-attention keys and values are computed once per user and read by all of its beams, which stand on
the query axis of one product. As they serve many queries, the query projection is folded into the keys
and the output projection into the values: `(x Wq)(s Wk)' = x (s Wk Wq')'`. Self-attention keys and values
stay where they were computed; a beam looks them up by its ancestors. The cache that `transformers` keeps
holds the cross-attention's once per beam and copies it at every step.

What verifies the steps of a draft (`search/speculative.py`) reads a tree of prefixes in one pass: all of a user stand
side by side as positions of one sequence. A mask lets each see its own beginnings alone, and the relative position bias
goes by length and not by place.

Shapes: `B` users, `L` levels, `W` beams, `N = B * W`, `S` source positions, `D` width, `H` heads, `K` width of a head,
`V` vocabulary; `R` users of a tree, `T` prefixes of a user, `W_l` of them with l codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cpu import kernels
from models.cpu.derived import derived
from models.cpu.matmul import Packed
from models.layers.t5 import Stack, T5Sizes
from models.retrieval.parts import Decoder, History, SidTokens
from models.retrieval.search.speculative import Tree

MOST_SCORES = 2**26
"""Attention scores of a layer over a tree held at once; more users are taken in turn."""


class T5Decoder(Decoder):
    """Blocks over the embeddings of the tokens, which are the output layer too and belong to the backbone."""

    def __init__(
        self,
        tokens: SidTokens,
        sizes: T5Sizes,
        embedding: nn.Embedding,
        *,
        layers: int | None = None,
        self_attention: bool = True,
        cross_attention: bool = True,
        codebook_logits: bool = False,
        codebook_scores: bool = False,
    ) -> None:
        """`layers` in place of those of `sizes`; each attention can be left out; with `codebook_logits` the logits of a
        level are of its codes, else of the whole vocabulary; with `codebook_scores` log-probabilities in search are
        normalised over the level's codes, else over the whole vocabulary, as `transformers` does."""
        super().__init__()
        self.tokens = tokens
        self.stack = Stack(
            sizes if layers is None else replace(sizes, num_decoder_layers=layers),
            decoder=True,
        )
        for block in self.stack.blocks:
            block.drop(not self_attention, not cross_attention)
        self.codebook_logits, self.codebook_scores, self.hidden_width = (
            codebook_logits,
            codebook_scores,
            sizes.d_model,
        )
        self._embedding = (embedding,)  # the backbone's, no submodule here

    @property
    def embedding(self) -> nn.Embedding:
        return self._embedding[0]

    def span(self, level: int) -> tuple[int, int]:
        return (
            super().span(level) if self.codebook_logits else (0, self.tokens.vocabulary)
        )

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """(B, L, D): states of the decoder, all codes at once."""
        return self.states(history, self.tokens.started(codes))

    def states(self, history: History, given: Tensor) -> Tensor:
        """(B, T, D): states of the decoder after the tokens `given` (B, T)."""
        bias = (
            self.stack.position_bias(given.shape[1])
            if self.stack.blocks[0].has_attention
            else None
        )
        dropout_p = self.stack.sizes.dropout if self.training else 0.0
        return self.stack(
            self.embedding(given), bias, dropout_p, history.states, history.padding
        )

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        """Scaled as T5 does where embeddings are tied."""
        scaled = hidden * self.stack.sizes.d_model**-0.5
        if not self.codebook_logits:
            return functional.linear(scaled, self.embedding.weight).unbind(1)
        spans = map(self.span, range(self.tokens.levels))
        return [
            functional.linear(scaled[:, level], self.embedding.weight.narrow(0, *span))
            for level, span in enumerate(spans)
        ]

    def packed(self) -> PackedDecoder:
        """The weights as they are now, kept until they change."""
        return derived(
            self,
            "packed_decoder",
            lambda: PackedDecoder(self.embedding, self.stack),
            self.embedding,
        )

    def scorer(self, history: History) -> SharedKV:
        return SharedKV(
            self.packed(), history, self.tokens, vocabulary=not self.codebook_scores
        )


class PackedDecoder:
    """The decoder's weights at this time: joined, with the norms' weights in what follows them."""

    @torch.no_grad()
    def __init__(self, embedding: nn.Embedding, stack: Stack) -> None:
        """`embedding` is that of the tokens, and the output layer."""
        self.embedding, self.stack, sizes, blocks = (
            embedding,
            stack,
            stack.sizes,
            stack.blocks,
        )
        self.normalize, self.heads = stack.final_layer_norm.normalize, sizes.num_heads
        self.q, self.kv, self.o = [], [], []
        self.has_attention, self.has_cross_attention = (
            blocks[0].has_attention,
            blocks[0].has_cross_attention,
        )
        if self.has_attention:
            attentions = [
                (block.attention, block.get_norm(0).weight) for block in blocks
            ]
            self.q = [Packed(a.q.weight * norm) for a, norm in attentions]
            self.kv = [
                Packed(torch.cat([a.k.weight, a.v.weight]) * norm)
                for a, norm in attentions
            ]
            self.o = [Packed(a.o.weight) for a, _ in attentions]
            token = self.normalize(embedding.weight)
            self.first_q, self.first_kv = (
                self.q[0](token),
                self.kv[0](token),
            )  # (V, ...): what block 0 makes of a token
        self.wi = [
            Packed(block.feedforward.wi.weight * block.get_norm(-1).weight)
            for block in blocks
        ]
        self.wo = [Packed(block.feedforward.wo.weight) for block in blocks]
        self.logits = Packed(
            embedding.weight * (stack.final_layer_norm.weight * sizes.d_model**-0.5)
        )
        self.keys, self.values = (
            [],
            [],
        )  # each (H * D, D): of the states, with the projections of q and o in them
        for cross, norm in [
            (b.cross_attention, b.get_norm(1).weight)
            for b in blocks
            if self.has_cross_attention
        ]:
            q, k, v = (
                layer.weight.unflatten(0, (cross.heads, -1))
                for layer in (cross.q, cross.k, cross.v)
            )
            o = cross.o.weight.unflatten(1, (cross.heads, -1))  # (D, H, K)
            self.keys.append(
                Packed(torch.einsum("hkd,hke->hde", q * norm, k).flatten(0, 1))
            )
            self.values.append(Packed(torch.einsum("dhk,hke->hde", o, v).flatten(0, 1)))


class SharedKV:
    """A `Scorer` (see `parts.py`) over T5 weights."""

    def __init__(
        self,
        decoder: PackedDecoder,
        history: History,
        tokens: SidTokens,
        vocabulary: bool = True,
    ) -> None:
        """Log-probabilities are normalised over the whole vocabulary, as `transformers` does, or over each level's
        codebook."""
        self.decoder, self.padding, self.tokens, self.vocabulary = (
            decoder,
            history.padding,
            tokens,
            vocabulary,
        )
        shape = (decoder.heads, -1)
        self.cross = [  # keys and values (B, H * S, D) of each block
            tuple(
                fold(history.states).unflatten(-1, shape).transpose(1, 2).flatten(1, 2)
                for fold in folds
            )
            for folds in zip(decoder.keys, decoder.values, strict=True)
        ]
        if decoder.has_attention:
            self.bias = decoder.stack.position_bias(tokens.levels)[0]  # (H, L, L)
        self.codes: list[list[Tensor]] = [
            [] for _ in decoder.wi
        ]  # per block and level (n, 2 * H * K): keys, values
        self.ancestors: list[
            Tensor
        ] = []  # per level (N,): each beam's row among those of that level
        self.batch, self.device = len(history.states), history.states.device

    def start(self) -> Tensor:
        begin = torch.zeros(
            (self.batch, 1), dtype=torch.long, device=self.device
        )  # T5 starts with padding
        return self._advance(begin, 0)[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        level = len(self.ancestors)
        user = torch.arange(self.batch, device=parents.device).unsqueeze(1)
        parent = (parents + user * (len(self.ancestors[-1]) // self.batch)).flatten()
        self.ancestors = [rows[parent] for rows in self.ancestors]
        return self._advance(tokens + self.tokens.first[level - 1], level)

    def _advance(self, tokens: Tensor, level: int) -> Tensor:
        """(B, W, C_level) after the last tokens (B, W)."""
        decoder, shape = self.decoder, tokens.shape
        self.ancestors.append(torch.arange(tokens.numel(), device=tokens.device))
        tokens = tokens.flatten()
        x = functional.embedding(tokens, decoder.embedding.weight)  # (N, D)
        for i, codes in enumerate(self.codes):
            if decoder.has_attention:
                if i == 0:
                    q, kv = (
                        functional.embedding(tokens, table)
                        for table in (decoder.first_q, decoder.first_kv)
                    )
                else:
                    normed = decoder.normalize(x)
                    q, kv = decoder.q[i](normed), decoder.kv[i](normed)
                seen = [*codes, kv]
                if level < self.tokens.levels - 1:
                    self.codes[i] = seen
                mixed = self._attend_to_codes(q, seen, self.bias[:, level, : level + 1])
                x = decoder.o[i](mixed, add=x)
            if decoder.has_cross_attention:
                keys, values = self.cross[i]
                x = x.unflatten(0, shape)  # (B, W, D)
                scores = (decoder.normalize(x) @ keys.transpose(1, 2)).unflatten(
                    -1, (decoder.heads, -1)
                )  # (B, W, H, S)
                scores = scores if self.padding is None else scores.add_(self.padding)
                x = (x + scores.softmax(-1).flatten(2) @ values).flatten(0, 1)
            x = decoder.wo[i](decoder.wi[i](decoder.normalize(x), relu=True), add=x)
        logits = decoder.logits(decoder.normalize(x))  # (N, V)
        first, size = self.tokens.first[level], self.tokens.sizes[level]
        if not self.vocabulary:
            return (
                logits.narrow(1, first, size).float().log_softmax(1).unflatten(0, shape)
            )
        if kernels.ready(logits):
            return kernels.log_softmax_part(logits, first, size).unflatten(0, shape)
        logits = logits.float()
        return (
            logits.narrow(1, first, size) - logits.logsumexp(1, keepdim=True)
        ).unflatten(0, shape)

    def _attend_to_codes(self, q: Tensor, codes: list[Tensor], bias: Tensor) -> Tensor:
        """(N, H * K): self-attention of a block from the last codes, `q` (N, H * K), to all codes of their beams."""
        heads = self.decoder.heads
        if kernels.ready(q):
            return kernels.beam_attention(q, codes, self.ancestors, bias, heads)
        query = q.unflatten(-1, (heads, -1))  # (N, H, K)
        seen = [
            kv.index_select(0, rows)
            .unflatten(-1, (2, heads, -1))
            .unbind(1)  # keys and values (N, H, K)
            for kv, rows in zip(codes, self.ancestors, strict=True)
        ]
        scores = torch.stack(
            [(query * k).sum(-1) for k, _ in seen], -1
        )  # (N, H, level + 1)
        weights = (scores + bias).softmax(-1).unsqueeze(-2)
        mixed = weights[..., 0] * seen[0][1]
        for at, (_, v) in enumerate(seen[1:], start=1):
            mixed = mixed + weights[..., at] * v
        return mixed.flatten(1)


class T5Target:
    """A `Target` (see `search/speculative.py`) over a T5 decoder and the users' histories."""

    def __init__(self, decoder: T5Decoder, history: History) -> None:
        self.decoder, self.history = decoder, history

    @torch.no_grad()
    def __call__(self, rows: Tensor, tree: Tree, first: int) -> list[Tensor]:
        """(R, W_l, C_l) for l from `first` on: normalised as the decoder's scorer does."""
        prefixes = 1 + sum(codes.shape[1] for codes in tree.codes)
        size = max(1, MOST_SCORES // (self.decoder.stack.sizes.num_heads * prefixes**2))
        found = []
        for part in torch.arange(len(rows), device=rows.device).split(size):
            own = Tree([x[part] for x in tree.parents], [x[part] for x in tree.codes])
            history = History(
                self.history.states[rows[part]], self.history.lengths[rows[part]]
            )
            found.append(self._log_probs(history, own, first))
        return [torch.cat(levels) for levels in zip(*found, strict=True)]

    def _log_probs(self, history: History, tree: Tree, first: int) -> list[Tensor]:
        decoder, tokens = self.decoder, self.decoder.tokens
        widths = [1, *(codes.shape[1] for codes in tree.codes)]
        given = [
            torch.zeros_like(history.lengths).unsqueeze(1)
        ]  # T5 starts with padding
        given += [codes + tokens.first[level] for level, codes in enumerate(tree.codes)]
        bias = (
            self._bias(tree, widths) if decoder.stack.blocks[0].has_attention else None
        )
        states = decoder.stack(
            decoder.embedding(torch.cat(given, 1)),
            bias,
            0.0,
            history.states,
            history.padding,
        )
        weight, found = decoder.embedding.weight, []
        for level, hidden in enumerate(states.split(widths, 1)):
            if level < first:
                continue
            begin, size = tokens.first[level], tokens.sizes[level]
            hidden = (
                hidden * decoder.stack.sizes.d_model**-0.5
            )  # as T5 does where embeddings are tied
            if decoder.codebook_scores:
                found.append(
                    functional.linear(hidden, weight.narrow(0, begin, size))
                    .float()
                    .log_softmax(-1)
                )
            else:
                found.append(
                    functional.linear(hidden, weight)
                    .float()
                    .log_softmax(-1)
                    .narrow(-1, begin, size)
                )
        return found

    def _bias(self, tree: Tree, widths: list[int]) -> Tensor:
        """(R, H, T, T): position bias by length; -inf where the key is no beginning of the query."""
        device = self.decoder.embedding.weight.device
        length = torch.cat(
            [torch.full((width,), at, device=device) for at, width in enumerate(widths)]
        )  # (T,)
        bias = self.decoder.stack.position_bias(len(widths))[0][
            :, length[:, None], length
        ]  # (H, T, T)
        users = len(tree.codes[0]) if tree.codes else 1
        seen = torch.eye(len(length), dtype=torch.bool, device=device).repeat(
            users, 1, 1
        )
        before = seen[:, :1]  # of the prefixes one code shorter
        begin = 1
        for parent in tree.parents:
            above = before.gather(1, parent.unsqueeze(-1).expand(-1, -1, len(length)))
            seen[:, begin : begin + parent.shape[1]] |= above
            before = seen[:, begin : begin + parent.shape[1]]
            begin += parent.shape[1]
        return bias.masked_fill(~seen.unsqueeze(1), -torch.inf)
