"""The base class of tokenizers, which make the codes of items.

    class Rqkmeans(Tokenizer):
        name = "rqkmeans"
        config_class = RqkmeansConfig

`models/registry.py` lists all tokenizers by name. Commands use the attributes of a
tokenizer's class, never its name.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from core.options import NamedConfig
from core.schemas import CodeMeasures
from models import own_code


@dataclass(frozen=True)
class Quantized:
    """A trained quantiser applied to the items, all on the CPU."""

    vectors: Tensor
    """(N, D) quantised vectors: embeddings, or latents of the RQ-VAE."""
    codebooks: Tensor
    """(C, K, D) centroids."""
    codes: Tensor
    """(N, C) int64 centroid of the residual at each level."""
    reconstruction_error: float
    """Share of the embeddings' variance that the codes do not explain."""
    measures: CodeMeasures = field(default_factory=CodeMeasures)
    """Further measures of the codes, for the manifest."""


Training = Generator[str, None, Quantized]
"""A training that yields messages on its progress and returns the codes."""


class Tokenizer:
    """A method to make codes of embeddings, of all items and later of new ones."""

    name: ClassVar[str]
    """Name of the tokenizer in the registry; its options start with the name."""
    config_class: ClassVar[type]
    """Subclass of `NamedConfig` with the tokenizer's options."""
    reads_file: ClassVar[bool] = False
    """Whether the codes are in a file, so that no embeddings are needed."""
    separates_items: ClassVar[bool] = False
    """Whether `fit` gives few or no items equal codes. If so, a conflict code is added
    only if items have equal codes."""
    arrays: dict[str, Tensor]
    """Arrays that `assign` needs, which are stored with the `codebooks` of `Quantized`.
    `fit` sets others than `codebooks`."""

    def __init__(self, config: Any) -> None:
        self.config, self.arrays = config, {}

    def __reduce__(self) -> Any:
        """Pickle the class too, if it is in a file of the user's own."""
        return own_code.pickle_with_code(self)

    @property
    def on_train_items(self) -> bool:
        """Whether codebooks are fitted on the items of training requests only."""
        return False

    def fit(self, embeddings: Tensor, chosen: Tensor | None = None) -> Training:
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
    separates_items = True
