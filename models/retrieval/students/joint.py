"""Models that start from a teacher's weights and train all of them: EARN and NEZHA as SID-MLP's paper ports them.

    python -m jobs.train --config jobs/configs/nezha.yaml --tables TABLES --sids SIDS --storage runs --name nezha \\
        --model.teacher runs/tiger

The teacher is not asked while training, so there is nothing to distil and nothing to keep in a cache: the loss is the
cross-entropy of the target's codes.

EARN (Yang et al., 2025; Appendix D.3): a register, which is a learned embedding, stands before the history and another
after it. The encoder's layers up to k read all positions; above k the states of the two registers alone go on, at the
positions that they have, and the decoder's cross-attention reads nothing else. The appendix gives k, the joint
fine-tuning from the teacher's weights and the loss, which is that of EARN's paper. It does not say what the registers
start from: here a normal distribution, as TIGER's own tokens do.

NEZHA (Wang et al., 2025; Appendix D.4): a placeholder per digit, a learned embedding, follows the history in the
encoder's input. One pass gives the root, the state of the last token before the placeholders, and a state h_i per
digit. Digit i is read by its own linear head from root + h_i; then a recurrent cell moves the root on by the embedding
of the chosen code. Encoder and head are trained together, each digit given those before it; the teacher's decoder is
not used. The papers say that the state update is recurrent, not which cell: here a GRU's. The codes' embeddings are the
encoder's. The published learning rates of the parts (head 1, token embeddings 100, transition 10 times the base) are
`jobs/configs/nezha/published_rates.yaml`; the figures of SID-MLP's Table 3 are without them, which did not help.
Published decoding has no trie: beams take the likeliest codes of all, and a hash set of the catalogue drops what is no
item in the end (`constrained` false). What invalid codes displace is lost then.

Shapes: `B` requests, `W` beams, `S` tokens of a history with its registers or placeholders, `D` width, `H` heads, `L`
levels (digits), `C_l` codes of level l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import check_positive
from models.layers.t5 import Block, dropout
from models.retrieval.backbones.t5 import ExtendedT5, T5Backbone
from models.retrieval.data import Catalogue
from models.retrieval.decoders.t5 import T5Decoder
from models.retrieval.distillation.student import TaughtConfig
from models.retrieval.parts import Backbone, Decoder, History, padding_mask
from models.retrieval.retriever import Retriever
from models.retrieval.tiger import Tiger
from models.storage.tables import UserError

REGISTERS = 2
"""Of EARN."""
PARTS = {
    "head": ("decoder.heads",),
    "embedding": ("backbone.embedding", "backbone.extra"),
    "transition": ("decoder.transition",),
}
"""Beginnings of the names of NEZHA's parameters, by part; what is in none of them has the base learning rate."""


@dataclass
class JointConfig(TaughtConfig):
    """What all of them have."""

    has_lasting_outputs: ClassVar[bool] = False
    beam: int = 50
    """Beams when recommending (Sec. 4.1 of SID-MLP)."""
    constrained: bool = True
    """Whether decoding keeps to the trie; without it, tuples of no item are dropped in the end."""

    def __post_init__(self) -> None:
        check_positive(self, ["beam"])
        if self.teacher_cache:
            raise ValueError(
                f"teacher_cache {self.teacher_cache} would hold what changes in every step of training; leave it out"
            )


class Joint(Retriever):
    """A backbone and a decoder trained together on the target's codes."""

    config: JointConfig

    def set_teacher(self, teacher: Retriever) -> None:
        """Takes the weights that `teacher` has for what is here too: embeddings, encoder, a T5's decoder."""
        backbone, own = tiger_of(teacher).backbone, cast(T5Backbone, self.backbone)
        own.embedding.load_state_dict(backbone.embedding.state_dict())
        own.encoder.load_state_dict(backbone.encoder.state_dict())
        if isinstance(self.decoder, T5Decoder):
            self.decoder.load_state_dict(teacher.decoder.state_dict())


def tiger_of(teacher: Retriever) -> Tiger:
    """The teacher. UserError for another model than TIGER."""
    if not isinstance(teacher, Tiger):
        raise UserError(
            f"the teacher is a {type(teacher).__name__}, and training starts from the weights of a TIGER's encoder; "
            f"give a TIGER as model.teacher"
        )
    return teacher


@dataclass
class EarnConfig(JointConfig):
    """EARN on TIGER; sizes are the teacher's."""

    register_layer: int = 1
    """k: the last encoder layer that reads the history (swept over 1, 2, 3 in Appendix D.3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.register_layer < 1:
            raise ValueError(
                f"register_layer {self.register_layer} is below 1; no layer would read the history"
            )


class EarnBackbone(ExtendedT5):
    """Gives the states of the two registers: a history of two positions."""

    def __init__(self, teacher: T5Backbone, layer: int) -> None:
        """`teacher` gives the vocabulary and the sizes."""
        super().__init__(teacher.tokens, teacher.sizes, teacher.max_history, REGISTERS)
        if layer > self.sizes.num_encoder_layers:
            raise UserError(
                f"register_layer {layer} exceeds the teacher's {self.sizes.num_encoder_layers} encoder layers; give "
                f"one of them"
            )
        self.layer = layer

    def inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """[prefix register, history, suffix register]."""
        tokens, lengths = super().inputs(batch)
        prefix = self.tokens.vocabulary
        tokens = functional.pad(functional.pad(tokens, (1, 0), value=prefix), (0, 1))
        return tokens.scatter(
            1, lengths.unsqueeze(1) + 1, prefix + 1
        ), lengths + REGISTERS

    def encode(self, batch: dict[str, Tensor]) -> History:
        """States (B, 2, D) of the registers."""
        tokens, lengths = self.inputs(batch)
        table, dropout_p = self.table(), self.sizes.dropout if self.training else 0.0
        x = dropout(functional.embedding(tokens, table), dropout_p)
        position = self.encoder.position_bias(tokens.shape[1])  # (1, H, S, S)
        padding = padding_mask(lengths, tokens.shape[1], table.dtype)
        at = torch.stack(
            [torch.zeros_like(lengths), lengths - 1], 1
        )  # (B, 2): where the registers are
        of_registers = position[0][:, at].transpose(
            0, 1
        )  # (B, H, 2, S): to all positions
        between = of_registers.take_along_dim(at[:, None, None], 3)  # (B, H, 2, 2)
        if padding is not None:
            position, of_registers = position + padding, of_registers + padding
        *all_see_all, last = self.encoder.blocks[: self.layer]
        for block in all_see_all:
            x = block(x, position, dropout_p)
        x = narrowed(last, x, at, of_registers, dropout_p)
        for block in self.encoder.blocks[self.layer :]:
            x = block(x, between, dropout_p)
        states = dropout(self.encoder.final_layer_norm(x), dropout_p)
        return History(states, torch.full_like(lengths, REGISTERS))

    def infer(self, batch: dict[str, Tensor]) -> History:
        return self.encode(batch)


def narrowed(
    block: Block, x: Tensor, at: Tensor, bias: Tensor, dropout_p: float
) -> Tensor:
    """(B, 2, D): what `block` makes of x (B, S, D) at the positions `at` (B, 2), whose attention to all positions has
    the `bias` (B, H, 2, S). The others' outputs would be dropped, so they are not computed."""
    normed, at = block.norm(0, x), at.unsqueeze(-1)
    (q,) = block.attention.project(normed.take_along_dim(at, 1), "q")
    k, v = block.attention.project(normed, "kv")
    x = x.take_along_dim(at, 1) + dropout(
        block.attention.attend(q, k, v, bias, dropout_p), dropout_p
    )
    return x + dropout(block.feedforward(block.norm(-1, x), dropout_p), dropout_p)


def earn(config: EarnConfig, catalogue: Catalogue, teacher: Retriever) -> Joint:
    """The model, to take its weights from `teacher`, a TIGER."""
    backbone = EarnBackbone(tiger_of(teacher).backbone, config.register_layer)
    return Joint(
        config,
        catalogue,
        backbone,
        T5Decoder(backbone.tokens, backbone.sizes, backbone.embedding),
    )


@dataclass
class NezhaConfig(JointConfig):
    """NEZHA on TIGER; sizes are the teacher's."""

    rates: dict[str, float] = field(default_factory=dict)
    """Learning rates as multiples of fit.lr, of the parts head, embedding and transition; those left out have 1."""

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


class NezhaBackbone(ExtendedT5):
    """Gives the root and the placeholders' states: a history of 1 + L positions."""

    def __init__(self, teacher: T5Backbone) -> None:
        """`teacher` gives the vocabulary and the sizes."""
        super().__init__(
            teacher.tokens, teacher.sizes, teacher.max_history, teacher.tokens.levels
        )

    def inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """[history, a placeholder per digit]."""
        tokens, lengths = super().inputs(batch)
        level = torch.arange(self.tokens.levels, device=tokens.device)
        placeholders = (self.tokens.vocabulary + level).expand(len(tokens), -1)
        at = lengths.unsqueeze(1) + level
        return functional.pad(tokens, (0, len(level))).scatter(
            1, at, placeholders
        ), lengths + len(level)

    def encode(self, batch: dict[str, Tensor]) -> History:
        """States (B, 1 + L, D)."""
        return last_positions(super().encode(batch), 1 + self.tokens.levels)

    def infer(self, batch: dict[str, Tensor]) -> History:
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

    config: NezhaConfig

    def __init__(
        self, config: NezhaConfig, catalogue: Catalogue, teacher: Retriever
    ) -> None:
        backbone = NezhaBackbone(tiger_of(teacher).backbone)
        super().__init__(config, catalogue, backbone, NezhaDecoder(backbone))


def lr_multipliers(config: NezhaConfig) -> dict[str, float]:
    """Multiples of the learning rate, by the beginning of parameters' names."""
    return {
        prefix: factor
        for part, factor in config.rates.items()
        for prefix in PARTS[part]
    }
