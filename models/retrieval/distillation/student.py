"""Students: a decoder on a teacher's frozen backbone, trained on the teacher's logits.

The config of a student names the checkpoint of its teacher, any backbone with a
decoder. The student uses the teacher's backbone and trains a decoder on the teacher's
logits and the target (equation 3 of SID-MLP). The teacher runs in every step, or its
outputs are cached in tables (`teacher_cache.py`). Recommending needs no teacher.

Shapes: `B` requests, `S` positions of the longest history, `L` levels (codes of an
item, called digits in SID-MLP), `O_l` codes or tokens that the decoder predicts at
level l.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional

from core.errors import UserError
from core.options import STRICT, Fraction
from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch
from models.retrieval.distillation.teacher import (
    TaughtModel,
    TeacherConfig,
    build_teacher,
)
from models.retrieval.distillation.teacher_cache import CachedStates, TeacherOutput
from models.retrieval.options import Scores, StudentOptions
from models.retrieval.parts import Decoder, History
from models.retrieval.recommend import recommender
from models.retrieval.retriever import Retriever
from models.retrieval.search.beam import Scorer
from models.training.distributed import global_mean


@dataclass(config=STRICT)
class StudentConfig(TeacherConfig):
    """Options of all students."""

    beam: PositiveInt = 50
    """Number of beams when recommending (Sec. 4.1 of SID-MLP)."""
    scores: Scores = "children"
    """Codes that log-probabilities are normalised over when recommending: the valid
    `children` of the prefix, as in the public code and the paper's figures (the first
    level always over its codebook), or the `codebook`."""
    alpha: Fraction = 0.7
    """Weight of the teacher in the loss, 1 - alpha is the target's (Eq. 3); 0 trains
    without a teacher's logits (Table 8; Table 5, w/o KL)."""
    tau: PositiveFloat = 1.0
    """Temperature of the teacher's and the student's distributions (Eq. 3)."""
    m: NonNegativeInt = 0
    """Number of first levels that the teacher's decoder generates; the student decodes
    the others (Table 1; Appendix E.1)."""


def distillation_loss(
    student: Tensor, teacher: Tensor | None, target: Tensor, alpha: float, tau: float
) -> Tensor:
    """Return equation 3 of SID-MLP for one level, the mean over the batch.

        alpha tau^2 KL(softmax(teacher / tau) || softmax(student / tau))
            + (1 - alpha) CE(student, target)

    Args:
        student: (B, O_l) logits.
        teacher: (B, O_l) logits, or None if alpha is 0.
        target: (B,) index of the target in the logits.
        alpha: Weight of the teacher.
        tau: Temperature.
    """
    student = student.float()
    loss = (1 - alpha) * functional.cross_entropy(student, target)
    if teacher is None:
        return loss
    log_p = (teacher.float() / tau).log_softmax(-1)
    log_q = (student / tau).log_softmax(-1)
    divergence = functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    return loss + alpha * tau**2 * divergence


class ReusesDecoder(Decoder):
    """The teacher's decoder for the first m levels, then the student's.

    Table 1 and Appendix E.1 of SID-MLP.
    """

    def __init__(self, teacher: Decoder, student: Decoder, m: int) -> None:
        """Join the decoders; `m` is the number of levels that `teacher` generates."""
        super().__init__()
        self.tokens, self.first_level = student.tokens, m
        self.teacher = teacher
        self.own = student  # the name in checkpoints

    @property
    def beam_bytes(self) -> int:  # type: ignore[override]
        """Bytes of a beam's state of the student's decoder."""
        return self.own.beam_bytes

    def span(self, level: int) -> tuple[int, int]:
        """Return the first token and the number of tokens of a level's logits."""
        return self.own.span(level)

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        """Raise UserError, as a decoder without states of all levels cannot teach."""
        raise UserError(
            f"a student with m {self.first_level} cannot be a teacher, as it decodes "
            "only its last levels"
        )

    def teacher_forced(self, history: History, codes: Tensor) -> Sequence[Tensor]:
        """Return the student's logits (B, O_l) of the levels from m on."""
        logits = self.own.teacher_forced(history, codes)
        return logits[self.first_level - self.own.first_level :]

    def scorer(self, history: History) -> Scorer:
        """Return a scorer that switches from the teacher to the student at level m."""
        return SwitchingScorer(
            self.teacher.scorer(history), self.own.scorer(history), self.first_level
        )


class SwitchingScorer:
    """A `Scorer` that switches from the teacher's scorer to the student's."""

    def __init__(self, teacher: Scorer, student: Scorer, m: int) -> None:
        """Join the scorers; `m` is the first level that `student` scores."""
        self.teacher, self.student = teacher, student
        self.m = m
        self.level = 0

    def start(self) -> Tensor:
        """Return the log-probabilities (B, C_0) of the first code, by the teacher."""
        self.student.start()
        return self.teacher.start()

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities (B, W, C_l) of each beam's next code."""
        self.level += 1
        student_scores = self.student.step(parents, tokens)
        if self.level < self.m:
            return self.teacher.step(parents, tokens)
        return student_scores


class Student(TaughtModel, Retriever):
    """A decoder on the teacher's frozen backbone.

    The teacher's decoder is not part of the student's weights, unless `m` of its levels
    are reused.
    """

    config: StudentConfig
    options_class: ClassVar[type | None] = StudentOptions

    def __init__(self, config: StudentConfig, catalogue: Catalogue) -> None:
        teacher = build_teacher(config, catalogue)
        decoder = self.build_decoder(config, teacher)
        levels = decoder.tokens.levels
        if config.m >= levels:
            raise UserError(f"m {config.m} leaves no level of {levels} to the student")
        if config.m:
            teacher_decoder = teacher.decoder.requires_grad_(False)
            decoder = ReusesDecoder(teacher_decoder, decoder, config.m)
        backbone = teacher.backbone.requires_grad_(False).eval()
        super().__init__(config, catalogue, backbone, decoder)
        # in a tuple, so that it is no submodule and is not saved
        self._teacher: tuple[Retriever, ...] = ()
        # tables of `teacher_cache` by name, set for training
        self._teacher_outputs: dict[str, CachedStates] = {}
        self.adopt_parts(teacher)

    @staticmethod
    def build_decoder(config: Any, teacher: Retriever) -> Decoder:
        """Return the student's decoder on the backbone of its teacher."""
        raise NotImplementedError

    def adopt_parts(self, teacher: Retriever) -> None:
        """Add further parts of the untrained teacher, by default none."""

    def train(self, mode: bool = True) -> Self:
        """Set training mode; the teacher's parts stay in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        if isinstance(self.decoder, ReusesDecoder):
            self.decoder.teacher.eval()
        return self

    def set_teacher(self, teacher: Retriever) -> None:
        """Copy the shared weights, and store the teacher for its logits.

        The shared weights are the backbone and, if `m` is above 0, the teacher's
        decoder.
        """
        self.copy_backbone(teacher)
        if isinstance(self.decoder, ReusesDecoder):
            self.decoder.teacher.load_state_dict(teacher.decoder.state_dict())
        device = self.tokens.items.device
        self._teacher = (teacher.requires_grad_(False).eval().to(device),)

    def copy_backbone(self, teacher: Retriever) -> None:
        """Copy the weights of the teacher's backbone to the student's."""
        self.backbone.load_state_dict(teacher.backbone.state_dict())

    @property
    def teacher(self) -> Retriever:
        """The teacher that the student learns from."""
        if not self._teacher:
            raise UserError("the student has no teacher to learn from")
        return self._teacher[0]

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states of the frozen backbone, cached or computed."""
        cached = self.teacher_outputs("encoder", batch)
        if cached:
            return cached
        with torch.no_grad():
            return self.backbone.encode(batch)

    def teacher_outputs(self, name: str, batch: HistoryBatch) -> History | None:
        """Return cached outputs of the teacher, or None if a request is not cached.

        Args:
            name: Table of the teacher cache: `encoder` or `decoder`.
            batch: Requests. The cache holds the requests of training and of its
                validation.
        """
        table = self._teacher_outputs.get(name)
        cached = table.pad_states(batch) if table else None
        if cached is None or name != "encoder" or not self.backbone.gives_query:
            return cached
        # the query is the first position, as `_encode_to_cache` writes it
        query = cached.states[:, 0, : self.backbone.embedding.embedding_dim]
        states = cached.states[:, 1:, : self.input_width]
        return History(states, cached.lengths - 1, query)

    @property
    def input_width(self) -> int:
        """Width of `decoder_input`."""
        return self.backbone.embedding.embedding_dim

    def decoder_input(self, history: History) -> Tensor:
        """Return the states (B, S, `input_width`) that the decoder reads.

        The teacher cache stores them, too.
        """
        return history.states

    def set_teacher_outputs(self, tables: dict[str, CachedStates]) -> None:
        """Set the tables of the teacher cache, by name."""
        self._teacher_outputs = tables

    def teacher_history(self, batch: HistoryBatch, history: History) -> History:
        """Return the teacher's states of the histories.

        Args:
            batch: Requests, for a student with an encoder of its own.
            history: The student's states, which by default are the states of the
                teacher's backbone.
        """
        return history

    @torch.no_grad()
    def teacher_logits(self, batch: RequestBatch, history: History) -> list[Tensor]:
        """Return the teacher's logits (B, O_l) of each level that the student decodes.

        Logits are conditioned on the target's codes before the level, and restricted to
        the tokens that the student predicts.

        Args:
            batch: Requests with their targets.
            history: The student's states of the histories.
        """
        teacher = self.teacher.decoder
        cached = self.teacher_outputs("decoder", batch)
        if cached:
            hidden = cached.states
        else:
            history = self.teacher_history(batch, history)
            hidden = teacher.hidden(history, self.tokens.codes(batch.target))
        logits = teacher.logits(hidden)
        restricted = []
        for level in range(self.decoder.first_level, self.tokens.levels):
            first, count = self.decoder.span(level)
            teacher_first, _ = teacher.span(level)
            restricted.append(logits[level].narrow(-1, first - teacher_first, count))
        return restricted

    def outputs_to_cache(self) -> list[TeacherOutput]:
        """Describe the tables to cache: states of the backbone and the decoder.

        The decoder's states are needed only if `alpha` is above 0.
        """
        config = self.config
        state_width = self.backbone.embedding.embedding_dim
        outputs = [
            TeacherOutput(
                name="encoder",
                weights=config.teacher_hash,
                config={
                    "teacher_model": config.teacher_model,
                    "width": max(self.input_width, state_width),
                },
                compute=self._encode_to_cache,
                splits=("train", "val"),
            )
        ]
        if config.alpha > 0:
            outputs.append(
                TeacherOutput(
                    name="decoder",
                    weights=config.teacher_hash,
                    config={
                        "teacher_model": config.teacher_model,
                        "width": self.teacher.decoder.hidden_width,
                    },
                    compute=self._decode_to_cache,
                    splits=("train",),
                )
            )
        return outputs

    def _encode_to_cache(self, batch: RequestBatch) -> tuple[Tensor, Tensor]:
        """Return the decoder's input (B, S, D), query first, and lengths (B,)."""
        history = self.encode(batch)
        states = self.decoder_input(history)
        if history.query is None:
            return states, history.lengths
        query = history.query.unsqueeze(1)  # (B, 1, D)
        width = max(query.shape[2], states.shape[2])
        padded = [
            functional.pad(part, (0, width - part.shape[2])) for part in (query, states)
        ]
        return torch.cat(padded, 1), history.lengths + 1

    def _decode_to_cache(self, batch: RequestBatch) -> tuple[Tensor, Tensor]:
        """Return the teacher's states (B, L, N) before each code, and L (B,)."""
        hidden = self.teacher.decoder.hidden(
            self.teacher.encode(batch), self.tokens.codes(batch.target)
        )
        return hidden, torch.full_like(batch.target, hidden.shape[1])

    def forward(self, batch: RequestBatch) -> dict[str, Tensor]:
        """Return the sum of equation 3 over the student's levels.

        Each level is conditioned on the target's codes before it.
        """
        config = self.config
        codes = self.tokens.codes(batch.target)
        history = self.encode(batch)
        logits = self.decoder.teacher_forced(history, codes)
        targets = self.decoder.targets(codes)
        teacher_logits: Sequence[Tensor | None] = [None] * len(targets)
        if config.alpha > 0:
            teacher_logits = self.teacher_logits(batch, history)
        losses = [
            distillation_loss(student, teacher, target, config.alpha, config.tau)
            for student, teacher, target in zip(
                logits, teacher_logits, targets, strict=True
            )
        ]
        return {"loss": global_mean(torch.stack(losses).sum(), len(codes))}

    @recommender
    def recommend(
        self,
        batch: HistoryBatch,
        k: int,
        beam: int | None = None,
        scores: Scores | None = None,
        constrained: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rank items by the log-probability of their codes.

        Args:
            batch: Histories of B requests.
            k: Number of items to return.
            beam: Number of beams; None for the config's.
            scores: Codes that log-probabilities are normalised over; None for the
                config's.
            constrained: False to search without the trie; log-probabilities are then
                normalised over the codebook. None is true.

        Returns:
            Items and scores, (B, k) both, best first. If fewer than k items are found,
            the tail is item -1 with score -inf.
        """
        history = self.teacher_outputs("encoder", batch) or self.backbone.infer(batch)
        return self.search(history, k, beam, scores, constrained, batch.allowed)

    def search(
        self,
        history: History,
        k: int,
        beam: int | None,
        scores: Scores | None,
        constrained: bool | None,
        allowed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Search from the states of B histories.

        See `recommend` for the options and the result.

        Args:
            history: States of B histories.
            k: Number of items.
            beam: Number of beams.
            scores: Codes that log-probabilities are normalised over.
            constrained: Whether to search within the trie.
            allowed: (E,) mask of the trie's edges that lead to allowed items; None for
                all items.
        """
        return self.decode_items(
            history,
            k,
            beam,
            constrained is not False,
            self.normalizes_children(scores),
            allowed,
        )

    def normalizes_children(self, scores: Scores | None) -> bool:
        """Return whether scores are normalised over the valid children of a prefix.

        `scores` None is the value in the config.
        """
        return (scores or self.config.scores) == "children"
