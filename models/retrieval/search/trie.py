"""The catalogue's semantic IDs as a trie in CSR form: what a decoder may say next.

A level is two tensors. The children of node `n` are the edges `offsets[n] : offsets[n + 1]`, `tokens`
holds their codes in rising order, and an edge's number is the node it leads to. Edges of a level are in
lexicographic order of their prefixes; those of the last level are the items (`leaves`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.storage.tables import UserError


class Trie(nn.Module):
    """CSR arrays per level, as buffers that follow a model to its device and stay out of checkpoints.

    Shapes: level l has `edges_l` edges and `nodes_l = edges_(l-1)` nodes (1 at the root); `offsets`
    (nodes_l + 1,), `tokens` (edges_l,), `leaves` (N,) item_index, a permutation of 0 to N - 1.
    """

    leaves: Tensor

    def __init__(self, codes: Tensor, codebook_sizes: tuple[int, ...]) -> None:
        """Item i has the codes of row i of `codes` (N, C). Raises UserError for equal rows, for none, and for a code
        that is outside of its codebook."""
        super().__init__()
        codes = codes.long().cpu()
        items, levels = codes.shape
        if not items:
            raise UserError(
                "there are 0 items and a trie needs at least 1; check the filters of jobs.prepare"
            )
        if levels != len(codebook_sizes):
            raise ValueError(
                f"codes have {levels} levels and there are {len(codebook_sizes)} codebooks; give one each"
            )
        for level, size in enumerate(codebook_sizes):
            outside = codes[(codes[:, level] < 0) | (codes[:, level] >= size), level]
            if len(outside):
                raise UserError(
                    f"code {int(outside[0])} at level {level} is outside of its codebook of {size}; run jobs.tokenize "
                    f"again"
                )
        self.codebook_sizes = codebook_sizes
        self.edges: list[int] = []
        """Edges per level: the number of distinct prefixes of that length."""
        self.max_branching: list[int] = []
        """Children of the level's widest node."""
        order = torch.arange(items)
        for level in reversed(
            range(levels)
        ):  # a radix sort: stable sorts from the last code to the first
            order = order[torch.argsort(codes[order, level], stable=True)]
        ordered = codes[order]
        new = torch.zeros(items, dtype=torch.bool)
        new[0] = True
        nodes, node = (
            1,
            torch.zeros(items, dtype=torch.long),
        )  # the node that each item has reached
        for level in range(levels):
            new[1:] |= ordered[1:, level] != ordered[:-1, level]
            counts = torch.bincount(node[new], minlength=nodes)
            offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
            self.register_buffer(f"offsets_{level}", offsets, persistent=False)
            self.register_buffer(
                f"tokens_{level}", ordered[new, level].contiguous(), persistent=False
            )
            node, nodes = new.cumsum(0) - 1, int(new.sum())
            self.edges.append(nodes)
            self.max_branching.append(int(counts.max()))
        if nodes != items:
            at = int((~new).nonzero()[0])
            raise UserError(
                f"items {int(order[at - 1])} and {int(order[at])} have the same codes {ordered[at].tolist()}; add a "
                f"conflict level or use --tokenizer psid"
            )
        self.register_buffer("leaves", order, persistent=False)

    @property
    def levels(self) -> int:
        return len(self.edges)

    @property
    def num_items(self) -> int:
        return self.edges[-1]

    def offsets(self, level: int) -> Tensor:
        """(nodes + 1,) int64: where each node's edges begin."""
        return self.get_buffer(f"offsets_{level}")

    def tokens(self, level: int) -> Tensor:
        """(edges,) int64: the code on each edge."""
        return self.get_buffer(f"tokens_{level}")

    def branching(self) -> list[float]:
        """Mean number of children of a node, per level (Table 7 of the SID-MLP paper)."""
        return [e / n for e, n in zip(self.edges, [1, *self.edges[:-1]], strict=True)]

    def edge_columns(self) -> dict[str, Tensor]:
        """A row per edge, as the `trie` table has them: sorted by `level` and `child`, the edge's rank within its
        level; `node` is the rank of its parent's edge in the level above (0 at the root), `token` its code and
        `item_index` the item at the last level, -1 above it."""
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
        """(E,) bool of a set of items (N,) bool: the edges that lead to one of them, level after level."""
        found = [items[self.leaves]]
        for level in reversed(range(1, self.levels)):
            before = functional.pad(found[0].cumsum(0), (1, 0))[self.offsets(level)]
            found.insert(0, before[1:] > before[:-1])
        return torch.cat(found)

    def children_of(self, level: int, node: Tensor) -> tuple[Tensor, Tensor]:
        """(edges, valid), each (..., M): the level's edges of each `node` (...), rising, M as many as the widest of
        them has (on a GPU, which would have to wait to know it, the widest of the level); an edge that is not valid
        is 0."""
        offsets = self.offsets(level)
        begin = offsets[node]
        count = offsets[node + 1] - begin
        on_cpu = node.device.type == "cpu" and not torch.compiler.is_compiling()
        widest = int(count.max()) if on_cpu else self.max_branching[level]
        child = torch.arange(widest, device=node.device)
        valid = child < count.unsqueeze(-1)
        return torch.where(valid, begin.unsqueeze(-1) + child, 0), valid

    def descend(self, level: int, node: Tensor, token: Tensor) -> Tensor:
        """The child of `node` along `token`, -1 where there is none (or where `node` is -1). Any shape."""
        tokens, offsets = self.tokens(level), self.offsets(level)
        size = self.codebook_sizes[level]
        parent = torch.arange(len(offsets) - 1, device=tokens.device)
        # of a size that is known, as a GPU would have to be waited for
        parent = torch.repeat_interleave(
            parent, offsets.diff(), output_size=len(tokens)
        )
        keys = parent * size + tokens  # rising: edges are sorted by (node, token)
        wanted = node * size + token
        edge = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        found = (keys[edge] == wanted) & (node >= 0) & (token >= 0) & (token < size)
        return torch.where(found, edge, -1)

    def lookup(self, codes: Tensor, allowed: Tensor | None = None) -> Tensor:
        """item_index of each tuple in (..., C) codes, -1 where no item has it, or one that `edges_to` leaves out."""
        node = torch.zeros_like(codes[..., 0])
        for level in range(self.levels):
            node = self.descend(level, node, codes[..., level])
        leaf = node.clamp(min=0)
        there = (
            node >= 0
            if allowed is None
            else (node >= 0) & allowed.split(self.edges)[-1][leaf]
        )
        return torch.where(there, self.leaves[leaf], -1)
