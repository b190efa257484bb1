"""NEZHA (Wang et al., 2025) on LC-Rec, as Appendix D.4 of SID-MLP ports it.

    python -m jobs.train --config jobs/configs/lc_rec_nezha.yaml --tables TABLES --sids SIDS --storage runs \\
        --name lc_rec_nezha --model.teacher runs/lc_rec

A placeholder per digit, which is a learned embedding, follows the whole prompt, its response header included. One pass
gives the root, the state of the last token of the prompt, and a state per digit; head, losses and search are those of
`decoders/nezha.py`. The language model is trained as LC-Rec was, whole or by LoRA, together with the head.

Shapes: `B` requests, `D` width, `L` levels (digits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from models import language_model
from models.retrieval.backbones.causal_lm import LmBackbone, Segment
from models.retrieval.data import Catalogue
from models.retrieval.decoders.nezha import NezhaConfig, NezhaDecoder, last_positions
from models.retrieval.joint import Joint
from models.retrieval.lc_rec import LcRec, lc_rec_of
from models.retrieval.parts import History
from models.retrieval.retriever import Retriever


@dataclass
class LcRecNezhaConfig(NezhaConfig):
    """NEZHA on LC-Rec; sizes are the teacher's."""

    taught_by: ClassVar[str] = "lc_rec"
    beam: int = 20
    """Beams when recommending (the teacher's; 10, 20, 50 and 512 were tried in Appendix D.4)."""


class NezhaLmBackbone(LmBackbone):
    """Gives the root and the placeholders' states: a history of 1 + L positions."""

    gives_query = False

    def __init__(self, teacher: LcRec) -> None:
        """`teacher` gives its language model away."""
        own = teacher.backbone
        super().__init__(own.tokens, own.lm, teacher.config.prompt, own.max_history)
        self.extra = nn.Embedding(self.tokens.levels, self.embedding.embedding_dim)
        nn.init.normal_(self.extra.weight, std=0.02)

    def table(self) -> Tensor:
        return torch.cat([self.embedding.weight, self.extra.weight])

    def prompts(self, batch: dict[str, Tensor]) -> list[Segment]:
        """With the placeholders behind them."""
        first = self.vocabulary + self.tokens.vocabulary
        placeholders = first + torch.arange(self.tokens.levels, device=self.before.device)
        return [*super().prompts(batch), self.constant(placeholders, batch["history"])]

    def encode(self, batch: dict[str, Tensor]) -> History:
        """States (B, 1 + L, D)."""
        tokens, lengths = self.inputs(batch)
        return last_positions(History(self.run(self.embed(tokens))[0], lengths), 1 + self.tokens.levels)


class LcRecNezha(Joint):
    """The language model with its placeholders, and NEZHA's head."""

    config: LcRecNezhaConfig
    backbone: NezhaLmBackbone

    def __init__(self, config: LcRecNezhaConfig, catalogue: Catalogue, teacher: Retriever) -> None:
        backbone = NezhaLmBackbone(lc_rec_of(teacher))
        lm = cast(Any, backbone.lm)
        if not language_model.tied(lm):
            lm.get_output_embeddings().requires_grad_(False)  # that of words, which nothing asks for
        super().__init__(config, catalogue, backbone, NezhaDecoder(backbone))

    def set_teacher(self, teacher: Retriever) -> None:
        """Takes the teacher's language model and its codes' embeddings."""
        own = lc_rec_of(teacher).backbone
        self.backbone.lm.load_state_dict(own.lm.state_dict())
        self.backbone.embedding.load_state_dict(own.embedding.state_dict())
