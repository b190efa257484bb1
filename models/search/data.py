"""What search models are built on and trained on: the catalogue with its text, and a user's requests as batches.

    catalogue = SearchCatalogue.load("tables", "text")
    examples = SearchExamples.load("tables/sequences", "train", unit="user", max_history=100)
    batch = examples.collate(next(examples.batches(100)))

A row is a history with all requests that it serves, so one encoder pass serves them all. Histories are
slices of the user's behaviours, found when a batch is made. Candidates are flat over a batch: each knows its
request, each request its row and how many of the row's behaviours lie before it.

Shapes: `B` rows, `T` positions, `R` requests, `N` candidates, `F` features, `K` labels, `W` width of text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from models.gpu.graphs import rung
from models.inputs import Inputs
from models.own_features import OwnFeatures
from models.retrieval.data import (
    BUCKET,
    PAD,
    Examples,
    hash_strings,
    of_requests,
    request_number,
)
from models.shares import (
    Shard,
    Share,
    find_in,
    joined,
    parts_by_turns,
    runs,
    spans,
    starts,
)
from models.tables import (
    Manifest,
    UserError,
    has_manifest,
    iter_parts,
    join,
    read_manifest,
    read_table,
    sequences_manifest,
)
from models.text_tables import size_of, vectors_of

MOST_REQUESTS = 64
"""Requests that share a row at most, so that many searches without a click are no row that a batch cannot hold."""

TABLES = {
    "tables": ("items", "queries", "sequences"),
    "text": ("items", "queries", "pairs"),
}
"""Tables that a catalogue comes from, by folder of `Inputs`."""

NO_QUERY = -1
"""`query_index` of a behaviour or request without a query."""

OF_BEHAVIOURS = ("item", "time", "query", "history_features")
"""What is held of behaviours."""


@dataclass(frozen=True)
class DocumentTokens:
    """What the text encoder read of each document, and what it made of its states."""

    tokens: Tensor
    """int32, end to end, special tokens among them."""
    begin: Tensor
    """(I + 1,) int64: where each document begins, and the end."""
    pooling: str
    """`cls`: the first token's state; `mean`: that of all tokens."""
    normalize: bool
    """Whether the result is scaled to length 1."""


@dataclass(frozen=True)
class SearchCatalogue:
    """Items, queries, labels and features of a search log, and the text embeddings of a frozen encoder."""

    num_items: int
    """Items; `item_index` is dense from 0."""
    num_queries: int
    """Queries; `query_index` is dense from 0."""
    labels: tuple[str, ...]
    """Names of the K labels; GAUC is of the first."""
    features: tuple[str, ...]
    """Names of the F features of a candidate and of a behaviour: counts, place and time, then the log's own."""
    queries: Tensor
    """(Q, W) float32: each query alone."""
    items: Tensor
    """(I, W) float32: each document alone."""
    pairs: Tensor
    """(P, W) float32: document and query together."""
    pair_keys: Tensor
    """(P,) int64, ascending: `pair_key` of each of them."""
    joint: Tensor | None = None
    """(P, W) float32: the encoder's [SEP] output over query and document, which has seen the document; or None."""
    text_size: float = 0.0
    """Root mean square of the documents' numbers, or that of a checkpoint."""
    feature_mean: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(F - own ones,) mean over train candidates."""
    feature_std: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(F - own ones,) standard deviation over train candidates; 0 for a constant."""
    own: OwnFeatures = field(default_factory=OwnFeatures)
    """The log's own features, the last ones of `features`."""
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Groups of features, in order."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of the tables it comes from."""
    documents: DocumentTokens | None = None
    """What the encoder read; None for TF-IDF."""
    unknown_when_ranking: tuple[str, ...] = ("position", "page")
    """Features that a candidate has once it was shown; `models/search/position.py` keeps them from the ranking."""

    def __post_init__(self) -> None:
        if not self.text_size:
            object.__setattr__(self, "text_size", size_of(self.items))

    def scales(self) -> dict[str, Any]:
        """What a checkpoint keeps of how texts and the log's own numbers are read."""
        return {
            "own": [asdict(number) for number in self.own.numbers],
            "text_size": self.text_size,
        }

    @classmethod
    def load(
        cls,
        tables: str,
        text: str | None,
        scale: bool = True,
        scales: Mapping[str, Any] | None = None,
    ) -> Self:
        """Reads what jobs.prepare made at `tables` and jobs.encode at `text`; without it, text is 0 wide.

        Without `scale` the manifest of the sequences is enough: 0 and 1 stand for the features' mean and deviation,
        which a checkpoint brings with it, as it does its `scales`. Raises UserError where they do not belong together.
        """
        hashes, uri = (
            Inputs(tables, text=text).hashes(TABLES),
            join(tables, "sequences"),
        )
        sequences = sequences_manifest(uri, "search")
        items, queries = (
            read_manifest(join(tables, name), name) for name in ("items", "queries")
        )
        info, own = sequences.info, OwnFeatures.of(sequences.info, scales)
        features = len(info["features"])
        mean, std = (
            feature_scale(uri, features)
            if scale
            else (torch.zeros(features), torch.ones(features))
        )
        return cls(
            num_items=items.rows,
            num_queries=queries.rows,
            labels=tuple(info["labels"]),
            features=(*info["features"], *own.names),
            **(
                load_text(text, items, queries.rows)
                if text
                else no_text(items.rows, queries.rows)
            ),
            text_size=(scales or {}).get("text_size", 0.0),
            feature_mean=mean,
            feature_std=std,
            own=own,
            unknown_when_ranking=tuple(info["unknown_when_ranking"]),
            groups={
                group["name"]: tuple(group["features"]) for group in info["groups"]
            },
            hashes=hashes,
        )

    def of_pairs(self, keys: NDArray[np.int64]) -> Self:
        """The same with the text of the pairs at `keys` alone, where it has it; of one pair at least."""
        place, found = find_in(self.pair_keys.numpy(), keys)
        rows = torch.from_numpy(
            place[found]
            if found.any()
            else np.zeros(min(1, len(self.pair_keys)), np.int64)
        )
        joint = None if self.joint is None else self.joint[rows]
        return replace(
            self, pair_keys=self.pair_keys[rows], pairs=self.pairs[rows], joint=joint
        )

    def leave_pairs_to(self, examples: Iterable[SearchExamples], config: Any) -> Self:
        """The same without text of pairs, which `examples` bring with their batches from now on, for a model of
        `config`. They keep that of their own pairs alone; so none is on the device but a batch's."""
        if not self.items.shape[1]:
            return self
        for part in examples:
            part.bring(self, config.history_pairs)
        none = self.pairs[:0].clone()
        joint = None if self.joint is None else none
        return replace(
            self, pairs=none, pair_keys=self.pair_keys[:0].clone(), joint=joint
        )


def load_text(text: str, items: Manifest, queries: int) -> dict[str, Any]:
    """Fields of a catalogue from what jobs.encode made; UserError where its tables do not belong together."""
    there = [
        name
        for name in ("items", "queries", "pairs", "tokens")
        if has_manifest(join(text, name))
    ]
    encoders = [encoded_by(read_manifest(join(text, name))) for name in there]
    if any(encoder != encoders[0] for encoder in encoders):
        raise UserError(
            f"the tables of {text} were encoded with several settings; run jobs.encode again"
        )
    of_items = embeddings(text, "items", items.rows)
    pairs = read_table(join(text, "pairs"))
    item, query = (
        pairs[name].to_numpy().astype(np.int64)
        for name in ("item_index", "query_index")
    )
    key = pair_key(item, query, queries)
    order = np.argsort(key, kind="stable")
    of_pairs = [
        vectors_of(pairs, name, len(key), join(text, "pairs"))[order]
        for name in ("embedding", "joint")
        if name in pairs.column_names
    ]
    return {
        "queries": embeddings(text, "queries", queries)
        if queries
        else of_items[:0].clone(),
        "items": of_items,
        "pairs": of_pairs[0],
        "pair_keys": torch.from_numpy(key[order]),
        "joint": of_pairs[1] if of_pairs[1:] else None,
        "documents": load_documents(join(text, "tokens"), items),
    }


def no_text(items: int, queries: int) -> dict[str, Any]:
    """The same fields for models that read no text."""
    widths = {
        "queries": torch.zeros(queries, 0),
        "items": torch.zeros(items, 0),
        "pairs": torch.zeros(0, 0),
    }
    return {**widths, "pair_keys": torch.zeros(0, dtype=torch.long)}


def encoded_by(manifest: Manifest) -> tuple[Any, dict[str, Any]]:
    """The encoder of a table of texts, and its settings; pairs may have a [SEP] state beside."""
    settings = {
        name: value
        for name, value in manifest.config.items()
        if name != "query_condition"
    }
    return manifest.inputs.get("encoder"), settings


def load_documents(uri: str, items: Manifest) -> DocumentTokens | None:
    """The table of documents' tokens, if there is one; UserError where it is of other items."""
    if not has_manifest(uri):
        return None
    manifest = read_manifest(uri, "tokens")
    if manifest.inputs.get("items") != items.hash:
        raise UserError(f"{uri} was made from other items; run jobs.encode again")
    lists = read_table(uri, "tokens")["tokens"].combine_chunks()
    begin = np.append(
        0, np.cumsum(pc.list_value_length(lists).to_numpy(), dtype=np.int64)
    )
    tokens = torch.from_numpy(lists.flatten().to_numpy().copy())
    return DocumentTokens(
        tokens,
        torch.from_numpy(begin),
        manifest.info["pooling"],
        manifest.info["normalize"],
    )


def pair_key(item: Any, query: Any, num_queries: int) -> Any:
    """One int64 for an item and a query; works on arrays and tensors."""
    return item * (num_queries + 1) + query + 1


def embeddings(text: str, name: str, rows: int) -> Tensor:
    """(rows, W) of a table of jobs.encode."""
    return vectors_of(read_table(join(text, name)), "embedding", rows, join(text, name))


def feature_scale(uri: str, features: int) -> tuple[Tensor, Tensor]:
    """(mean, standard deviation), each (F,), over the train candidates of the first part that has some."""
    for table in iter_parts(uri, "sequences", ["requests"]):
        requests = table["requests"].combine_chunks().flatten()
        train = requests.filter(pc.equal(pc.struct_field(requests, "split"), "train"))
        values = (
            pc.struct_field(train, "features")
            .flatten()
            .to_numpy()
            .reshape(-1, max(1, features))[:, :features]
        )
        if len(values):
            found = torch.from_numpy(values.astype(np.float64))
            std = found.std(0, correction=0)
            return found.mean(0).float(), torch.where(std > 1e-6, std, 0.0).float()
    raise UserError(f"{uri} has no train request; check the split of jobs.prepare")


class SearchExamples(Examples):
    """The requests of one split, in rows that share a history.

    `request`: every request sees exactly the latest `max_history` behaviours before it; requests whose
    histories begin at the same behaviour (all of a user with at most `max_history`) share a row.
    `user`: longer histories have windows that overlap, so that far fewer passes serve all requests, each with at least
    `window_overlap` of `max_history` behaviours before it. A behaviour is learned in the earliest row that has others
    before it, and in no other one (`history_new`).
    No row has more than `MOST_REQUESTS`.

    Requests with an empty history are kept, as a search has its query. Only requests of the split and
    behaviours before them are held, and only users who have some.
    """

    kind = "search"
    splits = ("train", "val", "test")
    unit = "user"
    counted = "requests"
    max_history = 1000
    window_overlap: ClassVar[float] = 0.75
    """Share of `max_history` that a search of a longer history reads at least in training, as a model's config says."""
    batch_of: ClassVar[str] = "requests"
    """What a batch counts: `requests`, or rows of `users`; likewise."""

    columns: dict[str, NDArray]
    """Of this rank: flat arrays by behaviour, user, request, row and candidate."""
    brought: SearchCatalogue | None = None
    """Text of the pairs that batches bring along, where the model does not hold it."""
    history_pairs = False
    """Whether they bring that of behaviours too."""

    @classmethod
    def _open(cls, uri: str) -> tuple[Manifest, list[str]]:
        manifest = sequences_manifest(uri, "search")
        asked = (
            "timestamp_ms",
            "query_index",
            "history_end",
            "split",
            "candidates",
            "positions",
            "features",
        )
        labels = (f"label_{name}" for name in manifest.info["labels"])
        own = OwnFeatures.of(manifest.info).names
        mine = [
            "user_id",
            "item_index",
            "timestamp_ms",
            "query_index",
            "features",
            *own,
        ]
        return manifest, [*mine, *of_requests(*asked, *labels, *own)]

    @classmethod
    def _read(cls, table: pa.Table, manifest: Manifest, uri: str) -> dict[str, NDArray]:
        labels = [f"label_{name}" for name in manifest.info["labels"]]
        part = read_part(
            table, labels, len(manifest.info["features"]), OwnFeatures.of(manifest.info)
        )
        return part | {"user_hash": hash_strings(table["user_id"].combine_chunks())}

    def _add(self, part: dict[str, NDArray], first_user: int, shard: Shard) -> int:
        chosen = np.flatnonzero(part["split"] == self.split)
        if self.split == "train" and self.since:
            chosen = chosen[self.left(part["request_time"][chosen], first_user)]
        owner, end = part["owner"][chosen], part["end"][chosen]
        begin = self._begin(end)
        first = np.ones(len(chosen), bool)
        first[1:] = (owner[1:] != owner[:-1]) | (begin[1:] != begin[:-1])
        number = np.arange(len(chosen))
        first |= (
            number - np.maximum.accumulate(np.where(first, number, 0))
        ) % MOST_REQUESTS == 0
        users, local, low, count = spans(owner, begin, end)
        behaviour = runs(starts(part["lengths"])[users] + low, count)
        counts = part["counts"][chosen]
        flat = runs(part["candidate_start"][chosen], counts)
        first = np.flatnonzero(first)
        self._parts.append(
            {
                **{name: part[name][behaviour] for name in OF_BEHAVIOURS},
                "user_start": self._behaviours + starts(count) - low,
                "user_hash": part["user_hash"][users],
                "user_row": first_user + users,
                "owner": (self._users + local).astype(np.int32),
                "end": end.astype(np.int32),
                "place": part["place"][chosen].astype(np.int32),
                "first": (self.requests + first).astype(np.int32),
                "begin": begin[first].astype(np.int32),
                "request_query": part["request_query"][chosen].astype(np.int32),
                "request_time": part["request_time"][chosen],
                "counts": counts.astype(np.int32),
                "candidate_start": self._candidates + starts(counts),
                **{
                    name: part[name][flat]
                    for name in ("candidate", "position", "labels", "features")
                },
            }
        )
        self._users += len(users)
        self.requests += len(end)
        self.learned += len(end)
        self._behaviours += len(behaviour)
        self._candidates += len(flat)
        return len(first)

    @classmethod
    def of_model(cls, config: Any) -> type[Self]:
        settings = {
            "window_overlap": config.window_overlap,
            "batch_of": config.batch_of,
        }
        return type(cls.__name__, (cls,), settings)

    def __init__(self, split: str, unit: str, max_history: int, share: Share) -> None:
        super().__init__(split, unit, max_history, share)
        self._stride = (
            1
            if unit == "request"
            else max(1, int(max_history * (1 - self.window_overlap)))
        )
        self._by_requests = self.batch_of == "requests" or split != "train"
        self._candidates = 0

    def _close(self) -> None:
        columns = joined(self._parts)
        del self._parts
        self._take(columns)

    @classmethod
    def of(cls, columns: dict[str, NDArray], lengths: NDArray, counts: NDArray) -> Self:
        """Requests in memory, each with a history and a row of its own, without labels.

        `columns` holds item, time, query and history_features, (behaviours, ...) end to end, `lengths` (R,) of each;
        the request_query (R,); and, end to end, the candidate and features (N, ...), `counts` (R,) of each.
        """
        self = cls.in_memory(
            "test", "request", max(1, int(lengths.max(initial=1))), len(lengths)
        )
        number, none = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
        self._take(
            {
                **columns,
                "counts": counts,
                "user_start": starts(lengths),
                "user_hash": none,
                "user_row": number,
                "owner": number,
                "begin": none,
                "end": lengths,
                "first": number,
                "place": none,
                "request_time": none,
                "candidate_start": starts(counts),
                "position": np.zeros(len(columns["candidate"]), np.int64),
                "labels": np.zeros((len(columns["candidate"]), 0), bool),
            }
        )
        return self

    def _take(self, columns: dict[str, NDArray]) -> None:
        self.columns = columns
        self._owner, self._end, self._place = (
            columns[name] for name in ("owner", "end", "place")
        )
        self._user_row, first = columns["user_row"], columns["first"]
        self._first = np.append(first, len(self._end))
        self._row_end = (
            np.maximum.reduceat(self._end, first) if len(first) else self._end[:0]
        )
        self.lengths = self._row_end - columns["begin"]
        again = (
            np.append(False, self._owner[first[1:]] == self._owner[first[:-1]])
            if len(first)
            else first == -1
        )
        learned = np.where(again, np.append(0, self._row_end[:-1]), 0)[: len(first)]
        self._new = np.clip(learned - columns["begin"], 1, None)

    def _bring(self, catalogue: SearchCatalogue, history: bool, complete: bool) -> None:
        """Lets batches bring the text of their candidates' pairs, and with `history` of their behaviours'. UserError
        where the catalogue lacks one, unless it need not be `complete`."""
        c, self.history_pairs = self.columns, history
        asked = np.repeat(c["request_query"], c["counts"])
        own = _keys(c["candidate"], asked, catalogue.num_queries)
        if history:
            own = np.union1d(own, _keys(c["item"], c["query"], catalogue.num_queries))
        self.brought = catalogue.of_pairs(own)
        if complete and len(
            missing := np.setdiff1d(own, self.brought.pair_keys.numpy())
        ):
            item, query = divmod(int(missing[0]), catalogue.num_queries + 1)
            raise UserError(
                f"the text has no embedding of item {item} with query {query - 1}; run jobs.encode again on these "
                f"tables"
            )

    def _begin(self, end: NDArray) -> NDArray[np.int64]:
        """First behaviour of the row that serves a request with `end` behaviours before it."""
        return -(-np.maximum(end - self.max_history, 0) // self._stride) * self._stride

    def sizes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Requests of each row, unless batches count users."""
        return (
            np.diff(self._first).astype(np.int64)[rows]
            if self._by_requests
            else super().sizes(rows)
        )

    def _arrange(
        self,
        rows: NDArray[np.int64],
        shard: int,
        batch_size: int,
        steps: int,
        rng: np.random.Generator,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """At random, and by length within the requests of `BUCKET` steps."""
        if not self._by_requests:
            return super()._arrange(rows, shard, batch_size, steps, rng)
        order = rows[rng.permutation(len(rows))]
        bucket = (
            np.cumsum(self.sizes(order))
            * steps
            // (BUCKET * max(1, int(self.sizes(order).sum())))
        )
        order = order[np.lexsort((self.lengths[order], bucket))]
        return order, parts_by_turns(self.sizes(order), steps, shard, self.share.shards)

    def collate(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """The rows as tensors, histories right-padded with -1 to their own longest.

        By row: history (B, T) item_index, history_query (B, T), history_time (B, T) ms, history_features (B, T, F),
        history_length (B,), history_new (B,) the first behaviour that no
        other row has learned (at least 1, as the first one has nothing before it), user (B,) hash of the id, user_row
        (B,). By request: request_row (R,), request_end (R,) behaviours of the row before it, request_query (R,),
        request_time (R,) ms, request (R,) its `request_number`. By candidate: candidate (N,) item_index,
        candidate_request (N,), candidate_position (N,), labels (N, K) bool, features (N, F). With `bring` also, of P
        distinct pairs, pair_keys (P,), pairs (P, W) and, where there is one, joint (P, W).
        """
        c = self.columns
        first = self._first[rows].astype(np.int64)
        count, length, begin = (
            self._first[rows + 1] - first,
            self.lengths[rows],
            c["begin"][rows],
        )
        user = self._owner[first]
        place = np.arange(max(1, int(length.max(initial=1))))
        inside = place < length[:, None]
        index = np.where(inside, (c["user_start"][user] + begin)[:, None] + place, 0)

        def history(name: str, empty: int) -> NDArray:
            values = (
                c[name][index]
                if len(c[name])
                else np.zeros((*index.shape, *c[name].shape[1:]), c[name].dtype)
            )
            return np.where(
                inside.reshape(inside.shape + (1,) * (values.ndim - 2)), values, empty
            )

        request = runs(first, count)
        counts = c["counts"][request]
        candidate = runs(c["candidate_start"][request], counts)
        batch = {
            "history": history("item", PAD),
            "history_query": history("query", NO_QUERY),
            "history_time": history("time", 0),
            "history_length": length,
            "history_new": self._new[rows],
            "user": c["user_hash"][user],
            "user_row": self._user_row[user],
            "request_row": np.repeat(np.arange(len(rows)), count),
            "request_end": self._end[request] - np.repeat(begin, count),
            "request_query": c["request_query"][request],
            "request_time": c["request_time"][request],
            "request": request_number(
                self._user_row[self._owner[request]], self._place[request]
            ),
            "candidate": c["candidate"][candidate],
            "candidate_request": np.repeat(np.arange(len(request)), counts),
            "candidate_position": c["position"][candidate],
        }
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(value, np.int64))
            for name, value in batch.items()
        }
        tensors["history_features"] = torch.from_numpy(history("history_features", 0))
        tensors["labels"] = torch.from_numpy(c["labels"][candidate])
        tensors["features"] = torch.from_numpy(c["features"][candidate])
        if self.brought:
            asked = np.repeat(batch["request_query"], counts)
            keys = _keys(batch["candidate"], asked, self.brought.num_queries)
            if self.history_pairs:
                past = _keys(
                    batch["history"], batch["history_query"], self.brought.num_queries
                )
                keys = np.union1d(keys, past)
            text = self.brought.of_pairs(keys)
            tensors |= {"pair_keys": text.pair_keys, "pairs": text.pairs}
            if text.joint is not None:
                tensors["joint"] = text.joint
        return tensors

    def asked(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        request = batch["candidate_request"]
        return {
            "user_row": batch["user_row"][batch["request_row"]][request],
            "request": batch["request"][request],
            "time": batch["request_time"][request],
            "query": batch["request_query"][request],
            "item": batch["candidate"],
            "labels": batch["labels"],
        }

    def filled(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """With more rows, behaviours, requests, candidates and pairs, that are none; `real` (N,) are the candidates."""
        length = batch["history"].shape[1]
        wide = min(rung(length), max(length, self.max_history)) - length
        more = {
            name: rung(len(batch[name])) - len(batch[name])
            for name in SIZED
            if name in batch
        }
        empty = {
            "history": PAD,
            "history_query": NO_QUERY,
            "request_query": NO_QUERY,
            "pair_keys": 2**62,  # above all; a larger one would be rounded
        }

        def padded(name: str, value: Tensor) -> Tensor:
            rows = next(
                more[of] for of, named in SIZED.items() if name.startswith(named)
            )
            beside = (
                (*(0, 0) * (value.ndim - 2), 0, wide)
                if name in HISTORIES
                else (0, 0) * (value.ndim - 1)
            )
            return functional.pad(value, (*beside, 0, rows), value=empty.get(name, 0))

        batch = {**batch, "real": torch.ones(len(batch["candidate"]), dtype=torch.bool)}
        return {name: padded(name, value) for name, value in batch.items()}


HISTORIES = ("history", "history_query", "history_time", "history_features")
"""Tensors of a batch by row and behaviour."""
SIZED = {
    "pair_keys": ("pair", "joint"),
    "request_query": ("request",),
    "user": ("user", "history"),
    "candidate": ("candidate", "labels", "features", "real"),
}
"""A tensor of each size of a batch, and the beginnings of the names of those of that size."""


def _keys(item: NDArray, query: NDArray, num_queries: int) -> NDArray[np.int64]:
    """Ascending `pair_key` of the pairs that have an item and a query."""
    there = (item >= 0) & (query != NO_QUERY)
    return np.unique(
        pair_key(
            item[there].astype(np.int64), query[there].astype(np.int64), num_queries
        )
    )


def read_part(
    table: pa.Table, labels: list[str], features: int, own: OwnFeatures | None = None
) -> dict[str, NDArray]:
    """Flat arrays of one part: of its behaviours, its requests and their candidates. `features` counts those of the
    table's vectors, beside which `own` ones have columns of their own."""
    own = own or OwnFeatures()
    items = table["item_index"].combine_chunks()
    lists = table["requests"].combine_chunks()
    requests = lists.flatten()
    per_user = pc.list_value_length(lists).to_numpy().astype(np.int64)
    shown = pc.struct_field(requests, "candidates")
    counts = pc.list_value_length(shown).to_numpy().astype(np.int64)

    def flat(column: str) -> NDArray[np.int64]:
        return table[column].combine_chunks().flatten().to_numpy().astype(np.int64)

    def of_request(name: str) -> NDArray[np.int64]:
        return pc.struct_field(requests, name).to_numpy().astype(np.int64)

    def of_candidate(name: str) -> NDArray:
        values = pc.struct_field(requests, name).flatten()
        return values.to_numpy(zero_copy_only=not pa.types.is_boolean(values.type))

    vectors = table["features"].combine_chunks().flatten().flatten().to_numpy()
    past = {name: table[name].combine_chunks().flatten() for name in own.names}
    now = {name: pc.struct_field(requests, name).flatten() for name in own.names}

    def with_own(
        vectors: NDArray, columns: dict[str, pa.Array], rows: int
    ) -> NDArray[np.float32]:
        built_in = vectors.astype(np.float32).reshape(rows, features)
        return (
            np.concatenate([built_in, own.matrix(columns, rows)], 1)
            if own.names
            else built_in
        )

    return {
        "lengths": pc.list_value_length(items).to_numpy().astype(np.int64),
        "item": items.flatten().to_numpy(),
        "time": flat("timestamp_ms"),
        "query": flat("query_index").astype(np.int32),
        "history_features": with_own(vectors, past, len(items.flatten())),
        "owner": np.repeat(np.arange(len(per_user)), per_user),
        "place": runs(np.zeros_like(per_user), per_user),
        "end": of_request("history_end"),
        "split": pc.struct_field(requests, "split").to_numpy(zero_copy_only=False),
        "request_query": of_request("query_index"),
        "request_time": of_request("timestamp_ms"),
        "counts": counts,
        "candidate_start": starts(counts),
        "candidate": shown.flatten().to_numpy(),
        "position": of_candidate("positions"),
        "labels": np.stack([of_candidate(name) for name in labels], 1),
        "features": with_own(of_candidate("features"), now, int(counts.sum())),
    }
