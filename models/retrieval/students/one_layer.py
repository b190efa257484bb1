"""A student of one T5 decoder layer, of Tables 1, 2, 8 and 9 of SID-MLP (Guo et al., 2026).

    python -m jobs.train --config jobs/configs/one_layer.yaml --tables TABLES --sids SIDS \\
        --storage runs --name one_layer --model.teacher runs/tiger

It keeps attention, over the frozen states and embeddings of its teacher's backbone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.decoders.t5 import T5Decoder
from models.retrieval.distillation.student import Student, StudentConfig
from models.retrieval.retriever import Retriever
from models.storage.tables import UserError


@dataclass
class OneLayerConfig(StudentConfig):
    """A student that keeps attention."""

    self_attention: bool = True
    """Whether the decoder attends to the prefix (Tables 2 and 9)."""
    cross_attention: bool = True
    """Whether the decoder attends to the encoder's states (Tables 2 and 9)."""
    logits: Literal["codebook", "vocabulary"] = "codebook"
    """What is predicted and the teacher's logits are cut to."""


class OneLayer(Student):
    """A student with a single layer of T5's decoder on the teacher's backbone."""

    name = "one_layer"
    config_class = OneLayerConfig

    @staticmethod
    def build_decoder(config: OneLayerConfig, teacher: Retriever) -> T5Decoder:
        backbone = teacher.backbone
        if not isinstance(backbone, T5Backbone):
            raise UserError(
                "the model 'one_layer' has a layer of its teacher's T5; give a TIGER as "
                "model.teacher"
            )
        return T5Decoder(
            backbone.tokens,
            backbone.sizes,
            backbone.embedding,
            layers=1,
            self_attention=config.self_attention,
            cross_attention=config.cross_attention,
            codebook_logits=config.logits == "codebook",
            codebook_scores=True,
        )
