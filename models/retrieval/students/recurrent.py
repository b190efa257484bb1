"""Decoders that carry a recurrent state in place of attention: Gated DeltaNet (Yang et al., 2025) and Mamba2 (Dao and
Gu, 2024), rows of Tables 3 and 11 of SID-MLP.

    python -m jobs.train --config jobs/configs/gdn.yaml --tables TABLES --sids SIDS --storage runs \\
        --name gdn --model.teacher runs/tiger

A causal stack reads, as one row, the backbone's frozen states of the history, a learned start token, and the prefix in
the backbone's frozen embeddings; the logits of a digit are a linear layer on the position before it (Appendix D.3 of
SID-MLP). Rows are shifted so that padding comes first and their last positions meet: neither the state nor the short
convolutions take anything from padding. In search the history is read once per user; from there on every beam has a
state, which at each step is gathered by parent beam and moved on by the chosen code.

The paper names no sizes (Appendix D.3: the authors' recommendations, but for what TIGER asks otherwise); these stacks
have about as many parameters as the 2.6 million of the teacher's decoder. Blocks are the authors':

- GDN: a mixer and a SwiGLU, 6 heads, values twice as wide as keys, convolutions of 4. In place of their head width of
  256, which alone would make one block of more than half of TIGER's decoder, it has the teacher's depth and widths: 4
  blocks of its width, with heads of 64; 2.5 million.
- Mamba2: a mixer alone, heads of 64, a state of 128, inner width twice the outer, convolutions of 4, chunks of 256. As
  a block of TIGER's width has 0.13 million parameters, the stack is twice as wide, 5 blocks; 2.6 million.

Shapes: `B` requests, `S` positions of the longest history, `D` width of the backbone, `N` width of the stack, `W`
beams of a user, `L` levels (digits), `C_l` codes of level l.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import check_dropout, check_least, check_positive
from models.layers.gated_deltanet import GatedDeltaNet
from models.layers.gated_recurrence import MixerState, RecurrentMixer
from models.layers.mamba2 import Mamba2
from models.layers.t5 import dropout
from models.retrieval.distillation.student import Student, StudentConfig
from models.retrieval.parts import Backbone, Decoder, History
from models.retrieval.retriever import Retriever
from models.storage.tables import UserError


@dataclass
class RecurrentConfig(StudentConfig):
    """What both decoders have."""

    num_layers: int = 4
    """Blocks of the stack."""
    width: int = 0
    """Width of the stack; 0: the backbone's, and its states are read as they are, else by a linear layer."""
    conv: int = 4
    """Positions of the short convolutions."""
    chunk: int = 64
    """Positions that are computed at once in training; it changes no result but by rounding."""
    dropout: float = 0.1
    """Dropout on what each block adds (TIGER's; swept over 0.1 and 0.2 in Appendix C.2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("num_layers", "conv", "chunk"))
        check_least(self, ["width"], 0)
        check_dropout(self, "dropout")


@dataclass
class GdnConfig(RecurrentConfig):
    """A student whose state forgets and corrects."""

    heads: int = 6
    """Heads (the authors', and TIGER's)."""
    head_width: int = 64
    """Width of a head's keys and queries (TIGER's; the authors' is 256)."""
    expand_v: int = 2
    """Width of a head's values over that of its keys (the authors')."""
    ffn_width: int = 512
    """Inner width of the SwiGLU after each mixer; 0: none. The authors' rule: 8/3 of the width, up to a multiple of
    256."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("heads", "head_width", "expand_v"))
        check_least(self, ["ffn_width"], 0)


@dataclass
class Mamba2Config(RecurrentConfig):
    """A student whose state forgets."""

    num_layers: int = 5
    """Blocks of the stack, as many as make the teacher's decoder in parameters."""
    width: int = 256
    """Width of the stack; 0: the backbone's, and its states are read as they are, else by a linear layer."""
    chunk: int = 256
    """Positions that are computed at once in training (the authors'); it changes no result but by rounding."""
    head_width: int = 64
    """Width of a head (the authors')."""
    state: int = 128
    """Width of the state of each of a head's channels (the authors')."""
    expand: int = 2
    """Inner width over that of the stack (the authors')."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("head_width", "state", "expand"))


class Block(nn.Module):
    """x + mixer(norm(x)), then, where it has one, x + ffn(norm(x)) with a SwiGLU."""

    def __init__(
        self, width: int, mixer: RecurrentMixer, ffn_width: int, dropout_p: float
    ) -> None:
        """`ffn_width` 0: none."""
        super().__init__()
        self.norm, self.mixer, self.dropout_p = (
            nn.RMSNorm(width, eps=1e-6),
            mixer,
            dropout_p,
        )
        self.ffn_norm: nn.RMSNorm | None = None
        if ffn_width:
            self.ffn_norm = nn.RMSNorm(width, eps=1e-6)
            self.ffn_in = nn.Linear(width, 2 * ffn_width, bias=False)
            self.ffn_out = nn.Linear(ffn_width, width, bias=False)

    def forward(
        self, x: Tensor, real: Tensor, last: int | None = None
    ) -> tuple[Tensor, MixerState]:
        """As `RecurrentMixer.forward`."""
        mixed, state = self.mixer(self.norm(x), real, last)
        x = x if last is None else x[:, x.shape[1] - last :]
        return self._add(x, mixed), state

    def step(
        self, x: Tensor, state: MixerState, keep: bool
    ) -> tuple[Tensor, MixerState]:
        """As `RecurrentMixer.step`."""
        mixed, state = self.mixer.step(self.norm(x), state, keep)
        return self._add(x, mixed), state

    def _add(self, x: Tensor, mixed: Tensor) -> Tensor:
        dropout_p = self.dropout_p if self.training else 0.0
        x = x + dropout(mixed, dropout_p)
        if self.ffn_norm is None:
            return x
        gate, up = self.ffn_in(self.ffn_norm(x)).chunk(2, -1)
        return x + dropout(self.ffn_out(functional.silu(gate) * up), dropout_p)


class RecurrentDecoder(Decoder):
    """A stack of blocks over the states and the embeddings of a backbone, whose they stay."""

    def __init__(
        self,
        config: RecurrentConfig,
        backbone: Backbone,
        mixer: Callable[[int], RecurrentMixer],
        ffn_width: int = 0,
    ) -> None:
        """`mixer(N)` makes that of a block."""
        super().__init__()
        self.tokens, self.first_level = backbone.tokens, config.m
        self._embedding = (backbone.embedding,)  # the backbone's, no submodule here
        dim = backbone.embedding.embedding_dim
        width = self.hidden_width = config.width or dim
        self.start = nn.Parameter(torch.randn(dim))
        self.enter = nn.Linear(dim, width) if config.width else nn.Identity()
        self.blocks: Any = nn.ModuleList(
            Block(width, mixer(width), ffn_width, config.dropout)
            for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.heads = nn.ModuleList(
            nn.Identity() if level < self.first_level else nn.Linear(width, size)
            for level, size in enumerate(self.tokens.sizes)
        )

    @property
    def beam_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the states of all blocks."""
        return self.norm.weight.element_size() * sum(
            block.mixer.state_size for block in self.blocks
        )

    def embedded(self, tokens: Tensor) -> Tensor:
        """(..., D) of `tokens` (...)."""
        return functional.embedding(tokens, self._embedding[0].weight)

    def read(self, history: History, prefix: Tensor) -> tuple[Tensor, list[MixerState]]:
        """(B, P + 1, N) after the history, from the start token on, of the embedded `prefix` (B, P, D); and each
        block's state after all of it."""
        states, lengths = history.states, history.lengths
        source = torch.arange(states.shape[1], device=states.device) - (
            states.shape[1] - lengths
        ).unsqueeze(1)
        shifted = states.gather(
            1, source.clamp(min=0).unsqueeze(-1).expand_as(states)
        )  # padding first
        begin = self.start.to(states.dtype).expand(len(states), 1, -1)
        x = self.enter(torch.cat([shifted, begin, prefix.to(states.dtype)], 1))
        real = functional.pad(
            (source >= 0).to(x.dtype), (0, 1 + prefix.shape[1]), value=1.0
        ).unsqueeze(-1)
        found = []
        for i, block in enumerate(self.blocks):
            x, state = block(
                x, real, 1 + prefix.shape[1] if i == len(self.blocks) - 1 else None
            )
            found.append(state)
        return self.norm(x), found

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        prefix = self.embedded(self.tokens.started(codes)[:, 1:])  # (B, L - 1, D)
        return self.read(history, prefix)[0][:, self.first_level :]

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        return [
            head(x)
            for head, x in zip(
                self.heads[self.first_level :], hidden.unbind(1), strict=True
            )
        ]

    def scorer(self, history: History) -> RecurrentScorer:
        return RecurrentScorer(self, history)


class RecurrentScorer:
    """A `Scorer` (see `parts.py`): log-probabilities of each level's codebook. Of levels before `first_level` it has
    none to give."""

    def __init__(self, decoder: RecurrentDecoder, history: History) -> None:
        self.decoder, self.history, self.level = decoder, history, 0
        self.states: list[MixerState] = []  # per block, of B * W rows

    def start(self) -> Tensor:
        states = self.history.states
        x, self.states = self.decoder.read(
            self.history, states.new_zeros((len(states), 0, states.shape[2]))
        )
        return self._score(x)[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        decoder, users = (
            self.decoder,
            torch.arange(len(parents), device=parents.device).unsqueeze(1),
        )
        beams = len(self.states[0].memory) // len(parents)
        rows = (parents + users * beams).flatten()
        x = decoder.enter(
            decoder.embedded(tokens.flatten() + decoder.tokens.first[self.level])
        )  # (B * W, N)
        self.level += 1
        keep = (
            self.level < decoder.tokens.levels - 1
        )  # after the last code nobody asks for a state
        for i, block in enumerate(decoder.blocks):
            x, self.states[i] = block.step(x, self.states[i].rows(rows), keep)
        return self._score(decoder.norm(x).unflatten(0, parents.shape))

    def _score(self, x: Tensor) -> Tensor:
        """(B, W, C_level) of `x` (B, W, N)."""
        if self.level < self.decoder.first_level:
            return x.new_zeros((*x.shape[:2], 0))
        return self.decoder.heads[self.level](x).float().log_softmax(-1)


class GdnStudent(Student):
    """A student with a Gated DeltaNet as decoder."""

    name = "gdn"
    config_class = GdnConfig

    @staticmethod
    def build_decoder(config: GdnConfig, teacher: Retriever) -> RecurrentDecoder:
        sizes = (
            config.heads,
            config.head_width,
            config.expand_v,
            config.conv,
            config.chunk,
        )
        return RecurrentDecoder(
            config,
            teacher.backbone,
            lambda width: GatedDeltaNet(width, *sizes),
            config.ffn_width,
        )


class Mamba2Student(Student):
    """A student with a Mamba2 as decoder."""

    name = "mamba2"
    config_class = Mamba2Config

    @staticmethod
    def build_decoder(config: Mamba2Config, teacher: Retriever) -> RecurrentDecoder:
        backbone = teacher.backbone
        inner = config.expand * (config.width or backbone.embedding.embedding_dim)
        if inner % config.head_width:
            raise UserError(
                f"the inner width {inner} of mamba2 does not divide by head_width "
                f"{config.head_width}; give one that divides expand times width"
            )
        sizes = (
            config.head_width,
            config.state,
            config.expand,
            config.conv,
            config.chunk,
        )
        return RecurrentDecoder(config, backbone, lambda width: Mamba2(width, *sizes))
