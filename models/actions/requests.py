"""Parsing of served requests of actions models: a user's context, candidates, and new items.

Actions are graded from 0 to 1, as `inputs` in the model's metadata says; an action that
is left out counts as not taken. A request may bring items that are not in the catalogue
in `new_items`, each with its `item_id` and its text and attributes by name. They are
scored by their content, as candidates and in the history. A viewer's category that
training has not seen counts as unknown, and a late feature that is left out as its mean
over training.

Shapes: `n` new items, `W` width of text, `A` kinds of action, `F` late features, `V`
viewer-side categories.
"""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from models.actions.batch import ActionsBatch
from models.actions.catalogue import ActionsCatalogue
from models.actions.data import ActionsDataset
from models.config import did_you_mean
from models.item_ids import parse_item_id
from models.own_features import CATEGORY, NUMBER
from models.ragged import concat_columns, lengths_to_starts
from models.requests import Columns, Request, Requests, Row, find_bundled_inputs
from models.storage.inputs import Inputs
from models.storage.tables import Manifest, UserError, join, read_manifest
from models.text.text_encoder import (
    Floats,
    TextCache,
    TextEncoder,
    TfidfEncoder,
    format_item_texts,
    text_columns,
)

LATEST_MS, EARLIEST_MS = 1 << 62, -(1 << 62)
"""Later and earlier than all times."""

Item = dict[str, Any]
"""A new item: its `item_id`, and by name the values of columns of the catalogue's
items."""


def read_text_manifest(inputs: Inputs) -> Manifest | None:
    """Return the manifest of the items' text, or None for a model that reads no text."""
    if not inputs.text:
        return None
    return read_manifest(join(inputs.text, "items"), "embeddings")


def text_template(text: Manifest | None) -> str:
    """Return the template by which items' columns were formatted as texts."""
    return str(text.config.get("template", "")) if text else ""


def content_columns(items: Manifest, text: Manifest | None) -> list[str]:
    """Return the columns of items that a model reads: attributes, and the columns that its text is made of."""
    names = [column["name"] for column in items.schema]
    read = [name for name in names if name.startswith((NUMBER, CATEGORY))]
    if text:
        read += text_columns(names, text_template(text)).values()
    return list(dict.fromkeys(read))


def field_name(column: str) -> str:
    """Return the name of an item's column in requests: `title` for `text_title`."""
    return column.partition("_")[2]


class NewItems:
    """Reader of items that are not in the catalogue, by their content: attributes and encoded text.

    A value that is left out counts as unknown, and so does a category that the
    catalogue does not have.
    """

    def __init__(
        self,
        catalogue: ActionsCatalogue,
        columns: Sequence[str],
        encoder: TextEncoder | TfidfEncoder | None = None,
        template: str = "",
    ) -> None:
        """Initialise the reader.

        Args:
            catalogue: The catalogue, whose scales and categories are used.
            columns: The columns that the model reads.
            encoder: Encoder of the catalogue's text, for a model that reads text.
            template: Template of the catalogue's text.
        """
        self.attributes, self.columns = catalogue.attributes, columns
        self.encoder, self.template = encoder, template
        self.width = catalogue.text.shape[1] if catalogue.text.numel() else 0
        self.names = list(dict.fromkeys(map(field_name, columns)))
        self.cache: TextCache[str] = TextCache()

    def parse(self, items: Sequence[Item]) -> dict[str, Item]:
        """Return the items by their id.

        Raises:
            UserError: If an item has no id, comes twice, or has a field that the model
                does not read.
        """
        by_id: dict[str, Item] = {}
        for item in items:
            if not (item or {}).get("item_id"):
                raise UserError(
                    "new_items has an item without item_id; give each the id that candidates call it by"
                )
            item_id = parse_item_id("new_items", item["item_id"])
            if item_id in by_id:
                raise UserError(f"new_items has '{item_id}' twice; give each item once")
            for name in item:
                if name not in ("item_id", *self.names):
                    near = did_you_mean(
                        name, self.names, "it reads nothing of items but their ids"
                    )
                    raise UserError(
                        f"new_items has '{name}' of '{item_id}', which the model does not read; {near}"
                    )
            by_id[item_id] = item
        return by_id

    def collate(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the tensors new_numbers, new_categories and new_text (n, ...) of `ActionsBatch`."""
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
        """Return the vectors (n, W) of texts; without an encoder zeros, with a warning."""
        if self.encoder is None:
            warnings.warn(
                f"the model comes without its text encoder; {len(texts)} new items count as without text",
                stacklevel=2,
            )
            return np.zeros((len(texts), self.width), np.float32)
        return self.cache.encode(texts, self.encoder.encode).astype(np.float32)


def _read_field(column: str, items: Sequence[Item]) -> pa.Array:
    """Return one column of new items.

    Raises:
        UserError: If a value is of another type or infinite.
    """
    is_number, name = column.startswith(NUMBER), field_name(column)
    values = [item.get(name) for item in items]
    try:
        array = pa.array(
            values, pa.float32() if is_number else pa.string(), from_pandas=True
        )
    except pa.ArrowException as error:
        kind = "numbers" if is_number else "texts"
        raise UserError(
            f"'{name}' of new_items is of {kind} ({str(error).splitlines()[0]}); give {kind}"
        ) from error
    if is_number and pc.any(pc.is_inf(array)).as_py():
        raise UserError(
            f"'{name}' of new_items has an infinite number; leave out what is not known"
        )
    return array


class ActionsRequests(Requests):
    """Requests for the actions of a user on candidates."""

    required_columns: ClassVar[Columns] = {
        **Requests.required_columns,
        "history_actions": "vectors",
    }
    optional_columns: ClassVar[Columns] = {
        **Requests.optional_columns,
        # of the request; events from then on, by their history_time_ms, are not read
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
        self.actions, self.own = catalogue.actions, catalogue.own
        self.wants_ids = model.wants_ids
        self.mean = model.features.mean.numpy()
        self.viewers = {
            name: {value: number for number, value in enumerate(values, 1)}
            for name, values in catalogue.viewers.items()
        }
        items = read_manifest(f"{folder}/tables/items", "items")
        text = read_text_manifest(find_bundled_inputs(folder))
        columns = content_columns(items, text)
        self.new = NewItems(catalogue, columns, self.encoder, text_template(text))

    @classmethod
    def columns(cls, info: Mapping[str, Any], inputs: Inputs) -> Columns:
        columns = super().columns(info, inputs)
        # of the request, and of each event of the history, "" for none
        for name in info.get("viewers", ()):
            columns |= {f"viewer_{name}": "string", f"history_viewer_{name}": "strings"}
        items = read_manifest(join(inputs.tables, "items"), "items")
        fields = {
            field_name(name): "number" if name.startswith(NUMBER) else "string"
            for name in content_columns(items, read_text_manifest(inputs))
        }
        return {**columns, "new_items": {"item_id": "id", **fields}}

    @classmethod
    def about(cls, info: Mapping[str, Any]) -> dict[str, Any]:
        inputs = info.get("definitions", {}).get("inputs", {})
        return {**super().about(info), "inputs": inputs}

    def parse(self, row: Row) -> Request:
        candidates, history = row.item_ids("candidates"), row.item_ids("history")
        sent_items = self.new.parse(row.value("new_items") or ())
        new = {key: item for key, item in sent_items.items() if key not in self.index}
        new_index = {item: number for number, item in enumerate(new, len(self.index))}
        index = ChainMap(new_index, self.index)
        known = [i for i, item in enumerate(candidates) if item in index]
        times, now = self._parse_times(row, len(history)), row.value("timestamp_ms")
        now = LATEST_MS if now is None else now
        earlier = [
            i for i, item in enumerate(history) if item in index and times[i] < now
        ]
        past = earlier[-self.max_history :]
        size, count = len(past), len(known)
        default = np.tile(self.mean, (len(candidates), 1))
        feature = row.vectors("features", default)[known]
        action = self._parse_actions(row, len(history))[past]
        items = [history[i] for i in past] + [candidates[i] for i in known]
        parts: dict[str, NDArray] = {
            "item": np.array([index[item] for item in items], np.int64),
            "time": np.array([times[i] for i in past] + [now] * count, np.int64),
            "action": np.pad(action, ((0, count), (0, 0))),
            "feature": np.pad(feature, ((size, 0), (0, 0))),
            "label": np.zeros((size + count, 0), np.float32),
        }
        if self.viewers:
            codes = [
                self._parse_viewer(row, name, len(history), past, count)
                for name in self.viewers
            ]
            parts["viewer"] = np.stack(codes, 1)
        if self.own.names:
            own_past = row.own_features(self.own, "history_", len(history))[past]
            own = row.own_features(self.own, "", len(candidates))[known]
            parts["own"] = np.concatenate([own_past, own])
        return Request(candidates, known, size, parts, list(new.values()))

    def _parse_times(self, row: Row, count: int) -> list[int]:
        """Return the time of each event of the history in ms; without times their order, before all times.

        Raises:
            UserError: If some times are missing or fall.
        """
        times = row.entries("history_time_ms", count)
        if row.value("history_time_ms") is None:
            return [EARLIEST_MS + position for position in range(count)]
        if None in times:
            raise UserError(
                "history_time_ms has an entry without a time; give one each, or leave the column out"
            )
        for earlier, later in pairwise(times):
            if later < earlier:
                raise UserError(
                    f"history_time_ms falls from {earlier} to {later}; give the history oldest first"
                )
        return times

    def _parse_actions(self, row: Row, count: int) -> Floats:
        """Return the actions (count, A) of the history.

        Raises:
            UserError: If an action is not from 0 to 1.
        """
        default = np.zeros((count, len(self.actions)), np.float32)
        action = row.vectors("history_actions", default)
        wrong = (action < 0) | (action > 1)
        if wrong.any():
            event, kind = np.argwhere(wrong)[0]
            raise UserError(
                f"history_actions has {action[event, kind]:g} for '{self.actions[kind]}', which is not from 0 to 1; "
                f"grade it as `inputs` in the model's metadata says"
            )
        return action

    def _parse_viewer(
        self, row: Row, name: str, size: int, past: list[int], count: int
    ) -> NDArray[np.int64]:
        """Return the code of a viewer-side category for each event and candidate.

        Args:
            row: The request.
            name: The category.
            size: Events of the history.
            past: Indices of the events that are read.
            count: Candidates, which all have the category of the request.
        """
        history = row.entries(f"history_viewer_{name}", size)
        values = [history[i] for i in past] + [row.value(f"viewer_{name}")] * count
        codes = self.viewers[name]
        return np.array([codes.get(value, 0) for value in values], np.int64)

    def collate(self, requests: Sequence[Request]) -> ActionsBatch:
        new = [item for request in requests for item in request.new]
        if new and self.wants_ids:
            warnings.warn(
                f"{len(new)} new items are scored without an id, and the model has never trained without one; train "
                f"it with --model.item_ids none or --model.id_dropout 0.2",
                stacklevel=2,
            )
        sizes = np.array([len(request.parts["item"]) for request in requests])
        context = np.array([request.events for request in requests])
        events = concat_columns([dict(request.parts) for request in requests])
        # each request numbers its new items from 0; in the batch they are numbered on
        new_counts = np.array([len(request.new) for request in requests])
        first_new = np.repeat(lengths_to_starts(new_counts), sizes)
        is_new = events["item"] >= len(self.index)
        events["item"] += np.where(is_new, first_new, 0)
        dataset = ActionsDataset.from_requests(events, context, sizes - context)
        batch = dataset.collate(np.arange(len(requests)))
        return replace(batch, **self.new.collate(new)) if new else batch
