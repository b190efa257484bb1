"""One T5 decoder layer over the teacher's frozen states and embeddings: Tables 1, 2, 8 and 9 of SID-MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.config import check_choices
from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.decoders.t5 import T5Decoder
from models.retrieval.parts import Backbone
from models.retrieval.student import StudentConfig
from models.tables import UserError


@dataclass
class OneLayerConfig(StudentConfig):
    """A student that keeps attention."""

    self_attention: bool = True
    """Whether the decoder attends to the prefix (Tables 2 and 9)."""
    cross_attention: bool = True
    """Whether the decoder attends to the encoder's states (Tables 2 and 9)."""
    logits: Literal["codebook", "vocabulary"] = "codebook"
    """What is predicted and the teacher's logits are cut to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)


def one_layer(config: OneLayerConfig, backbone: Backbone) -> T5Decoder:
    """The decoder on the backbone of a T5, such as TIGER's; UserError for another."""
    if not isinstance(backbone, T5Backbone):
        raise UserError("the model 'one_layer' has a layer of its teacher's T5; give a TIGER as model.teacher")
    return T5Decoder(
        backbone.tokens, backbone.sizes, backbone.embedding, layers=1, self_attention=config.self_attention,
        cross_attention=config.cross_attention, codebook_logits=config.logits == "codebook", codebook_scores=True,
    )  # fmt: skip
