"""A search model or a model of actions as MLflow loads it: a history and candidates in, the candidates ranked out.

    model = mlflow.pyfunc.load_model("models:/beauty/1")
    model.predict(pandas.DataFrame([{"history": ["B01", "B02"], "history_query": ["lip balm", "soap"],
                                     "query": "soap", "candidates": ["B07", "B02"],
                                     "numbers": {"bm25": [7.1, 3.0]}}]))     # item_id, score

Run by MLflow, not imported; a "model from code" as `served_model.py` is. A row is one request. What its columns mean is
in `models/<family>/requests.py`; the names and the order of features, actions and labels are in the model's metadata.
Candidates that are not known are ranked last, in the order given, with the score NaN.

The model is on `model_config={"device": "cpu"}`.
"""

from __future__ import annotations

import math
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import mlflow
import pandas as pd
import torch
from mlflow.pyfunc import PythonModel

if (
    code := Path(__file__).with_name("code") / "models.zip"
).is_file():  # where it is served
    sys.path.insert(0, str(code))

from models import checkpoint, registry
from models.fit import to_device
from models.requests import Row, bundled
from models.scores import check_finite
from models.tables import UserError

ROWS = 256
"""Requests that are scored at once."""

Ranking = tuple[list[str], list[float]]
"""Candidates, best first, and their scores."""


class RequestRanker(PythonModel):
    """Ranks the candidates of each row of a frame."""

    def load_context(self, context: Any) -> None:
        folder = context.artifacts["data"]
        about = checkpoint.read(f"{folder}/checkpoint")
        entry = registry.find(about.name)
        settings = {**entry.family.requests.settings, **(context.model_config or {})}
        catalogue = entry.family.catalogue(
            bundled(folder), scale=False, scales=about.learned.get("scales")
        )
        self.model: Any = registry.load(f"{folder}/checkpoint", catalogue)[0]
        self.requests = entry.family.requests(folder, self.model, catalogue, settings)
        self.device = torch.device(settings["device"])
        self.model.to(self.device)
        self.lock = Lock()  # the model holds the texts of one batch at a time

    def predict(
        self,
        context: Any,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """`item_id` and `score`, the chance of the label `params["label"]` (by default the model's first one)."""
        label = (params or {}).get("label") or self.model.labels[0]
        if label not in self.model.labels:
            raise UserError(
                f"the model has no label '{label}'; choose one of {', '.join(self.model.labels)}"
            )
        column = list(self.model.labels).index(label)
        requests = [
            self.requests.read(Row(row)) for row in model_input.to_dict("records")
        ]
        ranked: list[Ranking] = []
        for first in range(0, len(requests), ROWS):
            with self.lock:
                ranked += self.rank(requests[first : first + ROWS], column)
        return pd.DataFrame(ranked, columns=["item_id", "score"])

    @torch.no_grad()
    def rank(self, requests: list[Any], label: int) -> list[Ranking]:
        """Return the candidates of each request with their scores, best first; unknown candidates are last."""
        batch = to_device(self.requests.batch(requests), self.device)
        chances = torch.zeros(0)
        if any(request.known for request in requests):
            chances = torch.sigmoid(
                check_finite(self.model.score(batch)[:, label].float())
            ).cpu()
        ends = accumulate((len(request.known) for request in requests), initial=0)
        return [
            in_order(request.candidates, request.known, chances[first:end])
            for request, (first, end) in zip(requests, pairwise(ends), strict=True)
        ]


def in_order(candidates: list[str], known: list[int], chances: torch.Tensor) -> Ranking:
    """The `known` candidates by their chances, then the others without."""
    order = chances.argsort(descending=True, stable=True).tolist()
    inside = set(known)
    others = [item for i, item in enumerate(candidates) if i not in inside]
    scores = chances.tolist()
    return [candidates[known[i]] for i in order] + others, [
        scores[i] for i in order
    ] + [math.nan] * len(others)


mlflow.models.set_model(RequestRanker())
