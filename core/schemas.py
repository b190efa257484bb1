"""Arrow schemas of the tables, and the typed `info` of their manifests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, Self, TypeVar

import pyarrow as pa
from pydantic import (
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from core.errors import UserError, one_line
from core.files import absolute, join
from core.settings import ActionCounts, InputSettings, SearchCounts, TaskSettings
from core.tables import CHECKED, Table, TableInfo, open_table

LABEL_TYPES = {"bool": pa.bool_(), "float32": pa.float32()}

Record = TypeVar("Record", "RunRecord", "DayRecord")

CARRIED = ("label_", "known_", "num_", "cat_")
"""Prefixes of the columns that sequences copy from events."""


def _required(name: str, dtype: pa.DataType) -> pa.Field:
    """Return a field that is never null."""
    return pa.field(name, dtype, nullable=False)


def _list(dtype: pa.DataType) -> pa.DataType:
    """Return the type of a list whose elements are called `item`."""
    return pa.list_(pa.field("item", dtype))


def _user_list(name: str, dtype: pa.DataType) -> pa.Field:
    """Return a field with a list of values per user."""
    return _required(name, _list(dtype))


def _carried_lists(events: pa.Schema) -> list[pa.Field]:
    """Return the fields of events that sequences copy, as lists per user."""
    carried = [field for field in events if field.name.startswith(CARRIED)]
    return [_user_list(field.name, field.type) for field in carried]


def events_schema(log: LogInfo, texts: Iterable[str] = ()) -> pa.Schema:
    """Return the schema of events: one row per impression or interaction.

    Args:
        log: Labels and features of the log.
        texts: Names of the items' texts that the event files have.
    """
    labels = log.labels.items()
    return pa.schema(
        [
            _required("user_id", pa.string()),
            # id of the request or page view; "" if the log has none
            _required("request_id", pa.string()),
            # epoch ms, or the ordinal of a log without clock times
            _required("timestamp_ms", pa.int64()),
            _required("item_id", pa.string()),
            # null if the event has no query
            pa.field("query", pa.string()),
            # rank at which the item was shown, from 0; 0 if the log has none
            _required("position", pa.int32()),
            *(pa.field(f"label_{name}", LABEL_TYPES[kind]) for name, kind in labels),
            # epoch ms from which the label is known; null if the label is not set
            *(pa.field(f"known_{name}", pa.int64()) for name in log.known),
            *(pa.field(f"num_{name}", pa.float32()) for name in log.numbers),
            *(pa.field(f"cat_{name}", pa.string()) for name in log.categories),
            *(pa.field(f"text_{name}", pa.string()) for name in texts),
        ]
    )


REJECTS = pa.schema(
    [
        # raw file, relative to the input folder
        _required("file", pa.string()),
        # start of the piece of the file that was read: byte, or row group of Parquet
        _required("piece", pa.int64()),
        # index of the row in the piece, without header and blank lines
        _required("row", pa.int64()),
        # column of the log and error, such as "bought_at: negative"
        _required("reason", pa.string()),
        # raw row as JSON
        _required("source", pa.string()),
    ]
)
"""Schema of rejects: one row per raw row or line that breaks the schema of events."""


def items_schema(
    texts: Iterable[str] = (),
    attributes: Iterable[str] = (),
    numbers: Iterable[str] = (),
) -> pa.Schema:
    """Return the schema of items: one row per item, sorted by `item_index`."""
    return pa.schema(
        [
            # dense, from 0, in the order of item_id; appended items follow
            _required("item_index", pa.int32()),
            _required("item_id", pa.string()),
            *(pa.field(f"text_{name}", pa.string()) for name in texts),
            *(pa.field(f"cat_{name}", pa.string()) for name in attributes),
            *(pa.field(f"num_{name}", pa.float32()) for name in numbers),
        ]
    )


@dataclass(config=CHECKED)
class Split:
    """The split of the requests of a log."""

    by: Literal["temporal", "leave_last_out"]
    val_start_ms: int = 0
    """First epoch ms of the validation window of a temporal split."""
    test_start_ms: int = 0
    """First epoch ms of the test window of a temporal split."""


@dataclass(config=CHECKED)
class LogInfo:
    """Labels and features of a log, as its mapping declares them."""

    labels: dict[str, str]
    """Type of each label: `bool` or `float32`."""
    numbers: list[str]
    categories: list[str]
    clock: bool
    """Whether times are clock times; else `timestamp_ms` is an ordinal."""
    known: dict[str, float | None] = field(default_factory=dict)
    """Labels that become known later than their event, with the delay in minutes; None
    if a column has the time."""
    ranges: dict[str, list[float]] = field(default_factory=dict)
    """Range of each number label that declares one."""

    @property
    def bool_labels(self) -> list[str]:
        """Names of the bool labels."""
        return [name for name, kind in self.labels.items() if kind == "bool"]


@dataclass(config=CHECKED)
class Match:
    """Counts of distinct ids and their events with a row in item or user files."""

    ids: int = 0
    ids_matched: int = 0
    events: int = 0
    events_matched: int = 0
    unmatched: list[str] = field(default_factory=list)
    """The first ids of the events without a row."""
    others: list[str] = field(default_factory=list)
    """The first ids of the files."""

    def add(self, other: Match) -> None:
        """Add the counts of `other`, whose ids are different ones."""
        self.ids += other.ids
        self.ids_matched += other.ids_matched
        self.events += other.events
        self.events_matched += other.events_matched
        self.unmatched = sorted([*self.unmatched, *other.unmatched])[:2]


@dataclass(config=CHECKED)
class PartitionInfo:
    """A part of `events`, which has the events of one partition of the users."""

    partition: int
    first_user: str
    duplicates: int
    """Number of duplicates, whether dropped or kept."""
    matched: Match
    """Counts of users with a row in the user files."""


@dataclass(config=CHECKED, kw_only=True)
class EventsInfo(TableInfo):
    """Info of `events`."""

    table = "events"

    log: LogInfo
    parts: list[PartitionInfo]
    """The partition of each part, in order."""
    ties: Literal["strict", "log_order"]
    rows_read: int
    rejects: int
    reject_reasons: dict[str, int]
    rows_left_out: int = 0
    """Number of rows that the mapping's `where` leaves out, beside `rows_read`."""
    duplicates: int
    """Number of duplicates that were dropped."""
    duplicates_kept: int | None = None
    """Number of duplicates; None if they are dropped."""
    users: int
    first_ms: int
    """First time of a behaviour."""
    last_ms: int
    """Last time of a behaviour."""
    grain_ms: int = 1
    """Unused; it goes with the next format of the table."""
    stamps: dict[str, list[int]]
    """Size and modification time in ns of each raw file."""
    user_files: list[str]


@dataclass(config=CHECKED)
class RejectsInfo(TableInfo):
    """Info of `rejects`."""

    table = "rejects"

    stamps: dict[str, list[int]]
    """Stamps of the raw files of the events."""
    old_files: int
    """Number of first parts that an append took over; a later run drops the rest if a
    killed run left them."""


@dataclass(config=CHECKED)
class AsOfInfo(TableInfo):
    """Info of a table of features with times of their own."""

    key: str
    """Column of ids: `item_id` or `user_id`."""
    stamps: dict[str, list[int]]
    """Size and modification time in ns of each file."""


@dataclass(config=CHECKED)
class QueriesInfo(TableInfo):
    """Info of `queries`."""

    table = "queries"


@dataclass(config=CHECKED, kw_only=True)
class ItemsInfo(TableInfo):
    """Info of `items`."""

    table = "items"

    texts: list[str]
    """Names of the columns `text_*`."""
    attributes: list[str]
    """Names of the columns `cat_*`."""
    numbers: list[str]
    """Names of the columns `num_*`."""
    core: int
    """Minimum number of behaviours of users and items."""
    core_window: Literal["all", "train"]
    """Events that the k-core counts."""
    behaviour: str | None
    """Label that makes an event a behaviour; None if all events are."""
    split: Split
    split_made_from: list[Any]
    """Hash of the events, settings of the split, and `behaviour`."""
    items_before_core: int
    """Number of items with a behaviour."""
    dropped_items: int
    """Number of items with a behaviour that the catalogue lacks."""
    items_without_metadata: int
    metadata_outside_catalogue: int
    """Number of rows of item files of other items."""
    rows_left_out: int = 0
    """Number of rows of item files that `items.where` leaves out."""
    metadata_differ: int = 0
    """Number of rows of item files that differ from the first row of their item."""
    core_rounds: int = 0
    items_without_behaviours: int | None = None
    """Number of described items without a behaviour; None if they are left out."""
    stamps: dict[str, list[int]] = field(default_factory=dict)
    """Size and modification time in ns of each item file."""


@dataclass(config=CHECKED)
class CountsInfo(TableInfo):
    """Info of `counts`."""

    table = "counts"

    as_of_ms: int
    """Time in epoch ms; only earlier events are counted."""
    features: dict[str, list[str]]
    """Names of the features by kind of key: `item`, `query` and `pair`."""
    never: dict[str, float]
    """Features of a key without events."""
    search: SearchCounts
    behaviour: str
    """Label that is counted."""


@dataclass(config=CHECKED, frozen=True)
class Number:
    """A numeric custom feature, with statistics over the training window."""

    name: str
    """Name of the column."""
    mean: float
    std: float
    """Standard deviation; 0 for a constant feature and for one without values."""
    missing: bool
    """Whether values are missing in the training window; models then also read whether
    a value is present."""


@dataclass(config=CHECKED, frozen=True)
class Category:
    """A categorical custom feature. Models read a value as its code, 0 if unknown."""

    name: str
    """Name of the column."""
    values: tuple[str, ...] = ()
    """Values of the training window, with codes from 1 in this order."""
    buckets: int = 0
    """Number of hash buckets of a feature with too many values; 0 for a feature with a
    vocabulary."""

    @property
    def rows(self) -> int:
        """Number of codes, including code 0."""
        return 1 + (self.buckets or len(self.values))


@dataclass(config=CHECKED, frozen=True)
class CustomFeatures:
    """The custom features of a log, in the order of its mapping file."""

    numbers: tuple[Number, ...] = ()
    categories: tuple[Category, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns: numbers first, then categories."""
        numbers = [number.name for number in self.numbers]
        return (*numbers, *(category.name for category in self.categories))


@dataclass(config=CHECKED)
class AsOfFeatures:
    """Features that sequences take from a table with times of their own."""

    key: str
    """Column of ids: `item_id` or `user_id`."""
    features: list[str]


@dataclass(config=CHECKED, kw_only=True)
class SequencesInfo(TableInfo):
    """Settings and statistics of `sequences`; one subclass per layout."""

    table = "sequences"

    kind: str
    """Kind of the requests, as the source file names it."""
    layout: str
    """Columns of the table: those of a kind in `models`."""
    split: Split
    log: LogInfo
    ties: Literal["strict", "log_order"] = "strict"
    behaviour: str | None = None
    """Label that makes an event a behaviour; None if all events are."""
    max_events: int
    """Maximum number of behaviours of a user."""
    custom: CustomFeatures = field(default_factory=CustomFeatures)
    as_of: dict[str, AsOfFeatures] = field(default_factory=dict)
    """Features of tables with times of their own, by table."""
    item_features: list[str] = field(default_factory=list)
    """Columns of `items` among the custom features."""
    requests: dict[str, int]
    """Number of requests per split; of impressions in a log of actions."""
    users: int
    items: int
    interactions: int
    pairs: int
    """Number of distinct pairs of a user and an item."""
    max_length: int
    truncated_users: int
    """Number of users with more than `max_events` behaviours."""
    truncated_events: int
    """Number of their dropped behaviours."""
    tied_behaviours: int
    """Number of behaviours at the time of the user's previous one."""

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Self:
        """Validate the `info` of a manifest, as the class of its layout."""
        classes = {"search": SearchInfo, "actions": ActionsInfo}
        info_class = classes.get(content.get("layout", ""), RetrievalInfo)
        if not issubclass(info_class, cls):
            raise UserError(
                f"the tables are of {content.get('kind')}, which models of "
                f"{content['layout']} read",
                "kind",
            )
        return TypeAdapter(info_class).validate_python(content)


@dataclass(config=CHECKED, kw_only=True)
class RetrievalInfo(SequencesInfo):
    """Info of `sequences` of retrieval."""

    layout: Literal["retrieval"] = "retrieval"
    baskets: Literal["equal_times", "request"] | None = None
    """Which behaviours of a user are one request; None: each is its own."""
    requests_without_history: dict[str, int]
    tied_targets: dict[str, int]
    """Number of validation and test requests at the time of another of their user."""


@dataclass(config=CHECKED)
class FeatureGroup:
    """Features that HFG-Attention turns into one token."""

    name: str
    features: list[str]


@dataclass(config=CHECKED, kw_only=True)
class SearchInfo(SequencesInfo):
    """Info of `sequences` of search."""

    layout: Literal["search"] = "search"
    search: SearchCounts
    page_size: int
    labels: list[str]
    """Labels of the results; the first makes behaviours."""
    features: list[str]
    """Features that are computed from events."""
    groups: list[FeatureGroup]
    """Groups of HFG-Attention, in order."""
    unknown_when_ranking: list[str]
    windows: list[str]
    """Windows of the counts, such as `7d`."""
    queries: int
    candidates: dict[str, int]
    requests_one_class: dict[str, int]
    requests_without_history: dict[str, int]
    tied_targets: dict[str, int]
    """Number of validation and test requests at the time of another of their user."""
    requests_outside: int
    """Number of requests without an item of the catalogue."""
    candidates_outside: int
    requests_truncated: int
    requests_without_query: int
    sessions: list[str] = field(default_factory=list)
    """Types of behaviours in histories that are no results of a search."""
    session_rows: int = 0
    """Number of their rows, before truncation."""
    sessions_unknown_users: int = 0
    """Number of their rows that are left out because the user has no event."""
    sessions_unknown_items: int = 0
    """Number of their rows that are left out because the catalogue lacks the item."""


@dataclass(config=CHECKED)
class ActionDefinitions:
    """Settings of the tasks, inputs of models and counts of a log of actions."""

    tasks: dict[str, TaskSettings] = field(default_factory=dict)
    inputs: dict[str, InputSettings] = field(default_factory=dict)
    counts: ActionCounts = field(default_factory=ActionCounts)


@dataclass(config=CHECKED, kw_only=True)
class ActionsInfo(SequencesInfo):
    """Info of `sequences` of actions."""

    layout: Literal["actions"] = "actions"
    definitions: ActionDefinitions
    tasks: list[str]
    actions: list[str]
    features: list[str]
    viewers: dict[str, list[str]]
    """Values in training of each viewer-side category with few values."""
    feature_mean: list[float]
    feature_std: list[float]
    base_rates: dict[str, float]
    """Share of training events with each task."""
    dropped: dict[str, str]
    """Constant value of each `task NAME` and `action NAME` that was left out."""
    users_with_candidates: dict[str, int]
    users_with_context: dict[str, int]
    users_without_context: dict[str, int]
    events_outside: int
    """Number of events of items outside the catalogue."""


@dataclass(config=CHECKED, kw_only=True)
class EmbeddingsInfo(TableInfo):
    """Info of `embeddings`."""

    table = "embeddings"

    width: int
    encoder_width: int = 0
    """Width before the PCA."""
    pca: dict[str, str] | None = None
    """Arrays of the PCA in base64."""
    fitted_items: int | None = None
    """Number of first items that the PCA was fitted on; None for all."""


@dataclass(config=CHECKED)
class TokensInfo(TableInfo):
    """Info of `tokens`."""

    table = "tokens"

    pooling: str
    """`cls` or `mean`: how the encoder pools its states."""


@dataclass(config=CHECKED)
class QuantizerInfo(TableInfo):
    """Info of `quantizer`."""

    table = "quantizer"


@dataclass(config=CHECKED)
class Drift:
    """Errors and collisions of the codes of old and of new items."""

    new_items: int
    error_old: float
    """Mean squared error of old items, as a share of their variance."""
    error_new: float
    """Mean squared error of new items, as a share of the old items' variance."""
    collision_rate_old: float
    """Share of old items whose nearest codes another old item has."""
    collision_rate_new: float
    """Share of new items whose nearest codes any other item has."""
    relaxed_new: int
    """Number of new items without their nearest codes."""


@dataclass(config=CHECKED)
class LevelMeasures:
    """Use of a level's codebook."""

    used: int
    """Number of codes of items."""
    use: float
    """Share of the codebook."""
    entropy_bits: float


@dataclass(config=CHECKED, kw_only=True, frozen=True)
class CodeMeasures:
    """Quality of codes. None: the tokenizer does not measure it."""

    reconstruction_error: float | None = None
    """Share of the embeddings' variance that the nearest codes do not explain."""
    quantization_error: float | None = None
    """Share of the quantised space's variance that the chosen codes do not explain."""
    relaxed_items: int | None = None
    """Number of items without their nearest codes."""
    collision_rate_before: float | None = None
    """Collision rate of the nearest codes."""
    unused_published: int | None = None
    """Number of published codes of items that the catalogue lacks."""
    collision_rate: float = 0.0
    """Share of items with the codes of another item."""
    distinct: int = 0
    """Number of code tuples."""
    duplicates: int = 0
    """Number of items beyond the first of each tuple."""
    largest_group: int = 0
    """Most items with equal codes."""
    levels: list[LevelMeasures] = field(default_factory=list)


@dataclass(config=CHECKED)
class SidsInfo(TableInfo):
    """Info of `sids`."""

    table = "sids"

    codebook_sizes: list[int]
    """Number of codes of each level."""
    tokenizer: str
    items_hash: str
    conflict_level: bool
    """Whether the last levels tell apart items of equal codes."""
    measures: CodeMeasures = field(default_factory=CodeMeasures)
    """Quality of the codes, which trainings log beside their metrics."""
    fitted_items: int | None = None
    """Number of first items that codebooks were trained on; None for all."""
    drift: Drift | None = None


@dataclass(config=CHECKED)
class TrieInfo(TableInfo):
    """Info of `trie`."""

    table = "trie"

    codebook_sizes: list[int]
    """Number of codes of each level."""
    levels: int
    items: int
    branching: list[float]
    """Mean number of children of the nodes of each level."""


@dataclass(config=CHECKED, kw_only=True)
class PredictionsInfo(TableInfo):
    """Info of a table that batch inference writes."""

    model: str
    checkpoint: str
    split: str = ""
    """Split of the requests; "" for a recommendation per user."""
    candidates: int = 0
    """Number of scored candidates."""
    below_k: int = 0
    """Number of recommendations with fewer than k items."""


BEHAVIOURS = (
    _required("user_id", pa.string()),
    _user_list("item_index", pa.int32()),
    _user_list("timestamp_ms", pa.int64()),
)
"""First columns of sequences of all kinds."""

REQUEST = (
    # number of behaviours known strictly before the request
    pa.field("history_end", pa.int32()),
    # train, val or test
    pa.field("split", pa.string()),
    # item_index of the target, or of each result
    pa.field("candidates", _list(pa.int32())),
)
"""Fields of requests of retrieval and search."""


def sequences_schema(events: pa.Schema) -> pa.Schema:
    """Return the schema of retrieval sequences: one row per user.

    The columns of behaviours are lists of equal length. Behaviours are sorted by
    (timestamp_ms, request_id, position, item_id), or with `ties: log_order` by
    (timestamp_ms, position, item_id). If the behaviour label becomes known later than
    its event, they are sorted by that time first. `requests` has one struct per
    request, sorted by time.

    Args:
        events: Schema of the events.
    """
    request = pa.struct(
        [
            pa.field("timestamp_ms", pa.int64()),
            pa.field("query", pa.string()),
            *REQUEST,
        ]
    )
    return pa.schema(
        [
            *BEHAVIOURS,
            _user_list("query", pa.string()),
            *_carried_lists(events),
            _user_list("requests", request),
        ]
    )


QUERIES = pa.schema(
    [
        # dense, from 0, in the order of the text
        _required("query_index", pa.int32()),
        _required("query", pa.string()),
    ]
)
"""Schema of queries: one row per distinct query of a search log."""


def search_schema(
    events: pa.Schema, labels: Iterable[str], features: int, has_sessions: bool = False
) -> pa.Schema:
    """Return the schema of search sequences: one row per user with a request.

    Behaviours are results with the first of `labels` set, as lists of equal length.
    They are sorted by (timestamp_ms, request_id, position, item_id). If the label
    becomes known later than its event, they are sorted by that time first. `requests`
    has one struct per search at the time of its earliest result, sorted by
    (timestamp_ms, request_id, query_index). Its candidates are sorted by (position,
    timestamp_ms, item_id). Custom features (`num_*` and `cat_*` of events) are columns
    of both behaviours and requests.

    Args:
        events: Schema of the events, with joined features.
        labels: Names of the bool labels.
        features: Number F of computed features per candidate.
        has_sessions: Whether behaviours have a column of their session's type.
    """
    session_type = [_user_list("session_type", pa.string())] if has_sessions else []
    carried = _carried_lists(events)
    custom = [field for field in carried if field.name.startswith(("num_", "cat_"))]
    request = pa.struct(
        [
            pa.field("timestamp_ms", pa.int64()),
            # -1 if the search has no query
            pa.field("query_index", pa.int32()),
            *REQUEST,
            # rank of each result, from 0
            pa.field("positions", _list(pa.int32())),
            # label of each result
            *(pa.field(f"label_{name}", _list(pa.bool_())) for name in labels),
            # (candidates, F), flattened row by row
            pa.field("features", _list(pa.float32())),
            # custom features of each result, as logged
            *(pa.field(field.name, field.type) for field in custom),
        ]
    )
    return pa.schema(
        [
            *BEHAVIOURS,
            # -1 if the search had no query
            _user_list("query_index", pa.int32()),
            _user_list("position", pa.int32()),
            # null for a result of a search
            *session_type,
            *carried,
            # features at the time of the request that showed the result
            _user_list("features", pa.list_(pa.field("item", pa.float32()), features)),
            _user_list("requests", request),
        ]
    )


def actions_schema(
    events: pa.Schema, tasks: int, actions: int, features: int
) -> pa.Schema:
    """Return the schema of action sequences: one row per user.

    All lists have an entry per impression, sorted by (timestamp_ms, request_id,
    position, item_id). The manifest names the `tasks`, `actions` and `features` in
    order, and the values of each `cat_*` column in training (`viewers`). Validation
    has the events before `train_end` as context and the events from there to `val_end`
    as candidates. Test has the events before `val_end` as context and the remaining
    events as candidates.

    Args:
        events: Schema of the events, with joined features.
        tasks: Number of tasks.
        actions: Number of actions that models read.
        features: Number of features.
    """
    task_values = pa.list_(pa.field("item", pa.uint8()), tasks)
    action_values = pa.list_(pa.field("item", pa.float32()), actions)
    feature_values = pa.list_(pa.field("item", pa.float32()), features)
    return pa.schema(
        [
            *BEHAVIOURS,
            *_carried_lists(events),
            # targets of each task, 0 or 1
            _user_list("tasks", task_values),
            # inputs of models, from 0 to 1
            _user_list("actions", action_values),
            # counts before the event, or before the split time that it follows
            _user_list("features", feature_values),
            # number of events before the start of validation
            _required("train_end", pa.int32()),
            # number of events before the start of test
            _required("val_end", pa.int32()),
        ]
    )


def counts_schema(features: Iterable[Iterable[str]]) -> pa.Schema:
    """Return the schema of counts: one row per item, query, and (item, query) pair.

    Args:
        features: Names of the features, grouped by kind of key. In a row of one kind of
            key, the features of the other kinds are null.
    """
    names = [name for group in features for name in group]
    return pa.schema(
        [
            # null in a row of a query
            pa.field("item_id", pa.string()),
            # null in a row of an item
            pa.field("query", pa.string()),
            # values as in the features of sequences
            *(pa.field(name, pa.float32()) for name in names),
        ]
    )


def embeddings_schema(width: int, keys: Iterable[str] = ("item_index",)) -> pa.Schema:
    """Return the schema of embeddings, sorted by the keys.

    Args:
        width: Dimension of the vectors.
        keys: Names of the key columns: `item_index`, `query_index`, or both for
            embeddings of pairs.
    """
    vector = pa.list_(pa.float32(), width)
    return pa.schema(
        [
            *(_required(name, pa.int32()) for name in keys),
            _required("embedding", vector),
        ]
    )


TOKENS = pa.schema(
    [
        # dense, from 0, ascending
        _required("item_index", pa.int32()),
        # tokens of the item's document, as the text encoder reads them
        _required("tokens", _list(pa.int32())),
    ]
)
"""Schema of tokens: one row per item."""

SIDS = pa.schema(
    [
        # dense, from 0, ascending
        _required("item_index", pa.int32()),
        # one code per level
        _required("codes", _list(pa.uint16())),
    ]
)
"""Schema of semantic IDs: one row per item."""

QUANTIZER = pa.schema(
    [
        # codebooks, or a weight of the RQ-VAE's encoder
        _required("name", pa.string()),
        _required("shape", _list(pa.int32())),
        # row-major
        _required("values", _list(pa.float32())),
    ]
)
"""Schema of a trained quantizer: one row per array."""

TRIE = pa.schema(
    [
        # 0 for edges that leave the root
        _required("level", pa.int16()),
        # parent: rank of its edge within the level above, 0 for the root
        _required("node", pa.int32()),
        # code on the edge
        _required("token", pa.uint16()),
        # child: rank of the edge within its level
        _required("child", pa.int32()),
        # item at the last level, null above it
        pa.field("item_index", pa.int32()),
    ]
)
"""Schema of the trie of semantic IDs: one row per edge."""


@dataclass(config=CHECKED, frozen=True)
class RunRef:
    """Reference to an MLflow run: store, experiment and id."""

    uri: str
    """Tracking URI."""
    experiment: str
    """Name of the experiment."""
    run_id: str
    """Id of the run."""


@dataclass(config=CHECKED)
class JobRef:
    """A job that trained a run."""

    code: str
    """Version of the code."""
    submission_id: str
    """Ray submission id; "" if Ray did not start the job."""


@dataclass(config=CHECKED, kw_only=True)
class RunRecord:
    """Content of `run.json`: a training, a sweep, or a trial that evaluates."""

    version: Literal[4] = 4
    status: Literal["running", "finished", "failed"]
    run: RunRef
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of the training, resolved."""
    given: dict[str, Any] = field(default_factory=dict)
    """Options of the model as the user gave them."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of the tables, by name."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Folders of the tables, by option."""
    created: str = ""
    """UTC time of the start, ISO 8601."""
    jobs: list[JobRef] = field(default_factory=list)
    """Jobs that trained the run, the latest last."""
    epochs: int = 0
    """Number of trained epochs of a finished run."""
    stopped: bool = False
    """Whether the scheduler of a sweep stopped the run early."""
    values: dict[str, float] = field(default_factory=dict)
    """Validation metrics of the best checkpoint of a finished training, or metrics of a
    trial that evaluates."""


@dataclass(config=CHECKED)
class Verdict:
    """A model compared with the best model without training, on the same requests."""

    ranking: str
    """Items that are ranked."""
    repeats: float
    """Share of requests whose target is in the history."""
    metric: str
    value: float
    baseline: str
    baseline_value: float
    low: float
    """Start of the 95% interval of the difference."""
    high: float
    users: int
    verdict: str
    shown_order: str
    """Difference to the shown order; "" if the log has none."""
    baseline_model: str = ""
    """Name of the baseline in the registry."""


@dataclass(config=CHECKED, kw_only=True)
class DayRecord:
    """A day of a growing log in `days.json`. None: the step has not been taken yet."""

    version: Literal[2] = 2
    name: str
    """Date of the last event, and the start of the hash of the tables."""
    audited: bool = False
    anew: str = ""
    """Why the running model could not be trained further; "" if it was."""
    running: str = ""
    """Name of the day of the running model; "" if there is none."""
    before: dict[str, float] | None = None
    """Test metrics of the running model on the day."""
    checkpoint: str = ""
    """Folder of the model that was trained with the day."""
    after: dict[str, float] | None = None
    """Test metrics of that model."""
    baselines: list[Verdict] | None = None
    """One verdict per ranking."""
    accepted: bool | None = None


def parse_record(record_class: type[Record], content: Any, uri: str) -> Record:
    """Validate the content of a JSON file."""
    try:
        version = content.get("version", 1)
        if version != record_class.version:
            raise UserError(
                f"{uri} has format {version}, this version reads format "
                f"{record_class.version}",
                "format",
            )
        return TypeAdapter(record_class).validate_python(content)
    except (AttributeError, ValidationError) as error:
        raise UserError(f"{uri} is damaged ({one_line(error)})") from error


INFO_CLASSES: dict[str, Any] = {
    info_class.table: info_class for info_class in TableInfo.__subclasses__()
}
"""Type of the info of each table, by the name of the table."""


UNREAD = {"sids": "sids", "text": "items"}
"""Table whose manifest is read in a folder of `Inputs` that a model does not read."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Input folders of a run, as absolute paths or URIs.

    Fields have the names of command-line options.
    """

    tables: str
    """Output folder of jobs.prepare."""
    sids: str | None = None
    """Output folder of jobs.tokenize, for models that use semantic IDs."""
    text: str | None = None
    """Output folder of jobs.encode, for models of search and of actions."""

    def __post_init__(self) -> None:
        for option, folder in self.folders().items():
            object.__setattr__(self, option, absolute(folder))

    @property
    def sequences(self) -> str:
        """Folder of the table `sequences`."""
        return join(self.tables, "sequences")

    def folders(self) -> dict[str, str]:
        """Return the folders by option, without options that are not set."""
        return {option: folder for option, folder in vars(self).items() if folder}

    def versions(
        self,
        tables: Mapping[str, Sequence[str]],
        sequences: type[SequencesInfo] = SequencesInfo,
    ) -> dict[str, Table[Any]]:
        """Open tables.

        Args:
            tables: Names of the tables in each folder, by option. A table comes after
                the tables from which it was made.
            sequences: Type of the info of the sequences.

        Returns:
            The tables by name. The names of tables in the `text` folder have the prefix
            `text_`.
        """
        versions: dict[str, Table[Any]] = {}
        classes = {**INFO_CLASSES, "sequences": sequences}
        for option, folder in self.folders().items():
            for table in tables.get(option, ()):
                info_class = EmbeddingsInfo if option == "text" else classes[table]
                version = open_table(join(folder, table), info_class)
                for name, made_from in version.inputs.items():
                    if name in versions and versions[name].hash != made_from:
                        raise UserError(
                            f"{version.uri} was made from other {name} "
                            f"({made_from[:12]}, these are "
                            f"{versions[name].hash[:12]})"
                        )
                name = f"text_{table}" if option == "text" else table
                versions[name] = version
        return versions

    def select(self, model: str, reads: Mapping[str, bool]) -> Inputs:
        """Return the inputs that a model reads.

        Args:
            model: Name of the model.
            reads: Options of the folders that the model reads in addition to the
                tables, and whether each is required.
        """
        for option, is_required in reads.items():
            if is_required and not getattr(self, option):
                raise UserError(f"the model '{model}' needs {option}", option)
        for option, folder in self.folders().items():
            if option in UNREAD and option not in reads:
                open_table(join(folder, UNREAD[option]), TableInfo)
        folders = {option: getattr(self, option) for option in reads}
        return Inputs(self.tables, **folders)
