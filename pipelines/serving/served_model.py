"""A retrieval model as MLflow loads it: histories of item ids in, ranked item ids out. Run by MLflow, not imported.

Logged as a "model from code": this file, `models/` and the data of `package.py` are all that is stored, no
pickle. It needs PyTorch and MLflow alone. The model is on `model_config={"device": "cpu"}`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path
from threading import Lock
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import torch
from cachetools import LRUCache
from mlflow.pyfunc import PythonModel

if (
    code := Path(__file__).with_name("code") / "models.zip"
).is_file():  # where it is served
    sys.path.insert(0, str(code))

from models import checkpoint, registry
from models.fit import to_device
from models.requests import Row, bundled
from models.retrieval.recommend import allow
from models.retrieval.requests import EVERY
from models.setup import load_catalogue
from models.tables import UserError

MAX_CACHED_SETS = 64
"""Sets of allowed items whose masks are cached, the least recently used are dropped."""

MOST = 10_000
"""Items of an answer at most: what is ranked for more takes the memory of all who ask."""


class Ranker(PythonModel):
    """Ranks the catalogue for each row of a frame."""

    def load_context(self, context: Any) -> None:
        folder = context.artifacts["data"]
        about = checkpoint.read(f"{folder}/checkpoint")
        name = about.name
        catalogue = load_catalogue(name, bundled(folder), about)
        self.model: Any = registry.load(f"{folder}/checkpoint", catalogue)[0]
        requests = registry.find(name).family.requests
        self.requests: Any = requests(folder, self.model, catalogue, {})
        self.device = torch.device(
            {**requests.settings, **(context.model_config or {})}["device"]
        )
        self.model.to(self.device)
        self.warned = False
        self.allowed_masks: LRUCache[bytes, torch.Tensor] = LRUCache(MAX_CACHED_SETS)
        self.lock = Lock()  # guards allowed_masks

    def predict(
        self,
        context: Any,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """`history` (item ids, oldest first) to `item_id` and `score`, best first, and `unknown_items`: how many
        entries of a history are not in the catalogue. They are skipped.

        A history with no other entries gets an empty ranking, of which the model warns once. With `unseen` in `params`
        the items of the history are left out, and with `allowed`, a list of item ids, all but these.
        """
        options: dict[str, Any] = {
            "k": 10,
            "unseen": False,
            "allowed": EVERY,
            **(params or {}),
        }
        k, allowed = options["k"], self.allowed(options["allowed"])
        if not isinstance(k, int | np.integer) or not 1 <= k <= MOST:
            raise UserError(
                f"k is {k}; give the number of items to recommend, from 1 to {MOST:,}"
            )
        requests = [
            self.requests.read(Row(row)) for row in model_input.to_dict("records")
        ]
        if not self.warned and any(
            request.unknown and not request.items for request in requests
        ):
            self.warned = True
            warnings.warn(
                "a history has no item of the catalogue, so its ranking is empty; unknown_items counts them by row",
                stacklevel=2,
            )
        found: list[dict[str, Any]] = [
            {"item_id": [], "score": [], "unknown_items": request.unknown}
            for request in requests
        ]
        known = [place for place, request in enumerate(requests) if request.items]
        if known:
            batch = to_device(
                self.requests.batch([requests[place] for place in known]), self.device
            )
            most = min(int(k), len(self.requests.items))
            ranked, scores = self.model.recommend(
                batch, most, unseen=options["unseen"], allowed=allowed
            )
            for place, items, values in zip(known, ranked, scores, strict=True):
                real = items >= 0
                found[place]["item_id"] = [
                    self.requests.items[item] for item in items[real].tolist()
                ]
                found[place]["score"] = values[real].tolist()
        return pd.DataFrame(found, columns=["item_id", "score", "unknown_items"])

    def allowed(self, ids: list[str]) -> torch.Tensor | None:
        """Return the `allowed` of `recommend` for a set of item ids, cached; None where all items are allowed."""
        if ids == EVERY:
            return None
        key = hashlib.sha256(json.dumps([*map(str, ids)]).encode()).digest()
        with self.lock:
            if key not in self.allowed_masks:
                items = self.requests.allowed(ids).to(self.device)
                self.allowed_masks[key] = allow(self.model, items)
            return self.allowed_masks[key]


mlflow.models.set_model(Ranker())
