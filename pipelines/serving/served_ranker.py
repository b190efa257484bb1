"""A search model or a model of actions as MLflow loads it: a history and candidates in, the candidates ranked out.

    model = mlflow.pyfunc.load_model("models:/beauty/1")
    model.predict(pandas.DataFrame([{"history": ["B01", "B02"], "history_query": ["lip balm", "soap"],
                                     "query": "soap", "candidates": ["B07", "B02"],
                                     "numbers": {"bm25": [7.1, 3.0]}}]))     # item_id, score

Run by MLflow, not imported; a "model from code" as `served_model.py` is. A row is one request. What its columns mean is
in `models/<family>/requests.py`; the names and the order of features, actions and labels are in the model's metadata.
Candidates that are not known are ranked last, in the order given, with the score NaN.

A row with `history_from` goes on from what is kept of its `user_id`: its `history` has the behaviours from that one
on, counted from 0, and those that are kept already are skipped, so that a request can be sent again. Without candidates
it only adds to the state. Where the state is not there (any more), a row with all behaviours from 0 on, or with as many
of the latest as the model reads, begins it; another one is refused in words. States are held in the process, of the
users asked for last, up to `model_config={"state_mb": 1024}`. Scores are those without a state, until there are more
behaviours than the model reads: what is kept then is as `append` of the model says.

The model is on `model_config={"device": "cpu"}`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
from models.latest import Latest
from models.requests import Row, bundled
from models.scores import check_finite
from models.tables import UserError
from models.words import number_of

ROWS = 256
"""Requests that are scored at once."""

Ranking = tuple[list[str], list[float]]
"""Candidates, best first, and their scores."""


@dataclass
class UserState:
    """What is kept of a user."""

    state: Any
    end: int
    """Behaviours that the user has had so far, as requests count them."""


def size_of(state: Any) -> int:
    """Bytes of the tensors in a state."""
    parts = [
        value
        for value in vars(state).values()
        if value is not None and not isinstance(value, int)
    ]
    return sum(
        part.nbytes if isinstance(part, torch.Tensor) else size_of(part)
        for part in parts
    )


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
        self.keeps_state = entry.keeps_state(self.model.config)
        options = [about.model, about.learned.get("scales")]
        self.of = {
            "weights": about.sha256[checkpoint.WEIGHTS],
            "tables": catalogue.hashes,
            "options": options,
        }
        megabytes = settings["state_mb"]
        if not isinstance(megabytes, int | float) or not 0 < megabytes < math.inf:
            raise UserError(
                f"state_mb of model_config is {megabytes!r}; give a number of MB above 0, such as 1024"
            )
        self.users: Latest[UserState] = Latest(int(megabytes * 2**20))
        self.device = torch.device(settings["device"])
        self.model.to(self.device)
        self.lock = Lock()  # of users' states, and of texts that the model reads, which change from batch to batch

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
        place, rows = (
            list(self.model.labels).index(label),
            [Row(row) for row in model_input.to_dict("records")],
        )
        plain = [
            self.requests.read(row) for row in rows if row.given("history_from") is None
        ]
        ranked: list[Ranking] = []
        for low in range(0, len(plain), ROWS):
            with self.lock:
                ranked += self.rank(
                    part := plain[low : low + ROWS],
                    self.batch(part),
                    self.model.score,
                    place,
                )
        each = iter(ranked)
        found = [
            next(each) if row.given("history_from") is None else self.go_on(row, place)
            for row in rows
        ]
        return pd.DataFrame(found, columns=["item_id", "score"])

    def batch(self, requests: list[Any]) -> dict[str, torch.Tensor]:
        """What the model scores, on its device."""
        return to_device(self.requests.batch(requests), self.device)

    @torch.no_grad()
    def rank(
        self,
        requests: list[Any],
        batch: Any,
        score: Callable[[Any], torch.Tensor],
        label: int,
    ) -> list[Ranking]:
        """Per request of the batch its candidates, best first and those that are not known last, and their scores."""
        chances = torch.zeros(0)
        if any(request.known for request in requests):
            chances = torch.sigmoid(check_finite(score(batch)[:, label].float())).cpu()
        ends = accumulate((len(request.known) for request in requests), initial=0)
        return [
            in_order(request.candidates, request.known, chances[first:end])
            for request, (first, end) in zip(requests, pairwise(ends), strict=True)
        ]

    @torch.no_grad()
    def go_on(self, row: Row, label: int) -> Ranking:
        """The candidates of a request after what is kept of its user and the behaviours that come with it, which are
        kept too."""
        user, begin, size = (
            row.given("user_id"),
            int(row["history_from"]),
            len(row["history"]),
        )
        if not self.keeps_state:
            raise UserError(
                "history_from goes on from a user's state, and the model keeps none; send whole histories"
            )
        if not user:
            raise UserError(
                "history_from goes on from a user's state; give user_id too"
            )
        if begin < 0:
            raise UserError(
                f"history_from is {begin}; give the number of behaviours before the first one sent, from 0"
            )
        with self.lock:
            kept = self.users.get(user)
            if kept is None or kept.end < begin:
                if begin and size < (most := self.model.config.max_history):
                    there = f"is of {kept.end} behaviours" if kept else "is not kept"
                    raise UserError(
                        f"the state of user '{user}' {there} and the request goes on after {begin}; send all "
                        f"behaviours with history_from 0, or the latest {most} with the number before them"
                    )
                kept = UserState(self.model.new_state(1), begin)
            done = min(kept.end - begin, size)  # of a request that is sent again
            request = self.requests.read(
                Row(row.after(done), history_from=begin + done)
            )
            batch, state = self.batch([request]), kept.state
            if request.events:
                try:
                    state = self.model.append(state, batch)
                except ValueError as error:
                    raise UserError(
                        f"the history of user '{user}' does not go on from what is kept: {error}"
                    ) from error
            self.users.put(
                user, UserState(state, kept.end + size - done), size_of(state)
            )
            return self.rank(
                [request],
                batch,
                lambda batch: self.model.score_state(state, batch),
                label,
            )[0]

    def take_states(self, before: RequestRanker) -> str:
        """Goes on from the states of the model that was served before, where this one would have made the same; the end
        of a sentence that says so. Tables that extend others know items that a state was made without."""
        with before.lock:
            users = number_of(len(before.users), "user")
            if not len(before.users):
                return ""
            if other := [
                name for name, value in self.of.items() if value != before.of[name]
            ]:
                return f" without the states of {users}, who have to send their histories: other {', '.join(other)}"
            self.users, self.lock = before.users, before.lock
        return f" and goes on from the states of {users}"


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
