"""Students: a decoder that learns from a frozen teacher what to say after the states of a frozen backbone.

A student names its teacher's checkpoint, any backbone with a decoder, and keeps its backbone. Its own decoder is
trained on the teacher's logits and the target (equation 3 of SID-MLP), with the teacher in the loop or its outputs in
tables (`teacher_cache.py`). Recommending needs no teacher.

Shapes: `B` requests, `L` levels (codes of an item), `O_l` codes or tokens that the decoder predicts at level l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from models.config import check_choices, check_least, check_positive, check_shares
from models.retrieval.data import Catalogue
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
    """What a digit's log-probabilities are normalised over when recommending: the valid children of the prefix
    (the public code, and so the paper's figures; the first digit always over its codebook) or the codebook."""
    alpha: float = 0.7
    """Weight of the teacher against the target (Eq. 3); 0 is training from scratch (Table 8; Table 5, w/o KL)."""
    tau: float = 1.0
    """Temperature of the teacher's and the student's distributions (Eq. 3)."""
    m: int = 0
    """Digits that the teacher's decoder generates before the student takes over (Table 1; Appendix E.1)."""

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
    """Equation 3 of SID-MLP for one digit, the mean over the batch.

    alpha tau^2 KL(softmax(teacher / tau) || softmax(student / tau)) + (1 - alpha) CE(student, target), for
    logits (B, C) and target (B,); `teacher` may be None where alpha is 0.
    """
    student = student.float()
    loss = (1 - alpha) * functional.cross_entropy(student, target)
    if teacher is None:
        return loss
    soft = (teacher.float() / tau).log_softmax(-1)
    divergence = functional.kl_div(
        (student / tau).log_softmax(-1), soft, reduction="batchmean", log_target=True
    )
    return loss + alpha * tau**2 * divergence


class TakesOver(Decoder):
    """`own` from level m on, `teacher` before (Table 1, Appendix E.1 of SID-MLP)."""

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
        return BothScorers(
            self.teacher.scorer(history), self.own.scorer(history), self.first_level
        )


class BothScorers:
    """Both follow the beams from the start; the teacher's log-probabilities keep its normalisation."""

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
    """A decoder on the teacher's backbone, which stays frozen. The teacher's decoder is kept only while training,
    outside of the weights (`set_teacher`), or where m asks for it."""

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
            decoder = TakesOver(
                teacher.decoder.requires_grad_(False), decoder, config.m
            )
        super().__init__(
            config, catalogue, teacher.backbone.requires_grad_(False).eval(), decoder
        )
        self._teacher: tuple[
            Retriever, ...
        ] = ()  # no submodule: it is no part of the student's weights
        self._teacher_outputs: dict[
            str, States
        ] = {}  # tables of `teacher_cache`, while training
        self.keep_parts(teacher)

    @staticmethod
    def build_decoder(config: Any, teacher: Retriever) -> Decoder:
        """Return the student's decoder on the backbone of its teacher."""
        raise NotImplementedError

    def keep_parts(self, teacher: Retriever) -> None:
        """Keep further parts of the untrained teacher as parts of the student; here none."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.backbone.eval()
        if isinstance(self.decoder, TakesOver):
            self.decoder.teacher.eval()
        return self

    def set_teacher(self, teacher: Retriever) -> None:
        """Takes the weights of the backbone (and of the decoder where m asks for it) from `teacher`, and keeps it,
        outside of the weights, for its logits."""
        self.take_backbone(teacher)
        if isinstance(self.decoder, TakesOver):
            self.decoder.teacher.load_state_dict(teacher.decoder.state_dict())
        self._teacher = (
            teacher.requires_grad_(False).eval().to(self.tokens.items.device),
        )

    def take_backbone(self, teacher: Retriever) -> None:
        """Takes the weights of the teacher's backbone."""
        self.backbone.load_state_dict(teacher.backbone.state_dict())

    @property
    def teacher(self) -> Retriever:
        """The teacher that training learns from. Raises UserError where there is none."""
        if not self._teacher:
            raise UserError(
                "the student has no teacher to learn from; train it by jobs.train with model.teacher set"
            )
        return self._teacher[0]

    def encode(self, batch: dict[str, Tensor]) -> History:
        """What the frozen backbone reads, from the table of `teacher_cache` where it is there."""
        if found := self.teacher_outputs("encoder", batch):
            return found
        with torch.no_grad():
            return self.backbone.encode(batch)

    def teacher_outputs(self, name: str, batch: dict[str, Tensor]) -> History | None:
        """What the table `name` of `teacher_cache` has of the batch's requests; None where it does not have them all,
        as in all but training and its validation."""
        found = (
            self._teacher_outputs[name].padded(batch)
            if name in self._teacher_outputs
            else None
        )
        if found is None or name != "encoder" or not self.backbone.gives_query:
            return found
        query = found.states[
            :, 0, : self.backbone.embedding.embedding_dim
        ]  # as `_encoded` has put it there
        return History(found.states[:, 1:, : self.kept_width], found.lengths - 1, query)

    @property
    def kept_width(self) -> int:
        """Numbers of `kept` by position."""
        return self.backbone.embedding.embedding_dim

    def kept(self, history: History) -> Tensor:
        """(B, S, `kept_width`): what the decoder reads of the history, and so what `teacher_cache` keeps."""
        return history.states

    def set_teacher_outputs(self, tables: dict[str, States]) -> None:
        """Takes the tables that `teacher_queries` asked for."""
        self._teacher_outputs = tables

    def teacher_history(self, batch: dict[str, Tensor], history: History) -> History:
        """What the teacher's backbone reads; `history` is what the student's did, here the same."""
        return history

    @torch.no_grad()
    def teacher_hidden(self, batch: dict[str, Tensor], history: History) -> Tensor:
        """(B, L, N): what the teacher's logits of the target's codes are made of."""
        codes = self.tokens.codes(batch["target"])
        return self.teacher.decoder.hidden(self.teacher_history(batch, history), codes)

    @torch.no_grad()
    def teacher_logits(
        self, batch: dict[str, Tensor], history: History
    ) -> list[Tensor]:
        """(B, O_l) of each of the student's digits: the teacher's logits given the target's codes before, cut to what
        the student predicts."""
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
        """What `teacher_cache` can keep: states of a backbone that is not trained, and the teacher's outputs."""
        model = {"teacher_model": self.config.teacher_model}
        width = {"width": max(self.kept_width, self.backbone.embedding.embedding_dim)}
        found = [
            Query(
                "encoder",
                self.config.teacher_hash,
                model | width,
                self._encoded,
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
                    self._decoded,
                    ("train",),
                )
            )
        return found

    def _encoded(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        history = self.encode(batch)
        if history.query is None:
            return self.kept(history), history.lengths
        first, rest = (
            history.query.unsqueeze(1),
            self.kept(history),
        )  # the query goes before, as another position
        width = max(first.shape[2], rest.shape[2])
        padded = [
            functional.pad(part, (0, width - part.shape[2])) for part in (first, rest)
        ]
        return torch.cat(padded, 1), history.lengths + 1

    def _decoded(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.teacher.decoder.hidden(
            self.teacher.encode(batch), self.tokens.codes(batch["target"])
        )
        return hidden, torch.full_like(batch["target"], hidden.shape[1])

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Equation 3 summed over the student's digits, each given the target's before it (unit `request`)."""
        config, codes = self.config, self.tokens.codes(batch["target"])
        history = self.encode(batch)
        logits, targets = (
            self.decoder.teacher_forced(history, codes),
            self.decoder.targets(codes),
        )
        taught: Sequence[Tensor | None] = [None] * len(targets)
        if config.alpha > 0:
            taught = self.teacher_logits(batch, history)
        triples = zip(logits, taught, targets, strict=True)
        losses = [
            distillation_loss(*triple, config.alpha, config.tau) for triple in triples
        ]
        return {"loss": global_mean(torch.stack(losses).sum(), len(codes))}

    @recommender
    def recommend(
        self,
        batch: dict[str, Tensor],
        k: int,
        beam: int | None = None,
        scores: Scores | None = None,
        constrained: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(items, scores), each (B, k), by falling score; the search is the teacher's (see `beam_search`).

        Options left out are the config's. Without the trie (`constrained` False) there are no valid children
        and scores are the codebooks'. Where fewer than k items are found the tail is item -1 with score -inf.
        """
        history = self.teacher_outputs("encoder", batch) or self.backbone.infer(batch)
        return self.search(history, k, beam, scores, constrained, batch.get("allowed"))

    def search(
        self,
        history: History,
        k: int,
        beam: int | None,
        scores: Scores | None,
        constrained: bool | None,
        allowed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As `recommend`, by the decoder's scorer."""
        return self.find(
            history,
            k,
            beam,
            constrained is not False,
            self.among_children(scores),
            allowed,
        )

    def among_children(self, scores: Scores | None) -> bool:
        """Whether log-probabilities are normalised over the valid children of a prefix; None is the config's."""
        return (scores or self.config.scores) == "children"
