"""The tables' schemas, with a comment per column."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

LABEL_TYPES = {"bool": pa.bool_(), "float32": pa.float32()}


CARRIED = ("label_", "known_", "num_", "cat_")
"""Beginnings of the columns of events that sequences carry."""


def events_schema(
    labels: dict[str, str] | None = None,
    numbers: Iterable[str] = (),
    categories: Iterable[str] = (),
    known: Iterable[str] = (),
) -> pa.Schema:
    """events: one row per impression or interaction. `labels` maps names to `bool` or `float32`; `known` are those
    that have a time of their own or a delay."""
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
    """items: one row per item of the catalogue, sorted by `item_index`."""
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
    return pa.field(name, pa.list_(pa.field("item", value)), nullable=False)


def sequences_schema(events: pa.Schema) -> pa.Schema:
    """sequences: one row per user. Every column of `events` that is not a key becomes an equal-length list.

    Behaviours are sorted by (timestamp_ms, request_id, position, item_id), with `ties: log_order` by (timestamp_ms,
    position, item_id); where their label has a time of its own, by that first. `requests` has one struct per request,
    in the same order.
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
    """sequences of a search log: one row per user with a request.

    Behaviours (results with the first of `labels`, sorted by (timestamp_ms, request_id, position, item_id), and by
    `known_*` of the label first where the log has it) are equal-length lists. `requests` has one struct per search,
    at its earliest result, sorted by (timestamp_ms, request_id, query_index); its candidates by (position,
    timestamp_ms, item_id).
    `labels` are the bool labels, `features` is the number F of features. Own features, `num_*` and `cat_*` of events,
    are in behaviours and in requests.
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
    """sequences of a log of actions: one row per user, all lists of equal length, an entry per impression.

    Events are sorted by (timestamp_ms, request_id, position, item_id). The manifest names the `tasks`,
    `actions` and `features` in order, and the values of each `cat_*` column in training (`viewers`). Context of
    validation: events before `train_end`; its candidates: from there to `val_end`. Of test: before `val_end`, and
    from there on.
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
    """counts: what is counted before a moment of a log of searches; one row per item, per query and per pair. The
    manifest says which `features` are of which; those of the other kinds are null."""
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
    """embeddings: one row per item, query (`query_index`) or pair of both, sorted by the keys."""
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
