"""Answer requests with a trained model, as MLflow loads it.

    model = mlflow.pyfunc.load_model("models:/industrial/1")
    model.predict(pandas.DataFrame([{"history": ["B01", "B02"]}]), params={"k": 10})

The model is logged as a "model from code": MLflow runs this file, next to
`core/`, `models/` and the data of `package.py`, without pickle. The file needs only
PyTorch and MLflow.
Retrieval models rank their catalogue after a history, other models the candidates of a
request; `models/<kind>/requests.py` documents the columns of a request.
`model_config={"device": "cuda"}` puts the model on a GPU.

A key that the signature does not have is rejected (`refuse_unknown_keys`). MLflow would
drop the key with a warning in its log, so that a misspelt `allowed` would allow all
items.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from io import StringIO
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import ZipFile

import mlflow
import numpy as np
import pandas as pd
import torch
from cachetools import LRUCache
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from mlflow.pyfunc import PyFuncModel, PythonModel, scoring_server

# MLflow stores `core/` and `models/` as an archive beside this file.
if Path(__file__).with_name("code").joinpath("trieline.zip").is_file():
    code_file = Path(__file__).with_name("code") / "trieline.zip"
    sys.path.insert(0, str(code_file))
    # other packages of these names, or other code, may have been imported before
    with ZipFile(code_file) as archive:
        for name in archive.namelist():
            package, _, file = name.partition("/")
            try:
                code = pkgutil.get_data(package, file)
            except OSError:
                code = None
            if code != archive.read(name):
                imported = importlib.import_module(package)
                path = getattr(imported, "__path__", [imported.__file__])[0]
                raise ImportError(
                    f"this process has imported {path}, and the model has other "
                    f"code in {code_file}; load it in a process of its own"
                )

from core.errors import UserError, pluralize
from core.ids import parse_item_ids
from models import registry
from models.build import load_model
from models.metrics.scores import check_finite
from models.requests import Row, find_bundled_inputs
from models.retrieval.recommend import required_history
from models.retrieval.requests import EVERY
from models.training import checkpoint

MAX_CACHED_SETS = 64
"""Largest number of cached sets of allowed items; the least recently used set is
dropped."""

MAX_K = 10_000
"""Largest number of items of a ranking."""

MAX_ANSWER_ITEMS = 1_000_000
"""Largest number of items of all rankings of an answer, which limits its memory."""

MAX_ROWS = 10_000
"""Largest number of rows of a request to a server."""

MAX_BATCH_REQUESTS = 256
"""Largest number of requests that are ranked in one batch."""

MAX_BATCH_ENTRIES = 2**17
"""Largest number of entries of a padded batch with several requests."""

ROW_KEYS = ("dataframe_records", "dataframe_split")
"""Keys under which the body of a request can have its rows."""

Ranking = tuple[list[str], list[float]]
"""Item ids, best first, and their scores."""


class RefusedRequest(MlflowException, UserError):
    """Error for a request that the model rejects: HTTP 400 with a one-line message.

    MLflow's server answers so too.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason, BAD_REQUEST)

    @property
    def message(self) -> str:
        """The reason. MLflow's server cannot prepend all rows of the request to it."""
        return self._reason

    @message.setter
    def message(self, text: str) -> None:
        self._reason: str = getattr(self, "_reason", " ".join(text.split()))


class ServedModel(PythonModel):
    """A model that ranks items for each row of a frame."""

    refuses_unknown_keys = True
    """Marks models of this project for `refuse_unknown_keys`."""

    def load_context(self, context: Any) -> None:
        """Load the model from its bundle."""
        folder = context.artifacts["data"]
        saved = checkpoint.read(f"{folder}/checkpoint")
        model_class = registry.find(saved.name)
        defaults = model_class.requests_class.settings
        # MLflow drops unknown keys of a server's config, so they are checked here
        server_config = json.loads(os.environ.get("SERVING_MODEL_CONFIG") or "{}")
        refuse_unknown("SERVING_MODEL_CONFIG", server_config, defaults)
        settings = {**defaults, **(context.model_config or {})}
        scales = saved.learned.get("scales")
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
        """Return an answer for each row (see `answer` of the rankers)."""
        rows = [Row(row) for row in model_input.to_dict("records")]
        return self.ranker.answer(rows, **(params or {}))

    @staticmethod
    def read_body(
        data: str | bytes, content_type: str | None, model: PyFuncModel
    ) -> tuple[pd.DataFrame, Any]:
        """Read the body of an HTTP request.

        Args:
            data: JSON of the request.
            content_type: Value of its header. A page in a browser can post any type but
                JSON to a server on localhost.
            model: The model as MLflow has loaded it.

        Returns:
            The rows and the params.

        Raises:
            RefusedRequest: If the body is no JSON object, a key is unknown, or not
                exactly one key has rows.
        """
        content_type = content_type or ""
        if not content_type.startswith("application/json"):
            raise RefusedRequest(
                f"the Content-Type is '{content_type[:200]}', not application/json"
            )
        try:
            body = json.loads(data)
            if not isinstance(body, dict):
                raise UserError("the request is no JSON object with rows")
            refuse_unknown("the request", body, (*ROW_KEYS, "params"))
            params = body.pop("params", None)
            if len(body) != 1:
                raise UserError(
                    f"the request has {' and '.join(body) or 'no rows'}; give one of "
                    f"{', '.join(ROW_KEYS)}"
                )
            schema = model.metadata.get_input_schema()
            check_shape(next(iter(body.values())), schema.input_names())
            rows = scoring_server.infer_and_parse_data(body, schema)
        except UserError as error:
            raise RefusedRequest(str(error)) from error
        except MlflowException as error:
            raise RefusedRequest(error.message[:200]) from error
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(f"the request is no JSON ({error})") from error
        return rows, {} if params is None else params


class CatalogueRanker:
    """Ranker of the catalogue after the history of each request.

    Args:
        model: Loaded model.
        requests: Parser of requests, of the model's `requests_class`.
        device: Device of the model.
    """

    def __init__(self, model: Any, requests: Any, device: torch.device) -> None:
        self.model, self.requests, self.device = model, requests, device
        self.warned = False
        # encoded set and its number of items, by hash of the ids
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
        """Rank the catalogue for each request.

        Args:
            rows: Rows of the requests.
            k: Number of items per ranking.
            unseen: Whether to leave out the items of the history.
            allowed: Ids of the items that may be ranked; ["*"] for all.

        Returns:
            A row for each request with the columns `item_id` and `score` (lists, best
            first), `unknown_items` (number of history entries that the catalogue does
            not have and that are skipped) and `note` (the reason if there are fewer
            than `k` items). A history without known items gets an empty ranking.
        """
        if not isinstance(k, int | np.integer) or not 1 <= k <= MAX_K:
            raise UserError(f"k is {k!s:.200}, it must be from 1 to {MAX_K}")
        if k * len(rows) > MAX_ANSWER_ITEMS:
            raise UserError(
                f"{len(rows)} rows of {k} items are over {MAX_ANSWER_ITEMS} in all"
            )
        encoded, num_allowed = self.encode_allowed(allowed)
        requests = [self.requests.parse(row) for row in rows]
        latest = required_history(self.model.config.max_history, {"unseen": unseen})
        histories = [r._replace(items=r.items[-latest:]) for r in requests]
        rankings = rank_by_length(
            histories,
            [len(history.items) for history in histories],
            lambda batch: self.rank(batch, k, unseen, encoded),
        )
        answers = []
        for request, (items, scores) in zip(requests, rankings, strict=True):
            note = ""
            if len(items) < k:
                reason = self.explain_short(request, k, num_allowed, unseen)
                note = f"{len(items):,} of {k:,} items: {reason}"
            answers.append((items, scores, request.unknown, note))
        self.warn_of_unknown(requests)
        return pd.DataFrame(
            answers, columns=["item_id", "score", "unknown_items", "note"]
        )

    def rank(
        self, requests: list[Any], k: int, unseen: bool, allowed: torch.Tensor | None
    ) -> list[Ranking]:
        """Rank the catalogue for each request.

        Args:
            requests: Parsed requests, each with at least one item.
            k: Number of items per ranking.
            unseen: Whether to leave out the items of the history.
            allowed: Encoded set of allowed items, or None for all.
        """
        batch = self.requests.collate(requests)
        # (B, K) each
        ranked_items, scores = self.model.recommend(
            batch.to(self.device),
            min(int(k), len(self.requests.items)),
            unseen=unseen,
            allowed=allowed,
        )
        rankings = []
        for items, values in zip(ranked_items, scores, strict=True):
            is_item = items >= 0  # negative after the end of a short ranking
            item_ids = [self.requests.items[item] for item in items[is_item].tolist()]
            rankings.append((item_ids, values[is_item].tolist()))
        return rankings

    def explain_short(
        self, request: Any, k: int, num_allowed: int, unseen: bool
    ) -> str:
        """Return the reason why a ranking has fewer than `k` items.

        Args:
            request: Parsed request.
            k: Number of items that were requested.
            num_allowed: Number of items that may be ranked.
            unseen: Whether the items of the history are left out.
        """
        if not request.items:
            return "no item of the history is in the catalogue"
        if num_allowed < len(self.requests.items):
            reason = f"allowed has {pluralize(num_allowed, 'item')} of the catalogue"
        elif num_allowed < k:
            reason = f"the catalogue has {pluralize(num_allowed, 'item')}"
        else:
            reason = "the search found no more"
        if unseen:
            reason += ", and the items of the history are left out"
        return reason

    def warn_of_unknown(self, requests: list[Any]) -> None:
        """Warn, but only once, about a history with unknown items only."""
        is_empty = any(request.unknown and not request.items for request in requests)
        if is_empty and not self.warned:
            self.warned = True
            warnings.warn(
                "a history has no item of the catalogue, so its ranking is empty; "
                "unknown_items counts them by row",
                stacklevel=2,
            )

    def encode_allowed(self, ids: list[str]) -> tuple[torch.Tensor | None, int]:
        """Return the encoded set of item ids from the cache, and its number of items.

        The set is None if all items are allowed.
        """
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
    """Ranker of the candidates of each request.

    Args:
        model: Loaded model.
        requests: Parser of requests, of the model's `requests_class`.
        device: Device of the model.
    """

    def __init__(self, model: Any, requests: Any, device: torch.device) -> None:
        self.model, self.requests, self.device = model, requests, device

    def answer(self, rows: list[Row], label: str = "") -> pd.DataFrame:
        """Rank the candidates of each request.

        Args:
            rows: Rows of the requests.
            label: Label whose probability is the score; by default the model's first.

        Returns:
            A row for each request with the columns `item_id` and `score` (lists, best
            first). Candidates that the model does not know come last, in the order of
            the request, with NaN.
        """
        labels = list(self.model.labels)
        if label and label not in labels:
            raise UserError(
                f"the model has no label '{label:.200}'; choose one of "
                f"{', '.join(labels)}"
            )
        column = labels.index(label) if label else 0
        requests = [self.requests.parse(row) for row in rows]
        ranked = rank_by_length(
            requests,
            [1 + len(request.scored) + request.events for request in requests],
            lambda batch: self.rank(batch, column),
        )
        return pd.DataFrame(ranked, columns=["item_id", "score"])

    @torch.no_grad()
    def rank(self, requests: list[Any], label: int) -> list[Ranking]:
        """Return the candidates of each request with their scores, best first.

        Args:
            requests: Parsed requests.
            label: Index of the label.
        """
        batch = self.requests.collate(requests).to(self.device)
        probabilities = torch.zeros(0)
        if any(request.scored for request in requests):
            logits = self.model.score(batch)[:, label].float()
            probabilities = torch.sigmoid(check_finite(logits)).cpu()
        ends = accumulate((len(request.scored) for request in requests), initial=0)
        return [
            sort_candidates(
                request.candidates, request.scored, probabilities[first:end]
            )
            for request, (first, end) in zip(requests, pairwise(ends), strict=True)
        ]


def rank_by_length(
    requests: list[Any],
    lengths: list[int],
    rank: Callable[[list[Any]], list[Ranking]],
) -> list[Ranking]:
    """Rank requests in batches of similar length, so that little is padded.

    Args:
        requests: Parsed requests.
        lengths: Length of each request; length 0 gives an empty ranking.
        rank: Return the rankings of a batch of requests.
    """
    rankings: list[Ranking] = [([], []) for _ in requests]
    order = [index for index, length in enumerate(lengths) if length]
    order.sort(key=lengths.__getitem__, reverse=True)
    while order:
        size = max(1, MAX_BATCH_ENTRIES // lengths[order[0]])
        size = min(size, MAX_BATCH_REQUESTS)
        batch, order = order[:size], order[size:]
        ranked = rank([requests[index] for index in batch])
        for index, ranking in zip(batch, ranked, strict=True):
            rankings[index] = ranking
    return rankings


def sort_candidates(
    candidates: list[str], known: list[int], probabilities: torch.Tensor
) -> Ranking:
    """Sort the known candidates by probability, and append the others without a score.

    Args:
        candidates: Ids of all candidates of a request.
        known: Indices of the candidates that the model knows.
        probabilities: (K,) scores of the known candidates.
    """
    order = probabilities.argsort(descending=True, stable=True).tolist()
    ranked = [candidates[known[index]] for index in order]
    scored = set(known)
    others = [item for index, item in enumerate(candidates) if index not in scored]
    scores = probabilities[order].tolist()
    return ranked + others, scores + [math.nan] * len(others)


def check_shape(content: Any, columns: list[str]) -> None:
    """Check rows before pandas allocates a value for each row and name of a column.

    Args:
        content: Records, or a mapping with lists of values as `data`.
        columns: Names of the columns that a row may have.
    """
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise UserError("the request has no list of rows")
    if len(rows) > MAX_ROWS:
        raise UserError(f"the request has {len(rows)} rows, over {MAX_ROWS}")
    refuse_unknown("a record", column_names(rows), columns)
    longest = max((len(row) for row in rows if isinstance(row, list)), default=0)
    if longest > len(columns):
        raise UserError(f"a row has {longest} values, over {len(columns)}")


def refuse_unknown(part: str, names: Iterable[str], valid: Collection[str]) -> None:
    """Raise UserError for the first name that is not valid in a part of a request."""
    for name in names:
        if name not in valid:
            raise UserError(f"{part} has '{name!s:.200}', which is not known there")


def signature_names(model: PyFuncModel) -> tuple[list[str], list[str]]:
    """Return the names of the columns and the params in a model's signature."""
    columns = model.metadata.get_input_schema().input_names()
    return columns, [spec.name for spec in model.metadata.get_params_schema().params]


def check_request(model: PyFuncModel, data: Any, params: Any) -> Any:
    """Check the columns and params of a request.

    Args:
        model: The model as MLflow has loaded it.
        data: Rows of the request, in any form that MLflow accepts.
        params: Params of the request.

    Returns:
        The params, with the ids in `allowed` as strings.
    """
    columns, param_names = signature_names(model)
    refuse_unknown("a record", column_names(data), columns)
    if not isinstance(params, dict):
        return params  # None, or a type that MLflow rejects
    refuse_unknown("params", params, param_names)
    for name, value in params.items():
        if value is None:
            raise UserError(f"params has no value for '{name}'")
    if "allowed" in params:
        return params | {"allowed": parse_item_ids("allowed", params["allowed"])}
    return params


def column_names(data: Any) -> list[str]:
    """Return the names of all columns of a frame, a mapping, or a list of records."""
    if isinstance(data, pd.DataFrame | dict):
        return list(data)
    if isinstance(data, list):
        records = [row for row in data if isinstance(row, dict)]
        return list(dict.fromkeys(name for row in records for name in row))
    return []


def is_ours(model: Any) -> bool:
    """Return whether a model is a `ServedModel` of any version of this project."""
    try:
        return bool(getattr(model.unwrap_python_model(), "refuses_unknown_keys", False))
    except (MlflowException, AttributeError):
        return False


def refuse_unknown_keys() -> None:
    """Patch MLflow to reject unknown keys in requests to models of this project.

    MLflow has no option for it. `PyFuncModel.predict` drops columns and params that are
    not in the signature, and `scoring_server.invocations` drops keys of the body,
    before the model is called. Requests to other models are not changed.
    """
    if hasattr(PyFuncModel.predict, "refuses_unknown_keys"):
        return
    lenient_predict = PyFuncModel.predict
    lenient_invocations = scoring_server.invocations

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
        except MlflowException as error:  # its message has all rows and the schema
            raise RefusedRequest(
                error.message.rpartition("Error: ")[2][:200]
            ) from error

    @wraps(lenient_invocations)
    def invocations(
        data: Any, content_type: str, model: PyFuncModel, input_schema: Any
    ) -> Any:
        if is_ours(model):
            rows, params = ServedModel.read_body(data, content_type, model)
            answer = StringIO()
            scoring_server.predictions_to_json(model.predict(rows, params), answer)
            return scoring_server.InvocationsResponse(
                answer.getvalue(), 200, "application/json"
            )
        return lenient_invocations(data, content_type, model, input_schema)

    predict.refuses_unknown_keys = True  # type: ignore[attr-defined]
    PyFuncModel.predict = predict  # type: ignore[method-assign]
    scoring_server.invocations = invocations


refuse_unknown_keys()
mlflow.models.set_model(ServedModel())
