"""The model as MLflow loads it: histories of item ids in, ranked item ids out. Run by MLflow, not imported.

Logged as a "model from code": this file, `models/` and the data of `package.py` are all that is stored, no
pickle. It needs PyTorch and MLflow alone.
"""

from __future__ import annotations

import warnings
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel

from models import checkpoint, registry
from models.inputs import Inputs
from models.item_ids import clean_id, item_ids
from models.retrieval.data import batch_of, hash_strings
from models.setup import load_catalogue
from models.tables import UserError, read_table


class Ranker(PythonModel):
    """Ranks the catalogue for each row of a frame."""

    def load_context(self, context: Any) -> None:
        folder = context.artifacts["data"]
        about = checkpoint.read(f"{folder}/checkpoint")
        catalogue = load_catalogue(about.name, Inputs(f"{folder}/tables", f"{folder}/sids"))
        self.model: Any = registry.load(f"{folder}/checkpoint", catalogue)[0]
        self.history = registry.config_from_dict(about.model).max_history
        self.items = read_table(f"{folder}/tables/items", "items", ["item_id"])["item_id"].to_pylist()
        self.index = {item: index for index, item in enumerate(self.items)}
        self.warned = False

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """`history` (item ids, oldest first) to `item_id` and `score`, best first, and `unknown_items`: how many
        entries of a history are not in the catalogue. They are skipped.

        A history with no other entries gets an empty ranking, of which the model warns once.
        """
        import pyarrow as pa

        k = int((params or {}).get("k", 10))
        if k < 1:
            raise UserError(f"k {k} is below 1; give the number of items to recommend")
        given = [item_ids("history", history) for history in model_input["history"]]
        found = [[self.index[item] for item in history if item in self.index] for history in given]
        unknown = [len(history) - len(items) for history, items in zip(given, found, strict=True)]
        if not self.warned and any(history and not items for history, items in zip(given, found, strict=True)):
            self.warned = True
            warnings.warn(
                "a history has no item of the catalogue, so its ranking is empty; unknown_items counts them by row",
                stacklevel=2,
            )
        histories = [items[-self.history :] for items in found]
        users = model_input["user_id"] if "user_id" in model_input else [""] * len(histories)
        hashes = hash_strings(pa.array([clean_id(str(user or "")) or "" for user in users], pa.string()))
        ranked: list[list[str]] = [[] for _ in histories]
        scores: list[list[float]] = [[] for _ in histories]
        known = [row for row, history in enumerate(histories) if history]
        if known:
            items, values = self.model.recommend(batch_of([histories[row] for row in known], hashes[known]), k)
            for place, row in enumerate(known):
                real = items[place] >= 0
                ranked[row] = [self.items[item] for item in items[place][real].tolist()]
                scores[row] = values[place][real].tolist()
        return pd.DataFrame({"item_id": ranked, "score": scores, "unknown_items": unknown})


mlflow.models.set_model(Ranker())
