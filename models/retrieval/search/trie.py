"""The catalogue's semantic IDs as a trie in CSR form: what a decoder may say next.

A level is two tensors. The children of node `n` are the edges `offsets[n] : offsets[n + 1]`, `tokens`
holds their codes in rising order, and an edge's number is the node it leads to. Edges of a level are in
lexicographic order of their prefixes; those of the last level are the items (`leaves`).

All of this is checked once, when a trie is made: searches believe it, and compiled ones read where it points.
"""

from __future__ import annotations

from typing import Self

import pyarrow as pa
import torch
from torch import Tensor, nn

from models.tables import UserError


class Trie(nn.Module):
    """CSR arrays per level, as buffers that follow a model to its device and stay out of checkpoints.

    Shapes: level l has `edges_l` edges and `nodes_l = edges_(l-1)` nodes (1 at the root); `offsets`
    (nodes_l + 1,), `tokens` (edges_l,), `leaves` (N,) item_index, a permutation of 0 to N - 1. Raises UserError for
    arrays that are no such trie.
    """

    leaves: Tensor

    def __init__(
        self, offsets: list[Tensor], tokens: list[Tensor], leaves: Tensor, codebook_sizes: tuple[int, ...]
    ) -> None:
        super().__init__()
        _check(offsets, tokens, leaves, codebook_sizes)
        self.codebook_sizes = codebook_sizes
        self.edges = [len(t) for t in tokens]
        """Edges per level: the number of distinct prefixes of that length."""
        self.max_branching = [int(o.diff().max()) for o in offsets]
        """Children of the level's widest node."""
        for level, (offset, token) in enumerate(zip(offsets, tokens, strict=True)):
            self.register_buffer(f"offsets_{level}", offset, persistent=False)
            self.register_buffer(f"tokens_{level}", token, persistent=False)
        self.register_buffer("leaves", leaves, persistent=False)

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

    @classmethod
    def from_codes(cls, codes: Tensor, codebook_sizes: tuple[int, ...]) -> Self:
        """The trie of (N, C) codes; item i has the codes of row i. Raises UserError for equal rows and for none."""
        codes = codes.long().cpu()
        items, levels = codes.shape
        if not items:
            raise UserError("there are 0 items and a trie needs at least 1; check the filters of jobs.prepare")
        if levels != len(codebook_sizes):
            raise ValueError(f"codes have {levels} levels and there are {len(codebook_sizes)} codebooks; give one each")
        order = torch.arange(items)
        for level in reversed(range(levels)):  # a radix sort: stable sorts from the last code to the first
            order = order[torch.argsort(codes[order, level], stable=True)]
        ordered = codes[order]
        new = torch.zeros(items, dtype=torch.bool)
        new[0] = True
        nodes, node = 1, torch.zeros(items, dtype=torch.long)  # the node that each item has reached
        offsets, tokens = [], []
        for level in range(levels):
            new[1:] |= ordered[1:, level] != ordered[:-1, level]
            counts = torch.bincount(node[new], minlength=nodes)
            offsets.append(torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]))
            tokens.append(ordered[new, level].contiguous())
            node = new.cumsum(0) - 1
            nodes = len(tokens[-1])
        if nodes != items:
            at = int((~new).nonzero()[0])
            raise UserError(
                f"items {int(order[at - 1])} and {int(order[at])} have the same codes {ordered[at].tolist()}; add a "
                f"conflict level or use --tokenizer psid"
            )
        return cls(offsets, tokens, order, codebook_sizes)

    def edge_columns(self) -> dict[str, Tensor]:
        """A row per edge, as the `trie` table has them: sorted by `level` and `child`, the edge's rank within its
        level; `node` is the rank of its parent's edge in the level above (0 at the root), `token` its code and
        `item_index` the item at the last level, -1 above it."""
        columns: dict[str, list[Tensor]] = {name: [] for name in ("level", "node", "token", "child", "item_index")}
        for level, count in enumerate(self.edges):
            offsets = self.offsets(level)
            columns["level"].append(torch.full((count,), level))
            columns["node"].append(torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff()))
            columns["token"].append(self.tokens(level))
            columns["child"].append(torch.arange(count))
            columns["item_index"].append(self.leaves if level == self.levels - 1 else torch.full((count,), -1))
        return {name: torch.cat(parts) for name, parts in columns.items()}

    @classmethod
    def from_table(cls, table: pa.Table, codebook_sizes: tuple[int, ...]) -> Self:
        """The trie of a `trie` table, whose rows are sorted by (level, child)."""
        level, node, token, child = (_column(table, name) for name in ("level", "node", "token", "child"))
        if len(level) == 0 or int(level.min()) < 0 or int(level.max()) >= len(codebook_sizes):
            raise _damaged(f"it has no edges, or edges outside of its {len(codebook_sizes)} levels")
        offsets, tokens = [], []
        nodes, begin = 1, 0
        for depth, edges in enumerate(torch.bincount(level, minlength=len(codebook_sizes)).tolist()):
            rows = slice(begin, begin + edges)
            key = node[rows] * (max(codebook_sizes) + 1) + token[rows]
            sound = (
                edges > 0
                and bool((level[rows] == depth).all())
                and torch.equal(child[rows], torch.arange(edges))
                and bool((key.diff() > 0).all())
                and torch.equal(node[rows].unique(), torch.arange(nodes))
            )
            if not sound:
                raise _damaged(f"its edges at level {depth} do not form a tree")
            counts = torch.bincount(node[rows], minlength=nodes)
            offsets.append(torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]))
            tokens.append(token[rows].clone())
            begin, nodes = begin + edges, edges
        leaves = _column(table.slice(begin - nodes, nodes), "item_index")
        return cls(offsets, tokens, leaves, codebook_sizes)

    def check_leads_to(self, codes: Tensor) -> None:
        """Raises UserError unless each item of the (N, C) `codes` is what the trie finds by them."""
        found = self.lookup(codes)
        if len(codes) != self.num_items or not torch.equal(found, torch.arange(len(codes))):
            wrong = (found != torch.arange(len(codes))).nonzero()
            where = f"; item {int(wrong[0])} is not found by {codes[wrong[0, 0]].tolist()}" if len(wrong) else ""
            raise _damaged(f"its {self.num_items} leaves are not those of the {len(codes)} semantic IDs{where}")

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
        parent = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=tokens.device), offsets.diff())
        keys = parent * size + tokens  # rising: edges are sorted by (node, token)
        wanted = node * size + token
        edge = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        found = (keys[edge] == wanted) & (node >= 0) & (token >= 0) & (token < size)
        return torch.where(found, edge, -1)

    def lookup(self, codes: Tensor) -> Tensor:
        """item_index of each tuple in (..., C) codes, -1 where no item has it."""
        node = torch.zeros_like(codes[..., 0])
        for level in range(self.levels):
            node = self.descend(level, node, codes[..., level])
        return torch.where(node >= 0, self.leaves[node.clamp(min=0)], -1)


def _check(offsets: list[Tensor], tokens: list[Tensor], leaves: Tensor, sizes: tuple[int, ...]) -> None:
    """UserError unless the arrays are a trie over codebooks of these sizes."""
    if not len(offsets) == len(tokens) == len(sizes) > 0:
        raise _damaged(f"it has {len(tokens)} levels for {len(sizes)} codebooks")
    nodes = 1
    for level, (offset, token, size) in enumerate(zip(offsets, tokens, sizes, strict=True)):
        outside = token[(token < 0) | (token >= size)]
        if len(outside):
            raise _damaged(f"token {int(outside[0])} at level {level} is outside of its codebook of {size}")
        children = offset.diff()
        if len(offset) != nodes + 1 or int(offset[0]) or int(offset[-1]) != len(token) or int(children.min()) < 1:
            raise _damaged(f"its edges at level {level} do not form a tree")
        parent = torch.repeat_interleave(torch.arange(nodes, device=token.device), children)
        if not bool(((parent * size + token).diff() > 0).all()):
            raise _damaged(f"its edges at level {level} are not in order, or repeat")
        nodes = len(token)
    if not torch.equal(leaves.sort().values, torch.arange(nodes, device=leaves.device)):
        raise _damaged(f"its {nodes} leaves are not the items 0 to {nodes - 1}, each once")


def _column(table: pa.Table, name: str) -> Tensor:
    """An integer column without nulls as int64."""
    column = table[name] if name in table.column_names else pa.chunked_array([pa.nulls(1)])
    if column.null_count or not pa.types.is_integer(column.type):
        raise _damaged(f"its column {name} is missing, has gaps or holds no integers")
    return torch.from_numpy(column.to_numpy().astype("int64"))


def _damaged(why: str) -> UserError:
    return UserError(f"the trie is damaged: {why}; run jobs.tokenize again")
