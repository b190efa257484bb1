"""SIDs as a trie: one row per edge, level by level, in the order of the `trie` table."""

from __future__ import annotations

import numpy as np

from models.tables import UserError


def trie_edges(codes: np.ndarray) -> dict[str, np.ndarray]:
    """The edges of the trie of `codes` (N, C), whose row i is item_index i.

    Columns `level`, `node`, `token`, `child` and `item_index` (-1 above the last level). Rows are sorted by
    (level, child); `child` is the edge's rank within its level, `node` the rank of its parent's edge in the
    level above (0, the root, at level 0), and edges of one level are in the order of (node, token), which is
    the lexicographic order of prefixes. Raises UserError if two items have the same codes.
    """
    items, depth = codes.shape
    order = np.lexsort(codes.T[::-1])  # item indexes in lexicographic order of their codes
    ordered = codes[order]
    # whether a row opens a new prefix of length level + 1
    opens = np.ones((items, depth), dtype=bool)
    opens[1:] = np.logical_or.accumulate(ordered[1:] != ordered[:-1], axis=1)
    if not opens[:, -1].all():
        second = int(np.flatnonzero(~opens[:, -1])[0])
        raise UserError(
            f"items {order[second - 1]} and {order[second]} have the same codes {ordered[second].tolist()}; add a "
            f"conflict level or use --tokenizer psid"
        )
    ranks = np.cumsum(opens, axis=0) - 1  # (N, C): rank of each row's prefix within its level
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("level", "node", "token", "child", "item_index")}
    for level in range(depth):
        first = opens[:, level]  # the first row of each prefix stands for its edge
        count = int(first.sum())
        columns["level"].append(np.full(count, level))
        columns["node"].append(ranks[first, level - 1] if level else np.zeros(count, dtype=np.int64))
        columns["token"].append(ordered[first, level])
        columns["child"].append(np.arange(count))
        columns["item_index"].append(order if level == depth - 1 else np.full(count, -1))
    return {name: np.concatenate(parts) for name, parts in columns.items()}
