"""Answer requests with a trained model, as MLflow loads it.

    model = mlflow.pyfunc.load_model("models:/industrial/1")
    model.predict(pandas.DataFrame([{"history": ["B01", "B02"]}]), params={"k": 10})

It is logged as a "model from code": MLflow runs this file, beside `models/` and the
data of `package.py`, without pickle. It needs PyTorch and MLflow alone. Retrieval
models rank their catalogue after a history, the others the candidates of a request;
`models/<family>/requests.py` has the columns of a request. `model_config={"device":
"cuda"}` puts the model on a GPU.

A key that the signature does not have is refused: MLflow would drop it, with a warning
in its log, and a misspelt `allowed` would then let all items through
(`refuse_unknown_keys`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from functools import wraps
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import torch
from cachetools import LRUCache
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from mlflow.pyfunc import PyFuncModel, PythonModel, scoring_server

if (
    code := Path(__file__).with_name("code") / "models.zip"
).is_file():  # where it is served
    sys.path.insert(0, str(code))

from models import registry
from models.build import load_model
from models.config import nearest, pluralize
from models.item_ids import parse_allowed
from models.metrics.scores import check_finite
from models.requests import Row, find_bundled_inputs
from models.retrieval.requests import EVERY
from models.storage import checkpoint
from models.storage.tables import UserError

MAX_CACHED_SETS = 64
"""Sets of allowed items whose masks are cached; least recently used sets are
dropped."""

MAX_K = 10_000
"""Items of an answer, at most: a longer ranking takes the memory of other requests."""

MAX_SCORED_REQUESTS = 256
"""Requests whose candidates are scored in one batch, at most."""

ROW_KEYS = ("dataframe_records", "dataframe_split", "inputs", "instances")
"""Keys of a request's body under which MLflow takes rows."""

Ranking = tuple[list[str], list[float]]
"""Item ids, best first, and their scores."""


class RefusedRequest(MlflowException, UserError):
    """A request that the model refuses: HTTP 400 with one line, also from MLflow's server."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, BAD_REQUEST)

    @property
    def message(self) -> str:
        """The reason, which MLflow's server cannot prefix with all rows."""
        return self._reason

    @message.setter
    def message(self, text: str) -> None:
        self._reason: str = getattr(self, "_reason", " ".join(text.split()))


class ServedModel(PythonModel):
    """A model that ranks items for each row of a frame."""

    refuses_unknown_keys = True
    """Marks models of this project for `refuse_unknown_keys`."""

    def load_context(self, context: Any) -> None:
        """Load the model from its bundle, with the settings of MLflow and of the server."""
        folder = context.artifacts["data"]
        about = checkpoint.read(f"{folder}/checkpoint")
        model_class = registry.find(about.name)
        known = model_class.requests_class.settings
        # MLflow drops unknown keys of a server's config, so they are checked here
        server_config = json.loads(os.environ.get("SERVING_MODEL_CONFIG") or "{}")
        refuse_unknown("SERVING_MODEL_CONFIG", server_config, known, {})
        settings = {**known, **(context.model_config or {})}
        scales = about.learned.get("scales")
        catalogue = model_class.load_catalogue(
            find_bundled_inputs(folder), scales=scales, manifest_only=True
        )
        model, _ = load_model(f"{folder}/checkpoint", catalogue)
        device = torch.device(settings["device"])
        requests = model_class.requests_class(folder, model, catalogue, settings)
        ranker = (
            CatalogueRanker if model_class.ranks == "catalogue" else CandidateRanker
        )
        self.ranker: Any = ranker(model.to(device), requests, device)

    def predict(
        self,
        context: Any,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """Return the answer of the ranker to each row."""
        rows = [Row(row) for row in model_input.to_dict("records")]
        return self.ranker.answer(rows, **(params or {}))

    @staticmethod
    def check_body(body: Mapping[str, Any], model: PyFuncModel) -> None:
        """Check the keys of the body of an HTTP request.

        Raises:
            UserError: if a key is unknown, or the body does not have one set of rows.
        """
        columns, params = signature_names(model)
        refuse_unknown(
            "the request",
            body,
            (*ROW_KEYS, "params"),
            dict.fromkeys(params, "params") | dict.fromkeys(columns, "each record"),
        )
        given = [key for key in ROW_KEYS if key in body]
        if len(given) != 1:
            raise UserError(
                f"the request has {' and '.join(given) or 'no rows'}; give one of "
                f"{', '.join(ROW_KEYS)}"
            )


class CatalogueRanker:
    """A model that ranks the catalogue after the history of each request."""

    def __init__(self, model: Any, requests: Any, device: torch.device) -> None:
        self.model, self.requests, self.device = model, requests, device
        self.warned = False
        # by hash of the ids: the encoded set, and its number of items
        self.allowed_sets: LRUCache[bytes, tuple[torch.Tensor, int]] = LRUCache(
            MAX_CACHED_SETS
        )
        self.lock = Lock()  # guards allowed_sets

    def answer(
        self,
        rows: list[Row],
        k: int = 10,
        unseen: bool = False,
        allowed: list[str] = EVERY,
    ) -> pd.DataFrame:
        """Return the columns `item_id` and `score`, best first, `unknown_items` and `note`.

        `unknown_items` counts the entries of a history that the catalogue does not
        have, which are skipped. A history without other entries gets an empty ranking.
        `note` says why there are fewer than `k` items.

        Args:
            rows: The requests.
            k: Items to rank.
            unseen: Leave out the items of the history.
            allowed: Ids of the only items to rank; ["*"] for all.

        Raises:
            UserError: For an impossible `k`, and for a request that cannot be read.
        """
        if not isinstance(k, int | np.integer) or not 1 <= k <= MAX_K:
            raise UserError(
                f"k is {k}; give the number of items to recommend, from 1 to {MAX_K:,}"
            )
        encoded, num_allowed = self.encode_allowed(allowed)
        requests = [self.requests.parse(row) for row in rows]
        rankings = self.rank(requests, k, unseen, encoded)
        answers = []
        for request, (items, scores) in zip(requests, rankings, strict=True):
            note = ""
            if len(items) < k:
                why = self.explain_short(request, k, num_allowed, unseen)
                note = f"{len(items):,} of {k:,} items: {why}"
            answers.append((items, scores, request.unknown, note))
        self.warn_of_unknown(requests)
        return pd.DataFrame(
            answers, columns=["item_id", "score", "unknown_items", "note"]
        )

    def rank(
        self, requests: list[Any], k: int, unseen: bool, allowed: torch.Tensor | None
    ) -> list[Ranking]:
        """Rank for each request; a history without known items gets an empty ranking."""
        rankings: list[Ranking] = [([], []) for _ in requests]
        known = [index for index, request in enumerate(requests) if request.items]
        if not known:
            return rankings
        batch = self.requests.collate([requests[index] for index in known])
        ranked, scores = self.model.recommend(
            batch.to(self.device),
            min(int(k), len(self.requests.items)),
            unseen=unseen,
            allowed=allowed,
        )
        for index, items, values in zip(known, ranked, scores, strict=True):
            is_real = items >= 0
            names = [self.requests.items[item] for item in items[is_real].tolist()]
            rankings[index] = names, values[is_real].tolist()
        return rankings

    def explain_short(
        self, request: Any, k: int, num_allowed: int, unseen: bool
    ) -> str:
        """Return why a ranking has fewer than `k` items."""
        if not request.items:
            return "no item of the history is in the catalogue"
        if num_allowed < len(self.requests.items):
            why = f"allowed has {pluralize(num_allowed, 'item')} of the catalogue"
        elif num_allowed < k:
            why = f"the catalogue has {pluralize(num_allowed, 'item')}"
        else:
            why = "the search found no more"
        return f"{why}, and the items of the history are left out" if unseen else why

    def warn_of_unknown(self, requests: list[Any]) -> None:
        """Warn once that a history of unknown items alone gets an empty ranking."""
        is_empty = any(request.unknown and not request.items for request in requests)
        if is_empty and not self.warned:
            self.warned = True
            warnings.warn(
                "a history has no item of the catalogue, so its ranking is empty; "
                "unknown_items counts them by row",
                stacklevel=2,
            )

    def encode_allowed(self, ids: list[str]) -> tuple[torch.Tensor | None, int]:
        """Return the encoded set of item ids, cached, and its number of items."""
        if ids == EVERY:
            return None, len(self.requests.items)
        key = hashlib.sha256(json.dumps([*map(str, ids)]).encode()).digest()
        with self.lock:
            if key not in self.allowed_sets:
                items = self.requests.parse_allowed(ids).to(self.device)
                self.allowed_sets[key] = (
                    self.model.encode_allowed(items),
                    int(items.sum()),
                )
            return self.allowed_sets[key]


class CandidateRanker:
    """A model that ranks the candidates of each request."""

    def __init__(self, model: Any, requests: Any, device: torch.device) -> None:
        self.model, self.requests, self.device = model, requests, device

    def answer(self, rows: list[Row], label: str = "") -> pd.DataFrame:
        """Return the columns `item_id` and `score`, best first.

        The score is the probability of `label`, by default of the model's first label.
        Candidates that the model does not know are last, in the order given, with NaN.
        """
        labels = list(self.model.labels)
        if label and label not in labels:
            raise UserError(
                f"the model has no label '{label}'; choose one of {', '.join(labels)}"
            )
        column = labels.index(label) if label else 0
        requests = [self.requests.parse(row) for row in rows]
        ranked: list[Ranking] = []
        for first in range(0, len(requests), MAX_SCORED_REQUESTS):
            ranked += self.rank(requests[first : first + MAX_SCORED_REQUESTS], column)
        return pd.DataFrame(ranked, columns=["item_id", "score"])

    @torch.no_grad()
    def rank(self, requests: list[Any], label: int) -> list[Ranking]:
        """Return the candidates of each request with their scores, best first."""
        batch = self.requests.collate(requests).to(self.device)
        probabilities = torch.zeros(0)
        if any(request.known for request in requests):
            logits = self.model.score(batch)[:, label].float()
            probabilities = torch.sigmoid(check_finite(logits)).cpu()
        ends = accumulate((len(request.known) for request in requests), initial=0)
        return [
            sort_candidates(request.candidates, request.known, probabilities[first:end])
            for request, (first, end) in zip(requests, pairwise(ends), strict=True)
        ]


def sort_candidates(
    candidates: list[str], known: list[int], probabilities: torch.Tensor
) -> Ranking:
    """Sort the known candidates by probability, and append the others without a score.

    Args:
        candidates: ids of all candidates of a request.
        known: indices of the candidates that were scored.
        probabilities: (K,) scores of the known candidates.
    """
    order = probabilities.argsort(descending=True, stable=True).tolist()
    ranked = [candidates[known[index]] for index in order]
    scored = set(known)
    others = [item for index, item in enumerate(candidates) if index not in scored]
    scores = probabilities[order].tolist()
    return ranked + others, scores + [math.nan] * len(others)


def refuse_unknown(
    where: str,
    names: Iterable[str],
    known: Collection[str],
    elsewhere: Mapping[str, str],
) -> None:
    """Refuse names that are not known.

    Args:
        where: what has the names, for the message.
        names: the names.
        known: the known names.
        elsewhere: names that belong to another part of a request, which is named.

    Raises:
        UserError: for the first unknown name.
    """
    for name in names:
        if name in known:
            continue
        near = nearest(name, [*known, *elsewhere])
        remedy = f"the nearest is '{near}'"
        if near == name:
            remedy = f"it belongs to {elsewhere[name]}"
        elif near in elsewhere:
            remedy += f", of {elsewhere[near]}"
        raise UserError(f"{where} has '{name}', which is not known there; {remedy}")


def signature_names(model: PyFuncModel) -> tuple[list[str], list[str]]:
    """Return the columns and the params of the model's signature."""
    columns = model.metadata.get_input_schema().input_names()
    return columns, [spec.name for spec in model.metadata.get_params_schema().params]


def check_request(model: PyFuncModel, data: Any, params: Any) -> Any:
    """Check the columns and params of a request; return the params with item ids as texts.

    Raises:
        UserError: for a column or a param that the signature does not have.
    """
    columns, known = signature_names(model)
    refuse_unknown(
        "a record", column_names(data), columns, dict.fromkeys(known, "params")
    )
    if not isinstance(params, dict):
        return params  # nothing, or refused by MLflow
    refuse_unknown("params", params, known, dict.fromkeys(columns, "each record"))
    for name, value in params.items():
        if value is None:
            raise UserError(
                f"params has no value for '{name}'; give one or leave it out"
            )
    if "allowed" in params:
        return params | {"allowed": parse_allowed(params["allowed"])}
    return params


def column_names(data: Any) -> list[str]:
    """Return the names of all columns of a frame, of a mapping of columns, or of a list of records."""
    if isinstance(data, pd.DataFrame | dict):
        return list(data)
    if isinstance(data, list):
        records = [row for row in data if isinstance(row, dict)]
        return list(dict.fromkeys(name for row in records for name in row))
    return []


def is_ours(model: Any) -> bool:
    """Return whether MLflow's model is a `ServedModel`, of this version or of another."""
    try:
        return bool(getattr(model.unwrap_python_model(), "refuses_unknown_keys", False))
    except (MlflowException, AttributeError):
        return False


def refuse_unknown_keys() -> None:
    """Make MLflow's `predict` and its server refuse keys of requests to our models that they would drop.

    MLflow has no option for it. `PyFuncModel.predict` drops columns and params that are
    not in the signature before the model sees them, and `scoring_server.invocations`
    keys of the body. Requests to other models pass as they are.
    """
    if hasattr(PyFuncModel.predict, "refuses_unknown_keys"):
        return
    lenient_predict, lenient_invocations = (
        PyFuncModel.predict,
        scoring_server.invocations,
    )

    @wraps(lenient_predict)
    def predict(self: PyFuncModel, data: Any, params: Any = None) -> Any:
        if not is_ours(self):
            return lenient_predict(self, data, params)
        try:
            return lenient_predict(self, data, check_request(self, data, params))
        except RefusedRequest:
            raise
        except UserError as error:
            raise RefusedRequest(str(error)) from error
        except MlflowException as error:  # it repeats all rows and the whole schema
            raise RefusedRequest(error.message.rpartition("Error: ")[2]) from error

    @wraps(lenient_invocations)
    def invocations(
        data: Any, content_type: str, model: PyFuncModel, input_schema: Any
    ) -> Any:
        if is_ours(model) and content_type.startswith("application/json"):
            try:
                body = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise RefusedRequest(f"the request is no JSON ({error})") from error
            if not isinstance(body, dict):
                raise RefusedRequest("the request is no JSON object with rows")
            try:
                ServedModel.check_body(body, model)
            except UserError as error:
                raise RefusedRequest(str(error)) from error
        return lenient_invocations(data, content_type, model, input_schema)

    predict.refuses_unknown_keys = True  # type: ignore[attr-defined]
    PyFuncModel.predict = predict  # type: ignore[method-assign]
    scoring_server.invocations = invocations


refuse_unknown_keys()
mlflow.models.set_model(ServedModel())
