"""Students of LC-Rec as SID-MLP's paper ports them: SID-MLP (Appendix D.1) and NEZHA (Appendix D.4).

    python -m jobs.train --config jobs/configs/lc_rec_sid_mlp.yaml --tables TABLES --sids SIDS --storage runs \\
        --name lc_rec_sid_mlp --model.teacher runs/lc_rec

SID-MLP: the language model reads the history; a readout and an MLP per digit decode.
The readout's keys and values are those of the history's tokens in an early layer of the
frozen language model, as in its cache (keys after positional encoding), without the
prompt's words. The query is the last state of the prompt. One to three readouts are
stacked, each with the output of the one before as query. States of 4096 numbers are
projected to 768; so are the teacher's embeddings of the codes, which the appendix
leaves open. Heads, search and loss are SID-MLP's.

NEZHA: a placeholder per digit, which is a learned embedding, follows the whole prompt,
including its response header. One pass computes the root, the state of the last token
of the prompt, and a state per digit; head, losses and search are those of `nezha.py`.
The language model is trained like LC-Rec, in full or by LoRA, together with the head.

Shapes: `B` requests, `S` tokens of the longest prompt, `P` positions of the longest
history, `D` width of the language model, `E` width of its keys of all heads, `N` width
here, `H` heads, `K` width of a head, `V` tokens, `L` levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from models.cpu.derived import cache_until_changed
from models.retrieval.backbones.causal_lm import LmBackbone, Segment
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.decoders.sid_mlp import SidMlpConfig, SidMlpDecoder
from models.retrieval.distillation.student import ReusesDecoder, Student, StudentConfig
from models.retrieval.distillation.teacher import build_teacher
from models.retrieval.language.lc_rec import LcRec, require_lc_rec
from models.retrieval.parts import History
from models.retrieval.retriever import Retriever
from models.retrieval.students.joint import Joint
from models.retrieval.students.nezha import NezhaConfig, NezhaDecoder, last_positions
from models.storage.tables import UserError
from models.text import language_model


@dataclass
class LcRecSidMlpConfig(StudentConfig):
    """Options of SID-MLP on LC-Rec."""

    default_teacher: ClassVar[str] = "lc_rec"
    beam: int = 20
    """Beams when recommending (the teacher's)."""
    layer: int = 0
    """Layer whose keys and values are read, the first is 1; 0: a quarter of them
    (Appendix D.1: the 8th of 32)."""
    width: int = 768
    """Width that queries, keys and values are projected to (d_h of Appendix D.1)."""
    readout_layers: int = 1
    """Stacked readouts (swept over 1, 2, 3 in Appendix D.1)."""
    attention_heads: int = 12
    """Heads of a readout; none are published, 64 numbers each are LC-Rec's own."""
    ffn_width: int = 1024
    """Inner width of a readout's feed-forward (swept over 512, 1024, 2048, 3072 in
    Appendix D.1)."""
    head_width: int = 1024
    """Hidden width of each digit's head (swept over 512, 1024, 2048, 3072 in Appendix
    D.1)."""
    dropout: float = 0.2
    """Dropout of heads and feed-forward (public code of SID-MLP)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.readout_layers < 1 or self.layer < 0:
            raise ValueError(
                f"readout_layers {self.readout_layers} must be at least 1 and layer {self.layer} at least 0; give such "
                f"numbers"
            )
        self.to_sid_mlp()

    def to_sid_mlp(self) -> SidMlpConfig:
        """Return the options of SID-MLP's heads."""
        return SidMlpConfig(
            attention_heads=self.attention_heads,
            attention_width=self.width,
            ffn_width=self.ffn_width,
            head_width=self.head_width,
            dropout=self.dropout,
            m=self.m,
        )


class EarlyReadout(nn.Module):
    """A readout layer: x = LN(q + MHA(q, keys, values)); LN(x + FFN(x))."""

    def __init__(self, given: int, config: LcRecSidMlpConfig) -> None:
        """Build the readout of keys and values of width `given` (E)."""
        super().__init__()
        width, self.heads = config.width, config.attention_heads
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(given, width, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ffn = nn.Sequential(
            nn.Linear(width, config.ffn_width),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.ffn_width, width),
        )

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """Return (B, N) of `query` (B, N), `keys` and `values` (B, P, E); `mask` (B, 1, 1, P) is added to scores."""
        q = self.q(query).unflatten(-1, (self.heads, 1, -1))  # (B, H, 1, K)
        k, v = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x in (self.k(keys), self.v(values))
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask
        # all weights of an empty history are 0, however long others are
        weights = scores.softmax(-1).masked_fill(mask < 0, 0.0)
        x = self.norm1(query + self.o((weights @ v).flatten(1)))
        return self.norm2(x + self.ffn(x))


class EarlyReadouts(nn.Module):
    """Attention readouts over an early layer of the frozen language model (SID-MLP, Eq. 1 and App. D.1)."""

    def __init__(self, backbone: LmBackbone, config: LcRecSidMlpConfig) -> None:
        super().__init__()
        self._backbone = (backbone,)  # no submodule here
        layers, self.width = backbone.shape()
        self.layer = (config.layer or max(1, layers // 4)) - 1
        if self.layer >= layers:
            raise UserError(
                f"layer {config.layer} exceeds the {layers} of the language model; give one of them"
            )
        self.query = nn.Linear(backbone.embedding.embedding_dim, config.width)
        self.layers = nn.ModuleList(
            EarlyReadout(self.width, config) for _ in range(config.readout_layers)
        )

    def read(self, history: History) -> Tensor:
        """Return the keys and values (B, S, 2 E) of the layer."""
        if history.memory is None:
            return history.states  # as `teacher_cache` stores them
        return torch.cat(
            [x.transpose(1, 2).flatten(2) for x in history.memory[self.layer]], -1
        )

    def forward(self, history: History) -> Tensor:
        """Return z (B, N)."""
        place, real = self._backbone[0].locate_history(history)
        keys, values = self.read(history)[:, place].split(self.width, -1)
        mask = torch.zeros(real.shape, dtype=keys.dtype, device=keys.device)
        mask = mask.masked_fill(~real, torch.finfo(keys.dtype).min)[:, None, None]
        z = self.query(cast(Tensor, history.query))
        for layer in self.layers:
            z = layer(z, keys, values, mask)
        return z


class LcRecSidMlpDecoder(SidMlpDecoder):
    """SID-MLP's heads on the readouts of a language model."""

    def __init__(self, config: LcRecSidMlpConfig, backbone: LmBackbone) -> None:
        self._make = (config, backbone)
        super().__init__(config.to_sid_mlp(), backbone, config.width)
        self.project = nn.Linear(
            backbone.embedding.embedding_dim, config.width, bias=False
        )

    def _make_readout(self, dim: int) -> EarlyReadouts:
        config, backbone = self._make
        return EarlyReadouts(backbone, config)

    def embedding(self) -> Tensor:
        """Return (V, N): the teacher's embedding of each token, projected."""
        if torch.is_grad_enabled():
            return self.project(super().embedding())
        return cache_until_changed(
            self,
            "embedding",
            lambda: self.project(SidMlpDecoder.embedding(self)),
            self._embedding[0],
        )


class LcRecSidMlp(Student):
    """SID-MLP with LC-Rec as teacher."""

    name = "lc_rec_sid_mlp"
    config_class = LcRecSidMlpConfig
    config: LcRecSidMlpConfig

    @staticmethod
    def build_decoder(
        config: LcRecSidMlpConfig, teacher: Retriever
    ) -> LcRecSidMlpDecoder:
        return LcRecSidMlpDecoder(config, require_lc_rec(teacher).backbone)

    @property
    def readouts(self) -> EarlyReadouts:
        """Readouts of the student's own decoder."""
        own = (
            self.decoder.own
            if isinstance(self.decoder, ReusesDecoder)
            else self.decoder
        )
        return cast(EarlyReadouts, own.readout)

    @property
    def input_width(self) -> int:
        return 2 * self.readouts.width

    def decoder_input(self, history: History) -> Tensor:
        """Return keys and values of the layer that the readout reads."""
        return self.readouts.read(history)


@dataclass
class LcRecNezhaConfig(NezhaConfig):
    """Options of NEZHA on LC-Rec; sizes are the teacher's."""

    default_teacher: ClassVar[str] = "lc_rec"
    beam: int = 20
    """Beams when recommending (the teacher's; 10, 20, 50 and 512 were tried in Appendix
    D.4)."""


class NezhaLmBackbone(LmBackbone):
    """A language model that returns the root and the placeholders' states: 1 + L positions."""

    gives_query = False

    def __init__(self, teacher: LcRec) -> None:
        """Take over the language model of the teacher."""
        own = teacher.backbone
        super().__init__(own.tokens, own.lm, teacher.config.prompt, own.max_history)
        self.extra = nn.Embedding(self.tokens.levels, self.embedding.embedding_dim)
        nn.init.normal_(self.extra.weight, std=0.02)

    def table(self) -> Tensor:
        return torch.cat([self.embedding.weight, self.extra.weight])

    def prompts(self, batch: HistoryBatch) -> list[Segment]:
        """Return the prompt of each request, followed by the placeholders."""
        first = self.vocabulary + self.tokens.vocabulary
        placeholders = first + torch.arange(
            self.tokens.levels, device=self.before.device
        )
        return [*super().prompts(batch), self.constant(placeholders, batch.history)]

    def encode(self, batch: HistoryBatch) -> History:
        """Return states (B, 1 + L, D)."""
        tokens, lengths = self.inputs(batch)
        return last_positions(
            History(self.run(self.embed(tokens))[0], lengths), 1 + self.tokens.levels
        )


class LcRecNezha(Joint):
    """A language model with placeholders, and NEZHA's head."""

    name = "lc_rec_nezha"
    config_class = LcRecNezhaConfig
    supports_fsdp = True
    config: LcRecNezhaConfig
    backbone: NezhaLmBackbone

    def __init__(self, config: LcRecNezhaConfig, catalogue: Catalogue) -> None:
        backbone = NezhaLmBackbone(require_lc_rec(build_teacher(config, catalogue)))
        lm = cast(Any, backbone.lm)
        if not language_model.has_tied_embeddings(lm):
            lm.get_output_embeddings().requires_grad_(False)  # words are not predicted
        super().__init__(config, catalogue, backbone, NezhaDecoder(backbone))

    def lr_multipliers(self) -> dict[str, float]:
        return self.config.lr_multipliers()

    def fsdp_blocks(self) -> list[nn.Module]:
        return language_model.find_blocks(self)

    def set_teacher(self, teacher: Retriever) -> None:
        """Copy the teacher's language model and its codes' embeddings."""
        own = require_lc_rec(teacher).backbone
        self.backbone.lm.load_state_dict(own.lm.state_dict())
        self.backbone.embedding.load_state_dict(own.embedding.state_dict())
