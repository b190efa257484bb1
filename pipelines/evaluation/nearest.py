"""Write the nearest items of each item by a trained model to a Parquet file.

python -m jobs.evaluate --checkpoint RUN --tables TABLES --nearest FILE.parquet
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from core.files import write_file
from core.schemas import Inputs
from models.loaded_model import LoadedModel
from pipelines.training.record import find_checkpoint


def write_nearest(
    checkpoint: str, inputs: Inputs, file: str, k: int
) -> tuple[int, int]:
    """Write a Parquet file with `item_id`, `nearest` (best first) and `score`.

    Args:
        checkpoint: Folder of a checkpoint, or of a run, whose best checkpoint is used.
        inputs: The tables, with N items.
        file: URI of the file.
        k: Number of nearest items.

    Returns:
        N, the number of rows, and the number of rows whose list is empty.
    """
    loaded = LoadedModel.load(find_checkpoint(checkpoint), inputs)
    # (N, K) each; items are negative after the end of a shorter list
    items, scores = loaded.model.nearest_items(k)
    id_column = loaded.catalogue.versions["items"].read(["item_id"])
    ids = id_column["item_id"].to_pylist()
    nearest, nearest_scores = [], []
    for item_row, score_row in zip(items, scores.tolist(), strict=True):
        neighbours = item_row[item_row >= 0].tolist()
        nearest.append([ids[item] for item in neighbours])
        nearest_scores.append(score_row[: len(neighbours)])
    table = pa.table(
        {
            "item_id": id_column["item_id"],
            "nearest": nearest,
            "score": nearest_scores,
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_file(file, sink.getvalue().to_pybytes())
    return len(ids), nearest.count([])
