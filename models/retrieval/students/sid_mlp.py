"""SID-MLP (Guo et al., 2026): TIGER's decoder distilled into one attention readout and an MLP per digit.

    python -m jobs.train --config jobs/configs/sid_mlp.yaml --tables TABLES --sids SIDS --storage runs \\
        --name sid_mlp --model.teacher runs/tiger

The decoder is in `decoders/sid_mlp.py`, the loss in `distillation/student.py`, the
search here.

Shapes: `B` requests.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from models.cpu.fast import fast_search
from models.retrieval.data import HistoryBatch
from models.retrieval.decoders.sid_mlp import SidMlpConfig, SidMlpDecoder
from models.retrieval.distillation.student import Student
from models.retrieval.options import DecodePath, Scores, SidMlpOptions
from models.retrieval.recommend import recommender
from models.retrieval.retriever import Retriever


class SidMlp(Student):
    """The student, with a fast search for the paper's main model."""

    name = "sid_mlp"
    config_class: ClassVar[type] = SidMlpConfig
    options_class = SidMlpOptions
    config: SidMlpConfig
    decoder: SidMlpDecoder

    @staticmethod
    def build_decoder(config: SidMlpConfig, teacher: Retriever) -> SidMlpDecoder:
        return SidMlpDecoder(config, teacher.backbone)

    def fast_supported(self) -> bool:
        """Return whether the fast search covers this variant: the paper's main model."""
        config = self.config
        return (
            config.m == 0
            and (config.prefix, config.readout, config.logits)
            == ("concat", "attention", "codebook")
            and config.context_ffn
        )

    @recommender
    def recommend(
        self,
        batch: HistoryBatch,
        k: int,
        beam: int | None = None,
        scores: Scores | None = None,
        constrained: bool | None = None,
        path: DecodePath | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Recommend as `Student.recommend` does, by the fast search where it covers the model.

        Args:
            path: How to decode: `fast` or `plain`; None for the config's.
        """
        if (
            (path or self.config.path) == "plain"
            or constrained is False
            or not self.fast_supported()
        ):
            return self.search(
                self.encode(batch), k, beam, scores, constrained, batch.allowed
            )
        search, outputs = fast_search(self), self.teacher_outputs("encoder", batch)
        z = search.read(outputs) if outputs else search.context(batch)
        beam = self.config.beam if beam is None else beam
        return search.beam_search(
            z, k, beam, self.among_children(scores), batch.allowed
        )
