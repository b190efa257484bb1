"""Options of `recommend`, without PyTorch, to parse command lines quickly."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from core.options import STRICT

Scores = Literal["children", "codebook"]


@dataclass(config=STRICT)
class RecommendOptions:
    """Options of every `recommend`."""

    unseen: bool | None = None
    """true: leave out the items of the user's history. Validation during training
    leaves out the latest max_history items only."""
    precision: Literal["highest", "high"] | None = None
    """Precision of matrix products on a GPU: highest, full float32; high, TF32, which
    is faster and may swap items with nearly equal scores."""


@dataclass(config=STRICT)
class BeamOptions(RecommendOptions):
    """Options of `recommend` by beam search; None is the value in the config."""

    beam: PositiveInt | None = None
    """Number of beams (models that decode semantic IDs)."""


@dataclass(config=STRICT)
class StudentOptions(BeamOptions):
    """Options of `Student.recommend`."""

    scores: Scores | None = None
    """Codes that a student's probabilities are normalised over: the valid children of
    the prefix, or the whole codebook."""


@dataclass(config=STRICT)
class AtSpeedOptions(StudentOptions):
    """Options of `AtSpeed.recommend`, which are the options of all models."""

    draft_beam: PositiveInt | None = None
    """Number of beams that AtSpeed drafts per step."""
    draft_steps: NonNegativeInt | None = None
    """Most steps that AtSpeed drafts per verification."""
    seed: int | None = None
    """Random seed of AtSpeed-R."""
