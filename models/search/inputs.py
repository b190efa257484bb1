"""What every search model reads: text embeddings reduced by a trained projection, and scaled features.

Shapes: `W` width of the encoder's text, `E` of the reduced text, `F` features, `O` columns that layers read of them,
`...` any index shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from models.layers.standardised import Standardised
from models.own_features import OwnInputs
from models.search.data import NO_QUERY, SearchCatalogue, pair_key


class Text(nn.Module):
    """Frozen text embeddings, held outside of the weights, and the trained reduction of documents and of queries."""

    queries: Tensor
    items: Tensor
    pairs: Tensor
    pair_keys: Tensor
    joint: Tensor

    def __init__(self, catalogue: SearchCatalogue, width: int) -> None:
        super().__init__()
        self.num_queries = catalogue.num_queries
        tables = {
            name: getattr(catalogue, name)
            for name in ("queries", "items", "pairs", "pair_keys")
        }
        tables["joint"] = torch.zeros(0) if catalogue.joint is None else catalogue.joint
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)
        # normalised vectors of W numbers are small beside features
        self.gain = 1 / catalogue.text_size if catalogue.text_size > 0 else 1.0
        self.document = nn.Linear(catalogue.items.shape[1], width)
        self.of_query = nn.Linear(catalogue.items.shape[1], width)

    def take_pairs(self, batch: dict[str, Tensor]) -> None:
        """Reads pairs in the tables that the batch brings, where it brings some (`attach_text`), and queries
        in that of a served request, whose numbers are the request's own."""
        if "queries" in batch:
            self.queries, self.num_queries = batch["queries"], len(batch["queries"])
        if "pairs" in batch:
            self.pair_keys, self.pairs = batch["pair_keys"], batch["pairs"]
            self.joint = batch.get("joint", self.joint)

    def query(self, query: Tensor) -> Tensor:
        """(..., E): the query alone; zero where there is none."""
        if not len(
            self.queries
        ):  # of a log without queries; of the graph, as DDP wants gradients of all weights
            return (
                self.of_query(self.items.new_zeros(*query.shape, self.items.shape[1]))
                * 0
            )
        return (
            self.of_query(self.gain * self.queries[query.clamp(min=0)])
            * (query != NO_QUERY)[..., None]
        )

    def item(self, item: Tensor) -> Tensor:
        """(..., E): the document alone. Padding gives that of item 0."""
        return self.document(self.gain * self.items[item.clamp(min=0)])

    def pair(self, item: Tensor, query: Tensor) -> Tensor:
        """(..., E): document and query together ([CLS] in Eq. 1 of QGS); the document alone without a query."""
        index = self.pair_index(item, query)
        alone = self.items[item.clamp(min=0)]
        if len(self.pairs):
            alone = torch.where(
                (index >= 0)[..., None], self.pairs[index.clamp(min=0)], alone
            )
        return self.document(self.gain * alone)

    def seen(self, item: Tensor, query: Tensor) -> Tensor:
        """(..., E): the [SEP] output over query and document, which has seen the document; zero without a query."""
        index = self.pair_index(item, query)
        return (
            self.of_query(self.gain * self.joint[index.clamp(min=0)])
            * (index >= 0)[..., None]
        )

    def pair_index(self, item: Tensor, query: Tensor) -> Tensor:
        """(...) int64: row of each pair; -1 for padding, without a query, and for a pair that was not encoded."""
        if not len(self.pair_keys):
            return torch.full_like(item, -1)
        has_query = (item >= 0) & (query != NO_QUERY)
        key = pair_key(item, query, self.num_queries)
        index = torch.searchsorted(self.pair_keys, key).clamp(
            max=len(self.pair_keys) - 1
        )
        return torch.where(has_query & (self.pair_keys[index] == key), index, -1)


class Scale(Standardised):
    """Features as layers read them: standardised; the log's own ones as `OwnInputs` gives them."""

    def __init__(self, catalogue: SearchCatalogue, width: int, dropout: float) -> None:
        super().__init__(
            catalogue.feature_mean, catalogue.feature_std, catalogue.features
        )
        self.own = (
            OwnInputs(catalogue.own, width, dropout) if catalogue.own.names else None
        )
        self.columns = [
            *catalogue.features[: len(self.mean)],
            *(self.own.columns if self.own else ()),
        ]
        """(O,) the feature that each column of the output is of."""

    def forward(self, features: Tensor) -> Tensor:
        """(..., O) of (..., F)."""
        if self.own is None:
            return super().forward(features)
        counted, own = features[..., : len(self.mean)], features[..., len(self.mean) :]
        return torch.cat([super().forward(counted), self.own(own)], -1)


def feature_groups(
    columns: Sequence[str], declared: Mapping[str, Collection[str]]
) -> dict[str, list[int]]:
    """Places of columns, given by their features, in the `declared` groups of features."""
    return {
        group: [i for i, name in enumerate(columns) if name in of]
        for group, of in declared.items()
    }
