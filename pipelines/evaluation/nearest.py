"""Each item's nearest items by a trained model, as a Parquet file.

python -m jobs.evaluate --checkpoint RUN --tables TABLES --nearest FILE.parquet --k 10
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from models.loaded_model import LoadedModel
from models.storage.inputs import Inputs
from models.storage.tables import join, read_table
from models.storage.uri import write_file
from pipelines.training.record import find_checkpoint


def write_nearest(checkpoint: str, inputs: Inputs, file: str, k: int) -> int:
    """Write `item_id`, `nearest` (best first) and `score` per item; return the items."""
    loaded = LoadedModel.load(find_checkpoint(checkpoint), inputs)
    items, scores = loaded.model.nearest_items(k)
    ids = read_table(join(inputs.tables, "items"), "items", ["item_id"])["item_id"]
    names = ids.to_pylist()
    real = [row[row >= 0].tolist() for row in items]
    pairs = zip(real, scores.tolist(), strict=True)
    table = pa.table(
        {
            "item_id": ids,
            "nearest": [[names[item] for item in row] for row in real],
            "score": [values[: len(row)] for row, values in pairs],
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_file(file, sink.getvalue().to_pybytes())
    return len(names)
