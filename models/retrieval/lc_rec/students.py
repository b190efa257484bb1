r"""Students of LC-Rec from the paper of SID-MLP: SID-MLP (App. D.1), NEZHA (App. D.4).

    python -m jobs.train --config jobs/configs/retrieval/lc_rec_sid_mlp.yaml \
        --tables TABLES --sids SIDS --storage runs --name lc_rec_sid_mlp \
        --model.teacher runs/lc_rec

SID-MLP: the language model reads the history; a readout and an MLP per level decode.
The readout attends to the keys and values of the history's tokens in an early layer of
the frozen language model, as stored in its cache (keys after positional encoding),
without the prompt's words. The query is the last state of the prompt. One to three
readouts are stacked; the output of each is the query of the next. States of 4096
numbers are projected to 768. The teacher's code embeddings are projected, too, which
the appendix does not specify. Heads, search and loss are SID-MLP's.

NEZHA: a placeholder per level, which is a learned embedding, follows the whole prompt,
including its response header. One pass computes the root, which is the state of the
last token of the prompt, and a state per level. Head, loss and search are in
`nezha.py`. The language model is trained like LC-Rec, in full or by LoRA, together with
the head.

Shapes: `B` requests, `S` tokens of the longest prompt, `P` positions of the longest
history, `D` width of the language model, `E` width of its keys of all heads, `N` width
of the readouts, `H` heads, `K` width of a head, `V` tokens, `L` levels.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from core.errors import UserError
from core.options import STRICT, Dropout
from models.cpu.weights import cache_until_changed
from models.retrieval.data import HistoryBatch
from models.retrieval.distillation.student import Student, StudentConfig
from models.retrieval.distillation.teacher import require_class
from models.retrieval.lc_rec.backbone import LmBackbone, Segment, full_segment
from models.retrieval.lc_rec.lc_rec import LcRec
from models.retrieval.retriever import History, Memory, Retriever
from models.retrieval.sid_mlp.decoder import SidMlpConfig, SidMlpDecoder
from models.retrieval.students.nezha import (
    Nezha,
    NezhaConfig,
    NezhaDecoder,
    last_positions,
)
from models.text import language_model


@dataclass(config=STRICT)
class LcRecSidMlpConfig(StudentConfig):
    """Options of SID-MLP on LC-Rec."""

    default_teacher: ClassVar[str] = "lc_rec"
    beam: PositiveInt = 20
    """Number of beams when recommending (the teacher's)."""
    layer: NonNegativeInt = 0
    """Number of the layer whose keys and values are read, from 1; 0: a quarter of the
    layers (Appendix D.1: the 8th of 32)."""
    width: PositiveInt = 768
    """Width that queries, keys and values are projected to (d_h of Appendix D.1)."""
    readout_layers: PositiveInt = 1
    """Number of stacked readouts (swept over 1, 2, 3 in Appendix D.1)."""
    attention_heads: PositiveInt = 12
    """Heads of a readout, of 64 numbers each as in LC-Rec; the number is not
    published."""
    ffn_width: PositiveInt = 1024
    """Inner width of a readout's feed-forward (swept over 512, 1024, 2048, 3072 in
    Appendix D.1)."""
    head_width: PositiveInt = 1024
    """Hidden width of each level's head (swept over 512, 1024, 2048, 3072 in Appendix
    D.1)."""
    dropout: Dropout = 0.2
    """Dropout of heads and feed-forward (public code of SID-MLP)."""

    def __post_init__(self) -> None:
        if self.width % self.attention_heads:
            raise ValueError(
                f"width {self.width} does not divide by attention_heads "
                f"{self.attention_heads}"
            )


class EarlyReadout(nn.Module):
    """A readout layer: x = LN(q + MHA(q, keys, values)); LN(x + FFN(x))."""

    def __init__(self, memory_width: int, config: LcRecSidMlpConfig) -> None:
        """Build the readout; `memory_width` is the width E of keys and values."""
        super().__init__()
        width = config.width
        self.heads = config.attention_heads
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(memory_width, width, bias=False) for _ in range(2))
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
        """Return the readout (B, N).

        Args:
            query: (B, N) queries.
            keys: (B, P, E) keys of the language model.
            values: (B, P, E) values of the language model.
            mask: (B, 1, 1, P) mask to add to scores: 0 at codes, negative elsewhere.
        """
        q = self.q(query).unflatten(-1, (self.heads, 1, -1))  # (B, H, 1, K)
        k = self.k(keys).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, P, K)
        v = self.v(values).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask
        # an empty history has weights of 0, whatever the batch is padded to
        weights = scores.softmax(-1).masked_fill(mask < 0, 0.0)
        x = self.norm1(query + self.o((weights @ v).flatten(1)))
        return self.norm2(x + self.ffn(x))


class EarlyReadouts(nn.Module):
    """Stacked readouts over an early layer of the frozen language model.

    Equation 1 and Appendix D.1 of SID-MLP.
    """

    def __init__(self, backbone: LmBackbone, config: LcRecSidMlpConfig) -> None:
        super().__init__()
        self._backbone = (backbone,)  # in a tuple: no submodule
        with torch.no_grad():
            _, memory = backbone.run(backbone.words().weight[:1].unsqueeze(0))
        self.layer = (config.layer or max(1, len(memory) // 4)) - 1
        if self.layer >= len(memory):
            raise UserError(
                f"layer {config.layer} exceeds the {len(memory)} layers of the "
                "language model"
            )
        keys, _ = memory[self.layer]  # (1, heads, 1, head width)
        self.width = keys.numel()
        self.query = nn.Linear(backbone.embedding.embedding_dim, config.width)
        self.layers = nn.ModuleList(
            EarlyReadout(self.width, config) for _ in range(config.readout_layers)
        )

    def keys_and_values(self, history: History) -> Tensor:
        """Return the keys and values (B, S, 2 E) of the layer."""
        memory = cast(Memory, history.memory)
        keys, values = memory[self.layer]  # (B, heads, S, head width) both
        return torch.cat(
            [keys.transpose(1, 2).flatten(2), values.transpose(1, 2).flatten(2)], -1
        )

    def forward(self, history: History) -> Tensor:
        """Return z (B, N)."""
        positions, is_code = self._backbone[0].locate_history(history)
        keys, values = self.keys_and_values(history)[:, positions].chunk(2, -1)
        mask = torch.zeros(is_code.shape, dtype=keys.dtype, device=keys.device)
        mask = mask.masked_fill(~is_code, torch.finfo(keys.dtype).min)
        mask = mask[:, None, None]
        z = self.query(cast(Tensor, history.query))
        for layer in self.layers:
            z = layer(z, keys, values, mask)
        return z


class LcRecSidMlpDecoder(SidMlpDecoder):
    """SID-MLP's heads on the readouts of a language model."""

    readout: EarlyReadouts

    def __init__(self, config: LcRecSidMlpConfig, backbone: LmBackbone) -> None:
        self._readout_arguments = (backbone, config)  # for `_make_readout`
        heads = SidMlpConfig(
            ffn_width=config.ffn_width,
            head_width=config.head_width,
            dropout=config.dropout,
        )
        super().__init__(heads, backbone, config.width)
        self.project = nn.Linear(
            backbone.embedding.embedding_dim, config.width, bias=False
        )

    def _make_readout(self, dim: int) -> EarlyReadouts:
        """Return the readouts of the language model."""
        return EarlyReadouts(*self._readout_arguments)

    def table(self) -> Tensor:
        """Return the projected embeddings (V, N) of the teacher's tokens."""
        if torch.is_grad_enabled():
            return self.project(super().table())
        return cache_until_changed(
            self,
            "table",
            lambda: self.project(SidMlpDecoder.table(self)),
            self.embedding,
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
        """Return the decoder on the language model of an LC-Rec."""
        return LcRecSidMlpDecoder(config, require_class(teacher, LcRec).backbone)


@dataclass(config=STRICT)
class LcRecNezhaConfig(NezhaConfig):
    """Options of NEZHA on LC-Rec; sizes are the teacher's."""

    default_teacher: ClassVar[str] = "lc_rec"
    beam: PositiveInt = 20
    """Number of beams when recommending (the teacher's; Appendix D.4 tries 10, 20, 50
    and 512)."""


class NezhaLmBackbone(LmBackbone):
    """A language model that returns the root and the placeholders' states only."""

    def __init__(self, teacher: LcRec) -> None:
        """Build the backbone on the language model of the teacher."""
        backbone = teacher.backbone
        super().__init__(
            backbone.tokens, backbone.lm, teacher.config.prompt, backbone.max_history
        )
        self.extra = nn.Embedding(self.tokens.levels, self.embedding.embedding_dim)
        nn.init.normal_(self.extra.weight, std=0.02)

    def table(self) -> Tensor:
        """Return the embeddings of codes and placeholders."""
        return torch.cat([self.embedding.weight, self.extra.weight])

    def prompts(self, batch: HistoryBatch) -> list[Segment]:
        """Return the segments of the prompts, followed by the placeholders."""
        first = self.vocabulary + self.tokens.vocabulary
        level = torch.arange(self.tokens.levels, device=self.before.device)
        placeholders = (first + level).expand(len(batch.history), -1)
        return [*super().prompts(batch), full_segment(placeholders)]

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states (B, 1 + L, D) of the root and the placeholders."""
        tokens, lengths = self.inputs(batch)
        states, _ = self.run(self.embed(tokens))
        return last_positions(History(states, lengths), 1 + self.tokens.levels)


class LcRecNezha(Nezha):
    """NEZHA with the language model of an LC-Rec as backbone."""

    name = "lc_rec_nezha"
    config_class = LcRecNezhaConfig

    @staticmethod
    def build_parts(
        config: NezhaConfig, teacher: Retriever
    ) -> tuple[NezhaLmBackbone, NezhaDecoder]:
        """Return a language model with placeholders and a head on its tokens."""
        backbone = NezhaLmBackbone(require_class(teacher, LcRec))
        lm = cast(Any, backbone.lm)
        if not language_model.has_tied_embeddings(lm):
            lm.get_output_embeddings().requires_grad_(False)  # words are not predicted
        return backbone, NezhaDecoder(backbone)
