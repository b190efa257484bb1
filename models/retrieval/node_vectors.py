"""Item vectors that are sums of the vectors on a path of the trie of semantic IDs.

Every node of the trie but the root has a vector, and an item's vector is the sum of the
vectors of the nodes on its path. The last node of the path is the item itself:

    vector_item = own_item + sum of node_p over the item's proper prefixes p of codes

In tables that extend the training tables, nodes keep their vectors by their codes. The
vectors of a new item and of new nodes start at zero, so a new item starts as the sum of
the nodes that it shares with old items.

Shapes: `N` items, `L` levels (codes of an item), `D` width, `B` requests, `W` nodes,
`M` children of the widest node.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from core.errors import UserError
from models.cpu.weights import cache_until_changed
from models.custom_features import EmbeddingTables
from models.retrieval.data import Catalogue


class NodeVectors(EmbeddingTables):
    """The vectors of items and nodes, with the interface of an `nn.Embedding`."""

    new_items_are_zeros = True

    paths: Tensor
    """(N, L) edge of each item at each level of the trie."""

    def __init__(self, catalogue: Catalogue, dim: int) -> None:
        """Build a table of items, and one of nodes per level but the last.

        Row 0 of a table of nodes is zero, and row n + 1 is edge n of the trie's level.
        """
        super().__init__()
        if catalogue.sids is None or catalogue.trie is None:
            raise UserError("the model needs semantic IDs")
        self.trie, sids = catalogue.trie, catalogue.sids
        self.tables = nn.ModuleList([nn.Embedding(len(sids), dim)])
        names: list[list[str] | None] = [None]
        paths = []
        for level in range(self.trie.levels):
            # in lexicographic order, as the trie numbers its edges
            prefixes, edge = sids[:, : level + 1].unique(dim=0, return_inverse=True)
            paths.append(edge)
            if level < self.trie.levels - 1:
                nodes = nn.Embedding(1 + len(prefixes), dim, padding_idx=0)
                self.tables.append(nodes)
                names.append([" ".join(map(str, codes)) for codes in prefixes.tolist()])
        self.row_names = names
        self.register_buffer("paths", torch.stack(paths, 1), persistent=False)

    def forward(self, items: Tensor) -> Tensor:
        """Return the vectors (..., D) of `items` (...)."""
        own, *nodes = self.tables
        total = own(items)
        for level, table in enumerate(nodes):
            total += table(self.paths[items, level] + 1)
        return total

    @property
    def weight(self) -> Tensor:
        """The vectors (N, D) of all items; without gradients they are cached."""
        items = torch.arange(len(self.paths), device=self.paths.device)
        if torch.is_grad_enabled():
            return self(items)
        return cache_until_changed(self, "weight", lambda: self(items))

    def child_logits(
        self, states: Tensor, level: int, node: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Score each node's children by the dot product of state and child vector.

        Args:
            states: (B, D) states.
            level: Level of the children.
            node: (B, W) nodes.

        Returns:
            Edges (B, W, M) to the children, and their logits (B, W, M), -inf at
            padding.
        """
        own, *nodes = (table.get_parameter("weight") for table in self.tables)
        if level < len(nodes):
            vectors = nodes[level][1:]
        else:
            vectors = functional.embedding(self.trie.leaves, own)
        edge, valid = self.trie.get_children(level, node)
        logits = (states @ vectors.T).gather(1, edge.flatten(1)).view_as(edge)
        return edge, logits.masked_fill(~valid, -torch.inf)
