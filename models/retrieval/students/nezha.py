"""NEZHA (Wang et al., 2025) on TIGER, as Appendix D.4 of SID-MLP ports it.

    python -m jobs.train --config jobs/configs/nezha.yaml --tables TABLES --sids SIDS \\
        --storage runs --name nezha --model.teacher runs/tiger

A placeholder per digit, a learned embedding, follows the history in the encoder's
input. One pass gives the root, the state of the last token before the placeholders, and
a state h_i per digit. Digit i is read by its own linear head from root + h_i; then a
recurrent cell moves the root on by the embedding of the chosen code. Encoder and head
are trained together, each digit given those before it; the teacher's decoder is not
used. The papers say that the state update is recurrent, not which cell: here a GRU's.
The codes' embeddings are the encoder's.

The published learning rates of the parts (head 1, token embeddings 100, transition 10
times the base) are `jobs/configs/nezha/published_rates.yaml`; the figures of SID-MLP's
Table 3 are without them, which did not help. Published decoding has no trie: beams take
the likeliest codes of all, and a hash set of the catalogue drops what is no item in the
end (`constrained` false). What invalid codes displace is lost then.

Shapes: `B` requests, `W` beams, `D` width, `L` levels (digits), `C_l` codes of level l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.retrieval.backbones.t5 import ExtendedT5, T5Backbone
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.distillation.teacher import build_teacher
from models.retrieval.parts import Backbone, Decoder, History
from models.retrieval.students.joint import Joint, JointConfig, require_tiger

PARTS = {
    "head": ("decoder.heads",),
    "embedding": ("backbone.embedding", "backbone.extra"),
    "transition": ("decoder.transition",),
}
"""Beginnings of the names of NEZHA's parameters, by part; what is in none of them has
the base learning rate."""


@dataclass
class NezhaConfig(JointConfig):
    """NEZHA on TIGER; sizes are the teacher's."""

    rates: dict[str, float] = field(default_factory=dict)
    """Learning rates as multiples of fit.lr, of the parts head, embedding and
    transition; those left out have 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for part, factor in self.rates.items():
            if part not in PARTS:
                raise ValueError(
                    f"rates has '{part}'; its parts are {', '.join(PARTS)}"
                )
            if not factor > 0:
                raise ValueError(
                    f"rates.{part} is {factor}, it must be above 0; 1 is the base learning rate"
                )

    def lr_multipliers(self) -> dict[str, float]:
        """Return the `rates`, by the beginning of parameters' names."""
        return {
            prefix: factor
            for part, factor in self.rates.items()
            for prefix in PARTS[part]
        }


class NezhaBackbone(ExtendedT5):
    """Gives the root and the placeholders' states: a history of 1 + L positions."""

    def __init__(self, teacher: T5Backbone) -> None:
        """`teacher` gives the vocabulary and the sizes."""
        super().__init__(
            teacher.tokens, teacher.sizes, teacher.max_history, teacher.tokens.levels
        )

    def inputs(self, batch: HistoryBatch) -> tuple[Tensor, Tensor]:
        """[history, a placeholder per digit]."""
        tokens, lengths = super().inputs(batch)
        level = torch.arange(self.tokens.levels, device=tokens.device)
        placeholders = (self.tokens.vocabulary + level).expand(len(tokens), -1)
        at = lengths.unsqueeze(1) + level
        return functional.pad(tokens, (0, len(level))).scatter(
            1, at, placeholders
        ), lengths + len(level)

    def encode(self, batch: HistoryBatch) -> History:
        """States (B, 1 + L, D)."""
        return last_positions(super().encode(batch), 1 + self.tokens.levels)

    def infer(self, batch: HistoryBatch) -> History:
        return last_positions(super().infer(batch), 1 + self.tokens.levels)


def last_positions(history: History, count: int) -> History:
    """The last `count` positions of each request."""
    at = (
        history.lengths.unsqueeze(1)
        - count
        + torch.arange(count, device=history.lengths.device)
    )
    states = history.states.take_along_dim(at.unsqueeze(-1), 1)
    return History(states, torch.full_like(history.lengths, count))


class NezhaDecoder(Decoder):
    """Heads over root + h_i and the cell that moves the root."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.tokens, self.hidden_width = (
            backbone.tokens,
            backbone.embedding.embedding_dim,
        )
        self._embedding = (backbone.embedding,)  # the backbone's, no submodule here
        self.heads = nn.ModuleList(
            nn.Linear(self.hidden_width, size) for size in self.tokens.sizes
        )
        self.transition = nn.GRUCell(self.hidden_width, self.hidden_width)

    def move(self, root: Tensor, level: int, codes: Tensor) -> Tensor:
        """(..., D): the root (..., D) after `codes` (...) of the level."""
        chosen = self._embedding[0](codes + self.tokens.first[level])
        return cast(
            Tensor, self.transition(chosen.flatten(0, -2), root.flatten(0, -2))
        ).view(root.shape)

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """(B, L, D): root + h_i of each digit."""
        root, *own = history.states.unbind(1)
        found = [root + own[0]]
        for level in range(1, self.tokens.levels):
            root = self.move(root, level - 1, codes[:, level - 1])
            found.append(root + own[level])
        return torch.stack(found, 1)

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        return [head(x) for head, x in zip(self.heads, hidden.unbind(1), strict=True)]

    def scorer(self, history: History) -> RootScorer:
        return RootScorer(self, history)


class RootScorer:
    """A `Scorer` (see `parts.py`): log-probabilities of each level's codebook. A beam is its root."""

    def __init__(self, decoder: NezhaDecoder, history: History) -> None:
        self.decoder, self.own, self.level = decoder, history.states[:, 1:], 0
        self.root = history.states[:, :1]  # (B, W, D)

    def start(self) -> Tensor:
        return self._score()[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        before = self.root.take_along_dim(parents.unsqueeze(-1), 1)
        self.root = self.decoder.move(before, self.level, tokens)
        self.level += 1
        return self._score()

    def _score(self) -> Tensor:
        """(B, W, C_level)."""
        return (
            self.decoder.heads[self.level](self.root + self.own[:, self.level, None])
            .float()
            .log_softmax(-1)
        )


class Nezha(Joint):
    """The backbone with its placeholders, and the head in place of the teacher's decoder."""

    name = "nezha"
    config_class = NezhaConfig
    config: NezhaConfig

    def __init__(self, config: NezhaConfig, catalogue: Catalogue) -> None:
        teacher = require_tiger(build_teacher(config, catalogue))
        backbone = NezhaBackbone(teacher.backbone)
        super().__init__(config, catalogue, backbone, NezhaDecoder(backbone))

    def lr_multipliers(self) -> dict[str, float]:
        return self.config.lr_multipliers()
