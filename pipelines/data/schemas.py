"""The tables' schemas, with a comment per column."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

LABEL_TYPES = {"bool": pa.bool_(), "float32": pa.float32()}


CARRIED = ("label_", "known_", "num_", "cat_")
"""Prefixes of the columns of events that sequences carry."""


def events_schema(
    labels: dict[str, str] | None = None,
    numbers: Iterable[str] = (),
    categories: Iterable[str] = (),
    known: Iterable[str] = (),
) -> pa.Schema:
    """Return the schema of events: one row per impression or interaction.

    Args:
        labels: Type by name: `bool` or `float32`.
        numbers: Names of number features.
        categories: Names of category features.
        known: Labels with a time of their own or a delay.
    """
    return pa.schema(
        [
            pa.field("user_id", pa.string(), nullable=False),
            pa.field(
                "request_id", pa.string(), nullable=False
            ),  # one request or page view; "" if the log has none
            pa.field(
                "timestamp_ms", pa.int64(), nullable=False
            ),  # epoch ms, or the ordinal of an order-only log
            pa.field("item_id", pa.string(), nullable=False),
            pa.field("query", pa.string()),  # null where the event had no query
            pa.field(
                "position", pa.int32(), nullable=False
            ),  # rank shown, from 0; 0 if the log has none
            *(
                pa.field(f"label_{name}", LABEL_TYPES[kind])
                for name, kind in (labels or {}).items()
            ),
            *(
                pa.field(f"known_{name}", pa.int64()) for name in known
            ),  # from when on; null where the label is not set
            *(pa.field(f"num_{name}", pa.float32()) for name in numbers),
            *(pa.field(f"cat_{name}", pa.string()) for name in categories),
        ]
    )


REJECTS = pa.schema(
    [
        pa.field(
            "file", pa.string(), nullable=False
        ),  # raw file, relative to the input folder
        pa.field(
            "piece", pa.int64(), nullable=False
        ),  # where the piece that was read begins: byte, or row group
        pa.field(
            "row", pa.int64(), nullable=False
        ),  # row in that piece, from 0, without header and blank lines
        pa.field(
            "reason", pa.string(), nullable=False
        ),  # by the log's own column, such as "bought_at: negative"
        pa.field("source", pa.string(), nullable=False),  # the source row as JSON
    ]
)


def items_schema(
    texts: Iterable[str] = (),
    attributes: Iterable[str] = (),
    numbers: Iterable[str] = (),
) -> pa.Schema:
    """Return the schema of items: one row per item of the catalogue, sorted by `item_index`."""
    return pa.schema(
        [
            pa.field(
                "item_index", pa.int32(), nullable=False
            ),  # dense, from 0, by item_id; appended ones follow
            pa.field("item_id", pa.string(), nullable=False),
            *(pa.field(f"text_{name}", pa.string()) for name in texts),
            *(pa.field(f"cat_{name}", pa.string()) for name in attributes),
            *(pa.field(f"num_{name}", pa.float32()) for name in numbers),
        ]
    )


def _list(name: str, value: pa.DataType) -> pa.Field:
    """Return a field with a list of values per user."""
    return pa.field(name, pa.list_(pa.field("item", value)), nullable=False)


def sequences_schema(events: pa.Schema) -> pa.Schema:
    """Return the schema of retrieval sequences: one row per user.

    Every column of `events` that is not a key becomes a list of equal length.
    Behaviours are sorted by (timestamp_ms, request_id, position, item_id), with `ties:
    log_order` by (timestamp_ms, position, item_id); if their label has a time of its
    own, by that first. `requests` has one struct per request, in the order of time.
    """
    extra = [
        field
        for field in events
        if field.name == "query" or field.name.startswith(CARRIED)
    ]
    request = pa.struct(
        [
            pa.field("timestamp_ms", pa.int64()),
            pa.field("query", pa.string()),
            pa.field(
                "history_end", pa.int32()
            ),  # behaviours known strictly before the request
            pa.field("split", pa.string()),  # train, val or test
            pa.field(
                "candidates", pa.list_(pa.field("item", pa.int32()))
            ),  # item_index; retrieval: the target
        ]
    )
    return pa.schema(
        [
            pa.field("user_id", pa.string(), nullable=False),
            _list("item_index", pa.int32()),
            _list("timestamp_ms", pa.int64()),
            *(_list(field.name, field.type) for field in extra),
            _list("requests", request),
        ]
    )


QUERIES = pa.schema(
    [
        pa.field(
            "query_index", pa.int32(), nullable=False
        ),  # dense, from 0, in the order of the text
        pa.field("query", pa.string(), nullable=False),
    ]
)


def search_schema(events: pa.Schema, labels: Iterable[str], features: int) -> pa.Schema:
    """Return the schema of the sequences of a search log: one row per user with a request.

    Behaviours are lists of equal length. They are results with the first of `labels`,
    sorted by (timestamp_ms, request_id, position, item_id), and by `known_*` of the
    label first if the log has it. `requests` has one struct per search, at its earliest
    result, sorted by (timestamp_ms, request_id, query_index), with candidates sorted by
    (position, timestamp_ms, item_id). Custom features, `num_*` and `cat_*` of events,
    are in behaviours and in requests.

    Args:
        events: Schema of the events, with joined features.
        labels: Bool labels.
        features: Number F of features.
    """
    extra = [field for field in events if field.name.startswith(CARRIED)]
    own = [field for field in extra if field.name.startswith(("num_", "cat_"))]
    request = pa.struct(
        [
            pa.field("timestamp_ms", pa.int64()),
            pa.field("query_index", pa.int32()),  # -1: no query
            pa.field(
                "history_end", pa.int32()
            ),  # behaviours known strictly before the request
            pa.field("split", pa.string()),  # train, val or test
            pa.field(
                "candidates", pa.list_(pa.field("item", pa.int32()))
            ),  # item_index of each result shown
            pa.field(
                "positions", pa.list_(pa.field("item", pa.int32()))
            ),  # its rank shown, from 0
            *(
                pa.field(f"label_{name}", pa.list_(pa.field("item", pa.bool_())))
                for name in labels
            ),
            pa.field(
                "features", pa.list_(pa.field("item", pa.float32()))
            ),  # candidates x F, row after row
            *(
                pa.field(f.name, pa.list_(pa.field("item", f.type))) for f in own
            ),  # of each candidate, as the log has it
        ]
    )
    return pa.schema(
        [
            pa.field("user_id", pa.string(), nullable=False),
            _list("item_index", pa.int32()),
            _list("timestamp_ms", pa.int64()),
            _list("query_index", pa.int32()),  # -1: no query
            _list("position", pa.int32()),
            *(_list(field.name, field.type) for field in extra),
            _list(
                "features", pa.list_(pa.field("item", pa.float32()), features)
            ),  # as of the request that showed the result
            _list("requests", request),
        ]
    )


def actions_schema(
    events: pa.Schema, tasks: int, actions: int, features: int
) -> pa.Schema:
    """Return the schema of the sequences of a log of actions: one row per user.

    All lists have an entry per impression, sorted by (timestamp_ms, request_id,
    position, item_id). The manifest names the `tasks`, `actions` and `features` in
    order, and the values of each `cat_*` column in training (`viewers`). The context of
    validation is the events before `train_end`, its candidates are the events up to
    `val_end`. The context of test is the events before `val_end`, its candidates are
    the others.

    Args:
        events: Schema of the events, with joined features.
        tasks: Number of tasks.
        actions: Number of actions that models read.
        features: Number of features.
    """
    extra = [field for field in events if field.name.startswith(CARRIED)]
    return pa.schema(
        [
            pa.field("user_id", pa.string(), nullable=False),
            _list("item_index", pa.int32()),
            _list("timestamp_ms", pa.int64()),
            *(_list(field.name, field.type) for field in extra),
            _list("tasks", pa.list_(pa.field("item", pa.uint8()), tasks)),  # 0 or 1
            _list(
                "actions", pa.list_(pa.field("item", pa.float32()), actions)
            ),  # what models read, from 0 to 1
            _list(
                "features", pa.list_(pa.field("item", pa.float32()), features)
            ),  # counts before the event or its cut
            pa.field(
                "train_end", pa.int32(), nullable=False
            ),  # the user's events before the validation cut
            pa.field(
                "val_end", pa.int32(), nullable=False
            ),  # the user's events before the test cut
        ]
    )


def counts_schema(features: Iterable[Iterable[str]]) -> pa.Schema:
    """Return the schema of counts before a moment of a search log: one row per item, query and pair.

    `features` are the names of features by kind of key, as in the manifest; features of
    other kinds are null.
    """
    return pa.schema(
        [
            pa.field("item_id", pa.string()),  # null in a row of a query
            pa.field("query", pa.string()),  # null in a row of an item
            *(
                pa.field(name, pa.float32()) for names in features for name in names
            ),  # as in the features of sequences
        ]
    )


def embeddings_schema(
    width: int,
    keys: Iterable[str] = ("item_index",),
    vectors: Iterable[str] = ("embedding",),
) -> pa.Schema:
    """Return the schema of embeddings: one row per item, query (`query_index`) or pair of both, sorted by the keys."""
    return pa.schema(
        [
            *(pa.field(name, pa.int32(), nullable=False) for name in keys),
            *(
                pa.field(name, pa.list_(pa.float32(), width), nullable=False)
                for name in vectors
            ),
        ]
    )


TOKENS = pa.schema(
    [
        pa.field("item_index", pa.int32(), nullable=False),  # sorted, dense
        pa.field(
            "tokens", pa.list_(pa.field("item", pa.int32())), nullable=False
        ),  # of the document, as encoded
    ]
)

SIDS = pa.schema(
    [
        pa.field("item_index", pa.int32(), nullable=False),  # sorted, dense
        pa.field(
            "codes", pa.list_(pa.field("item", pa.uint16())), nullable=False
        ),  # one code per level
    ]
)

QUANTIZER = pa.schema(
    [
        pa.field(
            "name", pa.string(), nullable=False
        ),  # codebooks, or a weight of the RQ-VAE's encoder
        pa.field("shape", pa.list_(pa.field("item", pa.int32())), nullable=False),
        pa.field(
            "values", pa.list_(pa.field("item", pa.float32())), nullable=False
        ),  # row after row
    ]
)

TRIE = pa.schema(
    [
        pa.field(
            "level", pa.int16(), nullable=False
        ),  # 0 for the edges that leave the root
        pa.field(
            "node", pa.int32(), nullable=False
        ),  # parent: the edge's rank within the level above; root 0
        pa.field("token", pa.uint16(), nullable=False),  # code on the edge
        pa.field(
            "child", pa.int32(), nullable=False
        ),  # the edge's own rank within its level
        pa.field("item_index", pa.int32()),  # set at the last level, null above it
    ]
)
