"""Requests to served actions models: history, candidates and new items.

Actions are numbers from 0 to 1; `inputs` in the model's metadata defines their scale.
An action that is left out counts as not taken. `new_items` may hold items that are not
in the catalogue, each with its `item_id`, and its text and attributes by name. New
items can be candidates or part of the history; the model reads them by their content. A
missing value of an item counts as unknown, as does a category that is not in the
training data. A late feature that is left out is replaced by its mean over training.

Shapes: `A` kinds of action, `F` late features, `n` new items.
"""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Required, Self

import numpy as np
import pyarrow as pa
import torch
from pydantic import AfterValidator, Field, model_validator

from core.schemas import ActionsInfo, actions_schema
from models.actions.batch import ActionsBatch
from models.actions.catalogue import ActionsCatalogue
from models.custom_features import CATEGORY, NUMBER
from models.requests import (
    CandidateRequest,
    ItemId,
    Requests,
    Settings,
    Text,
    Texts,
    Time,
    Vectors,
    custom_schema,
    fill_missing,
    make_dict,
    refuse_large,
)
from models.text.text_encoder import TextCache, format_item_texts, text_columns

LATEST_MS = 1 << 62
"""A time later than all times of logs."""
EARLIEST_MS = -(1 << 62)
"""A time earlier than all times of logs."""


Number = Annotated[float | None, AfterValidator(refuse_large)]


def check_actions(vectors: list[list[float | None]]) -> list[list[float | None]]:
    """Return actions, of which NaN and None are missing."""
    for vector in vectors:
        for action in vector:
            if action is not None and (action < 0 or action > 1):
                raise ValueError(f"the action {action:g} is not from 0 to 1")
    return vectors


class ActionsRequest(CandidateRequest):
    """A request to predict a user's actions on candidates.

    Behaviours at the time of the request or later are ignored.
    """

    history_actions: Annotated[Vectors, AfterValidator(check_actions)]
    """Actions of each behaviour, in the order of the model's metadata."""

    history_time_ms: Annotated[list[Time], Field(fail_fast=True)] | None = None  # type: ignore[assignment]

    @model_validator(mode="after")
    def check_times(self) -> Self:
        """Raise ValueError for times that fall."""
        for time, next_time in pairwise(self.history_time_ms or ()):
            if next_time < time:
                raise ValueError(f"history_time_ms falls from {time} to {next_time}")
        return self


def field_name(column: str) -> str:
    """Return the name of an item's column in requests: `title` for `text_title`."""
    return column.partition("_")[2]


class ActionsRequests(Requests):
    """Reader of requests to predict a user's actions on candidates."""

    base_class = ActionsRequest

    def __init__(
        self,
        folder: str,
        model: Any,
        catalogue: ActionsCatalogue,
        settings: Settings,
    ) -> None:
        text = catalogue.versions.get("text_items")
        self.template = str(text.config.get("template", "")) if text else ""
        names = [column["name"] for column in catalogue.versions["items"].schema]
        columns = [name for name in names if name.startswith((NUMBER, CATEGORY))]
        if text:
            columns += text_columns(names, self.template).values()
        self.content = list(dict.fromkeys(columns))
        """Columns of items that the model reads: attributes and parts of the text."""
        self.cache: TextCache[str] = TextCache()
        super().__init__(folder, model, catalogue, settings)
        self.feature_mean = model.features.mean.numpy()
        info: ActionsInfo = self.info
        viewers = [CATEGORY + name for name in info.viewers]
        self.schema = actions_schema(
            custom_schema([*viewers, *info.custom.names]),
            len(info.tasks),
            len(info.actions),
            len(info.features),
        )

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of custom features, viewer-side categories, new items."""
        fields = super().log_fields()
        for name in self.info.viewers:
            fields[f"viewer_{name}"] = (Text | None, None)
            fields[f"history_viewer_{name}"] = (Texts | None, None)
        content = {
            field_name(name): Number if name.startswith(NUMBER) else Text | None
            for name in self.content
        }
        item: Any = make_dict("NewItem", {"item_id": Required[ItemId], **content})
        return {**fields, "new_items": (list.__class_getitem__(item), [])}

    @classmethod
    def list_names(cls, info: ActionsInfo) -> dict[str, Any]:
        """Return the names that requests refer to, and the definitions of actions."""
        return {
            **super().list_names(info),
            "labels": info.tasks,
            "features": info.features,
            "actions": info.actions,
            "viewers": list(info.viewers),
            "inputs": info.definitions.get("inputs", {}),
        }

    def find_candidates(self, request: Any) -> list[int]:
        """Return the indices of candidates in the catalogue or among the new items."""
        index = ChainMap({item["item_id"]: 0 for item in request.new_items}, self.index)
        return [i for i, item in enumerate(request.candidates) if item in index]

    def to_row(self, request: Any, new: dict[str, int]) -> dict[str, Any]:
        """Return a row of `sequences`: readable behaviours, then candidates to score.

        Args:
            request: The request, of `request_class`.
            new: `item_index` of the request's new items.
        """
        index = ChainMap(new, self.index)
        history, candidates = request.history, request.candidates
        now = LATEST_MS if request.timestamp_ms is None else request.timestamp_ms
        times = request.history_time_ms
        if times is None:
            times = [EARLIEST_MS + position for position in range(len(history))]
        past = [i for i, item in enumerate(history) if item in index and times[i] < now]
        past = past[-self.max_history :]
        scored = self.find_candidates(request)
        # of the history followed by the candidates
        selected = past + [len(history) + i for i in scored]
        actions = np.zeros((len(history), len(self.info.actions)), np.float32)
        actions = fill_missing("history_actions", request.history_actions, actions)
        features = np.tile(self.feature_mean, (len(candidates), 1))
        features = fill_missing("features", request.features, features)
        actions = np.pad(actions, ((0, len(candidates)), (0, 0)))
        features = np.pad(features, ((len(history), 0), (0, 0)))
        columns: dict[str, Any] = {
            "item_index": [index.get(item) for item in history + candidates],
            "timestamp_ms": [*times, *[now] * len(candidates)],
            "actions": actions,
            "features": features,
        }
        for name in self.info.viewers:
            values = getattr(request, f"history_viewer_{name}") or [""] * len(history)
            value = getattr(request, f"viewer_{name}")
            columns[CATEGORY + name] = [*values, *[value] * len(candidates)]
        custom = request.custom_columns(self.info.custom, "history_")
        for name, values in request.custom_columns(self.info.custom).items():
            columns[name] = custom[name] + values
        return {
            "user_id": "",
            "tasks": [[0] * len(self.info.tasks)] * len(selected),
            "train_end": 0,
            "val_end": len(past),
            **{name: [v[i] for i in selected] for name, v in columns.items()},
        }

    def collate(self, requests: Sequence[Any], max_history: int) -> ActionsBatch:
        """Return the batch of requests, with the new items of all requests."""
        rows: list[dict[str, Any]] = []
        new_items: list[dict[str, Any]] = []
        for request in requests:
            new: dict[str, int] = {}
            for item in request.new_items:
                if item["item_id"] not in self.index:
                    new[item["item_id"]] = len(self.items) + len(new_items)
                    new_items.append(item)
            rows.append(self.to_row(request, new))
        batch = self.collate_rows(rows, max_history, keep_empty=True)
        if not new_items:
            return batch
        if self.model.needs_ids:
            warnings.warn(
                f"{len(new_items)} new items are scored without an id, but the model "
                "was always trained with ids: item_ids is not none, id_dropout is 0",
                stacklevel=2,
            )
        return replace(batch, **self.read_new_items(new_items))

    def read_new_items(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields `new_*` of `ActionsBatch`, each a tensor (n, ...)."""
        content = [
            {column: item.get(field_name(column)) for column in self.content}
            for item in items
        ]
        table = pa.Table.from_pylist(content, custom_schema(self.content))
        numbers, categories = self.catalogue.attributes.read(table)
        catalogue_text = self.catalogue.text
        width = catalogue_text.shape[1] if catalogue_text.numel() else 0
        text = np.zeros((len(items), width), np.float32)
        if width and self.encoder:
            texts = format_item_texts(table, self.template)[0]
            text = self.cache.encode(texts, self.encoder.encode).astype(np.float32)
        elif width:
            warnings.warn(
                f"the model was saved without its text encoder; {len(items)} new items "
                "are scored without their text",
                stacklevel=2,
            )
        return {
            "new_numbers": numbers,
            "new_categories": categories,
            "new_text": torch.from_numpy(text),
        }
