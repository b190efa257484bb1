"""A causal language model that continues its prompt with the codes of the next item.

In search, the keys and values of a prompt are stored once per user, and the beams'
tokens are appended to the user's row. A mask restricts the attention of each beam to
the prompt and its ancestors, so a beam copies no keys and values from its parent. The
output layer has rows for codes only, and uses the rows of one level at a time.

Shapes: as in `parts.py`; `S` tokens of the longest prompt, `N` tokens of all beams so
far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.retrieval.lc_rec.backbone import LmBackbone
from models.retrieval.retriever import Decoder, History, Memory, real_positions


class LmDecoder(Decoder):
    """The output layer of the codes; the language model is the backbone's."""

    def __init__(self, backbone: LmBackbone, tied: bool) -> None:
        """Build the decoder on a backbone.

        Args:
            backbone: Backbone with the language model.
            tied: Whether the embeddings of the codes are also their output layer.
        """
        super().__init__(backbone)
        self._backbone = (backbone,)  # in a tuple: no submodule
        self.output: nn.Linear | None = None
        if not tied:
            width = self.embedding.embedding_dim
            self.output = nn.Linear(width, sum(self.tokens.sizes), bias=False)
            nn.init.normal_(self.output.weight, std=0.02)

    @property
    def backbone(self) -> LmBackbone:
        """The backbone with the language model."""
        return self._backbone[0]

    def output_weight(self) -> Tensor:
        """Return the weight (C_0 + ... + C_(L-1), D) of the output layer.

        The weight has a row per code. A tied decoder uses the codes' rows of the
        embeddings.
        """
        if self.output is not None:
            return self.output.weight
        return self.embedding.weight.narrow(
            0, self.tokens.first[0], sum(self.tokens.sizes)
        )

    def level_logits(self, level: int, hidden: Tensor) -> Tensor:
        """Return a level's logits (..., C_level) from the states (..., D) before it."""
        first = self.tokens.first[level] - self.tokens.first[0]
        weight = self.output_weight().narrow(0, first, self.tokens.sizes[level])
        return functional.linear(hidden, weight)

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """Return the states (B, L, D) before each code.

        The first is the last state of the prompt; the others are the states of all
        codes but the last.
        """
        query, memory = cast(Tensor, history.query), cast(Memory, history.memory)
        num_codes = self.tokens.levels - 1
        if num_codes == 0:  # the only code follows the prompt
            return query.unsqueeze(1)
        tokens = self.backbone.vocabulary + (codes + self.tokens.offset)[:, :-1]
        index = torch.arange(num_codes, device=codes.device)
        is_prompt = real_positions(history.lengths, history.states.shape[1])
        sees_prompt = is_prompt[:, None].expand(-1, num_codes, -1)
        sees_codes = (index <= index.unsqueeze(1)).expand(len(codes), -1, -1)
        visible = torch.cat([sees_prompt, sees_codes], 2)  # (B, L - 1, S + L - 1)
        positions = history.lengths.unsqueeze(1) + index
        states, _ = self.extend(tokens, positions, visible, memory)
        return torch.cat([query.unsqueeze(1), states], 1)

    def extend(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Run the language model over further tokens.

        Args:
            tokens: (B, n) tokens.
            positions: (B, n) positions of the tokens.
            visible: (B, n, S + n) mask of the tokens that each token attends to.
            memory: Keys and values of the S tokens before `tokens`.

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
        """Return the logits (B, C_l) of each level from states (B, L, D)."""
        return [self.level_logits(level, x) for level, x in enumerate(hidden.unbind(1))]

    def scorer(self, history: History) -> LmScorer:
        """Return a scorer over each level's codebook."""
        return LmScorer(self, history)


class LmScorer:
    """A `Scorer` over each level's codebook."""

    def __init__(self, decoder: LmDecoder, history: History) -> None:
        self.decoder, self.lengths = decoder, history.lengths
        self.query = cast(Tensor, history.query)
        self.memory = cast(Memory, history.memory)
        self.is_prompt = real_positions(history.lengths, history.states.shape[1])
        # (B, W, level): index of each beam's tokens among the N tokens of all beams
        self.paths = history.lengths.new_zeros((len(history.lengths), 1, 0))

    def start(self) -> Tensor:
        """Return the log-probabilities (B, C_0) of the first code."""
        return self.decoder.level_logits(0, self.query).float().log_softmax(-1)

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (B, W, C_l) of each beam's next code."""
        level = self.paths.shape[2]
        num_beams = tokens.shape[1]
        keys, _ = self.memory[0]
        num_before = keys.shape[2] - self.is_prompt.shape[1]  # N
        beam = torch.arange(num_beams, device=tokens.device).expand_as(tokens)
        parent_paths = self.paths.take_along_dim(parents.unsqueeze(-1), 1)
        newest = (num_before + beam).unsqueeze(-1)
        self.paths = torch.cat([parent_paths, newest], -1)
        shape = (*tokens.shape, num_before + num_beams)
        sees_tokens = torch.zeros(shape, dtype=torch.bool, device=tokens.device)
        sees_tokens.scatter_(2, self.paths, True)
        sees_prompt = self.is_prompt[:, None].expand(-1, num_beams, -1)
        visible = torch.cat([sees_prompt, sees_tokens], 2)
        positions = (self.lengths + level).unsqueeze(1).expand_as(tokens)
        first = self.decoder.backbone.vocabulary + self.decoder.tokens.first[level]
        states, self.memory = self.decoder.extend(
            first + tokens, positions, visible, self.memory
        )
        return self.decoder.level_logits(level + 1, states).float().log_softmax(-1)
