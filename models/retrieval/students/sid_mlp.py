r"""SID-MLP (Guo et al., 2026): TIGER's decoder distilled into a readout and MLPs.

    python -m jobs.train --config jobs/configs/retrieval/sid_mlp.yaml --tables TABLES \
        --sids SIDS --storage runs --name sid_mlp --model.teacher runs/tiger

One attention readout per user and an MLP per level replace the decoder. The decoder is
in `decoders/sid_mlp.py`, the loss in `distillation/student.py`, the fast search in
`models/cpu/fast.py`.

Shapes: `B` requests.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from models.cpu.fast import fast_search
from models.retrieval.data import HistoryBatch
from models.retrieval.decoders.sid_mlp import SidMlpConfig, SidMlpDecoder
from models.retrieval.distillation.student import Student
from models.retrieval.options import Scores
from models.retrieval.recommend import recommender
from models.retrieval.retriever import Retriever


class SidMlp(Student):
    """SID-MLP and its ablations, with a fast search for the paper's main model."""

    name = "sid_mlp"
    config_class: ClassVar[type] = SidMlpConfig
    config: SidMlpConfig
    decoder: SidMlpDecoder

    @staticmethod
    def build_decoder(config: SidMlpConfig, teacher: Retriever) -> SidMlpDecoder:
        """Return SID-MLP's decoder on the teacher's backbone."""
        return SidMlpDecoder(config, teacher.backbone)

    def supports_fast_search(self) -> bool:
        """Return whether fast search covers the model: the paper's main model."""
        config = self.config
        return (
            config.m == 0
            and config.prefix == "concat"
            and config.readout == "attention"
            and config.logits == "codebook"
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
    ) -> tuple[Tensor, Tensor]:
        """Rank items as `Student.recommend` does, by the fast search if supported.

        Arguments that are None default to the config.

        Args:
            batch: Histories of B requests.
            k: Number of items to return.
            beam: Number of beams.
            scores: Codes that log-probabilities are normalised over.
            constrained: False to search without the trie.

        Returns:
            Items and scores, (B, k) both, best first.
        """
        if constrained is False or not self.supports_fast_search():
            history = self.encode(batch)
            return self.search(history, k, beam, scores, constrained, batch.allowed)
        search = fast_search(self)
        cached = self.teacher_outputs("encoder", batch)
        z = search.read(cached) if cached else search.context(batch)
        beam = self.config.beam if beam is None else beam
        return search.beam_search(
            z, k, beam, self.normalizes_children(scores), batch.allowed
        )
