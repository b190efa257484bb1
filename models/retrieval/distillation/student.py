"""Students: a decoder on a teacher's frozen backbone, trained on the teacher's logits.

The config of a student names the checkpoint of its teacher, any backbone with a
decoder. The student uses the teacher's backbone and trains a decoder on the teacher's
logits and the target (equation 3 of SID-MLP). The teacher runs in every step.
Recommending needs no teacher.

Shapes: `B` requests, `S` positions of the longest history, `L` levels (codes of an
item, called digits in SID-MLP), `O_l` codes or tokens that the decoder predicts at
level l.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from pydantic import PositiveFloat, PositiveInt
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
from models.retrieval.options import Scores, StudentOptions
from models.retrieval.retriever import Backbone, Decoder, History, Retriever
from models.retrieval.search import Scorer
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


class SwitchingScorer:
    """A `Scorer` that switches from the teacher's scorer to the student's.

    Table 1 and Appendix E.1 of SID-MLP.
    """

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

    The teacher's decoder is not part of the student's weights, unless it is `reused`.
    """

    config: StudentConfig
    options_class: ClassVar[type] = StudentOptions
    verifies: ClassVar[bool] = False
    """Whether search needs the teacher's decoder to verify the student's drafts."""
    reused: Decoder | None
    """The teacher's decoder, which is saved with a student that needs it in search."""

    def __init__(self, config: StudentConfig, catalogue: Catalogue) -> None:
        teacher = build_teacher(config, catalogue)
        if teacher.decoder.first_level:
            raise UserError("a student with m above 0 cannot be a teacher")
        decoder = self.build_decoder(config, teacher)
        levels, first_level = decoder.tokens.levels, decoder.first_level
        if first_level >= levels:
            raise UserError(f"m {first_level} leaves no level of {levels}")
        backbone = teacher.backbone.requires_grad_(False).eval()
        super().__init__(config, catalogue, backbone, decoder)
        self.reused = None
        if first_level or self.verifies:
            self.reused = teacher.decoder.requires_grad_(False).eval()

    @staticmethod
    def build_decoder(config: Any, teacher: Retriever) -> Decoder:
        """Return the student's decoder on the backbone of its teacher."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> Self:
        """Set training mode; the backbone stays in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def set_teacher(self, teacher: Retriever) -> None:
        """Copy the weights of backbone and reused decoder, and store the teacher."""
        super().set_teacher(teacher)
        self.copy_backbone(teacher)
        if self.reused is not None:
            self.reused.load_state_dict(teacher.decoder.state_dict())

    def copy_backbone(self, teacher: Retriever) -> None:
        """Copy the weights of the teacher's backbone to the student's."""
        self.backbone.load_state_dict(teacher.backbone.state_dict())

    @torch.no_grad()
    def encode(self, batch: HistoryBatch) -> History:
        """Return the states of the frozen backbone."""
        return self.backbone.encode(batch)

    def scorer(self, history: History) -> Scorer:
        """Return the decoder's scorer, after the teacher's for the first m levels."""
        scorer, first_level = self.decoder.scorer(history), self.decoder.first_level
        if self.reused is None or not first_level:
            return scorer
        return SwitchingScorer(self.reused.scorer(history), scorer, first_level)

    def teacher_hidden(self, batch: RequestBatch, history: History) -> Tensor:
        """Return the teacher's states (B, L, N) before each code of the targets.

        Args:
            batch: Requests, for a student with an encoder of its own.
            history: The student's states of the histories, which by default are the
                states of the teacher's backbone.
        """
        codes = self.tokens.codes(batch.target)
        return self.teacher.decoder.hidden(history, codes)

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
        logits = teacher.logits(self.teacher_hidden(batch, history))
        restricted = []
        for level in range(self.decoder.first_level, self.tokens.levels):
            first, count = self.decoder.span(level)
            teacher_first, _ = teacher.span(level)
            restricted.append(logits[level].narrow(-1, first - teacher_first, count))
        return restricted

    def forward(self, batch: RequestBatch) -> dict[str, Tensor]:
        """Return the sum of equation 3 over the student's levels, the mean over rows.

            alpha tau^2 KL(softmax(teacher / tau) || softmax(student / tau))
                + (1 - alpha) CE(student, target)

        Each level is conditioned on the target's codes before it.
        """
        alpha, tau = self.config.alpha, self.config.tau
        codes = self.tokens.codes(batch.target)
        history = self.encode(batch)
        logits = self.decoder.teacher_forced(history, codes)
        targets = self.decoder.targets(codes)
        teacher_logits = self.teacher_logits(batch, history) if alpha > 0 else []
        losses = []
        for level, target in enumerate(targets):
            student = logits[level].float()
            loss = (1 - alpha) * functional.cross_entropy(student, target)
            if alpha > 0:
                log_p = (teacher_logits[level].float() / tau).log_softmax(-1)
                log_q = (student / tau).log_softmax(-1)
                loss = loss + alpha * tau**2 * functional.kl_div(
                    log_q, log_p, reduction="batchmean", log_target=True
                )
            losses.append(loss)
        return {"loss": global_mean(torch.stack(losses).sum(), len(codes))}


@dataclass(config=STRICT)
class JointConfig(TeacherConfig):
    """Options of EARN and NEZHA."""

    beam: PositiveInt = 50
    """Number of beams when recommending (Sec. 4.1 of SID-MLP)."""


class Joint(TaughtModel, Retriever):
    """A backbone and a decoder that start as the teacher's and are trained together.

    The loss is the cross-entropy of the target's codes, without the teacher.
    """

    config: JointConfig

    def __init__(self, config: JointConfig, catalogue: Catalogue) -> None:
        teacher = build_teacher(config, catalogue)
        super().__init__(config, catalogue, *self.build_parts(config, teacher))

    @staticmethod
    def build_parts(config: Any, teacher: Retriever) -> tuple[Backbone, Decoder]:
        """Return a backbone and a decoder of the sizes of the teacher."""
        raise NotImplementedError

    def set_teacher(self, teacher: Retriever) -> None:
        """Copy the teacher's backbone, and its decoder to one of the same class."""
        # not strict: the teacher has no embeddings of registers or placeholders
        self.backbone.load_state_dict(teacher.backbone.state_dict(), strict=False)
        if isinstance(self.decoder, type(teacher.decoder)):
            self.decoder.load_state_dict(teacher.decoder.state_dict())
