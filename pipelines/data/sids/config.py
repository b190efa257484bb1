"""Options of semantic IDs and embeddings.

Ray and PyTorch are not imported, so command lines are parsed quickly.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from models.config import check_choices, check_least
from models.retrieval.tokenizers.config import PsidConfig, RqkmeansConfig, RqvaeConfig
from models.storage.tables import read_manifest

MIN_ITEMS_PER_CODE = 4
"""Mean number of items per code of the first level below which there are too many
codes."""


@dataclass(frozen=True)
class EmbedConfig:
    """Options of embeddings of item texts."""

    template: str = ""
    """Item text, such as '{title}. {brand}'; empty for all text columns, joined by
    blanks."""
    empty: Literal["encode", "error"] = "encode"
    """Items without text: `encode` encodes the empty string and reports their count,
    `error` stops."""
    pooling: Literal["mean", "cls"] = "mean"
    """`mean` over tokens, or the state of the `cls` token."""
    normalize: bool = True
    """Scale encoder outputs to length 1, as in the training of sentence encoders."""
    max_tokens: int = 256
    """Most tokens per text; longer texts are truncated."""
    batch_size: int = 32
    """Texts per forward pass, sorted by length and padded to the longest of their
    batch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`fp32`, or `bf16` for the encoder's matrix products, which is faster on GPUs and
    newer CPUs."""
    workers: int = 0
    """Most encoder actors. 0: one per GPU or, without GPUs, one per CPU; on a cluster
    with an autoscaler, as many as the texts keep busy, up to 32, so that it starts
    nodes."""
    use_gpu: bool | Literal["auto"] = "auto"
    """Whether each encoder uses a GPU. auto: if the cluster has any at the start. true
    makes an autoscaler start GPU nodes."""
    memory_gb: float = 0
    """GiB of memory that Ray reserves per encoder; 0 to reserve only CPUs and GPUs."""
    svd: int = 256
    """Width of the TF-IDF encoder's truncated SVD."""
    whiten: bool = True
    """Scale principal components to variance 1 (with jobs.tokenize --pca)."""

    def __post_init__(self) -> None:
        check_choices(self, "embed.")
        check_least(self, ["max_tokens", "batch_size", "svd"], 1, "embed.")
        check_least(self, ["workers", "memory_gb"], 0, "embed.")
        if self.use_gpu not in (True, False, "auto"):
            raise ValueError(
                f"embed.use_gpu is {self.use_gpu!r}, it must be true, false or auto"
            )

    def encoder_options(self) -> tuple[str, int, int, bool, str]:
        """Return the arguments of TextEncoder after the name."""
        return (
            self.pooling,
            self.max_tokens,
            self.batch_size,
            self.normalize,
            self.precision,
        )


@dataclass(frozen=True)
class TextConfig(EmbedConfig):
    """Options of embeddings of a log's texts."""

    pooling: Literal["mean", "cls"] = "cls"
    """State of the `cls` token, as in the paper (Sec. 3.3), or the `mean` over
    tokens."""
    max_tokens: int = 180
    """Most tokens per text or pair; longer texts are truncated (Sec. 4.1 of QGS)."""
    svd: int = 64
    """Width of the TF-IDF encoder's truncated SVD."""
    query_condition: Literal["query", "joint"] = "query"
    """For searches. `query`: embeddings of the query alone. `joint`: adds the [SEP]
    state over query and document, which leaks."""


@dataclass(frozen=True)
class TokenizerConfig:
    """A tokenizer, and the options of all tokenizers; unused options are ignored."""

    tokenizer: str
    """`rqvae`, `rqkmeans`, `psid` or `published`."""
    published: str = ""
    """File of published SIDs, for `published`."""
    rqkmeans: RqkmeansConfig = field(default_factory=RqkmeansConfig)
    rqvae: RqvaeConfig = field(default_factory=RqvaeConfig)
    psid: PsidConfig = field(default_factory=PsidConfig)

    def __post_init__(self) -> None:
        if (self.tokenizer == "published") != bool(self.published):
            raise ValueError(
                f"tokenizer is {self.tokenizer!r} and published is {self.published!r}; "
                f"--tokenizer published and --published FILE go together"
            )

    @property
    def quantizer(self) -> str:
        """The tokenizer whose codebooks are trained."""
        return "rqkmeans" if self.tokenizer == "psid" else self.tokenizer

    def too_few_items(self, items_uri: str) -> str | None:
        """Return a message if the items are fewer than the codes of a codebook."""
        if self.quantizer == "published":
            return None
        size = getattr(self, self.quantizer).codebook_size
        items = read_manifest(items_uri, "items").rows
        if items >= size:
            return None
        if items < 2:
            return (
                f"{items_uri} has {items} item, and semantic IDs need 2 or more; lower "
                f"--core of jobs.prepare, or give a longer log"
            )
        return (
            f"{self.quantizer}.codebook_size is {size}, and {items_uri} has {items} "
            f"items, too few for that; use a smaller one, such as "
            f"{self._fitting(items)}"
        )

    def crowded_by_codes(self, items: int, used: int) -> str | None:
        """Return advice if few items share a first code and a smaller codebook helps.

        Args:
            items: Number of items.
            used: Number of first codes in use.
        """
        if self.quantizer == "published" or items >= MIN_ITEMS_PER_CODE * used:
            return None
        if self._fitting_size(items) >= getattr(self, self.quantizer).codebook_size:
            return None
        return (
            f"only {items / used:.1f} items share a first code; below "
            f"{MIN_ITEMS_PER_CODE} a model learns little about an item from similar "
            f"ones: try {self._fitting(items)}"
        )

    def _fitting(self, items: int) -> str:
        """Return the option that sets `_fitting_size`."""
        return f"--{self.quantizer}.codebook_size {self._fitting_size(items)}"

    @staticmethod
    def _fitting_size(items: int) -> int:
        """Return the largest power of two of codes with enough items per code."""
        return int(2 ** max(1, (items // MIN_ITEMS_PER_CODE).bit_length() - 1))

    @property
    def on_train_items(self) -> bool:
        """Whether codebooks are fitted on the items of training requests only."""
        return self.quantizer == "rqkmeans" and self.rqkmeans.train_items

    def relevant_settings(self) -> dict[str, Any]:
        """Return the options that the SIDs depend on."""
        options: dict[str, Any] = {"tokenizer": self.tokenizer}
        if self.tokenizer == "psid":
            options["psid"] = asdict(self.psid)
        if self.quantizer != "published":
            options[self.quantizer] = asdict(getattr(self, self.quantizer))
        return options
