"""Parsing of served requests of actions models: history, candidates and new items.

Actions are numbers from 0 to 1; `inputs` in the model's metadata defines their scale.
An action that is left out counts as not taken. The column `new_items` may hold items
that are not in the catalogue, each with its `item_id`, and its text and attributes by
name. New items can be candidates or part of the history; the model reads them by their
content. A viewer-side category that is not in the training data counts as unknown. A
late feature that is left out is replaced by its mean over training.

Shapes: `n` new items, `W` width of text, `A` kinds of action, `F` late features, `V`
viewer-side categories.
"""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from core.errors import UserError, one_line
from core.files import join
from core.ids import parse_item_id
from core.ragged import concat_columns, lengths_to_starts
from core.schemas import ActionsInfo, EmbeddingsInfo, Inputs, ItemsInfo
from core.tables import Table, open_table
from models.actions.batch import ActionsBatch
from models.actions.catalogue import ActionsCatalogue
from models.actions.data import ActionsDataset
from models.custom_features import CATEGORY, NUMBER
from models.requests import (
    Columns,
    Request,
    Requests,
    Row,
    check_entries,
)
from models.text.text_encoder import (
    Floats,
    TextCache,
    TextEncoder,
    TfidfEncoder,
    format_item_texts,
    text_columns,
)

LATEST_MS = 1 << 62
"""A time later than all times of logs."""
EARLIEST_MS = -(1 << 62)
"""A time earlier than all times of logs."""

Item = dict[str, Any]
"""A new item: `item_id`, and its text and attributes by name."""


def text_template(text: Table[Any] | None) -> str:
    """Return the template by which items' columns were formatted as texts."""
    return str(text.config.get("template", "")) if text else ""


def content_columns(
    items: Table[ItemsInfo], text: Table[EmbeddingsInfo] | None
) -> list[str]:
    """Return the columns of items that a model reads: attributes and parts of the text.

    Args:
        items: Table of the items.
        text: Table of the items' text, or None for a model that reads no text.
    """
    names = [column["name"] for column in items.schema]
    columns = [name for name in names if name.startswith((NUMBER, CATEGORY))]
    if text:
        columns += text_columns(names, text_template(text)).values()
    return list(dict.fromkeys(columns))


def field_name(column: str) -> str:
    """Return the name of an item's column in requests: `title` for `text_title`."""
    return column.partition("_")[2]


class NewItems:
    """Parser of items that are not in the catalogue, from their attributes and text.

    A missing value counts as unknown, as does a category value that the catalogue does
    not have.
    """

    def __init__(
        self,
        catalogue: ActionsCatalogue,
        columns: Sequence[str],
        encoder: TextEncoder | TfidfEncoder | None = None,
        template: str = "",
    ) -> None:
        """Take scales and categories from the catalogue.

        Args:
            catalogue: The catalogue, whose scales and categories are used.
            columns: Columns of items that the model reads.
            encoder: Encoder of the catalogue's text, for a model that reads text.
            template: Template of the catalogue's text.
        """
        self.attributes, self.columns = catalogue.attributes, columns
        self.encoder, self.template = encoder, template
        self.width = catalogue.text.shape[1] if catalogue.text.numel() else 0
        self.cache: TextCache[str] = TextCache()

    def parse(self, items: Sequence[Item]) -> dict[str, Item]:
        """Return the items by their id."""
        by_id: dict[str, Item] = {}
        for item in items:
            if not (item or {}).get("item_id"):
                raise UserError("new_items has an item without item_id")
            item_id = parse_item_id("new_items", item["item_id"])
            if item_id in by_id:
                raise UserError(f"new_items has '{item_id:.200}' twice")
            by_id[item_id] = item
        return by_id

    def collate(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the fields `new_*` of `ActionsBatch`, each a tensor (n, ...)."""
        ids = [parse_item_id("new_items", item["item_id"]) for item in items]
        columns = {"item_id": pa.array(ids)}
        for column in self.columns:
            columns[column] = _read_field(column, items)
        table = pa.table(columns)
        numbers, categories = self.attributes.read(table)
        text = np.zeros((len(items), 0), np.float32)
        if self.width:
            text = self._encode(format_item_texts(table, self.template)[0])
        return {
            "new_numbers": numbers,
            "new_categories": categories,
            "new_text": torch.from_numpy(text),
        }

    def _encode(self, texts: list[str]) -> Floats:
        """Return the vectors (n, W) of texts. Warn and return 0 without an encoder."""
        if self.encoder is None:
            warnings.warn(
                f"the model was saved without its text encoder; {len(texts)} new items "
                "are scored without their text",
                stacklevel=2,
            )
            return np.zeros((len(texts), self.width), np.float32)
        return self.cache.encode(texts, self.encoder.encode).astype(np.float32)


def _read_field(column: str, items: Sequence[Item]) -> pa.Array:
    """Return the values (n,) of one column of new items, null where missing."""
    is_number = column.startswith(NUMBER)
    name = field_name(column)
    values = [item.get(name) for item in items]
    check_entries(f"'{name}' of new_items", values, len(items))
    try:
        array = pa.array(
            values, pa.float32() if is_number else pa.string(), from_pandas=True
        )
    except pa.ArrowException as error:
        kind = "numbers" if is_number else "strings"
        raise UserError(
            f"'{name}' of new_items has values that are not {kind} "
            f"({one_line(error):.200})"
        ) from error
    if is_number and pc.any(pc.is_inf(array)).as_py():
        raise UserError(f"'{name}' of new_items has an infinite number")
    return array


class ActionsRequests(Requests):
    """Parser of requests to predict a user's actions on candidates."""

    required_columns: ClassVar[Columns] = {
        **Requests.required_columns,
        "history_actions": "vectors",
    }
    optional_columns: ClassVar[Columns] = {
        **Requests.optional_columns,
        # time of the request; events of the history at this time or later are ignored
        "timestamp_ms": "long",
        "features": "vectors",
        "history_time_ms": "longs",
    }

    def __init__(
        self,
        folder: str,
        model: Any,
        catalogue: ActionsCatalogue,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(folder, model, catalogue, settings)
        self.max_history = model.config.max_history
        self.actions = catalogue.actions
        self.custom_features = catalogue.custom_features
        self.needs_ids = model.needs_ids
        self.feature_mean = model.features.mean.numpy()
        self.viewers = {
            # code 0 is an unknown value
            name: {value: code for code, value in enumerate(values, 1)}
            for name, values in catalogue.viewers.items()
        }
        text = catalogue.versions.get("text_items")
        columns = content_columns(catalogue.versions["items"], text)
        self.new_items = NewItems(catalogue, columns, self.encoder, text_template(text))

    @classmethod
    def columns(cls, info: ActionsInfo, inputs: Inputs) -> Columns:
        """Return all optional columns, including viewer-side categories and new items.

        Args:
            info: Info of the sequences.
            inputs: Where the tables are.
        """
        columns = super().columns(info, inputs)
        # values of the request, and of each event of the history; "" for none
        for name in info.viewers:
            columns |= {f"viewer_{name}": "string", f"history_viewer_{name}": "strings"}
        items = open_table(join(inputs.tables, "items"), ItemsInfo)
        text = None
        if inputs.text:
            text = open_table(join(inputs.text, "items"), EmbeddingsInfo)
        fields = {
            field_name(name): "number" if name.startswith(NUMBER) else "string"
            for name in content_columns(items, text)
        }
        return {**columns, "new_items": {"item_id": "id", **fields}}

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

    def parse(self, row: Row) -> Request:
        """Return the request of a row, with the latest `max_history` readable events.

        Candidates and events are left out if their item is neither in the catalogue nor
        among the new items. Events that are not before the request are left out too.
        """
        candidates, history = row.item_ids("candidates"), row.item_ids("history")
        sent_items = self.new_items.parse(row.value("new_items") or ())
        new = {key: item for key, item in sent_items.items() if key not in self.index}
        new_index = {item: index for index, item in enumerate(new, len(self.index))}
        index = ChainMap(new_index, self.index)
        # positions in the lists of the row
        scored = [i for i, item in enumerate(candidates) if item in index]
        times = self._parse_times(row, len(history))
        request_time = row.value("timestamp_ms")
        if request_time is None:
            request_time = LATEST_MS
        events = [
            i
            for i, item in enumerate(history)
            if item in index and times[i] < request_time
        ]
        events = events[-self.max_history :]
        num_events, num_scored = len(events), len(scored)
        default = np.tile(self.feature_mean, (len(candidates), 1))
        feature = row.vectors("features", default)[scored]
        action = self._parse_actions(row, len(history))[events]
        items = [history[i] for i in events] + [candidates[i] for i in scored]
        time = [times[i] for i in events] + [request_time] * num_scored
        parts: dict[str, NDArray] = {
            "item": np.array([index[item] for item in items], np.int64),
            "time": np.array(time, np.int64),
            "action": np.pad(action, ((0, num_scored), (0, 0))),
            "feature": np.pad(feature, ((num_events, 0), (0, 0))),
            "label": np.zeros((num_events + num_scored, 0), np.float32),
        }
        if self.viewers:
            codes = [
                self._parse_viewer(row, name, len(history), events, num_scored)
                for name in self.viewers
            ]
            parts["viewer"] = np.stack(codes, 1)
        if self.custom_features.names:
            history_custom = row.custom_features(
                self.custom_features, "history_", len(history)
            )
            candidate_custom = row.custom_features(
                self.custom_features, "", len(candidates)
            )
            parts["custom"] = np.concatenate(
                [history_custom[events], candidate_custom[scored]]
            )
        return Request(candidates, scored, num_events, parts, list(new.values()))

    def _parse_times(self, row: Row, count: int) -> list[int]:
        """Return the time in ms of each event of the history."""
        times = row.entries("history_time_ms", count)
        if row.value("history_time_ms") is None:
            return [EARLIEST_MS + position for position in range(count)]
        if None in times:
            raise UserError("history_time_ms has an entry without a time")
        for time, next_time in pairwise(times):
            if next_time < time:
                raise UserError(f"history_time_ms falls from {time} to {next_time}")
        return times

    def _parse_actions(self, row: Row, count: int) -> Floats:
        """Return the actions (count, A) of the history."""
        default = np.zeros((count, len(self.actions)), np.float32)
        action = row.vectors("history_actions", default)
        is_invalid = (action < 0) | (action > 1)
        if is_invalid.any():
            event, kind = np.argwhere(is_invalid)[0]
            raise UserError(
                f"history_actions has {action[event, kind]:g} for "
                f"'{self.actions[kind]}', which is not from 0 to 1"
            )
        return action

    def _parse_viewer(
        self, row: Row, name: str, count: int, events: list[int], num_scored: int
    ) -> NDArray[np.int64]:
        """Return the code of a viewer-side category for each event and candidate."""
        history = row.entries(f"history_viewer_{name}", count)
        request_value = row.text(f"viewer_{name}")
        values = [history[i] for i in events] + [request_value] * num_scored
        codes = self.viewers[name]
        return np.array([codes.get(value, 0) for value in values], np.int64)

    def collate(self, requests: Sequence[Request]) -> ActionsBatch:
        """Collate requests into one batch, with the new items of all requests."""
        new_items = list(chain.from_iterable(request.new for request in requests))
        if new_items and self.needs_ids:
            warnings.warn(
                f"{len(new_items)} new items are scored without an id, but the model "
                "was always trained with ids: item_ids is not none, id_dropout is 0",
                stacklevel=2,
            )
        lengths = np.array([len(request.parts["item"]) for request in requests])
        context = np.array([request.events for request in requests])
        events = concat_columns([dict(request.parts) for request in requests])
        # a request numbers its new items from 0; a batch numbers those of all requests
        new_counts = np.array([len(request.new) for request in requests])
        first_new = np.repeat(lengths_to_starts(new_counts), lengths)
        is_new = events["item"] >= len(self.index)
        events["item"] += np.where(is_new, first_new, 0)
        dataset = ActionsDataset.from_requests(events, context, lengths - context)
        batch = dataset.collate(np.arange(len(requests)))
        return (
            replace(batch, **self.new_items.collate(new_items)) if new_items else batch
        )
