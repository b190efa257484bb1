"""The catalogue's semantic IDs as a trie in CSR form: the valid next codes of a prefix.

A level is two tensors. The children of node `n` are the edges `offsets[n] : offsets[n +
1]`, `tokens` holds their codes in ascending order, and the number of an edge is the
node that it leads to. Edges of a level are sorted by prefix; edges of the last level
are the items (`leaves`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.storage.tables import UserError


class Trie(nn.Module):
    """CSR arrays per level, as buffers that move with a model but are not saved.

    Level l has `edges_l` edges and `nodes_l = edges_(l-1)` nodes (1 at the root).
    Shapes: `offsets` (nodes_l + 1,), `tokens` (edges_l,), `leaves` (N,) item_index, a
    permutation of 0 to N - 1.
    """

    leaves: Tensor

    def __init__(self, codes: Tensor, codebook_sizes: tuple[int, ...]) -> None:
        """Build the trie.

        Args:
            codes: (N, C) codes of the items.
            codebook_sizes: Number of codes per level.

        Raises:
            UserError: If there are no items, two items have equal codes, or a code is
                outside of its codebook.
        """
        super().__init__()
        codes = codes.long().cpu()
        items, levels = codes.shape
        if not items:
            raise UserError(
                "there are 0 items and a trie needs at least 1; check the filters of "
                "jobs.prepare"
            )
        if levels != len(codebook_sizes):
            raise ValueError(
                f"codes have {levels} levels and there are {len(codebook_sizes)} "
                f"codebooks; give one each"
            )
        for level, size in enumerate(codebook_sizes):
            outside = codes[(codes[:, level] < 0) | (codes[:, level] >= size), level]
            if len(outside):
                raise UserError(
                    f"code {int(outside[0])} at level {level} is outside of its "
                    f"codebook of {size}; run jobs.tokenize again"
                )
        self.codebook_sizes = codebook_sizes
        self.edges: list[int] = []
        """Edges per level: the number of distinct prefixes of that length."""
        self.max_branching: list[int] = []
        """Children of the level's widest node."""
        order = torch.arange(items)
        # a radix sort: stable sorts from the last code to the first
        for level in reversed(range(levels)):
            order = order[torch.argsort(codes[order, level], stable=True)]
        ordered = codes[order]
        is_new = torch.zeros(items, dtype=torch.bool)
        is_new[0] = True
        nodes = 1
        node = torch.zeros(items, dtype=torch.long)  # the node of each item's prefix
        for level in range(levels):
            is_new[1:] |= ordered[1:, level] != ordered[:-1, level]
            counts = torch.bincount(node[is_new], minlength=nodes)
            offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
            self.register_buffer(f"offsets_{level}", offsets, persistent=False)
            self.register_buffer(
                f"tokens_{level}", ordered[is_new, level].contiguous(), persistent=False
            )
            node, nodes = is_new.cumsum(0) - 1, int(is_new.sum())
            self.edges.append(nodes)
            self.max_branching.append(int(counts.max()))
        if nodes != items:
            duplicate = int((~is_new).nonzero()[0])
            raise UserError(
                f"items {int(order[duplicate - 1])} and {int(order[duplicate])} have "
                f"the same codes {ordered[duplicate].tolist()}; add a conflict level "
                f"or use --tokenizer psid"
            )
        self.register_buffer("leaves", order, persistent=False)

    @property
    def levels(self) -> int:
        return len(self.edges)

    @property
    def num_items(self) -> int:
        return self.edges[-1]

    def offsets(self, level: int) -> Tensor:
        """Return the offsets (nodes + 1,) int64 of each node's edges."""
        return self.get_buffer(f"offsets_{level}")

    def tokens(self, level: int) -> Tensor:
        """Return the code (edges,) int64 of each edge."""
        return self.get_buffer(f"tokens_{level}")

    def branching(self) -> list[float]:
        """Return the mean number of children per level (Table 7 of SID-MLP)."""
        return [e / n for e, n in zip(self.edges, [1, *self.edges[:-1]], strict=True)]

    def edge_columns(self) -> dict[str, Tensor]:
        """Return the columns of the `trie` table, with a row per edge.

        Rows are sorted by `level` and `child`, the rank of the edge within its level.
        `node` is the rank of the parent's edge (0 at the root), `token` the code, and
        `item_index` the item at the last level, -1 above it.
        """
        columns: dict[str, list[Tensor]] = {
            name: [] for name in ("level", "node", "token", "child", "item_index")
        }
        for level, count in enumerate(self.edges):
            offsets = self.offsets(level)
            columns["level"].append(torch.full((count,), level))
            columns["node"].append(
                torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
            )
            columns["token"].append(self.tokens(level))
            columns["child"].append(torch.arange(count))
            columns["item_index"].append(
                self.leaves if level == self.levels - 1 else torch.full((count,), -1)
            )
        return {name: torch.cat(parts) for name, parts in columns.items()}

    def edges_to(self, items: Tensor) -> Tensor:
        """Mark the edges that lead to a set of items.

        Args:
            items: (N,) bool set of items.

        Returns:
            (E,) bool, level after level.
        """
        levels = [items[self.leaves]]
        for level in reversed(range(1, self.levels)):
            before = functional.pad(levels[0].cumsum(0), (1, 0))[self.offsets(level)]
            levels.insert(0, before[1:] > before[:-1])
        return torch.cat(levels)

    def get_children(self, level: int, node: Tensor) -> tuple[Tensor, Tensor]:
        """Return the edges of nodes (...) in ascending order.

        Args:
            level: Level of the edges.
            node: (...) nodes.

        Returns:
            Edges (..., M), 0 at padding, and a mask (..., M) of the valid edges. M is
            the number of edges of the widest of the nodes; a GPU, which would have to
            wait for that, uses the widest node of the level.
        """
        offsets = self.offsets(level)
        begin = offsets[node]
        count = offsets[node + 1] - begin
        on_cpu = node.device.type == "cpu" and not torch.compiler.is_compiling()
        widest = int(count.max()) if on_cpu else self.max_branching[level]
        child = torch.arange(widest, device=node.device)
        valid = child < count.unsqueeze(-1)
        return torch.where(valid, begin.unsqueeze(-1) + child, 0), valid

    def descend(self, level: int, node: Tensor, token: Tensor) -> Tensor:
        """Return the child of `node` along `token`, or -1, for tensors of any shape."""
        tokens, offsets = self.tokens(level), self.offsets(level)
        size = self.codebook_sizes[level]
        parent = torch.arange(len(offsets) - 1, device=tokens.device)
        # output_size avoids waiting for a GPU
        parent = torch.repeat_interleave(
            parent, offsets.diff(), output_size=len(tokens)
        )
        keys = parent * size + tokens  # ascending, as edges are sorted
        wanted = node * size + token
        edge = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        found = (keys[edge] == wanted) & (node >= 0) & (token >= 0) & (token < size)
        return torch.where(found, edge, -1)

    def lookup(self, codes: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the item_index of code tuples.

        Args:
            codes: (..., C) codes.
            allowed: Edges from `edges_to`; other items are not returned. None for all.

        Returns:
            (...) item_index, -1 if there is no item.
        """
        node = torch.zeros_like(codes[..., 0])
        for level in range(self.levels):
            node = self.descend(level, node, codes[..., level])
        leaf = node.clamp(min=0)
        exists = node >= 0
        if allowed is not None:
            exists &= allowed.split(self.edges)[-1][leaf]
        return torch.where(exists, self.leaves[leaf], -1)
