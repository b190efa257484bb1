"""Candidates of a served request as a batch of one user's events, with what he did before and new items.

Actions are graded from 0 to 1, as `inputs` in the model's metadata says; one that is not given counts as not taken.
A request may bring items that are not in the catalogue in `new_items`, each with its `item_id` and its text and
attributes by name: these are scored by their content, as candidates and in the history. A category of the viewer that
training has not seen counts as not known, and a late feature that is not given as its mean over training.

Shapes: `n` new items, `W` width of text, `A` kinds of action, `F` late features, `V` viewer-side categories.
"""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import Tensor

from models.actions.batch import ActionsCatalogue
from models.actions.data import ActionsDataset
from models.config import did_you_mean
from models.item_ids import parse_item_id
from models.own_features import CATEGORY, NUMBER
from models.ragged import concat_columns
from models.requests import Columns, Request, Requests, Row, bundled
from models.storage.inputs import Inputs
from models.storage.tables import Manifest, UserError, join, read_manifest
from models.text.text_encoder import (
    MAX_CACHED_TEXTS,
    Floats,
    TextEncoder,
    TfidfEncoder,
    encode_cached,
    format_item_texts,
    text_columns,
)

LAST, BEFORE = 1 << 62, -(1 << 62)
"""Later and earlier than all times, in ms."""


def text_of(inputs: Inputs) -> Manifest | None:
    """The table of the items' text, where the model reads one."""
    return (
        read_manifest(join(inputs.text, "items"), "embeddings") if inputs.text else None
    )


Post = dict[str, Any]
"""What is said of an item: its `item_id`, and by name what the columns of the catalogue's items hold."""


def template_of(text: Manifest | None) -> str:
    """How the text of items was made of their columns."""
    return str(text.config.get("template", "")) if text else ""


def columns_of(items: Manifest, text: Manifest | None) -> list[str]:
    """Columns of the items that models read: attributes, and of a model with `text` what that is made of."""
    there = [column["name"] for column in items.schema]
    read = [name for name in there if name.startswith((NUMBER, CATEGORY))]
    return list(
        dict.fromkeys(
            [*read, *(text_columns(there, template_of(text)).values() if text else ())]
        )
    )


def name_of(column: str) -> str:
    """What a request calls it: `title` of `text_title`."""
    return column.partition("_")[2]


class NewItems:
    """Items that are not in the catalogue, told by their content: attributes, and the text encoded. What is not given
    counts as unknown, and so does a category that the catalogue does not have."""

    def __init__(
        self,
        catalogue: ActionsCatalogue,
        columns: Sequence[str],
        encoder: TextEncoder | TfidfEncoder | None = None,
        template: str = "",
    ) -> None:
        """`columns` as of `columns_of`; `encoder` and `template`, of a model that reads text, as for the catalogue."""
        self.attributes, self.columns, self.encoder, self.template = (
            catalogue.attributes,
            columns,
            encoder,
            template,
        )
        self.width = catalogue.text.shape[1] if catalogue.text.numel() else 0
        self.names = list(dict.fromkeys(map(name_of, columns)))
        self.cache: LRUCache[str, Floats] = LRUCache(MAX_CACHED_TEXTS)

    def named(self, posts: Sequence[Post]) -> dict[str, Post]:
        """The posts by their id; UserError for one without, twice, or with what the model does not read."""
        found: dict[str, Post] = {}
        for post in posts:
            if not (item := (post or {}).get("item_id")):
                raise UserError(
                    "new_items has an item without item_id; give each the id that candidates call it by"
                )
            item = parse_item_id("new_items", item)
            if item in found:
                raise UserError(f"new_items has '{item}' twice; give each item once")
            for name in post:
                if name not in ("item_id", *self.names):
                    raise UserError(
                        f"new_items has '{name}' of '{item}', which the model does not read; "
                        f"{did_you_mean(name, self.names, 'it reads nothing of items but their ids')}"
                    )
            found[item] = post
        return found

    def read(self, posts: Sequence[Post]) -> dict[str, Tensor]:
        """new_numbers, new_categories and new_text (n, ...) as of `models/actions/batch.py`."""
        columns = {
            "item_id": pa.array(
                [parse_item_id("new_items", post["item_id"]) for post in posts]
            )
        }
        for column in self.columns:
            kind, name = (
                (pa.float32() if column.startswith(NUMBER) else pa.string()),
                name_of(column),
            )
            try:
                columns[column] = pa.array(
                    [post.get(name) for post in posts], kind, from_pandas=True
                )
            except pa.ArrowException as error:
                what = "numbers" if column.startswith(NUMBER) else "texts"
                raise UserError(
                    f"'{name}' of new_items is of {what} ({str(error).splitlines()[0]}); give {what}"
                ) from error
            if column.startswith(NUMBER) and pc.any(pc.is_inf(columns[column])).as_py():
                raise UserError(
                    f"'{name}' of new_items has an infinite number; leave out what is not known"
                )
        table = pa.table(columns)
        numbers, categories = self.attributes.read(table)
        text = (
            self.vectors(format_item_texts(table, self.template)[0])
            if self.width
            else np.zeros((len(posts), 0), np.float32)
        )
        return {
            "new_numbers": numbers,
            "new_categories": categories,
            "new_text": torch.from_numpy(text),
        }

    def vectors(self, texts: list[str]) -> Floats:
        """(n, W) of the texts, each encoded once; zeros, with a warning, where there is no encoder."""
        if self.encoder is None:
            warnings.warn(
                f"the model comes without its text encoder; {len(texts)} new items count as without text",
                stacklevel=2,
            )
            return np.zeros((len(texts), self.width), np.float32)
        return encode_cached(self.cache, texts, self.encoder.encode).astype(np.float32)


class ActionsRequests(Requests):
    """Rows as `models/actions/data.py` makes batches."""

    needs: ClassVar[Columns] = {**Requests.needs, "history_actions": "vectors"}
    takes: ClassVar[Columns] = {
        **Requests.takes,
        "timestamp_ms": "long",  # of the request; events from then on are unseen, by their history_time_ms
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
        self.length, self.actions, self.own = (
            model.config.max_history,
            catalogue.actions,
            catalogue.own,
        )
        self.wants_ids = model.wants_ids
        self.mean = model.features.mean.numpy()
        self.viewers = {
            name: {value: number for number, value in enumerate(values, 1)}
            for name, values in catalogue.viewers.items()
        }
        items, text = (
            read_manifest(f"{folder}/tables/items", "items"),
            text_of(bundled(folder)),
        )
        self.new = NewItems(
            catalogue, columns_of(items, text), self.encoder, template_of(text)
        )

    @classmethod
    def columns(cls, info: Mapping[str, Any], inputs: Inputs) -> Columns:
        found = super().columns(info, inputs)
        for name in info.get(
            "viewers", ()
        ):  # of the request, and of each event of the history, "" for none
            found |= {f"viewer_{name}": "string", f"history_viewer_{name}": "strings"}
        told = columns_of(
            read_manifest(join(inputs.tables, "items"), "items"), text_of(inputs)
        )
        kinds = {
            name_of(name): "number" if name.startswith(NUMBER) else "string"
            for name in told
        }
        return {**found, "new_items": {"item_id": "id", **kinds}}

    @classmethod
    def about(cls, info: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super().about(info),
            "inputs": info.get("definitions", {}).get("inputs", {}),
        }

    def read(self, row: Row) -> Request:
        candidates, shown = (row.ids(name) for name in ("candidates", "history"))
        brought = self.new.named(row.given("new_items") or ())
        posts = {item: post for item, post in brought.items() if item not in self.index}
        index = ChainMap(
            {item: number for number, item in enumerate(posts, len(self.index))},
            self.index,
        )
        known = [i for i, item in enumerate(candidates) if item in index]
        times, now = self.times(row, len(shown)), row.given("timestamp_ms")
        now = LAST if now is None else now
        past = [i for i, item in enumerate(shown) if item in index and times[i] < now][
            -self.length :
        ]
        size, count = len(past), len(known)
        features = row.vectors("features", np.tile(self.mean, (len(candidates), 1)))[
            known
        ]
        items = [shown[i] for i in past] + [candidates[i] for i in known]
        parts: dict[str, NDArray] = {
            "item": np.array([index[item] for item in items], np.int64),
            "time": np.array([times[i] for i in past] + [now] * count, np.int64),
            "action": np.pad(self.taken(row, len(shown))[past], ((0, count), (0, 0))),
            "feature": np.pad(features, ((size, 0), (0, 0))),
            "label": np.zeros((size + count, 0), np.float32),
        }
        if self.viewers:
            parts["viewer"] = np.stack(
                [
                    self.viewer(row, name, len(shown), past, count)
                    for name in self.viewers
                ],
                1,
            )
        if self.own.names:
            of_past = row.own(self.own, "history_", len(shown))[past]
            parts["own"] = np.concatenate(
                [of_past, row.own(self.own, "", len(candidates))[known]]
            )
        return Request(candidates, known, size, parts, list(posts.values()))

    def times(self, row: Row, size: int) -> list[int]:
        """When each event of the history was, in ms, or its place, before anything that has a time."""
        times = row.column("history_time_ms", size)
        if row.given("history_time_ms") is None:
            return [BEFORE + place for place in range(size)]
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

    def taken(self, row: Row, size: int) -> Floats:
        """(size, A) what was done with each item; UserError for what is not graded as in training."""
        action = row.vectors(
            "history_actions", np.zeros((size, len(self.actions)), np.float32)
        )
        wrong = (action < 0) | (action > 1)
        if wrong.any():
            event, kind = np.argwhere(wrong)[0]
            raise UserError(
                f"history_actions has {action[event, kind]:g} for '{self.actions[kind]}', which is not from 0 to 1; "
                f"grade it as `inputs` in the model's metadata says"
            )
        return action

    def viewer(
        self, row: Row, name: str, size: int, past: list[int], count: int
    ) -> NDArray[np.int64]:
        """(events and candidates,) a viewer-side category: of each event, and that of the request `count` times."""
        then = row.column(f"history_viewer_{name}", size)
        values = [then[i] for i in past] + [row.given(f"viewer_{name}")] * count
        return np.array(
            [self.viewers[name].get(value, 0) for value in values], np.int64
        )

    def batch(self, requests: Sequence[Request]) -> dict[str, Tensor]:
        posts = [post for request in requests for post in request.new]
        if posts and self.wants_ids:
            warnings.warn(
                f"{len(posts)} new items are scored without an id, and the model has never trained without one; train "
                f"it with --model.item_ids none or --model.id_dropout 0.2",
                stacklevel=2,
            )
        sizes = [len(request.parts["item"]) for request in requests]
        events = concat_columns([dict(request.parts) for request in requests])
        before = np.repeat(
            [*accumulate((len(request.new) for request in requests), initial=0)][:-1],
            sizes,
        )
        events["item"] += np.where(
            events["item"] >= len(self.index), before, 0
        )  # each request numbers its own
        context = np.array([request.events for request in requests])
        batch = ActionsDataset.from_requests(
            events, context, np.array(sizes) - context
        ).collate(np.arange(len(requests)))
        return batch | (self.new.read(posts) if posts else {})
