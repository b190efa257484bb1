"""The options of `texts.py`, apart from what encodes, so that a command line is read before Ray is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipelines.data.sids.embed import EmbedConfig


@dataclass(frozen=True)
class TextConfig(EmbedConfig):
    """Texts of a log to embeddings."""

    pooling: str = "cls"
    """The `cls` token's state, as in the paper (Sec. 3.3), or the `mean` over tokens."""
    max_tokens: int = 180
    """Tokens per text or pair; longer ones are cut (Sec. 4.1 of QGS)."""
    svd: int = 64
    """Width of the TF-IDF encoder's truncated SVD."""
    query_condition: Literal["query", "joint"] = "query"
    """Of searches. `query`: the query alone. `joint`: adds the [SEP] state over query and document, which leaks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_condition not in ("query", "joint"):
            raise ValueError(f"embed.query_condition is {self.query_condition!r}; it must be 'query' or 'joint'")
