"""The fast path of SID-MLP: the beam search of `beam.py` over the student's scores, nothing computed twice.

    walk = fast_walk(student)
    items, scores = walk(batch, k, beam, children=True)

The same items in the same order as the plain path, and scores equal up to the rounding of float32:

- the encoder does no work for padding (`encoder.py`);
- the readout's single query is taken through the key projection, and the weighted mean of the states through
  those of value and output: (q Wk') H' and (p H) Wv Wo, so that keys and values of the states are never made;
- the first layer of a head is a part of z, once per user, and a table row per code:
  [z; e(c1); e(c2)] W + b = (z Wz + b) + T1[c1] + T2[c2];
- where scores are those among the valid children, a prefix with one child costs nothing and its head is not run.

Shapes: `B` users, `S` source positions, `D` width, `H` heads and `K` their width, `W` beams, `R` prefixes that
are scored, `M` children of the widest, `N` hidden width of a head, `C_l` codes of level l, `L` levels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.retrieval.decoding.derived import derived
from models.retrieval.decoding.encoder import PackedEncoder
from models.retrieval.decoding.topk import select, top_k
from models.retrieval.readout import Readout, mean_state

if TYPE_CHECKING:
    from models.retrieval.sid_mlp import SidMlp


def fast_walk(student: SidMlp) -> FastWalk:
    """The walk of the student's weights as they are now, kept on it until they change."""
    return derived(student, "fast_walk", lambda: FastWalk(student))


class FastWalk:
    """Tables and folded weights of a student that `SidMlp.fast_supported`."""

    @torch.no_grad()
    def __init__(self, student: SidMlp) -> None:
        self.student = student
        t5 = student.source.t5
        self.encoder = PackedEncoder(t5) if hasattr(t5, "encoder") else None
        readout = self.readout = cast(Readout, student.readout)
        attention = readout.attention
        q, k, v = (
            x.weight.double().unflatten(0, (attention.heads, -1)) for x in (attention.q, attention.k, attention.v)
        )
        o = attention.o.weight.double().unflatten(1, (attention.heads, -1))  # (D, H, K)
        self.ask = torch.einsum("hkd,hke->hed", q, k).flatten(0, 1) * q.shape[1] ** -0.5  # (H * D, D)
        self.answer = torch.einsum("dhk,hke->dhe", o, v).flatten(1)  # (D, H * D)
        self.ask, self.answer = self.ask.to(t5.shared.weight.dtype), self.answer.to(t5.shared.weight.dtype)
        dim = t5.sizes.d_model
        heads = [cast(nn.Sequential, head) for head in student.heads]
        first = [cast(nn.Linear, head[0]) for head in heads]
        self.z_weight = torch.cat([layer.weight[:, :dim] for layer in first])  # (L * N, D)
        self.z_bias = torch.cat([layer.bias for layer in first])
        self.rest = [head[1:] for head in heads]
        codes = [
            student.code_table().narrow(0, begin, size)
            for begin, size in zip(student.first_token, student.sizes, strict=True)
        ]
        self.tables = [
            torch.cat([code @ w.T for code, w in zip(codes, layer.weight[:, dim:].split(dim, 1), strict=False)])
            if level
            else layer.weight.new_zeros(0)
            for level, layer in enumerate(first)
        ]  # of each level (C_0 + ... + C_(l-1), N): what a code of a level before adds to the hidden layer
        self.first_row = [begin - student.first_token[0] for begin in student.first_token]

    def __call__(self, batch: dict[str, Tensor], k: int, beam: int, children: bool) -> tuple[Tensor, Tensor]:
        """(items, scores), each (B, k), as `beam_search(scorer, trie, k, beam, children)` gives them."""
        return self.walk(self.context(batch), k, beam, children)

    def context(self, batch: dict[str, Tensor]) -> Tensor:
        """z (B, D) of equation 1."""
        if self.encoder is None:
            return self.read(*self.student.encode(batch))
        tokens, real = self.student.source.tokens(batch)
        return self.read(*self.encoder(tokens, real.sum(1)))

    def read(self, states: Tensor, padding: Tensor | None) -> Tensor:
        """z (B, D) of `states` (B, S, D)."""
        readout = self.readout
        query = readout.query(mean_state(states, padding))
        asked = functional.linear(query, self.ask).unflatten(1, (readout.attention.heads, -1))  # (B, H, D)
        scores = asked @ states.transpose(1, 2)  # (B, H, S)
        scores = scores if padding is None else scores + padding[:, 0]
        answer = functional.linear((scores.softmax(-1) @ states).flatten(1), self.answer)
        z = readout.norm1(query + answer)
        return readout.norm2(z + cast(nn.Sequential, readout.ffn)(z))

    def walk(self, z: Tensor, k: int, beam: int, children: bool) -> tuple[Tensor, Tensor]:
        """The search from z (B, D) on."""
        if k < 1 or beam < 1:
            raise ValueError(f"k {k} and beam {beam} need to be at least 1")
        trie = self.student.trie
        if list(trie.codebook_sizes) != self.student.sizes:
            raise ValueError(
                f"the model scores {self.student.sizes} codes by level, the trie has {list(trie.codebook_sizes)}; give "
                f"the semantic IDs that it was trained with"
            )
        hidden = functional.linear(z, self.z_weight, self.z_bias).chunk(trie.levels, 1)  # per level (B, N)
        log_probs = self.rest[0](hidden[0]).float().log_softmax(-1)
        edge = torch.arange(trie.edges[0], device=z.device).expand(z.shape[0], 1, -1)  # (B, 1, M)
        scores = log_probs[:, trie.tokens(0)]  # (B, M)
        rows = z.new_zeros((z.shape[0], 1, 0), dtype=torch.long)  # (B, W, level): table rows of each beam's codes
        for level in range(1, trie.levels):
            position = select(scores, min(beam, trie.edges[level - 1], scores.shape[1]))  # (B, W)
            score = scores.gather(1, position)
            node = edge.flatten(1).gather(1, position)
            parent = position // edge.shape[2]
            token = trie.tokens(level - 1)[node] + self.first_row[level - 1]
            rows = torch.cat([rows.gather(1, parent.unsqueeze(-1).expand(-1, -1, level - 1)), token.unsqueeze(-1)], -1)
            edge, scores = self._extend(level, hidden[level], rows, node, score, children)
        position, score = top_k(scores, k)
        item = trie.leaves[edge.flatten(1).gather(1, position.clamp(min=0))]
        return torch.where(score == -torch.inf, -1, item), score

    def _extend(
        self, level: int, hidden: Tensor, rows: Tensor, node: Tensor, score: Tensor, children: bool
    ) -> tuple[Tensor, Tensor]:
        """(edges (B, W, M) to the children of the beams, their scores (B, W * M)), -inf where there is none."""
        trie = self.student.trie
        offsets, tokens = trie.offsets(level), trie.tokens(level)
        begin = offsets[node]
        count = offsets[node + 1] - begin  # (B, W)
        counted = node.device.type == "cpu" and not torch.compiler.is_compiling()  # a GPU would have to wait
        widest = int(count.max()) if counted else trie.max_branching[level]
        child = torch.arange(widest, device=node.device)
        valid = child < count.unsqueeze(-1)
        edge = torch.where(valid, begin.unsqueeze(-1) + child, 0)  # (B, W, M), rising along the flattened beams
        scores = torch.where(valid, score.unsqueeze(-1), -torch.inf)
        if widest == 1 and children:
            return edge, scores.flatten(1)
        beams = rows.shape[1]
        rows, edges, valid = rows.flatten(0, 1), edge.flatten(0, 1), valid.flatten(0, 1)  # (B * W, ...)
        if counted:  # only those whose scores are not known
            scored = score > -torch.inf
            scored = (scored & (count > 1) if children else scored).flatten().nonzero().squeeze(1)  # (R,)
            rows, edges, valid = (x.index_select(0, scored) for x in (rows, edges, valid))
            hidden = hidden.index_select(0, scored // beams)
        else:
            hidden = hidden.repeat_interleave(beams, 0)
        logits = self._head(level, rows, hidden).float()
        token = tokens.index_select(0, edges.flatten()).view(edges.shape)
        if children:
            found = logits.gather(1, token).masked_fill(~valid, -torch.inf).log_softmax(-1)
        else:
            found = logits.log_softmax(-1).gather(1, token)
        if counted:
            scores.flatten(0, 1).index_add_(0, scored, found)
        else:
            scores = scores + found.view(scores.shape)
        return edge, scores.flatten(1)

    def _head(self, level: int, rows: Tensor, hidden: Tensor) -> Tensor:
        """(R, C_level): logits after the codes of the table rows (R, level); `hidden` (R, N) is the part of z."""
        return self.rest[level](functional.embedding_bag(rows, self.tables[level], mode="sum") + hidden)
