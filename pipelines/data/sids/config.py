"""Options of semantic IDs and embeddings, without importing Ray or PyTorch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from models.config import check_choices, check_least
from models.retrieval.tokenizers.config import PsidConfig, RqkmeansConfig, RqvaeConfig
from models.storage.tables import read_manifest

SHARE_CODE = 4
"""Mean number of items per code of the first level, below which codes are too many."""


@dataclass(frozen=True)
class EmbedConfig:
    """Options that turn texts into embeddings."""

    template: str = ""
    """Item text, such as '{title}. {brand}'; empty: all text columns in the table's order, joined by a blank."""
    empty: Literal["encode", "error"] = "encode"
    """Items with no text: `encode` encodes the empty string and says how many, `error` stops with their count."""
    pooling: Literal["mean", "cls"] = "mean"
    """`mean` over tokens, or the `cls` token's state."""
    normalize: bool = True
    """Scale encoder outputs to length 1, as sentence encoders are trained with."""
    max_tokens: int = 256
    """Tokens per text; longer ones are cut."""
    batch_size: int = 32
    """Texts per forward pass, sorted by length and padded to the longest of their batch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`fp32`, or `bf16` for the encoder's products: faster where the processor has it, on GPUs and newer CPUs."""
    workers: int = 0
    """Encoder actors at most; 0: one per GPU or, without GPUs, one per CPU, and on a cluster with an autoscaler as many
    as the texts keep busy, up to 32, so that it starts nodes for them."""
    use_gpu: bool | Literal["auto"] = "auto"
    """Whether each encoder takes a GPU; auto: if the cluster has any at the start. true makes an autoscaler start GPU
    nodes."""
    memory_gb: float = 0
    """GiB of memory that Ray reserves for each encoder; 0: Ray counts CPUs and GPUs alone."""
    svd: int = 256
    """Width of the TF-IDF encoder's truncated SVD."""
    whiten: bool = True
    """Scale PCA's components to variance 1 (with jobs.tokenize --pca)."""

    def __post_init__(self) -> None:
        check_choices(self, "embed.")
        check_least(self, ["max_tokens", "batch_size", "svd"], 1, "embed.")
        check_least(self, ["workers", "memory_gb"], 0, "embed.")
        if self.use_gpu not in (True, False, "auto"):
            raise ValueError(
                f"embed.use_gpu is {self.use_gpu!r}, it must be true, false or auto"
            )

    def encoder_options(self) -> tuple[str, int, int, bool, str]:
        """Return the arguments of TextEncoder after the encoder's name."""
        return (
            self.pooling,
            self.max_tokens,
            self.batch_size,
            self.normalize,
            self.precision,
        )


@dataclass(frozen=True)
class TextConfig(EmbedConfig):
    """Options that turn the texts of a log into embeddings."""

    pooling: Literal["mean", "cls"] = "cls"
    """The `cls` token's state, as in the paper (Sec. 3.3), or the `mean` over tokens."""
    max_tokens: int = 180
    """Tokens per text or pair; longer ones are cut (Sec. 4.1 of QGS)."""
    svd: int = 64
    """Width of the TF-IDF encoder's truncated SVD."""
    query_condition: Literal["query", "joint"] = "query"
    """Of searches. `query`: the query alone. `joint`: adds the [SEP] state over query and document, which leaks."""


@dataclass(frozen=True)
class TokenizerConfig:
    """A tokenizer and the options of all tokenizers; options of the others are ignored."""

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
                f"tokenizer is {self.tokenizer!r} and published is {self.published!r}; --tokenizer published and "
                f"--published FILE go together"
            )

    @property
    def quantizer(self) -> str:
        """Name of the tokenizer whose codebooks are trained."""
        return "rqkmeans" if self.tokenizer == "psid" else self.tokenizer

    def too_few_items(self, items_uri: str) -> str | None:
        """Return an error message if the catalogue has fewer items than a codebook has
        codes.
        """
        if self.quantizer == "published":
            return None
        size, items = (
            getattr(self, self.quantizer).codebook_size,
            read_manifest(items_uri, "items").rows,
        )
        if items >= size:
            return None
        if items < 2:
            return (
                f"{items_uri} has {items} item, and semantic IDs need 2 or more; lower --core of jobs.prepare, or give "
                "a longer log"
            )
        return (
            f"{self.quantizer}.codebook_size is {size}, and {items_uri} has {items} items, too few for that; "
            f"use a smaller one, such as {self._fitting(items)}"
        )

    def crowded_by_codes(self, items: int, used: int) -> str | None:
        """Return advice where few items share one of the `used` first codes and a smaller codebook would help."""
        if self.quantizer == "published" or items >= SHARE_CODE * used:
            return None
        if self._fitting_size(items) >= getattr(self, self.quantizer).codebook_size:
            return None
        return (
            f"only {items / used:.1f} items share a first code; below {SHARE_CODE} a model learns little about an item "
            f"from similar ones: try {self._fitting(items)}"
        )

    def _fitting(self, items: int) -> str:
        """Return the option that sets `_fitting_size`."""
        return f"--{self.quantizer}.codebook_size {self._fitting_size(items)}"

    @staticmethod
    def _fitting_size(items: int) -> int:
        """Return the largest power of two, at least 2, with SHARE_CODE or more items per code."""
        return int(2 ** max(1, (items // SHARE_CODE).bit_length() - 1))

    @property
    def on_train_items(self) -> bool:
        """Whether codebooks are fitted on the items of training requests only."""
        return self.quantizer == "rqkmeans" and self.rqkmeans.train_items

    def relevant_settings(self) -> dict[str, Any]:
        """Return the settings that the semantic IDs depend on, for the table's
        fingerprint.
        """
        used: dict[str, Any] = {"tokenizer": self.tokenizer}
        if self.tokenizer == "psid":
            used["psid"] = asdict(self.psid)
        if self.quantizer != "published":
            used[self.quantizer] = asdict(getattr(self, self.quantizer))
        return used
