"""Read the tables of text embeddings that jobs.encode writes.

A table has key columns (`item_index`, `query_index`, or both for pairs) and columns of
vectors. A single key is dense and sorted from 0.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from core.tables import Table
from models.dataset.dataset import Columns, open_columns


def root_mean_square(vectors: Tensor) -> float:
    """Return the root mean square of all numbers, 0 for an empty tensor."""
    return float(vectors.square().mean().sqrt()) if vectors.numel() else 0.0


def read_vectors(table: pa.Table, column: str) -> Tensor:
    """Return a fixed-size list column as (rows, W) float32."""
    vectors = table[column].combine_chunks()
    flat = vectors.flatten().to_numpy()
    matrix = flat.reshape(len(table), vectors.type.list_size).astype(np.float32)
    return torch.from_numpy(matrix)


def open_vectors(table: Table) -> Columns:
    """Memory-map a table of text vectors.

    Returns:
        Each key column as (n,) int64, and each column of vectors as (n, W) float32.
    """
    return open_columns(table, "text", None, _decode_vectors)


def _decode_vectors(table: pa.Table) -> Columns:
    """Decode one part of a table of text vectors."""
    columns: Columns = {}
    for field in table.schema:
        if pa.types.is_fixed_size_list(field.type):
            columns[field.name] = read_vectors(table, field.name).numpy()
        else:
            columns[field.name] = table[field.name].to_numpy().astype(np.int64)
    return columns
