"""Options of the models' `recommend`, without PyTorch, so that a command line is parsed before it is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.config import check_least

DecodeBy = Literal["shared_kv", "hf", "hf_nocache"]
DecodePath = Literal["fast", "plain"]
Scores = Literal["children", "codebook"]


@dataclass
class RecommendOptions:
    """Options of every `recommend`."""

    unseen: bool | None = None
    """true: leave out the items of the user's history; in validations of a training, of
    its max_history latest."""
    precision: Literal["highest", "high"] | None = None
    """Products on a GPU: highest, float32 in full; high, TF32, faster, which swaps
    items of nearly equal scores."""
    compile: bool | None = None
    """true: torch.compile fuses the kernels of a search on a GPU, at half a minute per
    shape of its batches."""


@dataclass
class BeamOptions(RecommendOptions):
    """Options of a `recommend` by beam search, by default the options of the model's
    config.
    """

    beam: int | None = None
    """Beams, of models that decode semantic IDs."""
    constrained: bool | None = None
    """Whether decoding semantic IDs keeps to the catalogue's trie."""

    def __post_init__(self) -> None:
        check_least(self, ["beam"], 1, "--")


@dataclass
class TigerOptions(BeamOptions):
    """Options of `Tiger.recommend`."""

    decoder: DecodeBy | None = None
    """TIGER: shared_kv, hf or hf_nocache."""


@dataclass
class StudentOptions(BeamOptions):
    """Options of `Student.recommend`."""

    scores: Scores | None = None
    """Students: probabilities of a code among the valid children of its prefix, or in
    its codebook."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.constrained is False and self.scores:
            raise ValueError(
                "--scores is of the search in the trie, and --constrained is false; leave one of them out"
            )


@dataclass
class SidMlpOptions(StudentOptions):
    """Options of `SidMlp.recommend`."""

    path: DecodePath | None = None
    """SID-MLP: the search that shares work, or the definition."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.constrained is False and self.path:
            raise ValueError(
                "--path is of the search in the trie, and --constrained is false; leave one of them out"
            )


@dataclass
class AtSpeedOptions(RecommendOptions):
    """Options of `AtSpeed.recommend`, by default the options of the model's config."""

    beam: int | None = None
    """Beams, of models that decode semantic IDs."""
    draft_beam: int | None = None
    """AtSpeed: beams that a step drafts."""
    draft_steps: int | None = None
    """AtSpeed: steps drafted for one verification, at most."""
    scores: Scores | None = None
    """Students: probabilities of a code among the valid children of its prefix, or in
    its codebook."""
    seed: int | None = None
    """AtSpeed-R: seed of what is drawn."""

    def __post_init__(self) -> None:
        check_least(self, ["beam", "draft_beam"], 1, "--")
        check_least(self, ["draft_steps"], 0, "--")


RECOMMEND_OPTIONS = (
    RecommendOptions,
    BeamOptions,
    TigerOptions,
    StudentOptions,
    SidMlpOptions,
    AtSpeedOptions,
)
"""All options that a model's `recommend` may have; a model's `options_class` says which
it has."""
