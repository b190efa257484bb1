"""The fast path of SID-MLP: beam search over a student without repeated work.

    search = fast_search(student)
    items, scores = search(batch, k, beam, children=True)

The items and their order equal the result of `search/beam.py`, and scores are equal up
to float32 rounding. The search saves work in these ways:

- T5's encoder does no work for padding (`t5_packed.py`).
- The readout's query is multiplied by the key projection, and the weighted mean of the
  states by the projections of value and output: (q Wk') H' and (p H) Wv Wo. Keys and
  values of the states are never computed.
- The first layer of a head is the sum of a part that depends on z, computed once per
  user, and of a table row per code:
  [z; e(c1); e(c2)] W + b = (z Wz + b) + T1[c1] + T2[c2].

On a CPU everything after z is one compiled call (`kernels.beam_search`), which keeps a
hidden layer in the core's cache and does not run the head of a prefix with a single
child.

Shapes: `B` users, `S` source positions, `D` width, `H` heads of width `K`, `W` beams,
`M` children of the widest node, `N` hidden width of a head, `C_l` codes of level l, `L`
levels.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cpu import kernels
from models.cpu.derived import cache_until_changed
from models.metrics.scores import check_finite
from models.retrieval.data import HistoryBatch
from models.retrieval.decoders.sid_mlp import Readout, SidMlpDecoder, query_state
from models.retrieval.parts import History, real_positions
from models.retrieval.retriever import Retriever
from models.retrieval.search.topk import select, top_k


class Beams(NamedTuple):
    """The beams of all users at one level of the trie."""

    node: Tensor
    """(B, W) nodes."""
    score: Tensor
    """(B, W) scores; -inf for a beam that does not exist."""


def fast_search(student: Retriever) -> FastSearch:
    """Return the search with the current weights, cached until the weights change."""
    return cache_until_changed(student, "fast_search", lambda: FastSearch(student))


class FastSearch:
    """Tables and folded weights of a student that supports the fast path."""

    @torch.no_grad()
    def __init__(self, student: Retriever) -> None:
        self.student = student
        self.backbone = student.backbone
        self.encoder = student.backbone.packed_encoder()
        decoder = cast(SidMlpDecoder, student.decoder)
        self.tokens = decoder.tokens
        self.readout = cast(Readout, decoder.readout)
        embedding = decoder.embedding()
        self._fold_attention(embedding.dtype)
        self._split_heads(decoder, embedding)

    def _fold_attention(self, dtype: torch.dtype) -> None:
        """Multiply the readout's projections with each other, in float64."""
        attention = self.readout.attention
        q, k, v = (
            x.weight.double().unflatten(0, (attention.heads, -1))  # (H, K, D)
            for x in (attention.q, attention.k, attention.v)
        )
        o = attention.o.weight.double().unflatten(1, (attention.heads, -1))  # (D, H, K)
        scale = q.shape[1] ** -0.5
        query_key = torch.einsum("hkd,hke->hed", q, k).flatten(0, 1) * scale
        value_output = torch.einsum("dhk,hke->dhe", o, v).flatten(1)
        self.query_key = query_key.to(dtype)  # (H * D, D)
        self.value_output = value_output.to(dtype)  # (D, H * D)

    def _split_heads(self, decoder: SidMlpDecoder, embedding: Tensor) -> None:
        """Split the first layers of the heads into parts for z and earlier codes."""
        tokens, dim = self.tokens, embedding.shape[1]
        heads = [cast(nn.Sequential, head) for head in decoder.heads]
        norms = [cast(nn.LayerNorm, head[1]) for head in heads]
        first_layers = [cast(nn.Linear, head[0]) for head in heads]
        z_weights = [layer.weight[:, :dim] for layer in first_layers]
        self.z_weight = torch.cat(z_weights)  # (L * N, D)
        self.z_bias = torch.cat([layer.bias for layer in first_layers])
        # norm, activation and dropout of each head
        self.inner_layers = [head[1:-1] for head in heads]
        self.outputs = [cast(nn.Linear, head[-1]) for head in heads]
        codes = [
            embedding.narrow(0, begin, size)
            for begin, size in zip(tokens.first, tokens.sizes, strict=True)
        ]
        # of each level (C_0 + ... + C_(l-1), N): contribution of each earlier code to
        # the hidden layer
        self.tables = [
            _code_contributions(layer.weight[:, dim:], codes[:level])
            for level, layer in enumerate(first_layers)
        ]
        self.first_row = [begin - tokens.first[0] for begin in tokens.first]
        # the argument `heads` of `kernels.beam_search`
        self.levels = [
            (table, norm.weight, norm.bias, output.weight, output.bias)
            for table, norm, output in zip(
                self.tables, norms, self.outputs, strict=True
            )
        ]
        for level in self.levels:
            for weight in level:
                check_finite(weight)
        self.epsilon = norms[0].eps

    def __call__(
        self, batch: HistoryBatch, k: int, beam: int, children: bool
    ) -> tuple[Tensor, Tensor]:
        """Recommend items, with the result of `search/beam.py` for the student.

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
        if self.encoder is None:
            return self.read(self.backbone.infer(batch))
        tokens, lengths = self.tokens.history(batch), self.tokens.lengths(batch)
        if not kernels.ready(self.query_key):
            return self.read(History(self.encoder(tokens, lengths), lengths))
        is_token = real_positions(lengths, tokens.shape[1])
        states = self.encoder.encode_packed(tokens[is_token], lengths)  # (n, D)
        begin = functional.pad(lengths.cumsum(0), (1, 0))
        index = torch.arange(states.shape[0])
        mean_states = functional.embedding_bag(index, states, begin[:-1], mode="mean")
        query = self.readout.query(mean_states)
        mixed = kernels.packed_readout(self._project_query(query), states, begin)
        return self._apply_readout(query, mixed)

    def read(self, history: History) -> Tensor:
        """Compute z (B, D) from encoded histories."""
        query = self.readout.query(query_state(history))
        keys = history.states.transpose(1, 2)
        scores = self._project_query(query) @ keys  # (B, H, S)
        if history.padding is not None:
            scores = scores + history.padding[:, 0]
        return self._apply_readout(query, scores.softmax(-1) @ history.states)

    def _project_query(self, query: Tensor) -> Tensor:
        """Return queries (B, D) in the key space of each head, (B, H, D)."""
        projected = functional.linear(query, self.query_key)
        return projected.unflatten(1, (self.readout.attention.heads, -1))

    def _apply_readout(self, query: Tensor, mixed: Tensor) -> Tensor:
        """Compute z (B, D) from the attention of the readout."""
        readout = self.readout
        attended = functional.linear(mixed.flatten(1), self.value_output)
        z = readout.norm1(query + attended)
        return readout.norm2(z + cast(nn.Sequential, readout.ffn)(z))

    def beam_search(
        self,
        z: Tensor,
        k: int,
        beam: int,
        children: bool,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Search for the best items, given z.

        Args:
            z: (B, D) contexts.
            k: Number of items.
            beam: Number of beams.
            children: Whether scores are normalised over the valid children.
            allowed: (E,) bool, true for edges of the trie that beams may take, or None
                to allow all edges.

        Returns:
            Items and scores, (B, k) both.

        Raises:
            ValueError: If the trie belongs to other SIDs.
        """
        trie, sizes = self.student.trie, self.tokens.sizes
        if list(trie.codebook_sizes) != sizes:
            raise ValueError(
                f"the model scores {sizes} codes by level, the trie has "
                f"{list(trie.codebook_sizes)}"
            )
        z_part = functional.linear(z, self.z_weight, self.z_bias)  # (B, L * N)
        if kernels.ready(z_part, self.z_weight):
            node, score = self._search_compiled(z_part, k, beam, children, allowed)
        else:
            node, score = self._search(z_part, k, beam, children, allowed)
        return torch.where(score == -torch.inf, -1, trie.leaves[node]), score

    def _search_compiled(
        self, z_part: Tensor, k: int, beam: int, children: bool, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Search with the compiled kernel; arguments and results as in `_search`."""
        trie = self.student.trie
        edges = [
            (trie.offsets(level), trie.tokens(level)) for level in range(trie.levels)
        ]
        check_finite(z_part)  # the kernel's comparisons would ignore NaN
        level_allowed = () if allowed is None else allowed.split(trie.edges)
        return kernels.beam_search(
            z_part,
            self.levels,
            edges,
            self.tokens.sizes,
            self.epsilon,
            beam,
            k,
            children,
            level_allowed,
        )

    def _search(
        self, z_part: Tensor, k: int, beam: int, children: bool, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Search with PyTorch, level by level."""
        trie, device = self.student.trie, z_part.device
        users = z_part.shape[0]
        level_parts = z_part.chunk(trie.levels, 1)  # L times (B, N)
        node = torch.zeros((users, 1), dtype=torch.long, device=device)  # (B, W)
        parent = torch.zeros_like(node)
        beams = Beams(node, torch.zeros(node.shape, device=device))
        # (B, W, level): table rows of the codes of each beam
        rows = z_part.new_zeros((users, 1, 0), dtype=torch.long)
        for level in range(trie.levels):
            if level > 0:
                code_row = trie.tokens(level - 1)[beams.node]
                code_row = code_row + self.first_row[level - 1]
                index = parent.unsqueeze(-1).expand(-1, -1, level - 1)
                rows = torch.cat([rows.gather(1, index), code_row.unsqueeze(-1)], -1)
            renormalise = children and level > 0
            hidden = level_parts[level].repeat_interleave(rows.shape[1], 0)
            if level > 0:
                hidden = hidden + functional.embedding_bag(
                    rows.flatten(0, 1), self.tables[level], mode="sum"
                )
            hidden = self.inner_layers[level](hidden)
            scores, edge = self._child_scores(
                level, hidden, beams, renormalise, allowed
            )
            if level == trie.levels - 1:
                position, score = top_k(scores, k)
                position = position.clamp(min=0)
            else:
                width = min(beam, trie.edges[level], scores.shape[1])
                position = select(scores, width)
                score = scores.gather(1, position)
            beams = Beams(edge.flatten(1).gather(1, position), score)
            parent = position // edge.shape[2]
        return beams.node, beams.score

    def _child_scores(
        self,
        level: int,
        hidden: Tensor,
        beams: Beams,
        children: bool,
        allowed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the scores of all children of the beams."""
        trie = self.student.trie
        logits = self.outputs[level](hidden).float()
        # (B, W, M), ascending along the flattened beams
        edge, is_valid = trie.get_children(level, beams.node)
        is_selectable = is_valid
        if allowed is not None:
            is_selectable = is_valid & allowed.split(trie.edges)[level][edge]
        scores = torch.where(is_selectable, beams.score.unsqueeze(-1), -torch.inf)
        edges, is_child = edge.flatten(0, 1), is_valid.flatten(0, 1)  # (B * W, M)
        token = trie.tokens(level).index_select(0, edges.flatten()).view(edges.shape)
        if children:
            child_logits = logits.gather(1, token).masked_fill(~is_child, -torch.inf)
            log_probs = child_logits.log_softmax(-1)
        else:
            log_probs = logits.log_softmax(-1).gather(1, token)
        scores = scores + log_probs.view(scores.shape)
        return scores.flatten(1), edge


def _code_contributions(weight: Tensor, codes: list[Tensor]) -> Tensor:
    """Return the contribution of each earlier code to a hidden layer."""
    if not codes:
        return weight.new_zeros(0)
    weights = weight.split(codes[0].shape[1], 1)
    return torch.cat([code @ w.T for code, w in zip(codes, weights, strict=True)])
