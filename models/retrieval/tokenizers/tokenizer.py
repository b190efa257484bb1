"""The base class of tokenizers, which make the codes of items.

    class Rqkmeans(Tokenizer):
        name = "rqkmeans"
        config_class = RqkmeansConfig

`models/registry.py` lists all tokenizers by name. Commands use the attributes of a
tokenizer's class, never its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from models.config import NamedConfig

if TYPE_CHECKING:
    from models.retrieval.tokenizers.rqkmeans import Quantized, Training


class Tokenizer:
    """A method to make codes of embeddings, of all items and later of new ones."""

    name: ClassVar[str]
    """Name of the tokenizer in the registry; its options start with the name."""
    config_class: ClassVar[type]
    """Subclass of `NamedConfig` with the tokenizer's options."""
    reads_file: ClassVar[bool] = False
    """Whether the codes are in a file, so that no embeddings are needed."""
    arrays: dict[str, Tensor]
    """Arrays that `assign` needs, which are stored: `codebooks`, (C, K, D) centroids,
    and any others. `fit` sets them."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def separates_items(self) -> bool:
        """Whether `fit` gives few or no items equal codes.

        If so, a conflict code is added only if items have equal codes.
        """
        return False

    @property
    def on_train_items(self) -> bool:
        """Whether codebooks are fitted on the items of training requests only."""
        return False

    def fit(
        self, embeddings: Tensor, chosen: Tensor | None = None
    ) -> Training[Quantized]:
        """Train on embeddings and set `arrays`, and yield the progress.

        Args:
            embeddings: (N, E) embeddings of all items; training runs on their device.
            chosen: (n,) items to fit the codebooks on if `on_train_items`, else None.

        Returns:
            The codes of all items.
        """
        raise NotImplementedError

    def assign(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors (N, D) to quantise and their nearest codes (N, C)."""
        raise NotImplementedError


class Published(Tokenizer):
    """Codes of other work, which are read from a file."""

    name = "published"
    config_class = NamedConfig
    reads_file = True
