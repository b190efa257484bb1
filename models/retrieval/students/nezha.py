r"""NEZHA (Wang et al., 2025) on TIGER, as ported in Appendix D.4 of SID-MLP.

    python -m jobs.train --config jobs/configs/retrieval/nezha.yaml --tables TABLES \
        --sids SIDS --storage runs --name nezha --model.teacher runs/tiger

The encoder's input is the history and a placeholder per level, which is a learned
embedding. One pass returns the root, the state of the last token before the
placeholders, and a state h_i per level. A linear head per level predicts level i from
root + h_i; then a recurrent cell updates the root with the embedding of the chosen
code. Encoder and head are trained together, each level conditioned on the levels before
it. The teacher's decoder is not used. The papers do not name the recurrent cell: here
it is a GRU. Code embeddings are shared with the encoder.

The published learning rates (head 1, token embeddings 100, transition 10 times the
base) are in `jobs/configs/retrieval/ablations/nezha/published_rates.yaml`. They did not
help, and the figures for SID-MLP's Table 3 are without them.

Published decoding has no trie: beams take the likeliest codes of the whole codebook,
and a hash set of the catalogue drops tuples without an item at the end. Here beams stay
within the trie.

Shapes: `B` requests, `W` beams, `D` width, `L` levels (the paper's digits), `C_l` codes
of level l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Literal, cast

import torch
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional

from core.options import STRICT
from models.retrieval.data import HistoryBatch
from models.retrieval.distillation.student import Joint, JointConfig
from models.retrieval.distillation.teacher import require_class
from models.retrieval.retriever import Backbone, Decoder, History, Retriever
from models.retrieval.tiger.encoder import ExtendedT5, T5Backbone
from models.retrieval.tiger.tiger import Tiger

Part = Literal["head", "embedding", "transition"]

PARAMETER_PREFIXES: dict[Part, tuple[str, ...]] = {
    "head": ("decoder.heads",),
    "embedding": ("backbone.embedding", "backbone.extra"),
    "transition": ("decoder.transition",),
}
"""Prefixes of the parameter names of each part that `rates` may name."""


@dataclass(config=STRICT)
class NezhaConfig(JointConfig):
    """Options of NEZHA on TIGER; sizes are the teacher's."""

    rates: dict[Part, PositiveFloat] = field(default_factory=dict)
    """Learning rates of head, embedding and transition as multiples of fit.lr; 1 for
    parts that are not named."""


class NezhaBackbone(ExtendedT5):
    """T5's encoder that returns the root and the placeholders' states only."""

    def __init__(self, teacher: T5Backbone) -> None:
        """Build the backbone with the vocabulary and the sizes of `teacher`."""
        super().__init__(
            teacher.tokens, teacher.sizes, teacher.max_history, teacher.tokens.levels
        )

    def inputs(self, batch: HistoryBatch) -> tuple[Tensor, Tensor]:
        """Return tokens `[history, L placeholders]` (B, S), and lengths (B,)."""
        tokens, lengths = super().inputs(batch)
        level = torch.arange(self.tokens.levels, device=tokens.device)
        placeholders = (self.tokens.vocabulary + level).expand(len(tokens), -1)
        positions = lengths.unsqueeze(1) + level
        tokens = functional.pad(tokens, (0, len(level)))
        return tokens.scatter(1, positions, placeholders), lengths + len(level)

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states (B, 1 + L, D) of the root and the placeholders."""
        return last_positions(super().encode(batch), 1 + self.tokens.levels)

    def infer(self, batch: HistoryBatch) -> History:
        """Return the states of `encode`, computed without work for padding."""
        return last_positions(super().infer(batch), 1 + self.tokens.levels)


def last_positions(history: History, count: int) -> History:
    """Return the states (B, count, D) of the last `count` positions of each request."""
    first = history.lengths.unsqueeze(1) - count
    positions = first + torch.arange(count, device=history.lengths.device)
    states = history.states.take_along_dim(positions.unsqueeze(-1), 1)
    return History(states, torch.full_like(history.lengths, count))


class NezhaDecoder(Decoder):
    """A linear head per level over root + h_i, and the cell that updates the root."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        width = self.embedding.embedding_dim
        self.heads = nn.ModuleList(nn.Linear(width, size) for size in self.tokens.sizes)
        self.transition = nn.GRUCell(width, width)

    def update_root(self, root: Tensor, level: int, codes: Tensor) -> Tensor:
        """Return the root (..., D) after a code.

        Args:
            root: (..., D) root before the code.
            level: Level of the code.
            codes: (...) chosen codes.
        """
        embedded = self.embedding(codes + self.tokens.first[level])
        updated = self.transition(embedded.flatten(0, -2), root.flatten(0, -2))
        return cast(Tensor, updated).view(root.shape)

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """Return root + h_i (B, L, D) of each level."""
        root, *level_states = history.states.unbind(1)  # (B, D) each
        hidden = [root + level_states[0]]
        for level in range(1, self.tokens.levels):
            root = self.update_root(root, level - 1, codes[:, level - 1])
            hidden.append(root + level_states[level])
        return torch.stack(hidden, 1)

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        """Return the logits (B, C_l) of each level from states (B, L, D)."""
        return [head(x) for head, x in zip(self.heads, hidden.unbind(1), strict=True)]

    def scorer(self, history: History) -> RootScorer:
        """Return a scorer over each level's codebook."""
        return RootScorer(self, history)


class RootScorer:
    """A `Scorer` over each level's codebook; the state of a beam is its root."""

    def __init__(self, decoder: NezhaDecoder, history: History) -> None:
        self.decoder, self.level = decoder, 0
        self.root = history.states[:, :1]  # (B, W, D)
        self.level_states = history.states[:, 1:]  # (B, L, D)

    def start(self) -> Tensor:
        """Return the log-probabilities (B, C_0) of the first code."""
        return self._score()[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (B, W, C_l) of each beam's next code."""
        parent_root = self.root.take_along_dim(parents.unsqueeze(-1), 1)
        self.root = self.decoder.update_root(parent_root, self.level, tokens)
        self.level += 1
        return self._score()

    def _score(self) -> Tensor:
        """Return the log-probabilities (B, W, C_level) of the current level."""
        hidden = self.root + self.level_states[:, self.level, None]
        return self.decoder.heads[self.level](hidden).float().log_softmax(-1)


class Nezha(Joint):
    """An encoder with placeholders, and a head in place of the teacher's decoder."""

    name = "nezha"
    config_class = NezhaConfig
    config: NezhaConfig

    @staticmethod
    def build_parts(
        config: NezhaConfig, teacher: Retriever
    ) -> tuple[Backbone, NezhaDecoder]:
        """Return an encoder with placeholders and a head on the teacher's tokens."""
        backbone = NezhaBackbone(require_class(teacher, Tiger).backbone)
        return backbone, NezhaDecoder(backbone)

    def lr_multipliers(self) -> dict[str, float]:
        """Return the `rates` of the config by prefix of parameter names."""
        multipliers: dict[str, float] = {}
        for part, factor in self.config.rates.items():
            multipliers |= dict.fromkeys(PARAMETER_PREFIXES[part], factor)
        return multipliers
