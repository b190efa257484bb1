"""Inputs of every search model: text vectors reduced by a trained projection, and scaled features.

Shapes: `W` width of the encoder's text, `E` of the reduced text, `F` features, `O`
columns that layers read of them, `...` any index shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from models.layers.standardised import Standardised
from models.own_features import OwnInputs
from models.search.catalogue import SearchCatalogue


class TextProjection(nn.Module):
    """Trained reductions of frozen text vectors: one of documents and pairs, one of queries.

    The vectors of documents are a table of the module, outside of its weights. Those of
    queries and pairs come with a batch, with the row of each use; the row -1 stands for
    padding and for text that does not exist.
    """

    items: Tensor

    def __init__(self, catalogue: SearchCatalogue, width: int) -> None:
        super().__init__()
        vectors = catalogue.text.items
        self.register_buffer("items", vectors, persistent=False)
        # normalised vectors of W numbers are small beside features
        self.gain = 1 / catalogue.text_size if catalogue.text_size > 0 else 1.0
        self.document = nn.Linear(vectors.shape[1], width)
        self.of_query = nn.Linear(vectors.shape[1], width)

    def project_query(self, vectors: Tensor, row: Tensor) -> Tensor:
        """Return the reduced vectors (..., E) of rows (...) of queries' or joint `vectors` (n, W), zero at row -1."""
        if not len(vectors):
            # part of the graph, since DDP needs gradients of all weights
            zeros = self.items.new_zeros(*row.shape, self.items.shape[1])
            return self.of_query(zeros) * 0
        reduced = self.of_query(self.gain * vectors[row.clamp(min=0)])
        return reduced * (row >= 0)[..., None]

    def project_item(self, item: Tensor) -> Tensor:
        """Return the reduced vectors (..., E) of documents alone; padding gets that of item 0."""
        return self.document(self.gain * self.items[item.clamp(min=0)])

    def project_pair(self, item: Tensor, pairs: Tensor, row: Tensor) -> Tensor:
        """Return the reduced vectors (..., E) of documents together with their queries ([CLS] in Eq. 1 of QGS).

        Args:
            item: (...) items.
            pairs: (P, W) vectors of pairs.
            row: (...) row of each pair in `pairs`, -1 for the document alone.
        """
        vectors = self.items[item.clamp(min=0)]
        if len(pairs):
            is_pair = (row >= 0)[..., None]
            vectors = torch.where(is_pair, pairs[row.clamp(min=0)], vectors)
        return self.document(self.gain * vectors)


class FeatureScaler(Standardised):
    """Features as layers read them: standardised; the log's own ones as `OwnInputs` returns them."""

    def __init__(self, catalogue: SearchCatalogue, width: int, dropout: float) -> None:
        super().__init__(
            catalogue.feature_mean, catalogue.feature_std, catalogue.features
        )
        self.own = None
        if catalogue.own.names:
            self.own = OwnInputs(catalogue.own, width, dropout)
        own_columns = self.own.columns if self.own else []
        self.columns = [*catalogue.features[: len(self.mean)], *own_columns]
        """(O,) the feature of each column of the output."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the columns (..., O) of `features` (..., F)."""
        if self.own is None:
            return super().forward(features)
        counts, own = features[..., : len(self.mean)], features[..., len(self.mean) :]
        return torch.cat([super().forward(counts), self.own(own)], -1)


def feature_groups(
    columns: Sequence[str], declared: Mapping[str, Collection[str]]
) -> dict[str, list[int]]:
    """Return the indices of the columns in each `declared` group of features, by the columns' features."""
    return {
        group: [i for i, name in enumerate(columns) if name in members]
        for group, members in declared.items()
    }
