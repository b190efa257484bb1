"""Write the nearest items of each item by a trained model to a Parquet file.

python -m jobs.evaluate --checkpoint RUN --tables TABLES --nearest FILE.parquet
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from core.files import write_file
from models.loaded_model import LoadedModel
from pipelines.evaluation.config import EvaluateConfig
from pipelines.training.record import find_checkpoint


def write_nearest(config: EvaluateConfig) -> pa.Table:
    """Write the table of `find_nearest` to the Parquet file `config.nearest`."""
    uri = find_checkpoint(config.checkpoint)
    loaded = LoadedModel.load(uri, config.inputs, trust_code=config.trust_code)
    table = find_nearest(loaded, config.k)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_file(str(config.nearest), sink.getvalue().to_pybytes())
    return table


def find_nearest(loaded: LoadedModel, k: int) -> pa.Table:
    """Return `item_id`, `nearest` (best first, at most k) and `score` of all items."""
    # (N, K) each; items are negative after the end of a shorter list
    items, scores = loaded.model.nearest_items(k)
    id_column = loaded.catalogue.versions["items"].read(["item_id"])["item_id"]
    ids = id_column.to_pylist()
    nearest, nearest_scores = [], []
    for item_row, score_row in zip(items, scores.tolist(), strict=True):
        neighbours = item_row[item_row >= 0].tolist()
        nearest.append([ids[item] for item in neighbours])
        nearest_scores.append(score_row[: len(neighbours)])
    columns = {"item_id": id_column, "nearest": nearest, "score": nearest_scores}
    return pa.table(columns)
