"""A causal language model goes on from its prompt with the codes of the next item.

In search the keys and values of a prompt stand once per user. Beams are further tokens of the same row: what one of
them may see, the prompt and its own ancestors, is a mask, so the keys and values of at most L - 1 tokens per beam stay
where they were made and a child copies nothing from its parent. The output layer has rows for codes alone, and those
of one level are used at a time: words take no part.

Shapes: as in `parts.py`; `S` tokens of the longest prompt, `N` tokens of beams so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.retrieval.backbones.causal_lm import LmBackbone
from models.retrieval.parts import Decoder, History, Memory
from models.storage.tables import UserError


class LmDecoder(Decoder):
    """The output layer of the codes; the language model and the embeddings are the backbone's."""

    def __init__(self, backbone: LmBackbone, tied: bool) -> None:
        """With `tied` the codes' embeddings are their output layer, as of models whose words' are."""
        super().__init__()
        self.tokens, self.hidden_width = (
            backbone.tokens,
            backbone.embedding.embedding_dim,
        )
        self._backbone = (backbone,)  # no submodule here
        self.output: nn.Linear | None = None
        if not tied:
            self.output = nn.Linear(
                self.hidden_width, sum(self.tokens.sizes), bias=False
            )
            nn.init.normal_(self.output.weight, std=0.02)

    @property
    def backbone(self) -> LmBackbone:
        return self._backbone[0]

    def rows(self) -> Tensor:
        """(C_0 + ... + C_(L-1), D): the output layer."""
        if self.output is not None:
            return self.output.weight
        return self.backbone.embedding.weight.narrow(
            0, self.tokens.first[0], sum(self.tokens.sizes)
        )

    def level_logits(self, level: int, hidden: Tensor) -> Tensor:
        """(..., C_level) of the states before the code."""
        rows = self.rows().narrow(
            0, self.tokens.first[level] - self.tokens.first[0], self.tokens.sizes[level]
        )
        return functional.linear(hidden, rows)

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """(B, L, D): the prompt's last state, then those of all codes but the last."""
        memory, query = prompt_of(history)
        longest, given = history.states.shape[1], self.tokens.levels - 1
        if given == 0:  # items of one code follow on the prompt alone
            return query.unsqueeze(1)
        device = codes.device
        tokens = self.backbone.vocabulary + (codes + self.tokens.offset)[:, :-1]
        prompt = (
            torch.arange(longest, device=device) < history.lengths[:, None, None]
        )  # (B, 1, S)
        causal = (
            torch.ones(given, given, dtype=torch.bool, device=device)
            .tril()
            .expand(len(codes), -1, -1)
        )
        seen = torch.cat([prompt.expand(-1, given, -1), causal], 2)
        at = history.lengths.unsqueeze(1) + torch.arange(given, device=device)
        states = self.go_on(tokens, at, seen, memory)[0]
        return torch.cat([query.unsqueeze(1), states], 1)

    def go_on(
        self, tokens: Tensor, at: Tensor, seen: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """((B, n, D) states, keys and values with theirs) of further `tokens` (B, n) at the positions `at` (B, n);
        each sees those marked in `seen` (B, n, S + n)."""
        embedded = self.backbone.embed(tokens)
        mask = torch.zeros(
            seen.shape, dtype=embedded.dtype, device=seen.device
        ).masked_fill(~seen, -torch.inf)
        return self.backbone.run(
            embedded, memory, attention_mask=mask.unsqueeze(1), position_ids=at
        )

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        return [self.level_logits(level, x) for level, x in enumerate(hidden.unbind(1))]

    def scorer(self, history: History) -> LmScorer:
        return LmScorer(self, history)


def prompt_of(history: History) -> tuple[Memory, Tensor]:
    """(keys and values of the prompt, its last state (B, D))."""
    if history.memory is None or history.query is None:
        raise UserError(
            "the language model has no keys and values of the prompt to go on from; leave model.teacher_cache out"
        )
    return history.memory, history.query


class LmScorer:
    """A `Scorer` (see `parts.py`): log-probabilities of each level's codebook."""

    def __init__(self, decoder: LmDecoder, history: History) -> None:
        self.decoder, self.lengths = decoder, history.lengths
        self.memory, self.query = prompt_of(history)
        positions = torch.arange(history.states.shape[1], device=history.lengths.device)
        self.prompt = positions < history.lengths[:, None, None]  # (B, 1, S)
        self.ancestors = history.lengths.new_zeros(
            (len(history.lengths), 1, 0)
        )  # (B, W, level) among N

    def start(self) -> Tensor:
        return self.decoder.level_logits(0, self.query).float().log_softmax(-1)

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        level = self.ancestors.shape[2]
        before = self.memory[0][0].shape[2] - self.prompt.shape[2]  # N
        own = before + torch.arange(tokens.shape[1], device=tokens.device).expand_as(
            tokens
        )
        inherited = self.ancestors.take_along_dim(parents.unsqueeze(-1), 1)
        self.ancestors = torch.cat([inherited, own.unsqueeze(-1)], -1)
        beams = torch.zeros(
            (*tokens.shape, before + tokens.shape[1]),
            dtype=torch.bool,
            device=tokens.device,
        )
        beams.scatter_(2, self.ancestors, True)
        seen = torch.cat([self.prompt.expand(-1, tokens.shape[1], -1), beams], 2)
        at = (self.lengths + level).unsqueeze(1).expand_as(tokens)
        chosen = (
            self.decoder.backbone.vocabulary + self.decoder.tokens.first[level] + tokens
        )
        states, self.memory = self.decoder.go_on(chosen, at, seen, self.memory)
        return self.decoder.level_logits(level + 1, states).float().log_softmax(-1)
