"""Models that start from their teacher's weights and train all of them: EARN and NEZHA.

The teacher is not asked while training, so there is nothing to distil and nothing to
cache: the loss is the cross-entropy of the target's codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from models.config import check_positive
from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.decoders.t5 import T5Decoder
from models.retrieval.distillation.teacher import TaughtModel, TeacherConfig
from models.retrieval.retriever import Retriever
from models.retrieval.tiger import Tiger
from models.storage.tables import UserError


@dataclass
class JointConfig(TeacherConfig):
    """Options of EARN and NEZHA."""

    has_fixed_outputs: ClassVar[bool] = False
    beam: int = 50
    """Beams when recommending (Sec. 4.1 of SID-MLP)."""
    constrained: bool = True
    """Whether decoding keeps to the trie; without it, tuples of no item are dropped in
    the end."""

    def __post_init__(self) -> None:
        check_positive(self, ["beam"])
        if self.teacher_cache:
            raise ValueError(
                f"teacher_cache {self.teacher_cache} would hold what changes in every step of training; leave it out"
            )


class Joint(TaughtModel, Retriever):
    """A backbone and a decoder trained together on the target's codes."""

    config: JointConfig

    def set_teacher(self, teacher: Retriever) -> None:
        """Copy the teacher's embeddings and encoder, and its decoder if this one is a T5's too."""
        backbone = require_tiger(teacher).backbone
        own = cast(T5Backbone, self.backbone)
        own.embedding.load_state_dict(backbone.embedding.state_dict())
        own.encoder.load_state_dict(backbone.encoder.state_dict())
        if isinstance(self.decoder, T5Decoder):
            self.decoder.load_state_dict(teacher.decoder.state_dict())


def require_tiger(teacher: Retriever) -> Tiger:
    """Return the teacher, or raise a UserError if it is no TIGER."""
    if not isinstance(teacher, Tiger):
        raise UserError(
            f"the teacher is a '{teacher.name}', and training starts from the weights of a TIGER's encoder; "
            f"give a TIGER as model.teacher"
        )
    return teacher
