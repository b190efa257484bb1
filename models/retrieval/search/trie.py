"""The catalogue's semantic IDs as a trie in CSR form: the valid next codes of a prefix.

A level is two tensors. The children of node `n` are the edges `offsets[n] : offsets[n +
1]`, `tokens` holds their codes in ascending order, and the number of an edge is the
node that it leads to. Edges of a level are sorted by prefix; edges of the last level
are the items (`leaves`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from core.errors import UserError


class Trie(nn.Module):
    """The codes of all items as a trie, in buffers that are not saved with a model.

    Level l has `edges[l]` edges and `edges[l - 1]` nodes (level 0 has 1 node, the
    root).
    """

    leaves: Tensor
    """(N,) item_index of each edge of the last level, a permutation of 0 to N - 1."""

    def __init__(self, codes: Tensor, codebook_sizes: tuple[int, ...]) -> None:
        """Build the trie.

        Args:
            codes: (N, C) codes of the items.
            codebook_sizes: Number of codes per level.
        """
        super().__init__()
        codes = codes.long().cpu()
        items, levels = codes.shape
        if not items:
            raise UserError("there are 0 items and a trie needs at least 1")
        is_outside = (codes < 0) | (codes >= torch.tensor(codebook_sizes))
        if is_outside.any():
            item, level = is_outside.nonzero()[0].tolist()
            raise UserError(
                f"code {int(codes[item, level])} at level {level} is outside of its "
                f"codebook of {codebook_sizes[level]}"
            )
        self.codebook_sizes = codebook_sizes
        self.edges: list[int] = []
        """Number of edges per level, which is the number of distinct prefixes."""
        self.max_branching: list[int] = []
        """Most children of a node, per level."""
        order = torch.from_numpy(np.lexsort(codes.numpy().T[::-1]))
        ordered = codes[order]
        # (N, C) whether the item's prefix differs from the one before
        differs = torch.ones_like(codes, dtype=torch.bool)
        differs[1:] = (ordered[1:] != ordered[:-1]).cumsum(1) > 0
        node = torch.zeros(items, dtype=torch.long)  # node of each item's prefix
        num_nodes = 1
        for level in range(levels):
            is_new = differs[:, level]
            counts = torch.bincount(node[is_new], minlength=num_nodes)
            offsets = functional.pad(counts.cumsum(0), (1, 0))
            tokens = ordered[is_new, level].contiguous()
            self.register_buffer(f"offsets_{level}", offsets, persistent=False)
            self.register_buffer(f"tokens_{level}", tokens, persistent=False)
            node = is_new.cumsum(0) - 1
            num_nodes = int(is_new.sum())
            self.edges.append(num_nodes)
            self.max_branching.append(int(counts.max()))
        if num_nodes != items:
            duplicate = int((~is_new).nonzero()[0])
            raise UserError(
                f"items {int(order[duplicate - 1])} and {int(order[duplicate])} have "
                f"the same codes {ordered[duplicate].tolist()}"
            )
        self.register_buffer("leaves", order, persistent=False)

    @property
    def levels(self) -> int:
        """Number C of levels."""
        return len(self.edges)

    def offsets(self, level: int) -> Tensor:
        """Return the offsets (nodes + 1,) int64 of each node's edges."""
        return self.get_buffer(f"offsets_{level}")

    def tokens(self, level: int) -> Tensor:
        """Return the code (edges,) int64 of each edge."""
        return self.get_buffer(f"tokens_{level}")

    def mark_edges(self, items: Tensor) -> Tensor:
        """Return a mask of the edges that lead to any of the given items.

        Args:
            items: (N,) mask of items.

        Returns:
            (E,) mask of the edges of all levels, concatenated from the first level on.
        """
        is_marked = items[self.leaves]
        levels = [is_marked]
        for level in reversed(range(1, self.levels)):
            # an edge leads to a given item if any edge of its child node does
            num_marked = functional.pad(is_marked.cumsum(0), (1, 0))
            num_before = num_marked[self.offsets(level)]
            is_marked = num_before[1:] > num_before[:-1]
            levels.insert(0, is_marked)
        return torch.cat(levels)

    def get_children(self, level: int, node: Tensor) -> tuple[Tensor, Tensor]:
        """Return the edges of nodes (...) in ascending order.

        Args:
            level: Level of the edges.
            node: (...) nodes.

        Returns:
            Edges (..., M), 0 at padding, and a mask (..., M) of the valid edges. On a
            CPU, M is the most edges of the given nodes; on a GPU, the most edges of
            any node of the level, to avoid synchronisation.
        """
        offsets = self.offsets(level)
        begin = offsets[node]
        count = offsets[node + 1] - begin
        on_cpu = node.device.type == "cpu"
        widest = int(count.max()) if on_cpu else self.max_branching[level]
        child = torch.arange(widest, device=node.device)
        valid = child < count.unsqueeze(-1)
        return torch.where(valid, begin.unsqueeze(-1) + child, 0), valid

    def descend(self, level: int, node: Tensor, token: Tensor) -> Tensor:
        """Return the edges from nodes along tokens.

        Args:
            level: Level of the edges.
            node: (...) nodes, -1 for none.
            token: (...) codes of the level's codebook.

        Returns:
            (...) edges, -1 if a node has no edge with the code.
        """
        tokens, offsets = self.tokens(level), self.offsets(level)
        parent = torch.arange(len(offsets) - 1, device=tokens.device)
        # output_size avoids waiting for a GPU
        parent = torch.repeat_interleave(
            parent, offsets.diff(), output_size=len(tokens)
        )
        size = self.codebook_sizes[level]
        edge_keys = parent * size + tokens  # ascending, as edges are sorted
        key = node * size + token  # negative without a node
        edge = torch.searchsorted(edge_keys, key).clamp(max=len(edge_keys) - 1)
        return torch.where(edge_keys[edge] == key, edge, -1)

    def lookup(self, codes: Tensor) -> Tensor:
        """Return the item_index (...) of codes (..., C), -1 if no item has them."""
        node = torch.zeros_like(codes[..., 0])
        for level in range(self.levels):
            node = self.descend(level, node, codes[..., level])
        return torch.where(node >= 0, self.leaves[node], -1)
