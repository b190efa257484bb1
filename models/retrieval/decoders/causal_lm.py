"""A causal language model that continues its prompt with the codes of the next item.

In search, the keys and values of a prompt are stored once per user. Beams are further
tokens of the same row. A mask shows each beam the prompt and its ancestors, so the keys
and values of at most L - 1 tokens per beam are stored once, and a child copies nothing
from its parent. The output layer has rows for codes only, and uses the rows of one
level at a time.

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
    """The output layer of the codes; the language model is the backbone's."""

    def __init__(self, backbone: LmBackbone, tied: bool) -> None:
        """Build the decoder on a backbone.

        Args:
            backbone: Backbone with the language model.
            tied: Whether the embeddings of the codes are their output layer too.
        """
        super().__init__()
        self.tokens = backbone.tokens
        self.hidden_width = backbone.embedding.embedding_dim
        self._backbone = (backbone,)  # a tuple, so that it is not a submodule
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
        """Return the output layer (C_0 + ... + C_(L-1), D)."""
        if self.output is not None:
            return self.output.weight
        return self.backbone.embedding.weight.narrow(
            0, self.tokens.first[0], sum(self.tokens.sizes)
        )

    def level_logits(self, level: int, hidden: Tensor) -> Tensor:
        """Return the logits (..., C_level) of states (..., D) before the code."""
        rows = self.rows().narrow(
            0, self.tokens.first[level] - self.tokens.first[0], self.tokens.sizes[level]
        )
        return functional.linear(hidden, rows)

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """Return the states (B, L, D) before each code.

        The first is the last state of the prompt, the others follow all codes but the
        last.
        """
        memory, query = require_prompt(history)
        longest, num_codes = history.states.shape[1], self.tokens.levels - 1
        if num_codes == 0:  # items of one code follow the prompt directly
            return query.unsqueeze(1)
        device = codes.device
        tokens = self.backbone.vocabulary + (codes + self.tokens.offset)[:, :-1]
        index = torch.arange(longest, device=device)
        prompt = index < history.lengths[:, None, None]  # (B, 1, S)
        causal = torch.ones(
            num_codes, num_codes, dtype=torch.bool, device=device
        ).tril()
        visible = torch.cat(
            [
                prompt.expand(-1, num_codes, -1),
                causal.expand(len(codes), -1, -1),
            ],
            2,
        )
        positions = history.lengths.unsqueeze(1) + torch.arange(
            num_codes, device=device
        )
        states = self.extend(tokens, positions, visible, memory)[0]
        return torch.cat([query.unsqueeze(1), states], 1)

    def extend(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Run the language model over further tokens.

        Args:
            tokens: (B, n) tokens.
            positions: (B, n) their positions.
            visible: (B, n, S + n) mask of the tokens that each token attends to.
            memory: Keys and values of the S tokens before them.

        Returns:
            States (B, n, D), and the keys and values of all tokens.
        """
        embedded = self.backbone.embed(tokens)
        mask = torch.zeros(visible.shape, dtype=embedded.dtype, device=visible.device)
        mask = mask.masked_fill(~visible, -torch.inf)
        return self.backbone.run(
            embedded, memory, attention_mask=mask.unsqueeze(1), position_ids=positions
        )

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        return [self.level_logits(level, x) for level, x in enumerate(hidden.unbind(1))]

    def scorer(self, history: History) -> LmScorer:
        return LmScorer(self, history)


def require_prompt(history: History) -> tuple[Memory, Tensor]:
    """Return the keys and values of the prompt, and its last state (B, D).

    Raises:
        UserError: If the history has no keys and values.
    """
    if history.memory is None or history.query is None:
        raise UserError(
            "the language model has no keys and values of the prompt to go on from; "
            "leave model.teacher_cache out"
        )
    return history.memory, history.query


class LmScorer:
    """A `Scorer` that returns log-probabilities over each level's codebook."""

    def __init__(self, decoder: LmDecoder, history: History) -> None:
        self.decoder, self.lengths = decoder, history.lengths
        self.memory, self.query = require_prompt(history)
        index = torch.arange(history.states.shape[1], device=history.lengths.device)
        self.prompt = index < history.lengths[:, None, None]  # (B, 1, S)
        # (B, W, level): tokens of each beam among the N tokens of beams
        self.ancestors = history.lengths.new_zeros((len(history.lengths), 1, 0))

    def start(self) -> Tensor:
        return self.decoder.level_logits(0, self.query).float().log_softmax(-1)

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        level = self.ancestors.shape[2]
        beams = tokens.shape[1]
        before = self.memory[0][0].shape[2] - self.prompt.shape[2]  # N
        newest = before + torch.arange(beams, device=tokens.device).expand_as(tokens)
        inherited = self.ancestors.take_along_dim(parents.unsqueeze(-1), 1)
        self.ancestors = torch.cat([inherited, newest.unsqueeze(-1)], -1)
        own_path = torch.zeros(
            (*tokens.shape, before + beams), dtype=torch.bool, device=tokens.device
        )
        own_path.scatter_(2, self.ancestors, True)
        visible = torch.cat([self.prompt.expand(-1, beams, -1), own_path], 2)
        positions = (self.lengths + level).unsqueeze(1).expand_as(tokens)
        first = self.decoder.backbone.vocabulary + self.decoder.tokens.first[level]
        states, self.memory = self.decoder.extend(
            first + tokens, positions, visible, self.memory
        )
        return self.decoder.level_logits(level + 1, states).float().log_softmax(-1)
