"""A decoder that takes over after the first m codes, which the teacher's generates (Table 1, Appendix E.1 of SID-MLP).

Shapes: as in `parts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from models.retrieval.parts import Decoder, History, Scorer
from models.tables import UserError


class TakesOver(Decoder):
    """`own` from level m on, `teacher` before."""

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
        raise UserError(f"a student that takes over after {self.first_level} codes is no teacher; give one with m 0")

    def teacher_forced(self, history: History, codes: Tensor) -> Sequence[Tensor]:
        return self.own.teacher_forced(history, codes)[self.first_level - self.own.first_level :]

    def scorer(self, history: History) -> Scorer:
        return BothScorers(self.teacher.scorer(history), self.own.scorer(history), self.first_level)


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
