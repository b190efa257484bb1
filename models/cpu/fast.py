"""The fast path of SID-MLP: beam search over a student without repeated work.

    search = fast_search(student)
    items, scores = search(batch, k, beam, children=True)

Returns the items of `search/beam.py` in the same order, with equal scores up to float32
rounding:

- T5's encoder does no work for padding (`t5_packed.py`).
- The readout's query is multiplied by the key projection, and the weighted mean of the
  states by the projections of value and output: (q Wk') H' and (p H) Wv Wo. Keys and
  values of the states are never computed.
- The first layer of a head is a part of z, computed once per user, plus a table row per
  code: [z; e(c1); e(c2)] W + b = (z Wz + b) + T1[c1] + T2[c2].
- If scores are normalised over the valid children, the head of a prefix with a single
  child is not run.

On a CPU everything after z is one compiled call (`kernels.beam_search`), which keeps a
hidden layer in the core's cache.

Shapes: `B` users, `S` source positions, `D` width, `H` heads and `K` their width, `W`
beams, `R` scored prefixes, `M` children of the widest node, `N` hidden width of a head,
`C_l` codes of level l, `L` levels.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cpu import kernels
from models.cpu.derived import cache_until_changed
from models.metrics.scores import check_finite
from models.retrieval.data import HistoryBatch
from models.retrieval.decoders.sid_mlp import Readout, SidMlpDecoder, query_state
from models.retrieval.parts import History, real_positions
from models.retrieval.recommend import nothing
from models.retrieval.retriever import Retriever
from models.retrieval.search.topk import select, top_k
from models.retrieval.search.trie import Trie


def fast_search(student: Retriever) -> FastSearch:
    """Return the search with the current weights, cached until the weights change."""
    return cache_until_changed(student, "fast_search", lambda: FastSearch(student))


class FastSearch:
    """Tables and folded weights of a student that supports the fast path."""

    @torch.no_grad()
    def __init__(self, student: Retriever) -> None:
        self.student, self.backbone, self.encoder = (
            student,
            student.backbone,
            student.backbone.packed_encoder(),
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

        def layer_tables(layer: nn.Linear, earlier: list[Tensor]) -> Tensor:
            if not earlier:
                return layer.weight.new_zeros(0)
            weights = layer.weight[:, dim:].split(dim, 1)
            return torch.cat(
                [code @ w.T for code, w in zip(earlier, weights, strict=True)]
            )

        # of each level (C_0 + ... + C_(l-1), N): contribution of each earlier code to
        # the hidden layer
        self.tables = [
            layer_tables(layer, codes[:level]) for level, layer in enumerate(first)
        ]
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
        self, batch: HistoryBatch, k: int, beam: int, children: bool
    ) -> tuple[Tensor, Tensor]:
        """Recommend items as `beam_search` with the student's scorer does.

        Args:
            batch: Batch of requests.
            k: Number of items.
            beam: Number of beams.
            children: Whether scores are normalised over the valid children.

        Returns:
            Items and scores, (B, k) both.
        """
        return self.beam_search(self.context(batch), k, beam, children)

    def context(self, batch: HistoryBatch) -> Tensor:
        """Compute z (B, D) of equation 1."""
        if not torch.compiler.is_compiling() and not len(batch.history):
            return self.query_key.new_zeros((0, self.query_key.shape[1]))
        if self.encoder is None:
            return self.read(self.backbone.infer(batch))
        tokens, lengths = self.tokens.history(batch), self.tokens.lengths(batch)
        if not kernels.ready(self.query_key):
            return self.read(History(self.encoder(tokens, lengths), lengths))
        states = self.encoder.encode_packed(
            tokens[real_positions(lengths, tokens.shape[1])], lengths
        )
        begin = functional.pad(lengths.cumsum(0), (1, 0))
        index = torch.arange(states.shape[0])
        query = self.readout.query(
            functional.embedding_bag(index, states, begin[:-1], mode="mean")
        )
        return self._readout(
            query, kernels.packed_readout(self._project_query(query), states, begin)
        )

    def read(self, history: History) -> Tensor:
        """Compute z (B, D) from encoded histories."""
        query = self.readout.query(query_state(history))
        scores = self._project_query(query) @ history.states.transpose(
            1, 2
        )  # (B, H, S)
        scores = scores if history.padding is None else scores + history.padding[:, 0]
        return self._readout(query, scores.softmax(-1) @ history.states)

    def _project_query(self, query: Tensor) -> Tensor:
        """Multiply queries (B, D) by the key projections of all heads: (B, H, D)."""
        return functional.linear(query, self.query_key).unflatten(
            1, (self.readout.attention.heads, -1)
        )

    def _readout(self, query: Tensor, mixed: Tensor) -> Tensor:
        """Compute z (B, D).

        Args:
            query: (B, D) queries.
            mixed: (B, H, D) states weighted by each head.
        """
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
        """Search from z on.

        Args:
            z: (B, D) contexts.
            k: Number of items.
            beam: Number of beams.
            children: Whether scores are normalised over the valid children.
            allowed: (E,) bool edges of the trie that beams may take, or None for all.

        Returns:
            Items and scores, (B, k) both.
        """
        if k < 1 or beam < 1:
            raise ValueError(f"k {k} and beam {beam} need to be at least 1")
        trie, sizes = self.student.trie, self.tokens.sizes
        if list(trie.codebook_sizes) != sizes:
            raise ValueError(
                f"the model scores {sizes} codes by level, the trie has "
                f"{list(trie.codebook_sizes)}; give the semantic IDs that it was "
                f"trained with"
            )
        joined = functional.linear(z, self.z_weight, self.z_bias)  # (B, L * N)
        if not torch.compiler.is_compiling() and not len(z):
            return nothing(k, z.device)
        if kernels.ready(joined, self.z_weight):
            edges = [
                (trie.offsets(level), trie.tokens(level))
                for level in range(trie.levels)
            ]
            check_finite(joined)  # the kernel's comparisons would ignore NaN
            level_allowed = () if allowed is None else allowed.split(trie.edges)
            node, score = kernels.beam_search(
                joined,
                self.levels,
                edges,
                sizes,
                self.epsilon,
                beam,
                k,
                children,
                level_allowed,
            )
            return torch.where(score == -torch.inf, -1, trie.leaves[node]), score
        hidden = joined.chunk(trie.levels, 1)  # per level (B, N)
        node = torch.zeros((z.shape[0], 1), dtype=torch.long, device=z.device)  # (B, W)
        parent = torch.zeros_like(node)
        score = torch.zeros(node.shape, device=z.device)
        # (B, W, level): table rows of the codes of each beam
        rows = z.new_zeros((z.shape[0], 1, 0), dtype=torch.long)
        for level in range(trie.levels):
            if level > 0:
                token = trie.tokens(level - 1)[node] + self.first_row[level - 1]
                before = rows.gather(1, parent.unsqueeze(-1).expand(-1, -1, level - 1))
                rows = torch.cat([before, token.unsqueeze(-1)], -1)
            last = level == trie.levels - 1
            renormalised = children and level > 0
            x, row = self._hidden(level, hidden[level], rows, node, score, renormalised)
            keep = k if last else min(beam, trie.edges[level])
            node, parent, score = _best_children(
                trie,
                level,
                x,
                self.outputs[level],
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
        """Compute the hidden layer of a level's head for the beams that need it.

        Args:
            level: Level of the head.
            hidden: (B, N) contribution of z.
            rows: (B, W, level) table rows of the codes of each beam.
            node: (B, W) nodes of the beams.
            score: (B, W) scores of the beams.
            children: Whether scores are normalised over the valid children.

        Returns:
            Hidden layers (R, N), and the row of each beam in them (B, W), -1 for beams
            that need none. On a GPU, which would wait for the number of rows, all beams
            have a row, and the rows are None.
        """
        offsets = self.student.trie.offsets(level)
        beams = rows.shape[1]
        tables = rows.flatten(0, 1)
        row = None
        if node.device.type == "cpu" and not torch.compiler.is_compiling():
            needed = score > -torch.inf
            if children:  # an only child has probability 1
                needed &= offsets[node + 1] - offsets[node] > 1
            needed = needed.flatten()
            row = torch.where(needed, needed.cumsum(0) - 1, -1).unflatten(0, node.shape)
            needed = needed.nonzero().squeeze(1)  # (R,)
            tables = tables.index_select(0, needed)
            hidden = hidden.index_select(0, needed // beams)
        else:
            hidden = hidden.repeat_interleave(beams, 0)
        if level > 0:
            prefix = functional.embedding_bag(tables, self.tables[level], mode="sum")
            hidden = prefix + hidden
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
    """Choose the best continuations of the beams.

    Of equal scores the first are chosen. If there are fewer than `keep` continuations,
    fewer may be returned.

    Args:
        trie: Trie of the catalogue.
        level: Level of the codes to choose.
        x: (R, N) hidden layers of `head`.
        head: Output layer of the level.
        row: (B, W) row of each beam in `x`, -1 if its only child has probability 1;
            None if every beam has a row.
        node: (B, W) nodes of the beams.
        score: (B, W) scores of the beams.
        children: Whether scores are normalised over the valid children, otherwise over
            all codes.
        keep: Number of continuations to choose.
        by_score: Whether to order them by score, otherwise by beam and edge.
        allowed: As in `beam_search`.

    Returns:
        Edges, their parents among the beams, and scores, (B, keep) each.
    """
    logits = head(x).float()
    edge, valid = trie.get_children(
        level, node
    )  # (B, W, M), rising along the flattened beams
    selectable = (
        valid if allowed is None else valid & allowed.split(trie.edges)[level][edge]
    )
    scores = torch.where(selectable, score.unsqueeze(-1), -torch.inf)
    edges, is_child = edge.flatten(0, 1), valid.flatten(0, 1)  # (B * W, M)
    if row is not None:
        scored = (row.flatten() >= 0).nonzero().squeeze(1)  # (R,)
        edges, is_child = (
            edges.index_select(0, scored),
            is_child.index_select(0, scored),
        )
    token = trie.tokens(level).index_select(0, edges.flatten()).view(edges.shape)
    if children:
        log_probs = (
            logits.gather(1, token).masked_fill(~is_child, -torch.inf).log_softmax(-1)
        )
    else:
        log_probs = logits.log_softmax(-1).gather(1, token)
    if row is not None:
        scores.flatten(0, 1).index_add_(0, scored, log_probs)
    else:
        scores = scores + log_probs.view(scores.shape)
    scores = scores.flatten(1)
    if by_score:
        position, best = top_k(scores, keep)
        position = position.clamp(min=0)
    else:
        position = select(scores, min(keep, scores.shape[1]))
        best = scores.gather(1, position)
    return edge.flatten(1).gather(1, position), position // edge.shape[2], best
