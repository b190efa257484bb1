"""T5's decoder over a tree of prefixes in one pass: what verifies the steps of a draft (`search/speculative.py`).

All prefixes of a user stand side by side as positions of one sequence. A tree mask lets each see its own beginnings
alone, the relative position bias goes by length and not by place, and cross-attention's keys and values are computed
once per user for all of them.

Shapes: `R` users, `T` prefixes of a user, `W_l` of them with l codes, `D` width, `H` heads, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.retrieval.decoders.t5 import T5Decoder
from models.retrieval.parts import History
from models.retrieval.search.speculative import Tree

MOST_SCORES = 2**26
"""Attention scores of a layer held at once; more users are taken in turn."""


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
            history = History(self.history.states[rows[part]], self.history.lengths[rows[part]])
            found.append(self._log_probs(history, own, first))
        return [torch.cat(levels) for levels in zip(*found, strict=True)]

    def _log_probs(self, history: History, tree: Tree, first: int) -> list[Tensor]:
        decoder, tokens = self.decoder, self.decoder.tokens
        widths = [1, *(codes.shape[1] for codes in tree.codes)]
        given = [torch.zeros_like(history.lengths).unsqueeze(1)]  # T5 starts with padding
        given += [codes + tokens.first[level] for level, codes in enumerate(tree.codes)]
        bias = self._bias(tree, widths) if decoder.stack.blocks[0].has_attention else None
        states = decoder.stack(decoder.embedding(torch.cat(given, 1)), bias, 0.0, history.states, history.padding)
        weight, found = decoder.embedding.weight, []
        for level, hidden in enumerate(states.split(widths, 1)):
            if level < first:
                continue
            begin, size = tokens.first[level], tokens.sizes[level]
            hidden = hidden * decoder.stack.sizes.d_model**-0.5  # as T5 does where embeddings are tied
            if decoder.codebook_scores:
                found.append(functional.linear(hidden, weight.narrow(0, begin, size)).float().log_softmax(-1))
            else:
                found.append(functional.linear(hidden, weight).float().log_softmax(-1).narrow(-1, begin, size))
        return found

    def _bias(self, tree: Tree, widths: list[int]) -> Tensor:
        """(R, H, T, T): position bias by length; -inf where the key is no beginning of the query."""
        device = self.decoder.embedding.weight.device
        length = torch.cat([torch.full((width,), at, device=device) for at, width in enumerate(widths)])  # (T,)
        bias = self.decoder.stack.position_bias(len(widths))[0][:, length[:, None], length]  # (H, T, T)
        users = len(tree.codes[0]) if tree.codes else 1
        seen = torch.eye(len(length), dtype=torch.bool, device=device).repeat(users, 1, 1)
        before = seen[:, :1]  # of the prefixes one code shorter
        begin = 1
        for parent in tree.parents:
            above = before.gather(1, parent.unsqueeze(-1).expand(-1, -1, len(length)))
            seen[:, begin : begin + parent.shape[1]] |= above
            before = seen[:, begin : begin + parent.shape[1]]
            begin += parent.shape[1]
        return bias.masked_fill(~seen.unsqueeze(1), -torch.inf)
