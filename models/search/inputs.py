"""Inputs of every search model: vectors of documents and queries, scaled features.

Shapes: `W` width of the encoder's text, `E` width of the reduced text, `F` features,
`O` columns of scaled features, `...` any index shape.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.custom_features import CustomInputs
from models.layers.standardised import Standardised
from models.search.catalogue import SearchCatalogue


class TextProjection(nn.Module):
    """Trained projections of frozen text vectors; of ids if there is no text.

    One projection reduces documents and pairs, another one queries. The vectors of
    documents are a buffer of the module. The vectors of queries and pairs are part of a
    batch, together with the row of each use; row -1 means padding or no text.

    Without text, documents and pairs have a trained vector of the document's id, and
    queries have vectors of width 0.
    """

    items: Tensor
    """(I, W) vectors of the documents."""

    def __init__(self, catalogue: SearchCatalogue, width: int) -> None:
        super().__init__()
        vectors = catalogue.text.items
        self.register_buffer("items", vectors, persistent=False)
        self.has_text = vectors.shape[1] > 0
        self.document: nn.Module
        if not self.has_text:
            self.document = nn.Embedding(catalogue.num_items, width)
            nn.init.normal_(self.document.weight, std=0.02)
            return
        # entries of normalised vectors are small compared with standardised features
        self.gain = 1 / catalogue.text_size if catalogue.text_size > 0 else 1.0
        self.document = nn.Linear(vectors.shape[1], width)
        self.of_query = nn.Linear(vectors.shape[1], width)

    def project_query(self, vectors: Tensor, row: Tensor) -> Tensor:
        """Return the reduced vectors (..., E) of queries, 0 at row -1.

        Without text they have width 0.

        Args:
            vectors: (n, W) vectors of queries, or joint vectors of queries and items.
            row: (...) row of each query in `vectors`.
        """
        if not self.has_text:
            return self.items.new_zeros(*row.shape, 0)
        if not len(vectors):
            # part of the graph, since DDP needs gradients of all weights
            zeros = self.items.new_zeros(*row.shape, self.items.shape[1])
            return self.of_query(zeros) * 0
        reduced = self.of_query(self.gain * vectors[row.clamp(min=0)])
        return reduced * (row >= 0)[..., None]

    def project_item(self, item: Tensor) -> Tensor:
        """Return the reduced vectors (..., E) of documents alone.

        Args:
            item: (...) items; padding gets the vector of item 0.
        """
        item = item.clamp(min=0)
        if not self.has_text:
            return self.document(item)
        return self.document(self.gain * self.items[item])

    def project_pair(self, item: Tensor, pairs: Tensor, row: Tensor) -> Tensor:
        """Return the reduced vectors (..., E) of pairs ([CLS] in Eq. 1 of QGS).

        Args:
            item: (...) items.
            pairs: (P, W) vectors of pairs.
            row: (...) row of each pair in `pairs`, -1 for the document alone.
        """
        if not self.has_text:
            return self.project_item(item)
        vectors = self.items[item.clamp(min=0)]
        if len(pairs):
            is_pair = (row >= 0)[..., None]
            vectors = torch.where(is_pair, pairs[row.clamp(min=0)], vectors)
        return self.document(self.gain * vectors)


class FeatureScaler(Standardised):
    """Scale features: standardise built-in features, embed the log's custom features.

    Args:
        catalogue: Catalogue with the features and their scales.
        width: Width of the embedding of each category.
        dropout: Share of category values replaced by the unknown value in training.
    """

    def __init__(self, catalogue: SearchCatalogue, width: int, dropout: float) -> None:
        super().__init__(
            catalogue.feature_mean, catalogue.feature_std, catalogue.features
        )
        self.own = None  # the name in checkpoints
        if catalogue.custom_features.names:
            self.own = CustomInputs(catalogue.custom_features, width, dropout)
        custom_columns = self.own.columns if self.own else []
        self.columns = [*catalogue.features[: len(self.mean)], *custom_columns]
        """(O,) name of the feature of each output column."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the columns (..., O) of `features` (..., F)."""
        if self.own is None:
            return super().forward(features)
        built_in = features[..., : len(self.mean)]
        custom_features = features[..., len(self.mean) :]
        return torch.cat([super().forward(built_in), self.own(custom_features)], -1)
