"""Options of embeddings.

Ray and PyTorch are not imported, so command lines are parsed quickly.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from core.options import STRICT


@dataclass(config=STRICT, frozen=True)
class EmbedConfig:
    """Options of embeddings of item texts."""

    template: str = ""
    """Item text, such as '{title}. {brand}'; empty joins all text columns by spaces."""
    empty: Literal["encode", "error"] = "encode"
    """Items without text: `encode` encodes the empty string and reports their number,
    `error` stops the job."""
    pooling: Literal["folder", "mean", "cls"] = "folder"
    """`folder`: as the folder of sentence-transformers says; the mean in a folder of
    transformers. `mean` over tokens, or the `cls` token's state, scaled to length 1."""
    max_tokens: PositiveInt = 256
    """Maximum number of tokens per text; longer texts are truncated."""
    batch_size: PositiveInt = 32
    """Texts per forward pass; a batch holds texts of similar length and is padded to
    its longest."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`fp32`, or `bf16` for the encoder's matrix products, which is faster on GPUs and
    newer CPUs."""
    workers: NonNegativeInt = 0
    """Maximum number of encoder actors. 0: one per GPU or, without GPUs, one per CPU;
    on a cluster with an autoscaler also one per 4 blocks of texts, up to 32, so that
    it starts nodes."""
    use_gpu: bool | Literal["auto"] = "auto"
    """Whether each encoder uses a GPU. auto: if the cluster has a GPU when the job
    starts. true makes an autoscaler start GPU nodes."""
    memory_gb: NonNegativeFloat = 0
    """GiB of memory that Ray reserves per encoder; 0 reserves only CPUs and GPUs."""
    svd: PositiveInt = 256
    """Width of the TF-IDF encoder's truncated SVD."""

    def encoder_options(self) -> tuple[str, int, int, str]:
        """Return the arguments of `TextEncoder` that follow its name."""
        return (
            self.pooling,
            self.max_tokens,
            self.batch_size,
            self.precision,
        )


@dataclass(config=STRICT, frozen=True)
class TextConfig(EmbedConfig):
    """Options of jobs.encode: embeddings of items, queries and pairs."""

    pooling: Literal["mean", "cls"] = "cls"  # type: ignore[assignment]
    """State of the `cls` token, as in QGS (Sec. 3.3), or the `mean` over tokens; scaled
    to length 1. The pooling of the encoder's folder is not used."""
    max_tokens: PositiveInt = 180
    """Maximum number of tokens per text or pair (QGS, Sec. 4.1); longer texts are
    truncated."""
    svd: PositiveInt = 64
    """Width of the TF-IDF encoder's truncated SVD."""
    query_condition: Literal["query", "joint"] = "query"
    """For searches. `query`: embeddings of the query alone. `joint`: also the [SEP]
    state over query and document, which leaks the document to predict."""
