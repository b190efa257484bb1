"""Answer requests with a trained model, as MLflow loads it.

    model = mlflow.pyfunc.load_model("models:/industrial/1")
    model.predict(pandas.DataFrame([{"history": ["B01", "B02"]}]), params={"k": 10})

The model is logged as a "model from code", without pickle: MLflow runs a file that
imports this module, `core/` and `models/` from an archive (`package.py`). The module
needs only PyTorch and MLflow.
Retrieval models rank their catalogue after a history, other models the candidates of a
request; `models/<kind>/requests.py` has the pydantic model of a request.
`model_config={"device": "cuda"}` puts the model on a GPU.

MLflow has no schema of the rows, so that it passes on all of their keys, and pydantic
refuses an unknown one. MLflow drops unknown params, with a warning in its log.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import pandas as pd
import torch
from cachetools import LRUCache
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from mlflow.pyfunc import PythonModel
from pydantic import BaseModel, Field, ValidationError, create_model

from core.errors import UserError
from core.schemas import Inputs
from models import own_code, registry
from models.loaded_model import LoadedModel, load_model
from models.model import check_finite
from models.requests import CONTRACT, MAX_ROWS
from models.retrieval.popular import load_counts
from models.retrieval.recommend import required_history
from models.retrieval.requests import EVERY
from models.retrieval.search import top_k
from models.training import checkpoint

MAX_CACHED_SETS = 64
"""Largest number of cached sets of allowed items; the least recently used set is
dropped."""

MAX_ANSWER_ITEMS = 1_000_000
"""Largest number of items of all rankings of an answer, which limits its memory."""

MAX_BATCH_REQUESTS = 256
"""Largest number of requests that are ranked in one batch."""

MAX_BATCH_ENTRIES = 2**17
"""Largest number of entries of a padded batch with several requests."""

ANSWER_FIELDS = ["item_id", "score"]
"""Fields of each answer."""

Answer = dict[str, Any]
"""The lists `item_id`, best first, and `score`, and notes on them."""


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


def validate(model_class: type[BaseModel], content: Any) -> Any:
    """Parse content or JSON into a pydantic model.

    Raises:
        RefusedRequest: If a key or value is invalid. The message has at most 200
            characters of each.
    """
    try:
        if isinstance(content, str | bytes | bytearray):
            return model_class.model_validate_json(content)
        return model_class.model_validate(content)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, fault["loc"]))
        reason = fault["msg"].removeprefix("Value error, ")
        raise RefusedRequest(
            f"{key:.200} is {fault['input']!r:.200}; {reason:.200}"
        ) from None


class ServedModel(PythonModel):
    """A model that ranks items for each request."""

    def load_context(self, context: Any) -> None:
        """Load the model from its bundle."""
        folder = context.artifacts["data"]
        saved = checkpoint.read(f"{folder}/checkpoint")
        trust_code = bool((context.model_config or {}).get("trust_code"))
        own_code.accept_code(saved.code, "the registered version", trust_code)
        model_class = registry.find(saved.name)
        settings_class = model_class.requests_class.settings_class
        # MLflow drops unknown keys of a server's config
        server_config = os.environ.get("SERVING_MODEL_CONFIG") or "{}"
        validate(settings_class, server_config)
        settings = validate(settings_class, context.model_config or {})
        inputs = {
            name: f"{folder}/{name}"
            for name in ("tables", "sids", "text")
            if Path(folder, name).exists()
        }
        catalogue = model_class.catalogue_class.load(
            Inputs(**inputs), saved.learned.get("scales"), manifest_only=True
        )
        model, metadata = load_model(f"{folder}/checkpoint", catalogue)
        self.use_model(LoadedModel(metadata, model, catalogue), folder, settings)

    def use_model(self, loaded: LoadedModel, folder: str, settings: Any) -> None:
        """Answer with a model on its catalogue; `folder` may have a text encoder."""
        model, catalogue = loaded.model, loaded.catalogue
        model.check_served()
        self.device = settings.device
        self.model = model.to(self.device)
        self.requests = model.requests_class(folder, model, catalogue, settings)
        num_items = len(self.requests.items)
        self.popularity = load_counts(loaded.checkpoint, num_items)
        self.every_item = torch.ones(num_items, dtype=torch.bool)
        self.ranks_catalogue = model.ranks == "catalogue"
        # encoded set and its mask (N,), by hash of the ids
        self.allowed_sets: LRUCache[bytes, tuple[torch.Tensor, torch.Tensor]] = (
            LRUCache(MAX_CACHED_SETS)
        )
        self.lock = Lock()  # guards allowed_sets
        rows = Annotated[
            list[self.requests.request_class],  # type: ignore[name-defined]
            Field(max_length=MAX_ROWS, fail_fast=True),
        ]
        options_class = self.requests.options_class
        self.body_class = create_model(
            "Body",
            __config__=CONTRACT,
            dataframe_records=(rows, ...),
            params=(options_class, options_class()),
        )
        """The body of an HTTP request."""

    def predict(
        self,
        context: Any,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """Return an answer for each row (`rank_catalogue`, `rank_candidates`)."""
        rows: Any = model_input
        if isinstance(model_input, pd.DataFrame):  # a missing value is NaN
            filled = model_input.astype(object).where(model_input.notna(), None)
            rows = [
                {name: value for name, value in row.items() if value is not None}
                for row in filled.to_dict("records")
            ]
        answers = self.answer_rows(rows, params or {})
        return pd.DataFrame(answers or {name: [] for name in ANSWER_FIELDS})

    def answer_rows(self, rows: Any, params: dict[str, Any]) -> list[Answer]:
        """Return the answer to each row, after rows and params are checked."""
        body = validate(self.body_class, {"dataframe_records": rows, "params": params})
        return self.answer(body.dataframe_records, body.params)

    def read_body(self, data: bytes | bytearray, content_type: str | None) -> Any:
        """Parse the JSON body of an HTTP request.

        Args:
            data: The body.
            content_type: Value of its header. Types other than JSON are refused, as a
                page in a browser can post them to a server on localhost.
        """
        content_type = content_type or ""
        if not content_type.startswith("application/json"):
            raise RefusedRequest(
                f"the Content-Type is '{content_type[:200]}', not application/json"
            )
        return validate(self.body_class, data)

    def answer(self, requests: Sequence[Any], options: Any) -> list[Answer]:
        """Return the answer to each request: lists `item_id` and `score`, best first.

        Raises:
            RefusedRequest: If the model has no answer.
        """
        rank = self.rank_catalogue if self.ranks_catalogue else self.rank_candidates
        try:
            return rank(requests, options)
        except UserError as error:
            raise RefusedRequest(str(error)) from error

    def rank_catalogue(self, requests: Sequence[Any], options: Any) -> list[Answer]:
        """Rank the catalogue for each request.

        Returns:
            The rankings; `unknown_items`, the number of history entries that the
            catalogue does not have and that are skipped; `note`, the reason if there
            are fewer than `k` items; and `fallback`, which is `popularity` if the
            history has no known item. The ranking then has the allowed items with the
            most training behaviours, whose number is the score.
        """
        k, unseen = options.k, options.unseen
        if k * len(requests) > MAX_ANSWER_ITEMS:
            raise UserError(
                f"{len(requests)} rows of {k} items are over {MAX_ANSWER_ITEMS} in all"
            )
        allowed, mask = self.encode_allowed(options.allowed)
        num_allowed = int(mask.sum())
        ids = self.requests.items
        known = [len(self.requests.find_items(r.history)) for r in requests]
        latest = required_history(self.model.config.max_history, {"unseen": unseen})

        def rank(indices: list[int]) -> list[Answer]:
            batch = self.requests.collate([requests[i] for i in indices], latest)
            items, scores = self.model.recommend(
                batch.to(self.device),
                min(k, len(ids)),
                unseen=unseen,
                allowed=allowed,
            )  # (B, K) each
            rankings = zip(items, scores, strict=True)
            return [make_answer(ids, *ranking) for ranking in rankings]

        answers = rank_by_length([min(count, latest) for count in known], rank)
        if not all(known):
            counts = self.popularity.masked_fill(~mask, -torch.inf)[None]
            items, scores = top_k(counts, min(k, num_allowed))
            popular = make_answer(ids, items[0], scores[0])
        for i, (request, count) in enumerate(zip(requests, known, strict=True)):
            answer = answers[i] if count else popular
            num_ranked, note = len(answer["item_id"]), ""
            if num_ranked < k:
                note = f"{num_ranked:,} of {k:,} items: {num_allowed:,} allowed"
                note += ", without those of the history" if unseen else ""
            answers[i] = {
                **answer,
                "unknown_items": len(request.history) - count,
                "note": note,
                "fallback": "" if count else "popularity",
            }
        return answers

    def encode_allowed(
        self, ids: list[str]
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the encoded set of item ids from the cache, and its mask (N,).

        The set is None if all items are allowed.
        """
        if ids == EVERY:
            return None, self.every_item
        key = hashlib.sha256(json.dumps(ids).encode()).digest()
        with self.lock:
            if key not in self.allowed_sets:
                items = torch.zeros(len(self.requests.items), dtype=torch.bool)
                items[self.requests.find_items(ids)] = True
                if not items.any():
                    raise UserError(
                        f"allowed has {len(ids)} ids, and none of an item of the "
                        "catalogue"
                    )
                encoded = self.model.encode_allowed(items.to(self.device))
                self.allowed_sets[key] = encoded, items
            return self.allowed_sets[key]

    def rank_candidates(self, requests: Sequence[Any], options: Any) -> list[Answer]:
        """Rank the candidates of each request.

        Candidates that the model does not know come last, in the order of the request,
        with NaN.
        """
        labels = list(self.model.labels)
        label = options.label or labels[0]
        if label not in labels:
            raise UserError(
                f"the model has no label '{label:.200}'; choose one of "
                f"{', '.join(labels)}"
            )
        max_history = self.model.config.max_history
        scored = [self.requests.find_known(r, r.candidates) for r in requests]

        @torch.no_grad()
        def rank(indices: list[int]) -> list[Answer]:
            selected = [requests[index] for index in indices]
            batch = self.requests.collate(selected, max_history).to(self.device)
            known = [scored[index] for index in indices]
            probabilities = torch.zeros(0)
            if any(known):
                logits = self.model.score(batch)[:, labels.index(label)].float()
                probabilities = torch.sigmoid(check_finite(logits)).cpu()
            answers = []
            for index, values in zip(
                indices, probabilities.split([len(i) for i in known]), strict=True
            ):
                candidates = requests[index].candidates
                scores = torch.full((len(candidates),), -torch.inf)
                scores[scored[index]] = values
                scores, order = scores.sort(descending=True, stable=True)
                scores = scores.masked_fill(scores.isneginf(), torch.nan)
                answers.append(make_answer(candidates, order, scores))
            return answers

        lengths = [
            1 + len(request.candidates) + min(len(request.history), max_history)
            for request in requests
        ]
        return rank_by_length(lengths, rank)


def rank_by_length(
    lengths: list[int], rank: Callable[[list[int]], list[Answer]]
) -> list[Answer]:
    """Rank requests in batches of similar length, so that little is padded.

    Args:
        lengths: Length of each request; length 0 gives an empty ranking.
        rank: Return the answers to the requests with these indices.
    """
    answers: list[Answer] = [{"item_id": [], "score": []} for _ in lengths]
    order = [index for index, length in enumerate(lengths) if length]
    order.sort(key=lengths.__getitem__, reverse=True)
    while order:
        size = max(1, MAX_BATCH_ENTRIES // lengths[order[0]])
        size = min(size, MAX_BATCH_REQUESTS)
        batch, order = order[:size], order[size:]
        for index, answer in zip(batch, rank(batch), strict=True):
            answers[index] = answer
    return answers


def make_answer(
    ids: Sequence[str], items: torch.Tensor, scores: torch.Tensor
) -> Answer:
    """Return the ranked ids and their scores.

    Args:
        ids: Ids of all items.
        items: (K,) indices of the ranked items, negative after the last one.
        scores: (K,) scores.
    """
    is_item = items >= 0
    ranked = [ids[item] for item in items[is_item].tolist()]
    return {"item_id": ranked, "score": scores[is_item].tolist()}
