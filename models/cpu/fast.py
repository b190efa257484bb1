"""The fast path of SID-MLP: the search of `search/beam.py` over the student's scores, nothing computed twice.

    search = fast_search(student)
    items, scores = search(batch, k, beam, children=True)

The same items in the same order as the plain path, and scores equal up to the rounding of float32:

- T5's encoder does no work for padding (`t5_packed.py`);
- the readout's single query is taken through the key projection, and the weighted mean of the states through
  those of value and output: (q Wk') H' and (p H) Wv Wo, so that keys and values of the states are never made;
- the first layer of a head is a part of z, once per user, and a table row per code:
  [z; e(c1); e(c2)] W + b = (z Wz + b) + T1[c1] + T2[c2];
- where scores are those among the valid children, a prefix with one child costs nothing and its head is not run.

On a CPU all that comes after z is one compiled call (`kernels.beam_search`), a hidden layer never leaving the core's
cache.

Shapes: `B` users, `S` source positions, `D` width, `H` heads and `K` their width, `W` beams, `R` prefixes that
are scored, `M` children of the widest, `N` hidden width of a head, `C_l` codes of level l, `L` levels.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cpu import kernels
from models.cpu.derived import derived
from models.metrics.scores import check_finite
from models.retrieval.decoders.sid_mlp import Readout, SidMlpDecoder, query_state
from models.retrieval.parts import History, real_positions
from models.retrieval.recommend import nothing
from models.retrieval.retriever import Retriever
from models.retrieval.search.topk import select, top_k
from models.retrieval.search.trie import Trie


def fast_search(student: Retriever) -> FastSearch:
    """The search with the student's weights as they are now, kept on it until they change."""
    return derived(student, "fast_search", lambda: FastSearch(student))


class FastSearch:
    """Tables and folded weights of a student that `SidMlp.fast_supported`."""

    @torch.no_grad()
    def __init__(self, student: Retriever) -> None:
        self.student, self.backbone, self.encoder = (
            student,
            student.backbone,
            student.backbone.packed(),
        )
        decoder = cast(SidMlpDecoder, student.decoder)
        tokens = self.tokens = decoder.tokens
        readout = self.readout = cast(Readout, decoder.readout)
        attention = readout.attention
        q, k, v = (
            x.weight.double().unflatten(0, (attention.heads, -1))
            for x in (attention.q, attention.k, attention.v)
        )
        o = attention.o.weight.double().unflatten(1, (attention.heads, -1))  # (D, H, K)
        embedding = decoder.embedding()
        query_key = (
            torch.einsum("hkd,hke->hed", q, k).flatten(0, 1) * q.shape[1] ** -0.5
        )
        value_output = torch.einsum("dhk,hke->dhe", o, v).flatten(1)
        self.query_key = query_key.to(embedding.dtype)  # (H * D, D)
        self.value_output = value_output.to(embedding.dtype)  # (D, H * D)
        dim = embedding.shape[1]
        heads = [cast(nn.Sequential, head) for head in decoder.heads]
        norms = [cast(nn.LayerNorm, head[1]) for head in heads]
        first = [cast(nn.Linear, head[0]) for head in heads]
        self.z_weight = torch.cat(
            [layer.weight[:, :dim] for layer in first]
        )  # (L * N, D)
        self.z_bias = torch.cat([layer.bias for layer in first])
        self.rest = [head[1:-1] for head in heads]
        self.outputs = [cast(nn.Linear, head[-1]) for head in heads]
        codes = [
            embedding.narrow(0, begin, size)
            for begin, size in zip(tokens.first, tokens.sizes, strict=True)
        ]
        self.tables = [
            torch.cat(
                [
                    code @ w.T
                    for code, w in zip(
                        codes, layer.weight[:, dim:].split(dim, 1), strict=False
                    )
                ]
            )
            if level
            else layer.weight.new_zeros(0)
            for level, layer in enumerate(first)
        ]  # of each level (C_0 + ... + C_(l-1), N): what a code of a level before adds to the hidden layer
        self.first_row = [begin - tokens.first[0] for begin in tokens.first]
        self.levels = [
            (table, norm.weight, norm.bias, output.weight, output.bias)
            for table, norm, output in zip(
                self.tables, norms, self.outputs, strict=True
            )
        ]  # what `kernels.beam_search` is given
        for level in self.levels:
            for weight in level:
                check_finite(weight)
        self.epsilon = norms[0].eps

    def __call__(
        self, batch: dict[str, Tensor], k: int, beam: int, children: bool
    ) -> tuple[Tensor, Tensor]:
        """(items, scores), each (B, k), as `beam_search(scorer, trie, k, beam, children)` gives them."""
        return self.beam_search(self.context(batch), k, beam, children)

    def context(self, batch: dict[str, Tensor]) -> Tensor:
        """z (B, D) of equation 1."""
        if not torch.compiler.is_compiling() and not len(batch["history"]):
            return self.query_key.new_zeros((0, self.query_key.shape[1]))
        if self.encoder is None:
            return self.read(self.backbone.infer(batch))
        tokens, lengths = self.tokens.history(batch), self.tokens.lengths(batch)
        if not kernels.ready(self.query_key):
            return self.read(History(self.encoder(tokens, lengths), lengths))
        states = self.encoder.packed(
            tokens[real_positions(lengths, tokens.shape[1])], lengths
        )
        begin = functional.pad(lengths.cumsum(0), (1, 0))
        index = torch.arange(len(states))
        query = self.readout.query(
            functional.embedding_bag(index, states, begin[:-1], mode="mean")
        )
        return self._readout(
            query, kernels.packed_readout(self._keyed(query), states, begin)
        )

    def read(self, history: History) -> Tensor:
        """z (B, D) of the history."""
        query = self.readout.query(query_state(history))
        scores = self._keyed(query) @ history.states.transpose(1, 2)  # (B, H, S)
        scores = scores if history.padding is None else scores + history.padding[:, 0]
        return self._readout(query, scores.softmax(-1) @ history.states)

    def _keyed(self, query: Tensor) -> Tensor:
        """(B, H, D): what each head looks for in the states."""
        return functional.linear(query, self.query_key).unflatten(
            1, (self.readout.attention.heads, -1)
        )

    def _readout(self, query: Tensor, mixed: Tensor) -> Tensor:
        """z (B, D) of the query (B, D) and the states as each head weighs them (B, H, D)."""
        readout = self.readout
        z = readout.norm1(
            query + functional.linear(mixed.flatten(1), self.value_output)
        )
        return readout.norm2(z + cast(nn.Sequential, readout.ffn)(z))

    def beam_search(
        self,
        z: Tensor,
        k: int,
        beam: int,
        children: bool,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The search from z (B, D) on."""
        if k < 1 or beam < 1:
            raise ValueError(f"k {k} and beam {beam} need to be at least 1")
        trie, sizes = self.student.trie, self.tokens.sizes
        if list(trie.codebook_sizes) != sizes:
            raise ValueError(
                f"the model scores {sizes} codes by level, the trie has {list(trie.codebook_sizes)}; give "
                f"the semantic IDs that it was trained with"
            )
        joined = functional.linear(z, self.z_weight, self.z_bias)  # (B, L * N)
        if not torch.compiler.is_compiling() and not len(z):
            return nothing(k, z.device)
        if kernels.ready(joined, self.z_weight):
            edges = [
                (trie.offsets(level), trie.tokens(level))
                for level in range(trie.levels)
            ]
            check_finite(
                joined
            )  # the kernel compares what it meets, and NaN is less than nothing
            kept = () if allowed is None else allowed.split(trie.edges)
            node, score = kernels.beam_search(
                joined, self.levels, edges, sizes, self.epsilon, beam, k, children, kept
            )
            return torch.where(score == -torch.inf, -1, trie.leaves[node]), score
        hidden = joined.chunk(trie.levels, 1)  # per level (B, N)
        node, parent = torch.zeros(
            (2, z.shape[0], 1), dtype=torch.long, device=z.device
        ).unbind(0)  # (B, W)
        score = torch.zeros(node.shape, device=z.device)
        rows = z.new_zeros(
            (z.shape[0], 1, 0), dtype=torch.long
        )  # (B, W, level): table rows of each beam's codes
        for level in range(trie.levels):
            if level > 0:
                token = trie.tokens(level - 1)[node] + self.first_row[level - 1]
                before = rows.gather(1, parent.unsqueeze(-1).expand(-1, -1, level - 1))
                rows = torch.cat([before, token.unsqueeze(-1)], -1)
            last = level == trie.levels - 1
            renormalised = children and level > 0
            x, row = self._hidden(level, hidden[level], rows, node, score, renormalised)
            keep, head = (
                k if last else min(beam, trie.edges[level]),
                self.outputs[level],
            )
            node, parent, score = _best_children(
                trie,
                level,
                x,
                head,
                row,
                node,
                score,
                renormalised,
                keep,
                last,
                allowed,
            )
        return torch.where(score == -torch.inf, -1, trie.leaves[node]), score

    def _hidden(
        self,
        level: int,
        hidden: Tensor,
        rows: Tensor,
        node: Tensor,
        score: Tensor,
        children: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden activations (R, N) of the beams whose head is needed, their row there by beam (B, W), else -1).

        The row is None where all have them: on a GPU, which would have to wait to see how many need them.
        `hidden` (B, N) is the part of z.
        """
        offsets, beams, tables = (
            self.student.trie.offsets(level),
            rows.shape[1],
            rows.flatten(0, 1),
        )
        row = None
        if node.device.type == "cpu" and not torch.compiler.is_compiling():
            count = offsets[node + 1] - offsets[node]
            needed = (
                (count > 1) & (score > -torch.inf) if children else score > -torch.inf
            ).flatten()
            row = torch.where(needed, needed.cumsum(0) - 1, -1).unflatten(0, node.shape)
            needed = needed.nonzero().squeeze(1)  # (R,)
            tables, hidden = (
                tables.index_select(0, needed),
                hidden.index_select(0, needed // beams),
            )
        else:
            hidden = hidden.repeat_interleave(beams, 0)
        if level > 0:
            hidden = (
                functional.embedding_bag(tables, self.tables[level], mode="sum")
                + hidden
            )
        return self.rest[level](hidden), row


def _best_children(
    trie: Trie,
    level: int,
    x: Tensor,
    head: nn.Linear,
    row: Tensor | None,
    node: Tensor,
    score: Tensor,
    children: bool,
    keep: int,
    by_score: bool,
    allowed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(edges, their parents among the beams, scores), each (B, keep): the best continuations of the beams at the
    nodes `node` (B, W) of a level with scores `score` (B, W). `row` (B, W) is a beam's in `x` (R, N), the hidden
    layer of `head`, or -1 where its only child has probability 1; None where every beam has a row. With `children`
    scores are normalised over them, else over all codes. Of equal scores the first are taken; `by_score` orders them
    by score, else they come in order of beam and edge. Where fewer than `keep` are found that many may be given.
    `allowed` as in `beam_search`.
    """
    logits = head(x).float()
    edge, valid = trie.children_of(
        level, node
    )  # (B, W, M), rising along the flattened beams
    there = valid if allowed is None else valid & allowed.split(trie.edges)[level][edge]
    scores = torch.where(there, score.unsqueeze(-1), -torch.inf)
    edges, real = edge.flatten(0, 1), valid.flatten(0, 1)  # (B * W, M)
    if row is not None:
        scored = (row.flatten() >= 0).nonzero().squeeze(1)  # (R,)
        edges, real = edges.index_select(0, scored), real.index_select(0, scored)
    token = trie.tokens(level).index_select(0, edges.flatten()).view(edges.shape)
    if children:
        found = logits.gather(1, token).masked_fill(~real, -torch.inf).log_softmax(-1)
    else:
        found = logits.log_softmax(-1).gather(1, token)
    if row is not None:
        scores.flatten(0, 1).index_add_(0, scored, found)
    else:
        scores = scores + found.view(scores.shape)
    scores = scores.flatten(1)
    if by_score:
        position, best = top_k(scores, keep)
        position = position.clamp(min=0)
    else:
        position = select(scores, min(keep, scores.shape[1]))
        best = scores.gather(1, position)
    return edge.flatten(1).gather(1, position), position // edge.shape[2], best
