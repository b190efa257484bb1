"""What `recommend(batch, k, **options)` of each retrieval model takes; a field that is None is the checkpoint's own.

    TigerOptions(beam=50)

The command line of jobs.evaluate and `fit.eval_options` are read from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NoOptions:
    """Of models that rank the catalogue in one way."""


@dataclass(frozen=True)
class BeamOptions:
    """Of models that decode semantic IDs."""

    beam: int | None = None
    """Beams: prefixes to keep at each code."""
    constrained: bool | None = None
    """Whether decoding keeps to the catalogue's trie."""

    def __post_init__(self) -> None:
        if self.beam is not None and self.beam < 1:
            raise ValueError(f"beam is {self.beam}, the least is 1; give the prefixes to keep at each code")


@dataclass(frozen=True)
class TigerOptions(BeamOptions):
    """Of TIGER."""

    decoder: Literal["shared_kv", "hf", "hf_nocache"] | None = None
    """How prefixes are decoded: with one memory for all beams, or as Hugging Face does, with and without its cache."""


@dataclass(frozen=True)
class StudentOptions(BeamOptions):
    """Of decoders that were taught."""

    scores: Literal["children", "codebook"] | None = None
    """Probabilities of a code among the valid children of its prefix, or in its codebook."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.constrained is False:
            for name in ("path", "scores"):
                if vars(self).get(name) is not None:
                    raise ValueError(
                        f"{name} is of the search in the trie, and constrained is false; leave one of them out"
                    )


@dataclass(frozen=True)
class SidMlpOptions(StudentOptions):
    """Of SID-MLP and SID-MLP++."""

    path: Literal["fast", "plain"] | None = None
    """The walk that shares work, or the definition."""
