r"""A student with one T5 decoder layer (Tables 1, 2, 8 and 9 of SID-MLP).

    python -m jobs.train --config jobs/configs/retrieval/one_layer.yaml \
        --tables TABLES --sids SIDS --storage runs --name one_layer \
        --model.teacher runs/tiger

The layer attends to the prefix and to the frozen states of the teacher's backbone.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass

from core.options import STRICT
from models.retrieval.distillation.student import Student, StudentConfig
from models.retrieval.distillation.teacher import require_class
from models.retrieval.retriever import Retriever
from models.retrieval.tiger.decoder import T5Decoder
from models.retrieval.tiger.encoder import T5Backbone


@dataclass(config=STRICT)
class OneLayerConfig(StudentConfig):
    """Options of the one-layer student; sizes are the teacher's."""

    m: NonNegativeInt = 0
    """Number of first levels that the teacher's decoder generates (Table 1)."""
    self_attention: bool = True
    """Whether the decoder attends to the prefix (Tables 2 and 9)."""
    cross_attention: bool = True
    """Whether the decoder attends to the encoder's states (Tables 2 and 9)."""


class OneLayer(Student):
    """A student with a single layer of T5's decoder on the teacher's backbone."""

    name = "one_layer"
    config_class = OneLayerConfig

    @staticmethod
    def build_decoder(config: OneLayerConfig, teacher: Retriever) -> T5Decoder:
        """Return a decoder with one layer of the teacher's sizes."""
        backbone = require_class(teacher.backbone, T5Backbone)
        return T5Decoder(
            backbone,
            replace(backbone.sizes, num_decoder_layers=1),
            self_attention=config.self_attention,
            cross_attention=config.cross_attention,
            codebooks=True,
            first_level=config.m,
        )
