"""Embeddings of texts, as jobs.encode writes them: tables of a fixed-size list column, by a dense key."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from models.storage.tables import UserError


def size_of(vectors: Tensor) -> float:
    """Root mean square of the numbers; 0 of none."""
    return float(vectors.square().mean().sqrt()) if vectors.numel() else 0.0


def vectors_of(table: pa.Table, column: str, rows: int, name: str) -> Tensor:
    """(rows, W) float32 of a fixed-size list column; a table of one key must be in the key's dense order."""
    if len(table) != rows:
        raise UserError(
            f"{name} has {len(table)} rows where {rows} are expected; run jobs.encode again"
        )
    keys = [key for key in ("item_index", "query_index") if key in table.column_names]
    if len(keys) == 1 and not np.array_equal(
        table[keys[0]].to_numpy().astype(np.int64), np.arange(rows)
    ):
        raise UserError(
            f"{name}: {keys[0]} is not dense and sorted from 0; run jobs.encode again"
        )
    values = table[column].combine_chunks()
    return torch.from_numpy(
        values.flatten()
        .to_numpy()
        .reshape(rows, values.type.list_size)
        .astype(np.float32)
    )
