"""A search model or a model of actions as MLflow loads it: a history and candidates in, the candidates ranked out.

    model = mlflow.pyfunc.load_model("models:/beauty/1")
    model.predict(pandas.DataFrame([{"history": ["B01", "B02"], "history_query": ["lip balm", "soap"],
                                     "query": "soap", "candidates": ["B07", "B02"],
                                     "numbers": {"bm25": [7.1, 3.0]}}]))     # item_id, score

Run by MLflow, not imported; a "model from code" as `served_model.py` is. A row is one request. What the columns mean
is in `package.py`; the names and the order of features, actions and labels, and how actions are graded, are in the
model's metadata. A feature that is not given, or NaN, counts as its mean over training, an action as not taken. To a
search model `model_config={"counts": TABLES/counts}` gives what `jobs.prepare --counts_as_of` has counted, and
`timestamp_ms` the hour and weekday of the request, so that a request of these needs no features of its candidates.
Features of the log's own are given by name, a value per candidate, and per behaviour with `history_` before the
column's name; one that is not given counts as unknown, and so does a value that training has not seen. Labels of
behaviours that a search model's tokens have (`token_labels`) are given by name in `history_labels`, as they were known
when the result became a behaviour.
Candidates that are not in the catalogue are ranked last, in the order given, with the score NaN; items of a history
that are not are skipped. To a model of actions a request may bring such items in `new_items`, each with its `item_id`
and its text and attributes by name: these are scored by their content, as candidates and in the history. Where a result
would be shown is not read. Queries, and pairs of query and document, that training has not seen are encoded as
jobs.encode would have, by the encoder that comes with the model, and kept; in a model that has none such a query counts
as none, and a warning says so. A category of the viewer that training has not seen counts as not known.

A row with `history_from` goes on from what is kept of its `user_id`: its `history` has the behaviours from that one
on, counted from 0, and those that are kept already are skipped, so that a request can be sent again. Without candidates
it only adds to the state. Where the state is not there (any more), a row with all behaviours from 0 on, or with as many
of the latest as the model reads, begins it; another one is refused in words. States are held in the process, of the
users asked for last, up to `model_config={"state_mb": 1024}`. Scores are those without a state, until there are more
behaviours than the model reads: what is kept then is as `append` of the model says.

Shapes: `N` candidates, `F` features, `A` kinds of action, `K` labels, `T` positions, `V` viewer-side categories.
"""

from __future__ import annotations

import math
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from mlflow.pyfunc import PythonModel
from numpy.typing import NDArray

from models import checkpoint, registry
from models.actions.batch import ActionsCatalogue
from models.actions.data import ActionsExamples
from models.actions.new_items import NewItems, Post, columns_of, template_of
from models.config import hint
from models.item_ids import item_ids
from models.latest import Latest
from models.own_features import CATEGORY, NUMBER, OwnFeatures
from models.scores import check_finite
from models.search.counts import HOURS, Counts, hours
from models.search.data import NO_QUERY, SearchCatalogue, SearchExamples, pair_key
from models.search.request_text import RequestText
from models.tables import UserError, read_manifest, read_table
from models.text_encoder import load_saved

ROWS = 256
"""Requests that are scored at once."""

LAST, BEFORE = 1 << 62, -(1 << 62)
"""Later and earlier than all times, in ms."""

Row = dict[str, Any]
"""A request: the values of its columns."""

Index = Mapping[str, int]
"""Numbers of items by their id."""

STATE_MB = 1024
"""MB of users' states that are kept, where `model_config` does not say."""

Floats = NDArray[np.float32]


def given(row: Row, name: str) -> Any:
    """What the row has in a column, None where it has nothing."""
    value = row.get(name)
    return None if isinstance(value, float) and np.isnan(value) else value


def vectors(row: Row, name: str, empty: Floats) -> Floats:
    """(count, width) of a column of vectors, `empty` (count, width) for what is not given; UserError for another
    shape."""
    there, (count, width) = given(row, name), empty.shape
    if there is None:
        return empty
    if any(vector is None for vector in there):
        raise UserError(f"{name} has an entry without numbers; give NaN for what is not known, or leave the column out")
    widths = {len(vector) for vector in there} or {width}
    if len(there) != count or widths != {width}:
        wide = ", ".join(map(str, sorted(widths)))
        raise UserError(
            f"{name} has {len(there)} vectors of {wide} numbers, {count} of {width} are expected; the model's "
            f"metadata names them"
        )
    values = np.array([list(vector) for vector in there], np.float32).reshape(count, width)
    return np.where(np.isnan(values), empty, values)


def finite(name: str, values: Floats) -> Floats:
    """The values; UserError for an infinite one, which a model would read as a very large number."""
    if np.isinf(values).any():
        raise UserError(f"{name} has an infinite number; give NaN for what is not known")
    return values


def sequence(row: Row, name: str, count: int, empty: Any) -> list[Any]:
    """`count` entries of a column of lists, `empty` for what is not given; UserError for another number."""
    there = given(row, name)
    values = [empty] * count if there is None else list(there)
    if len(values) != count:
        raise UserError(f"{name} has {len(values)} entries for a history of {count}; give one each")
    return values


def own_values(row: Row, own: OwnFeatures, of: str, count: int, usual: dict[str, pa.Array] | None = None) -> Floats:
    """(count, own features) of what the columns `{of}numbers` and `{of}categories` give by name; `usual` has columns
    for those that they do not give. UserError for a name that the model does not read, and for another number of
    values."""
    columns = dict(usual or {})
    for kind, start, value in (("numbers", NUMBER, pa.float32()), ("categories", CATEGORY, pa.string())):
        known = [name[len(start) :] for name in own.names if name.startswith(start)]
        for name, values in (given(row, of + kind) or {}).items():
            if name not in known:
                none = f"it reads no {kind}"
                raise UserError(f"{of}{kind} has '{name}', which the model does not read; {hint(name, known, none)}")
            if len(values) != count:
                raise UserError(f"{of}{kind} has {len(values)} values of '{name}' where {count} are expected; one each")
            if kind == "numbers":
                finite(f"'{name}' of {of}{kind}", np.array(list(values), np.float32))
            columns[start + name] = pa.array(list(values), value, from_pandas=True)
    return own.matrix(columns, count)


class SearchRequests:
    """Rows of a frame as a batch of `models/search/data.py`."""

    def __init__(self, folder: str, model: Any, catalogue: SearchCatalogue, counts: str | None = None) -> None:
        """`counts`: the table of `jobs.prepare --counts_as_of`, where there is one."""
        self.length, self.mean, self.config = model.config.max_history, model.scale.mean.numpy(), model.config
        has_queries = read_manifest(f"{folder}/tables/queries", "queries").rows > 0
        queries = read_table(f"{folder}/tables/queries", "queries")["query"].to_pylist() if has_queries else []
        encoder, documents = None, []
        if Path(folder, "encoder").exists():
            encoder = load_saved(f"{folder}/encoder")
            documents = pq.read_table(f"{folder}/encoder/documents.parquet")["text"].to_pylist()
        self.text = RequestText(catalogue, queries, encoder, documents)
        info = read_manifest(f"{folder}/tables/sequences", "sequences").info
        self.of_behaviours = catalogue.behaviour_labels
        self.counts = Counts.load(counts, info["features"], info) if counts else None
        self.hours = [place for place, name in enumerate(info["features"]) if name in HOURS]
        self.own = OwnFeatures.of(info)
        of_items = info.get("item_features", [])
        self.of_items = read_table(f"{folder}/tables/items", "items", of_items) if of_items else pa.table({})

    def indexes(self, rows: list[Row], index: Index) -> list[Index]:
        """By row the numbers of items."""
        return [index] * len(rows)

    def batch(self, rows: list[Row], index: Index, known: list[list[int]]) -> dict[str, torch.Tensor]:
        """`known` are the places of each row's candidates that are in the catalogue."""
        past: list[dict[str, Any]] = []
        for row in rows:
            items = list(row["history"])
            kept = [i for i, item in enumerate(items) if item in index][-self.length :]
            asked = sequence(row, "history_query", len(items), "")
            times = sequence(row, "history_time_ms", len(items), None)
            if self.config.reads_times and None in times:
                raise UserError("history_time_ms is missing, and the model reads when each behaviour was; give it")
            features = self.features(row, "history_", items, index)
            past.append(
                {
                    "item": np.array([index[items[i]] for i in kept], np.int64),
                    "query": [asked[i] for i in kept],
                    "time": np.array([times[i] or 0 for i in kept], np.int64),
                    "history_features": features[kept],
                    **({"history_labels": self.labels(row, len(items))[kept]} if self.config.reads_labels else {}),
                }
            )
        pairs = list(zip(rows, known, strict=True))
        shown = [self.features(row, "", row["candidates"], index)[places] for row, places in pairs]
        asked = [given(row, "query") for row in rows]
        texts, number = self.numbered([asked, *(part["query"] for part in past)])
        for part in past:
            part["query"] = number(part["query"])
        requests: dict[str, NDArray] = {
            "request_query": number(asked),
            "candidate": np.array([index[row["candidates"][i]] for row, places in pairs for i in places], np.int64),
            "features": np.concatenate(shown),
        }
        lengths, counts = (np.array([len(x) for x in lists]) for lists in ([part["item"] for part in past], known))
        history = {name: np.concatenate([part[name] for part in past]) for name in past[0]}
        read = {
            "candidates": (requests["candidate"], np.repeat(requests["request_query"], counts)),
            "behaviours": (history["item"], history["query"]),
        }
        if not self.config.history_pairs:
            del read["behaviours"]
        text = self.text.of(texts, *(np.concatenate(each) for each in zip(*read.values(), strict=True)))
        for name, (item, query) in read.items():
            self.warn(name, item, query, text)
        examples = SearchExamples.of(history, lengths, requests, counts)
        examples.bring(text, self.config.history_pairs, complete=False)
        return {**examples.collate(np.arange(len(rows))), "queries": text.queries}

    def features(self, row: Row, of: str, items: Sequence[str], index: Index) -> Floats:
        """(items, F) of candidates, or with `history_` of behaviours. Those of items are known, and of candidates what
        is counted and, from the request's time, hour and weekday."""
        places = pa.array([index.get(item) for item in items], pa.int64())
        usual = {name: self.of_items[name].combine_chunks().take(places) for name in self.of_items.column_names}
        own = own_values(row, self.own, of, len(items), usual)
        usually = np.tile(self.mean, (len(items), 1))
        if not of and self.counts:
            self.counts.fill(usually, items, given(row, "query"))
        if not of and self.hours and (now := given(row, "timestamp_ms")) is not None:
            usually[:, self.hours] = hours(np.array([now], np.int64))
        return np.concatenate([finite(f"{of}features", vectors(row, f"{of}features", usually)), own], 1)

    def labels(self, row: Row, count: int) -> Floats:
        """(count, A) what `history_labels` gives by name of the labels in tokens; NaN for a number, and 0 for what is
        true or false, that is not given. UserError for what no behaviour can have."""
        there, known = given(row, "history_labels") or {}, self.config.reads_labels
        for name in there:
            if name not in known:
                raise UserError(f"history_labels has '{name}', which the model does not read; {hint(name, known)}")
        columns = []
        for name in known:
            values = there.get(name)
            values = [None] * count if values is None else list(values)
            if len(values) != count:
                raise UserError(
                    f"history_labels has {len(values)} values of '{name}' for a history of {count}; one each"
                )
            number = self.of_behaviours[name].number
            try:
                column = np.array([np.nan if value is None else value for value in values], np.float32)
            except (TypeError, ValueError):
                column = np.full(count, np.inf, np.float32)
            if np.isinf(column).any() or not (number or np.isin(column[~np.isnan(column)], (0, 1)).all()):
                what = "finite numbers" if number else "true or false"
                raise UserError(f"history_labels has values of '{name}' that are not {what}; give None for none")
            columns.append(column if number else np.nan_to_num(column))
        return np.stack(columns, 1)

    def numbered(
        self, lists: list[list[str | None]]
    ) -> tuple[list[str], Callable[[list[str | None]], NDArray[np.int64]]]:
        """The distinct queries of some lists that there is text of, and what gives each its place among them, NO_QUERY
        for none and, with a warning, for those without text."""
        for queries in lists:
            if unknown := sum(bool(query) and not self.text.has(str(query)) for query in queries):
                warnings.warn(
                    f"{unknown} of {len(queries)} queries are none of the training tables'; they count as no query",
                    stacklevel=2,
                )
        texts = list(dict.fromkeys(query for queries in lists for query in queries if query and self.text.has(query)))
        number = {query: place for place, query in enumerate(texts)}
        return texts, lambda queries: np.array([number.get(query or "", NO_QUERY) for query in queries], np.int64)

    def warn(self, what: str, item: NDArray[np.int64], query: NDArray[np.int64], text: SearchCatalogue) -> None:
        """Says how many pairs were never encoded, where the model cannot encode them."""
        key = pair_key(item, query, text.num_queries)[query != NO_QUERY]
        missing = 0 if self.text.encoder else int((~np.isin(key, text.pair_keys.numpy())).sum())
        if missing:
            warnings.warn(
                f"{missing} of {len(query)} {what} were never encoded together with their query; their document alone "
                f"is read",
                stacklevel=2,
            )

    def events(self, batch: dict[str, torch.Tensor]) -> int:
        """Behaviours of a batch."""
        return int(batch["history_length"].sum())


class ActionsRequests:
    """Rows of a frame as a batch of `models/actions/batch.py`."""

    def __init__(self, folder: str, model: Any, catalogue: ActionsCatalogue) -> None:
        self.length, self.mean = model.config.max_history, model.features.mean.numpy()
        self.wants_ids = model.config.item_ids != "none" and not model.config.id_dropout
        info = read_manifest(f"{folder}/tables/sequences", "sequences").info
        self.actions = info["actions"]
        # numbers as in models/actions/data.py: from 1, 0 for what training has not seen
        self.viewers = {
            name: {value: number for number, value in enumerate(values, 1)}
            for name, values in info.get("viewers", {}).items()
        }
        self.own = OwnFeatures.of(info)
        text = read_manifest(f"{folder}/text/items") if catalogue.text.numel() else None
        encoder = load_saved(f"{folder}/encoder") if Path(folder, "encoder").exists() else None
        columns = columns_of(read_manifest(f"{folder}/tables/items", "items"), text)
        self.new = NewItems(catalogue, columns, encoder, template_of(text))

    def posts(self, rows: list[Row], index: Index) -> list[dict[str, Post]]:
        """By row and id, what comes with it of items that are not in the catalogue."""
        brought = (self.new.named(given(row, "new_items") or ()) for row in rows)
        return [{item: post for item, post in posts.items() if item not in index} for posts in brought]

    def indexes(self, rows: list[Row], index: Index) -> list[Index]:
        """By row the numbers of items: those of the catalogue, and from there on of those that rows bring along."""
        posts = self.posts(rows, index)
        first = accumulate(map(len, posts), initial=len(index))
        numbers = ({item: place for place, item in enumerate(own, low)} for own, low in zip(posts, first, strict=False))
        return [ChainMap(number, index) if number else index for number in numbers]  # type: ignore[arg-type]

    def batch(self, rows: list[Row], index: Index, known: list[list[int]]) -> dict[str, torch.Tensor]:
        """`known` are the places of each row's candidates that are in the catalogue or come with the row."""
        parts: list[dict[str, NDArray]] = []
        indexes = self.indexes(rows, index)
        posts = [post for own in self.posts(rows, index) for post in own.values()]
        if posts and self.wants_ids:
            warnings.warn(
                f"{len(posts)} new items are scored without an id, and the model has never trained without one; train "
                f"it with --model.item_ids none or --model.id_dropout 0.2",
                stacklevel=2,
            )
        kept = [self.past(row, own) for row, own in zip(rows, indexes, strict=True)]
        for row, index, past, places in zip(rows, indexes, kept, known, strict=True):
            size, count = len(past), len(places)
            items = [row["history"][i] for i in past] + [row["candidates"][i] for i in places]
            usually = np.tile(self.mean, (len(row["candidates"]), 1))
            features = finite("features", vectors(row, "features", usually))[places]
            times, now = self.times(row), given(row, "timestamp_ms")
            part = {
                "item": np.array([index[item] for item in items], np.int64),
                "time": np.array([times[i] for i in past] + [LAST if now is None else now] * count, np.int64),
                "action": np.concatenate([self.taken(row)[past], np.zeros((count, len(self.actions)), np.float32)]),
                "feature": np.concatenate([np.zeros((size, len(self.mean)), np.float32), features]),
                "label": np.zeros((size + count, 0), np.float32),
            }
            if self.viewers:
                now = np.tile(self.viewer(row), (count, 1))
                part["viewer"] = np.concatenate([self.history_viewer(row)[past], now])
            if self.own.names:
                shown = own_values(row, self.own, "", len(row["candidates"]))[places]
                seen = own_values(row, self.own, "history_", len(row["history"]))[past]
                part["own"] = np.concatenate([seen, shown])
            parts.append(part)
        events = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        context, candidates = (np.array([len(x) for x in lists]) for lists in (kept, known))
        batch = ActionsExamples.of(events, context, candidates).collate(np.arange(len(rows)))
        return batch | (self.new.read(posts) if posts else {})

    def events(self, batch: dict[str, torch.Tensor]) -> int:
        """Events of a batch's contexts."""
        return int(batch["valid"].sum())

    def past(self, row: Row, index: Index) -> list[int]:
        """Places in the history of the latest events before the request, of items of the catalogue. Where the time of
        the request or those of the history are not given, all of the history is before it."""
        now = given(row, "timestamp_ms")
        # what is kept of a user may be read by later requests; a candidate reads what is earlier by its time
        now = LAST if now is None or given(row, "history_from") is not None else now
        times = self.times(row)
        return [i for i, item in enumerate(row["history"]) if item in index and times[i] < now][-self.length :]

    def times(self, row: Row) -> list[int]:
        """When each event of the history was, in ms, or its place, before anything that has a time."""
        size, first = len(row["history"]), given(row, "history_from")
        times = sequence(row, "history_time_ms", size, None)
        if given(row, "history_time_ms") is None:
            return [BEFORE + int(first or 0) + place for place in range(size)]
        if None in times:
            raise UserError("history_time_ms has an entry without a time; give one each, or leave the column out")
        for earlier, later in pairwise(times):
            if later < earlier:
                raise UserError(f"history_time_ms falls from {earlier} to {later}; give the history oldest first")
        return times

    def taken(self, row: Row) -> Floats:
        """(size of the history, A) what was done with each item; UserError for what is not graded as in training."""
        action = vectors(row, "history_actions", np.zeros((len(row["history"]), len(self.actions)), np.float32))
        wrong = (action < 0) | (action > 1)
        if wrong.any():
            event, kind = np.argwhere(wrong)[0]
            raise UserError(
                f"history_actions has {action[event, kind]:g} for '{self.actions[kind]}', which is not from 0 to 1; "
                f"grade it as `inputs` in the model's metadata says"
            )
        return action

    def history_viewer(self, row: Row) -> NDArray[np.int64]:
        """(size of the history, V) the viewer-side categories of each event."""
        size = len(row["history"])
        codes = np.zeros((size, len(self.viewers)), np.int64)
        for place, (name, number) in enumerate(self.viewers.items()):
            there = sequence(row, f"history_viewer_{name}", size, None)
            codes[:, place] = [number.get(value, 0) for value in there]
        return codes

    def viewer(self, row: Row) -> NDArray[np.int64]:
        """(V,) those of the request."""
        there = [number.get(given(row, f"viewer_{name}"), 0) for name, number in self.viewers.items()]
        return np.array(there, np.int64)


def text_at(folder: str) -> str | None:
    """The text of a bundle, where the model was trained with some."""
    return f"{folder}/text" if Path(folder, "text").exists() else None


READERS: dict[str, tuple[Callable[[str], Any], Callable[[str, Any, Any, dict[str, Any]], Any]]] = {
    "search": (
        lambda at: SearchCatalogue.load(f"{at}/tables", f"{at}/text", scale=False),
        lambda at, model, catalogue, settings: SearchRequests(at, model, catalogue, settings.get("counts")),
    ),
    "actions": (
        lambda at: ActionsCatalogue.load(f"{at}/tables", text_at(at)),
        lambda at, model, catalogue, settings: ActionsRequests(at, model, catalogue),
    ),
}
"""By family: the catalogue of a bundle, and what makes batches of requests to a model with its `model_config`."""


@dataclass
class Kept:
    """What is kept of a user."""

    state: Any
    end: int
    """Behaviours that the user has had so far, as requests count them."""

    @property
    def size(self) -> int:
        """Bytes."""
        return size_of(self.state)


def size_of(state: Any) -> int:
    """Bytes of the tensors in a state."""
    parts = [value for value in vars(state).values() if value is not None and not isinstance(value, int)]
    return sum(part.nbytes if isinstance(part, torch.Tensor) else size_of(part) for part in parts)


def state_bytes(given: Any) -> int:
    """Bytes of states that are kept; UserError for what is no number of MB."""
    try:
        megabytes = float(given)
    except (TypeError, ValueError):
        megabytes = math.nan
    if not 0 < megabytes < math.inf:
        raise UserError(f"state_mb of model_config is {given!r}; give a number of MB above 0, such as {STATE_MB}")
    return int(megabytes * 2**20)


class RequestRanker(PythonModel):
    """Ranks the candidates of each row of a frame."""

    def load_context(self, context: Any) -> None:
        folder, settings = context.artifacts["data"], context.model_config or {}
        about = checkpoint.read(f"{folder}/checkpoint")
        entry = registry.find(about.name)
        catalogue, requests = READERS[entry.family.name]
        of_tables = catalogue(folder)
        self.model: Any = registry.load(f"{folder}/checkpoint", of_tables)[0]
        self.requests = requests(folder, self.model, of_tables, settings)
        items = read_table(f"{folder}/tables/items", "items", ["item_id"])["item_id"].to_pylist()
        self.index = {item: index for index, item in enumerate(items)}
        self.keeps_state = entry.keeps_state is not None and entry.keeps_state(self.model.config)
        self.users: Latest[Kept] = Latest(state_bytes(settings.get("state_mb", STATE_MB)))
        self.lock = Lock()  # states, and tables that the model reads, change with requests

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """`item_id` and `score`, the chance of the label `params["label"]` (by default the model's first one)."""
        label = (params or {}).get("label") or self.model.labels[0]
        if label not in self.model.labels:
            raise UserError(f"the model has no label '{label}'; choose one of {', '.join(self.model.labels)}")
        place = list(self.model.labels).index(label)
        names = model_input.columns.tolist()
        rows = [dict(zip(names, values, strict=True)) for values in model_input.itertuples(index=False, name=None)]
        for row in rows:
            row |= {column: item_ids(column, row[column]) for column in ("candidates", "history")}
        plain = [row for row in rows if given(row, "history_from") is None]
        with self.lock, torch.no_grad():
            at_once = (self.rank(plain[low : low + ROWS], place) for low in range(0, len(plain), ROWS))
            ranked = (pair for pairs in at_once for pair in pairs)
            found = [next(ranked) if given(row, "history_from") is None else self.go_on(row, place) for row in rows]
        return pd.DataFrame(found, columns=["item_id", "score"])

    def rank(self, rows: list[Row], label: int) -> list[tuple[list[str], list[float]]]:
        """Per row its candidates, best first, and their scores."""
        known = self.known(rows)
        chances = torch.zeros(0)
        if any(known):
            logits = self.model.score(self.requests.batch(rows, self.index, known))[:, label].float()
            chances = torch.sigmoid(check_finite(logits))
        ends = list(accumulate(map(len, known), initial=0))
        return [
            in_order(row["candidates"], places, chances[first:end])
            for row, places, (first, end) in zip(rows, known, pairwise(ends), strict=True)
        ]

    def known(self, rows: list[Row]) -> list[list[int]]:
        """By row, places of the candidates that are in the catalogue or come with the row."""
        indexes = self.requests.indexes(rows, self.index)
        return [
            [i for i, item in enumerate(row["candidates"]) if item in index]
            for row, index in zip(rows, indexes, strict=True)
        ]

    def go_on(self, row: Row, label: int) -> tuple[list[str], list[float]]:
        """The candidates of a request, best first, and their scores, after what is kept of its user and the behaviours
        that come with it, which are kept too."""
        user, begin, size = given(row, "user_id"), int(row["history_from"]), len(row["history"])
        if not self.keeps_state:
            raise UserError("history_from goes on from a user's state, and the model keeps none; send whole histories")
        if not user:
            raise UserError("history_from goes on from a user's state; give user_id too")
        if begin < 0:
            raise UserError(f"history_from is {begin}; give the number of behaviours before the first one sent, from 0")
        kept = self.users.get(user)
        if kept is None or kept.end < begin:
            if begin and size < self.model.config.max_history:
                there = f"is of {kept.end} behaviours" if kept else "is not kept"
                raise UserError(
                    f"the state of user '{user}' {there} and the request goes on after {begin}; send all behaviours "
                    f"with history_from 0, or the latest {self.model.config.max_history} with the number before them"
                )
            kept = Kept(self.model.new_state(1), begin)
        done = min(kept.end - begin, size)  # of a request that is sent again
        row = {name: later(value, done) if name.startswith("history") else value for name, value in row.items()}
        row["history_from"] = begin + done
        (known,) = self.known([row])
        batch = self.requests.batch([row], self.index, [known])
        if self.requests.events(batch):
            try:
                kept = Kept(self.model.append(kept.state, batch), kept.end)
            except ValueError as error:
                raise UserError(f"the history of user '{user}' does not go on from what is kept: {error}") from error
        kept.end += size - done
        self.users.put(user, kept, kept.size)
        chances = torch.zeros(0)
        if known:
            chances = torch.sigmoid(check_finite(self.model.score_state(kept.state, batch)[:, label].float()))
        return in_order(row["candidates"], known, chances)


def later(value: Any, done: int) -> Any:
    """What a column has of the behaviours after the first `done`."""
    if isinstance(value, dict):
        return {name: later(values, done) for name, values in value.items()}
    return value if value is None or np.isscalar(value) else value[done:]


def in_order(candidates: Sequence[str], known: list[int], chances: torch.Tensor) -> tuple[list[str], list[float]]:
    """The `known` candidates by their chances, then the others without."""
    order = chances.argsort(descending=True, stable=True).tolist()
    inside = set(known)
    others = [item for i, item in enumerate(candidates) if i not in inside]
    scores = chances.tolist()
    return [candidates[known[i]] for i in order] + others, [scores[i] for i in order] + [math.nan] * len(others)


mlflow.models.set_model(RequestRanker())
