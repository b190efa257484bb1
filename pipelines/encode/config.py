"""Options of embeddings and of semantic IDs.

Ray and PyTorch are not imported, so command lines are parsed quickly.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import AfterValidator, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from core.options import STRICT, Folder
from models import registry
from models.text.pretrained import locate_encoder

SUFFIXES = (".parquet", ".npy")  # of files of precomputed embeddings


def check_encoder(name: str) -> str:
    """Return the name of a text encoder, or raise UserError for an unknown name.

    The package of `minilm` is needed only when the encoder is loaded.
    """
    return name if name in ("tfidf", "minilm") else locate_encoder(name)


Encoder = Annotated[str, AfterValidator(check_encoder)]
"""Type of a text encoder's name."""


@dataclass(config=STRICT, frozen=True)
class EmbedConfig:
    """Options of embeddings of item texts."""

    template: str = ""
    """Item text, such as '{title}. {brand}'; empty joins all text columns by spaces."""
    pooling: Literal["folder", "mean", "cls"] = "folder"
    """`folder`: as the folder of sentence-transformers says; the mean in a folder of
    transformers. `mean` over tokens, or the `cls` token's state, scaled to length 1."""
    max_tokens: PositiveInt = 256
    """Maximum number of tokens per text; longer texts are truncated."""
    batch_size: PositiveInt = 32
    """Texts per forward pass; a batch holds texts of similar length and is padded to
    its longest."""
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

    def encoder_options(self) -> tuple[str, int, int]:
        """Return the arguments of `TextEncoder` that follow its name."""
        return self.pooling, self.max_tokens, self.batch_size


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


@dataclass(config=STRICT)
class TokenizeConfig:
    """Options of jobs.tokenize."""

    tables: Folder
    """TABLES: the folder that jobs.prepare made."""
    output: Folder
    """SIDS: folder for the tables embeddings, sids and trie."""
    tokenizer: registry.TokenizerSection
    """Tokenizer, and its options such as `--tokenizer.levels 4`: trained codebooks with
    a conflict code (rqvae, rqkmeans), trained codebooks with relaxed codes (psid), or
    codes of a file (published)."""
    encoder: Encoder = "minilm"
    """Text encoder: a transformers hub name or folder, `minilm` (a pip package), or
    `tfidf` (no weights)."""
    pca: NonNegativeInt = 0
    """Width of the embeddings after PCA; 0: no PCA. SID-MLP uses 128, whitened."""
    published: str = ""
    """File with published SIDs, for --tokenizer published: CSV or LC-Rec's index.json,
    optionally gzipped."""
    embeddings: str = ""
    """Folder of the embeddings, which are computed if it is empty and may be shared by
    several tokenizers; by default OUTPUT/embeddings. Or a .parquet or .npy file with
    your own embeddings, which replaces --encoder."""
    id: str = ""
    """Ids of your own embeddings: the column of ids in a .parquet file, or a text file
    with the id of each row of a .npy file."""
    extend: str = ""
    """SIDS made for an earlier version of TABLES, such as OUTPUT itself: the codes and
    codebooks are kept, and new items get unused codes. The other options must equal
    those of the earlier command; a file of your own embeddings must contain the new
    items too."""
    overwrite: bool = False
    """Replace existing tables."""
    embed: EmbedConfig = field(default_factory=EmbedConfig)

    def __post_init__(self) -> None:
        reads_file = registry.find_tokenizer(self.tokenizer.name).reads_file
        if reads_file != bool(self.published) or (reads_file and self.embeddings):
            raise ValueError(
                f"tokenizer is {self.tokenizer.name!r}, published {self.published!r} "
                f"and embeddings {self.embeddings!r}; only the tokenizer "
                f"published takes a published file, and it takes no embeddings"
            )
        if bool(self.id) != self.has_custom_embeddings:
            raise ValueError(
                f"embeddings is {self.embeddings!r} and id is {self.id!r}; a .parquet "
                f"or .npy file needs id, and id needs such a file"
            )

    @property
    def has_custom_embeddings(self) -> bool:
        """Whether `embeddings` is a file with the user's own embeddings."""
        return self.embeddings.lower().endswith(SUFFIXES)


@dataclass(config=STRICT)
class EncodeConfig:
    """Options of jobs.encode."""

    tables: Folder
    """TABLES: the folder that jobs.prepare made, of a search or actions log."""
    output: Folder
    """TEXT: folder for the table items and, for a search log, queries, pairs and tokens
    (no tokens with tfidf)."""
    encoder: Encoder = "minilm"
    """Text encoder: a transformers hub name or folder, `minilm` (a pip package), or
    `tfidf` (no weights)."""
    overwrite: bool = False
    """Replace existing tables."""
    embed: TextConfig = field(default_factory=TextConfig)
