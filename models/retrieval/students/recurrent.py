r"""Students with a recurrent state in place of attention: Gated DeltaNet and Mamba2.

Gated DeltaNet (Yang et al., 2025) and Mamba2 (Dao and Gu, 2024) are rows of Tables 3
and 11 of SID-MLP.

    python -m jobs.train --config jobs/configs/retrieval/gdn.yaml --tables TABLES \
        --sids SIDS --storage runs --name gdn --model.teacher runs/tiger

The input of a causal stack is the backbone's frozen states of the history, a learned
start token, and the frozen embeddings of the prefix. A linear layer on the position
before a level predicts its logits (Appendix D.3 of SID-MLP). Rows are shifted so that
padding comes first and the last positions align: then neither the state nor the short
convolutions read padding. Search reads the history once per user. Each beam has a
state, which every step gathers from the parent beam and updates with the chosen code.

The paper gives no sizes (Appendix D.3: the authors' recommendations, adapted to TIGER).
The stacks here have about as many parameters as the teacher's decoder, 2.6 million.
Blocks are as published:

- GDN: a mixer and a SwiGLU, 6 heads, values twice as wide as keys, convolutions over 4
  positions. With the published head width of 256, one block would be larger than half
  of TIGER's decoder, so depth and widths are TIGER's: 4 blocks with heads of 64; 2.5
  million parameters.
- Mamba2: a mixer without feed-forward, heads of 64, a state of 128, an inner width of
  twice the outer, convolutions over 4 positions, chunks of 256. A block of TIGER's
  width has 0.13 million parameters, so the stack is twice as wide, with 5 blocks; 2.6
  million parameters.

Shapes: `B` requests, `S` positions of the longest history, `P` codes of a prefix, `D`
width of the backbone, `N` width of the stack, `W` beams of a user, `L` levels,
`C_l` codes of level l, `O_l` logits of level l.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional

from core.errors import UserError
from core.options import STRICT, Dropout
from models.layers.gated_deltanet import GatedDeltaNet
from models.layers.gated_recurrence import MixerState, RecurrentMixer
from models.layers.mamba2 import Mamba2
from models.layers.t5 import dropout
from models.retrieval.distillation.student import Student, StudentConfig
from models.retrieval.retriever import Backbone, Decoder, History, Retriever

EXPAND_V = 2
"""Ratio of the width of a Gated DeltaNet head's values to its keys (published)."""


@dataclass(config=STRICT)
class RecurrentConfig(StudentConfig):
    """Options of both recurrent students."""

    num_layers: PositiveInt = 4
    """Number of blocks."""
    width: NonNegativeInt = 0
    """Width of the stack. 0: the backbone's width, without a linear layer before the
    stack."""
    chunk: PositiveInt = 64
    """Number of positions that training computes in parallel; results differ by
    rounding only."""
    dropout: Dropout = 0.1
    """Dropout on the output of each block (TIGER's value; swept over 0.1 and 0.2 in
    Appendix C.2)."""


@dataclass(config=STRICT)
class GdnConfig(RecurrentConfig):
    """Options of the student with a Gated DeltaNet."""

    heads: PositiveInt = 6
    """Number of heads (published; also TIGER's)."""
    head_width: PositiveInt = 64
    """Width of a head's keys and queries (TIGER's; published 256)."""
    ffn_width: NonNegativeInt = 512
    """Inner width of the SwiGLU after each mixer; 0 for no SwiGLU. The published rule
    is 8/3 of the width, rounded up to a multiple of 256."""


@dataclass(config=STRICT)
class Mamba2Config(RecurrentConfig):
    """Options of the student with a Mamba2."""

    num_layers: PositiveInt = 5
    """Number of blocks; 5 have as many parameters as the teacher's decoder."""
    width: NonNegativeInt = 256
    """Width of the stack. 0: the backbone's width, without a linear layer before the
    stack."""
    chunk: PositiveInt = 256
    """Number of positions that training computes in parallel (published); results
    differ by rounding only."""
    head_width: PositiveInt = 64
    """Width of a head (published)."""
    state: PositiveInt = 128
    """Width of the state of each channel of a head (published)."""
    expand: PositiveInt = 2
    """Ratio of the inner width to the width of the stack (published)."""


class Block(nn.Module):
    """A pre-norm block: a recurrent mixer, followed by an optional SwiGLU."""

    def __init__(
        self, width: int, mixer: RecurrentMixer, ffn_width: int, dropout_p: float
    ) -> None:
        """Build the block; with `ffn_width` 0 it has no SwiGLU."""
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.mixer = mixer
        self.dropout_p = dropout_p
        self.ffn_norm: nn.RMSNorm | None = None
        if ffn_width:
            self.ffn_norm = nn.RMSNorm(width, eps=1e-6)
            self.ffn_in = nn.Linear(width, 2 * ffn_width, bias=False)
            self.ffn_out = nn.Linear(ffn_width, width, bias=False)

    def forward(
        self, x: Tensor, real: Tensor, last: int | None = None
    ) -> tuple[Tensor, MixerState]:
        """Return the block's output and state, as `RecurrentMixer.forward` does."""
        mixed, state = self.mixer(self.norm(x), real, last)
        if last is not None:
            x = x[:, x.shape[1] - last :]
        return self._add(x, mixed), state

    def step(
        self, x: Tensor, state: MixerState, keep: bool
    ) -> tuple[Tensor, MixerState]:
        """Return the block's output and next state, as `RecurrentMixer.step` does."""
        mixed, state = self.mixer.step(self.norm(x), state, keep)
        return self._add(x, mixed), state

    def _add(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the block's output from its input `x` and the mixer's output."""
        dropout_p = self.dropout_p if self.training else 0.0
        x = x + dropout(mixed, dropout_p)
        if self.ffn_norm is None:
            return x
        gate, up = self.ffn_in(self.ffn_norm(x)).chunk(2, -1)
        return x + dropout(self.ffn_out(functional.silu(gate) * up), dropout_p)


class RecurrentDecoder(Decoder):
    """A stack of recurrent blocks over a backbone's states and token embeddings."""

    def __init__(
        self,
        config: RecurrentConfig,
        backbone: Backbone,
        make_mixer: Callable[[int], RecurrentMixer],
        ffn_width: int = 0,
    ) -> None:
        """Build the stack.

        Args:
            config: Options of the student.
            backbone: Backbone of the teacher.
            make_mixer: Returns the mixer of one block for a width N.
            ffn_width: Inner width of each block's SwiGLU; 0 for none.
        """
        super().__init__(backbone)
        dim = self.embedding.embedding_dim
        width = config.width or dim
        self.start = nn.Parameter(torch.randn(dim))
        self.enter = nn.Linear(dim, width) if config.width else nn.Identity()
        self.blocks: Any = nn.ModuleList(
            Block(width, make_mixer(width), ffn_width, config.dropout)
            for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.heads = nn.ModuleList(nn.Linear(width, size) for size in self.tokens.sizes)

    @property
    def beam_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the states of all blocks."""
        numbers = sum(block.mixer.state_size for block in self.blocks)
        return self.norm.weight.element_size() * numbers

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (..., D) of `tokens` (...)."""
        return functional.embedding(tokens, self.embedding.weight)

    def read(self, history: History, prefix: Tensor) -> tuple[Tensor, list[MixerState]]:
        """Read a history, the start token and a prefix.

        Args:
            history: Histories of B requests.
            prefix: (B, P, D) embedded codes.

        Returns:
            (B, P + 1, N) outputs from the start token on; the state of each block after
            the prefix.
        """
        states, lengths = history.states, history.lengths
        longest = states.shape[1]
        position = torch.arange(longest, device=states.device)
        # (B, S): position before the shift, negative at padding
        source = position - (longest - lengths).unsqueeze(1)
        index = source.clamp(min=0).unsqueeze(-1).expand_as(states)
        shifted = states.gather(1, index)
        start = self.start.to(states.dtype).expand(len(states), 1, -1)
        x = self.enter(torch.cat([shifted, start, prefix.to(states.dtype)], 1))
        num_outputs = 1 + prefix.shape[1]
        # (B, S + P + 1, 1): 0 at padding, else 1
        real = functional.pad((source >= 0).to(x.dtype), (0, num_outputs), value=1.0)
        real = real.unsqueeze(-1)
        block_states = []
        for i, block in enumerate(self.blocks):
            is_last = i == len(self.blocks) - 1
            x, state = block(x, real, num_outputs if is_last else None)
            block_states.append(state)
        return self.norm(x), block_states

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """Return the outputs (B, L, N) before each code.

        Args:
            history: States of the history.
            codes: (B, L) codes of the target.
        """
        prefix = self.embed(self.tokens.shift_right(codes)[:, 1:])  # (B, L - 1, D)
        outputs, _ = self.read(history, prefix)
        return outputs

    def logits(self, hidden: Tensor) -> Sequence[Tensor]:
        """Return the logits (B, C_l) of each level."""
        return [head(x) for head, x in zip(self.heads, hidden.unbind(1), strict=True)]

    def scorer(self, history: History) -> RecurrentScorer:
        """Return a scorer over each level's codebook."""
        return RecurrentScorer(self, history)


class RecurrentScorer:
    """A `Scorer` over each level's codebook."""

    def __init__(self, decoder: RecurrentDecoder, history: History) -> None:
        self.decoder, self.history = decoder, history
        self.level = 0
        self.states: list[MixerState] = []  # per block, of B * W rows

    def start(self) -> Tensor:
        """Return the log-probabilities (B, C_0) of the first code."""
        states = self.history.states
        no_prefix = states.new_zeros((len(states), 0, states.shape[2]))
        x, self.states = self.decoder.read(self.history, no_prefix)
        return self._score(x)[:, 0]

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (B, W, C_l) of each beam's next code."""
        decoder = self.decoder
        users = torch.arange(len(parents), device=parents.device).unsqueeze(1)
        num_beams = len(self.states[0].memory) // len(parents)
        parent_rows = (parents + users * num_beams).flatten()
        codes = tokens.flatten() + decoder.tokens.first[self.level]
        x = decoder.enter(decoder.embed(codes))  # (B * W, N)
        self.level += 1
        keep = self.level < decoder.tokens.levels - 1  # the last state is not read
        for i, block in enumerate(decoder.blocks):
            x, self.states[i] = block.step(x, self.states[i].rows(parent_rows), keep)
        return self._score(decoder.norm(x).unflatten(0, parents.shape))

    def _score(self, x: Tensor) -> Tensor:
        """Return the log-probabilities (B, W, C_level) of outputs `x` (B, W, N)."""
        return self.decoder.heads[self.level](x).float().log_softmax(-1)


class GdnStudent(Student):
    """A student with a Gated DeltaNet as decoder."""

    name = "gdn"
    config_class = GdnConfig

    @staticmethod
    def build_decoder(config: GdnConfig, teacher: Retriever) -> RecurrentDecoder:
        """Return a stack of Gated DeltaNet blocks on the teacher's backbone."""
        make_mixer = partial(
            GatedDeltaNet,
            heads=config.heads,
            head_width=config.head_width,
            expand_v=EXPAND_V,
            chunk=config.chunk,
        )
        return RecurrentDecoder(config, teacher.backbone, make_mixer, config.ffn_width)


class Mamba2Student(Student):
    """A student with a Mamba2 as decoder."""

    name = "mamba2"
    config_class = Mamba2Config

    @staticmethod
    def build_decoder(config: Mamba2Config, teacher: Retriever) -> RecurrentDecoder:
        """Return a stack of Mamba2 blocks on the teacher's backbone."""
        backbone = teacher.backbone
        inner = config.expand * (config.width or backbone.embedding.embedding_dim)
        if inner % config.head_width:
            raise UserError(
                f"the inner width {inner} of mamba2 is not a multiple of head_width "
                f"{config.head_width}"
            )

        make_mixer = partial(
            Mamba2,
            head_width=config.head_width,
            state=config.state,
            expand=config.expand,
            chunk=config.chunk,
        )
        return RecurrentDecoder(config, backbone, make_mixer)
