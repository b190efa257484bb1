"""Students: a decoder on the frozen backbone of a teacher, trained on the teacher's logits.

A student names the checkpoint of its teacher, any backbone with a decoder, and keeps
the backbone. Its own decoder is trained on the teacher's logits and the target
(equation 3 of SID-MLP). The teacher runs in every step, or its outputs are cached in
tables (`teacher_cache.py`). Recommending needs no teacher.

Shapes: `B` requests, `L` levels (codes of an item), `O_l` codes or tokens that the
decoder predicts at level l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from models.config import check_choices, check_least, check_positive, check_shares
from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch
from models.retrieval.distillation.teacher import (
    TaughtModel,
    TeacherConfig,
    build_teacher,
)
from models.retrieval.distillation.teacher_cache import Query, States
from models.retrieval.options import Scores, StudentOptions
from models.retrieval.parts import Decoder, History, Scorer
from models.retrieval.recommend import recommender
from models.retrieval.retriever import Retriever
from models.storage.tables import UserError
from models.training.distributed import global_mean


@dataclass
class StudentConfig(TeacherConfig):
    """Options of all students."""

    beam: int = 50
    """Beams when recommending (Sec. 4.1 of SID-MLP)."""
    scores: Scores = "children"
    """Codes over which a digit's log-probabilities are normalised when recommending:
    the valid `children` of the prefix, as in the public code and so the paper's figures
    (the first digit always over its codebook), or the `codebook`."""
    alpha: float = 0.7
    """Weight of the teacher against the target (Eq. 3); 0 is training from scratch
    (Table 8; Table 5, w/o KL)."""
    tau: float = 1.0
    """Temperature of the teacher's and the student's distributions (Eq. 3)."""
    m: int = 0
    """Digits that the teacher's decoder generates before the student takes over (Table
    1; Appendix E.1)."""

    def __post_init__(self) -> None:
        check_positive(self, ["beam"])
        check_shares(self, ["alpha"])
        check_least(self, ["m"], 0)
        check_choices(self)
        if not self.tau > 0:
            raise ValueError(
                f"tau {self.tau} is not above 0; give a temperature such as 1"
            )


def distillation_loss(
    student: Tensor, teacher: Tensor | None, target: Tensor, alpha: float, tau: float
) -> Tensor:
    """Return equation 3 of SID-MLP for one digit, the mean over the batch.

        alpha tau^2 KL(softmax(teacher / tau) || softmax(student / tau))
            + (1 - alpha) CE(student, target)

    Args:
        student: (B, C) logits.
        teacher: (B, C) logits, or None if alpha is 0.
        target: (B,) codes.
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
    """The teacher's decoder up to level m, then the student's (Table 1, Appendix E.1 of SID-MLP)."""

    def __init__(self, teacher: Decoder, own: Decoder, m: int) -> None:
        super().__init__()
        self.tokens, self.first_level = own.tokens, m
        self.teacher, self.own = teacher, own

    @property
    def beam_bytes(self) -> int:  # type: ignore[override]
        return self.own.beam_bytes

    def span(self, level: int) -> tuple[int, int]:
        return self.own.span(level)

    def hidden(self, history: History, codes: Tensor) -> Tensor:
        raise UserError(
            f"a student that takes over after {self.first_level} codes is no teacher; give one with m 0"
        )

    def teacher_forced(self, history: History, codes: Tensor) -> Sequence[Tensor]:
        return self.own.teacher_forced(history, codes)[
            self.first_level - self.own.first_level :
        ]

    def scorer(self, history: History) -> Scorer:
        return TwoScorers(
            self.teacher.scorer(history), self.own.scorer(history), self.first_level
        )


class TwoScorers:
    """A `Scorer` with the teacher's log-probabilities below level m and the student's
    from level m on.
    """

    def __init__(self, teacher: Scorer, own: Scorer, m: int) -> None:
        self.teacher, self.own, self.m, self.level = teacher, own, m, 0

    def start(self) -> Tensor:
        self.own.start()
        return self.teacher.start()

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        self.level += 1
        own = self.own.step(parents, tokens)
        return self.teacher.step(parents, tokens) if self.level < self.m else own


class Student(TaughtModel, Retriever):
    """A decoder on the teacher's backbone, which stays frozen.

    The teacher's decoder is kept outside of the weights, for training only, unless its
    first `m` digits are reused.
    """

    config: StudentConfig
    options_class: ClassVar[type | None] = StudentOptions

    def __init__(self, config: StudentConfig, catalogue: Catalogue) -> None:
        teacher = build_teacher(config, catalogue)
        decoder = self.build_decoder(config, teacher)
        levels = decoder.tokens.levels
        if config.m >= levels:
            raise UserError(
                f"m {config.m} leaves no digit of {levels} to the student; give a smaller m"
            )
        if config.m:
            decoder = ReusesDecoder(
                teacher.decoder.requires_grad_(False), decoder, config.m
            )
        super().__init__(
            config, catalogue, teacher.backbone.requires_grad_(False).eval(), decoder
        )
        self._teacher: tuple[Retriever, ...] = ()  # no submodule: not saved with it
        # tables of `teacher_cache`, while training
        self._teacher_outputs: dict[str, States] = {}
        self.keep_parts(teacher)

    @staticmethod
    def build_decoder(config: Any, teacher: Retriever) -> Decoder:
        """Return the student's decoder on the backbone of its teacher."""
        raise NotImplementedError

    def keep_parts(self, teacher: Retriever) -> None:
        """Keep further parts of the untrained teacher; a plain student keeps none."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.backbone.eval()
        if isinstance(self.decoder, ReusesDecoder):
            self.decoder.teacher.eval()
        return self

    def set_teacher(self, teacher: Retriever) -> None:
        """Copy the teacher's backbone, and with `m` its decoder, and keep the teacher for its logits."""
        self.take_backbone(teacher)
        if isinstance(self.decoder, ReusesDecoder):
            self.decoder.teacher.load_state_dict(teacher.decoder.state_dict())
        self._teacher = (
            teacher.requires_grad_(False).eval().to(self.tokens.items.device),
        )

    def take_backbone(self, teacher: Retriever) -> None:
        """Copy the weights of the teacher's backbone."""
        self.backbone.load_state_dict(teacher.backbone.state_dict())

    @property
    def teacher(self) -> Retriever:
        """The teacher that the student learns from.

        Raises:
            UserError: If the student was loaded without one.
        """
        if not self._teacher:
            raise UserError(
                "the student has no teacher to learn from; train it by jobs.train with model.teacher set"
            )
        return self._teacher[0]

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states of the frozen backbone, from `teacher_cache` if it has them."""
        if found := self.teacher_outputs("encoder", batch):
            return found
        with torch.no_grad():
            return self.backbone.encode(batch)

    def teacher_outputs(self, name: str, batch: HistoryBatch) -> History | None:
        """Return the cached outputs of the batch's requests, or None if some are not cached.

        `name` is that of a table of `teacher_cache`. Only requests of training and its
        validation are cached.
        """
        found = (
            self._teacher_outputs[name].pad_states(batch)
            if name in self._teacher_outputs
            else None
        )
        if found is None or name != "encoder" or not self.backbone.gives_query:
            return found
        query = found.states[
            :, 0, : self.backbone.embedding.embedding_dim
        ]  # where `_encode_to_cache` puts it
        return History(
            found.states[:, 1:, : self.input_width], found.lengths - 1, query
        )

    @property
    def input_width(self) -> int:
        """Width of `decoder_input`."""
        return self.backbone.embedding.embedding_dim

    def decoder_input(self, history: History) -> Tensor:
        """Return (B, S, `input_width`) states that the decoder reads and `teacher_cache` stores."""
        return history.states

    def set_teacher_outputs(self, tables: dict[str, States]) -> None:
        self._teacher_outputs = tables

    def teacher_history(self, batch: HistoryBatch, history: History) -> History:
        """Return the states of the teacher's backbone, by default the student's own
        `history`.
        """
        return history

    @torch.no_grad()
    def teacher_hidden(self, batch: RequestBatch, history: History) -> Tensor:
        """Return (B, L, N) hidden states that the teacher's logits of the target are computed from."""
        codes = self.tokens.codes(batch.target)
        return self.teacher.decoder.hidden(self.teacher_history(batch, history), codes)

    @torch.no_grad()
    def teacher_logits(self, batch: RequestBatch, history: History) -> list[Tensor]:
        """Return the teacher's logits (B, O_l) of each of the student's digits.

        They are given the target's codes before the digit, and restricted to the tokens
        that the student predicts.
        """
        found = self.teacher_outputs("decoder", batch)
        teacher = self.teacher.decoder
        logits = teacher.logits(
            found.states if found else self.teacher_hidden(batch, history)
        )
        cut = []
        for level in range(self.decoder.first_level, self.tokens.levels):
            (begin, count), (first, _) = self.decoder.span(level), teacher.span(level)
            cut.append(logits[level].narrow(-1, begin - first, count))
        return cut

    def teacher_queries(self) -> list[Query]:
        """Return queries for the backbone's states and the teacher's hidden states."""
        model = {"teacher_model": self.config.teacher_model}
        width = {"width": max(self.input_width, self.backbone.embedding.embedding_dim)}
        found = [
            Query(
                "encoder",
                self.config.teacher_hash,
                model | width,
                self._encode_to_cache,
                ("train", "val"),
            )
        ]
        if self.config.alpha > 0:
            width = {"width": self.teacher.decoder.hidden_width}
            found.append(
                Query(
                    "decoder",
                    self.config.teacher_hash,
                    model | width,
                    self._decode_to_cache,
                    ("train",),
                )
            )
        return found

    def _encode_to_cache(self, batch: RequestBatch) -> tuple[Tensor, Tensor]:
        history = self.encode(batch)
        if history.query is None:
            return self.decoder_input(history), history.lengths
        first, rest = (
            history.query.unsqueeze(1),
            self.decoder_input(history),
        )  # the query is the first position
        width = max(first.shape[2], rest.shape[2])
        padded = [
            functional.pad(part, (0, width - part.shape[2])) for part in (first, rest)
        ]
        return torch.cat(padded, 1), history.lengths + 1

    def _decode_to_cache(self, batch: RequestBatch) -> tuple[Tensor, Tensor]:
        hidden = self.teacher.decoder.hidden(
            self.teacher.encode(batch), self.tokens.codes(batch.target)
        )
        return hidden, torch.full_like(batch.target, hidden.shape[1])

    def forward(self, batch: RequestBatch) -> dict[str, Tensor]:
        """Return the sum of equation 3 over the student's digits, each given the target's codes before it."""
        config, codes = self.config, self.tokens.codes(batch.target)
        history = self.encode(batch)
        logits, targets = (
            self.decoder.teacher_forced(history, codes),
            self.decoder.targets(codes),
        )
        taught: Sequence[Tensor | None] = [None] * len(targets)
        if config.alpha > 0:
            taught = self.teacher_logits(batch, history)
        losses = [
            distillation_loss(student, teacher, target, config.alpha, config.tau)
            for student, teacher, target in zip(logits, taught, targets, strict=True)
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
        """Return (items, scores), each (B, k), best first, by the teacher's search (`beam_search`).

        Arguments that are None default to the config. If `constrained` is False, the
        search ignores the trie and log-probabilities are normalised over the whole
        codebook. If fewer than k items are found, the tail is item -1 with score -inf.
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
        """Search with the decoder's scorer; `recommend` documents the arguments."""
        return self.find(
            history,
            k,
            beam,
            constrained is not False,
            self.among_children(scores),
            allowed,
        )

    def among_children(self, scores: Scores | None) -> bool:
        """Return whether scores are normalised over the valid children of a prefix; None is the config's."""
        return (scores or self.config.scores) == "children"
