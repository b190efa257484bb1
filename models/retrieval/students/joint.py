"""Models initialised with their teacher's weights and trained as a whole: EARN, NEZHA.

The loss is the cross-entropy of the target's codes. Training does not run the teacher,
so there are no teacher outputs to cache.
"""

from __future__ import annotations

from typing import Any, cast

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from core.options import STRICT
from models.retrieval.data import Catalogue
from models.retrieval.distillation.teacher import (
    TaughtModel,
    TeacherConfig,
    build_teacher,
    require,
)
from models.retrieval.parts import Backbone, Decoder
from models.retrieval.retriever import Retriever
from models.retrieval.tiger.decoder import T5Decoder
from models.retrieval.tiger.encoder import T5Backbone
from models.retrieval.tiger.tiger import Tiger


@dataclass(config=STRICT)
class JointConfig(TeacherConfig):
    """Options of EARN and NEZHA."""

    beam: PositiveInt = 50
    """Number of beams when recommending (Sec. 4.1 of SID-MLP)."""


class Joint(TaughtModel, Retriever):
    """A backbone and a decoder trained together on the target's codes."""

    config: JointConfig

    def __init__(self, config: JointConfig, catalogue: Catalogue) -> None:
        teacher = build_teacher(config, catalogue)
        super().__init__(config, catalogue, *self.build_parts(config, teacher))

    @staticmethod
    def build_parts(config: Any, teacher: Retriever) -> tuple[Backbone, Decoder]:
        """Return a backbone and a decoder of the sizes of the teacher."""
        raise NotImplementedError

    def set_teacher(self, teacher: Retriever) -> None:
        """Copy the teacher's embeddings, encoder and, to a T5 decoder, its decoder."""
        source = require(teacher, Tiger).backbone
        backbone = cast(T5Backbone, self.backbone)
        backbone.embedding.load_state_dict(source.embedding.state_dict())
        backbone.encoder.load_state_dict(source.encoder.state_dict())
        if isinstance(self.decoder, T5Decoder):
            self.decoder.load_state_dict(teacher.decoder.state_dict())
