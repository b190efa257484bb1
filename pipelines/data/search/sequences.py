"""A search log's `queries` and `sequences`: results that users engaged with, and searches with what they showed.

`python -m jobs.prepare` makes them where a source says `prepare: {kind: search, behaviour: click}`. An
events part holds each of its users whole and sorted, so a part becomes a part of `sequences` in one
vectorised pass: list columns are flat columns with offsets over them, and what a search may see of the
user's past is one integer, `history_end`.

Shapes: E events of a part, R requests (searches), C candidates of all requests, F features.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.config import pluralize
from models.storage.tables import Manifest, Part, UserError, part_uris, write_part
from pipelines.data.engine import Shared, fetch
from pipelines.data.events.event_stats import (
    Union,
    Vocabulary,
    coded,
    count_pairs,
    counted_before,
    distinct,
    known_times,
    positions_in,
    read_coded,
    runs,
)
from pipelines.data.reading.durations import MINUTE_MS
from pipelines.data.reading.log import Log
from pipelines.data.run import Run, gather_parts
from pipelines.data.schemas import CARRIED, QUERIES, search_schema
from pipelines.data.search.config import SearchConfig, bool_labels
from pipelines.data.search.features import (
    IDS,
    SearchWindows,
    feature_names,
    features,
    gather,
)
from pipelines.data.search.groups import feature_groups, unknown_features
from pipelines.data.search.requests import requests_of
from pipelines.data.sequences.as_of import (
    AsOfTable,
    as_of_schema,
    attach,
    describe_as_of,
    make_as_of,
    say_missing,
    share_as_of,
    share_items,
)
from pipelines.data.sequences.counts import Columns, count_in_buckets
from pipelines.data.sequences.own_features import (
    TrainingValues,
    describe_features,
    item_columns,
    own_names,
    usual_groups,
)
from pipelines.data.sequences.splits import (
    NAMES,
    assign,
    count_tied,
    require_training,
    tied_targets,
)

QUERIES_PER_PART = 1_000_000
NOTHING = pa.schema([])
NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class SearchRules:
    """What turns the events of a search log into sequences."""

    schema: pa.Schema
    """Schema of the events."""
    split: dict[str, Any]
    """The split as its manifest records it: `kind`, and the cut times of a temporal one."""
    max_events: int
    """A user's most recent behaviours that are kept."""
    labels: list[str]
    """Bool labels of the log; the first makes a result a behaviour."""
    clock: bool
    """Whether times are clock times; without them there are no windows and no hours."""
    search: SearchConfig
    """The features."""
    as_of: pa.Schema = NOTHING
    """Features of tables with a time of their own, and of items."""

    @property
    def features(self) -> list[str]:
        """Names of the features."""
        return feature_names(self.search, self.clock)

    @property
    def own(self) -> list[str]:
        """Columns of the log's own features."""
        return own_names(self.carried)

    @property
    def windowed(self) -> bool:
        """Whether there are windowed counts."""
        return self.clock and bool(self.search.windows_ms)

    @property
    def output(self) -> pa.Schema:
        """Schema of the sequences."""
        return search_schema(self.carried, self.labels, len(self.features))

    @property
    def carried(self) -> pa.Schema:
        """Columns of events, and those that are joined to them."""
        return pa.schema([*self.schema, *self.as_of])


def _part_queries(uri: str) -> pa.Array:
    return coded(read_coded(uri, ["query"], ("query",)), "query").dictionary.cast(
        pa.large_string()
    )


def _first_rows(new: np.ndarray) -> np.ndarray:
    """(E,) for each row the last row at or before it that is `new`."""
    return np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))


def build_search(
    events: pa.Table,
    catalogue: Vocabulary,
    queries: Vocabulary,
    counts: dict[str, np.ndarray] | None,
    rules: SearchRules,
    as_of: Sequence[AsOfTable] = (),
) -> tuple[pa.Table, Counter[str]]:
    """Sequences of one events part (sorted, IDS dictionary-coded) and what was counted on the way.

    catalogue and queries hold the ids and texts whose places are item_index and query_index; counts
    are those of `gather`, None for a log without windows. as_of: the tables that `rules.as_of` is of.
    """
    count: Counter[str] = Counter()
    schema = rules.output
    if not events.num_rows:
        return schema.empty_table(), count
    user = coded(events, "user_id")
    codes, time = user.indices.to_numpy(), events["timestamp_ms"].to_numpy()
    item = positions_in(coded(events, "item_id"), catalogue)
    query = positions_in(coded(events, "query"), queries)
    label = {
        name: pc.fill_null(events[f"label_{name}"].combine_chunks(), False).to_numpy(
            zero_copy_only=False
        )
        for name in rules.labels
    }
    inside = item >= 0
    new_user = np.concatenate([[True], codes[1:] != codes[:-1]])
    user_row = _first_rows(new_user)  # (E,) first row of the user

    # 1. Behaviours: results of the catalogue that have the label, the most recent of each user, by when they are known.
    known = known_times(events, rules.labels[0])  # (E,)
    engaged = np.flatnonzero(inside & label[rules.labels[0]])
    behaviour, oldest = recent_behaviours(engaged, known, user_row, rules.max_events)
    count["truncated_events"], count["truncated_users"] = (
        len(engaged) - len(behaviour),
        int((oldest > NEVER).sum()),
    )
    lost = (
        time < oldest[user_row]
    )  # a user who lost behaviours loses the requests that are older than what is left

    # 2. Requests and their candidates.
    asked = requests_of(events, query, rules.search, rules.clock)
    position, first = events["position"].to_numpy(), asked.first
    count["at_position_0"] = int((position == 0).sum())
    count["at_position_1"] = int((position == 1).sum())
    order, begins = asked.order(query, position)
    request = np.cumsum(begins) - 1  # (E,) in the order of the requests
    at = time[asked.earliest]  # (E,) the request's time
    events = attach(events, at, as_of, count)
    lost = lost[asked.earliest]
    usable = (inside & ~lost)[order]
    candidate = order[usable]  # (C,) rows of events
    start = runs(request[usable])  # (R,) first candidate of each request
    asks = first[
        candidate[start]
    ]  # (R,) the earliest event of each request, whatever it showed
    found = np.bincount(request, weights=inside[order])
    count["requests_outside"] = int((found == 0).sum())
    count["candidates_outside"] = int((~inside).sum())
    count["requests_truncated"] = int((lost[order][begins] & (found > 0)).sum())
    spread = asked.spread(time)
    count["requests_spread"], count["max_spread_ms"] = (
        len(distinct(first[spread > 0])),
        int(spread.max()),
    )
    count["requests_without_query"] = int((query[asks] < 0).sum())
    if not len(asks):
        return schema.empty_table(), count
    user_start = runs(codes[asks])  # (U,) first request of each user
    drawn = rules.split["kind"] == "leave_last_out"
    ids = (
        pa.DictionaryArray.from_arrays(codes[asks], user.dictionary),
        coded(events, "item_id").take(pa.array(candidate[start])),
    )
    split = assign(rules.split, at[asks], user_start, ids if drawn else None)
    if drawn:
        for name, tied in count_tied(split, at[asks], user_start).items():
            count[f"tied_targets_{name}"] = tied
    length = np.diff(np.append(start, len(candidate)))
    history_end = counted_before(
        user_row[behaviour], known[behaviour], user_row[asks], at[asks]
    )

    # 3. List columns: offsets over the flat columns.
    values = features(counts, position, at, rules.search, rules.clock)  # (E, F)
    of_result = {"candidates": item, "positions": position, "features": values}
    of_result |= {f"label_{name}": flags for name, flags in label.items()}
    of_request = {
        "timestamp_ms": pa.array(at[asks]),
        "query_index": pa.array(query[asks]),
        "history_end": pa.array(history_end.astype(np.int32)),
        "split": pa.DictionaryArray.from_arrays(pa.array(split), pa.array(NAMES)).cast(
            pa.string()
        ),
    }
    kind, offsets = schema.field("requests").type, np.append(start, len(candidate))
    requests = request_lists(
        kind.value_type, events, of_request, of_result, candidate, offsets
    )
    # A user whose every request is older than what is left of the history is left out.
    behaviour = behaviour[np.isin(user_row[behaviour], user_row[asks])]
    of_user = np.append(
        np.searchsorted(user_row[behaviour], user_row[asks][user_start]), len(behaviour)
    )
    of_behaviour = {
        "item_index": pa.array(item[behaviour]),
        "query_index": pa.array(query[behaviour]),
        "features": pa.FixedSizeListArray.from_arrays(
            pa.array(values[behaviour].reshape(-1)), values.shape[1]
        ),
    }
    columns = [
        pa.DictionaryArray.from_arrays(
            pa.array(codes[asks][user_start]), user.dictionary
        ).cast(pa.string())
    ]
    for field in list(schema)[1:-1]:
        column = of_behaviour.get(field.name)
        column = (
            events[field.name].combine_chunks().take(pa.array(behaviour))
            if column is None
            else column
        )
        columns.append(lists(of_user, column.cast(field.type.value_type), field.type))
    columns.append(lists(np.append(user_start, len(asks)), requests, kind))

    clicks = np.add.reduceat(label[rules.labels[0]][candidate].astype(np.int64), start)
    one_class = (clicks == 0) | (clicks == length)
    pairs = count_pairs(codes[behaviour], item[behaviour])
    count.update(users=len(user_start), interactions=len(behaviour), pairs=pairs)
    tied = (known[behaviour][1:] == known[behaviour][:-1]) & (
        user_row[behaviour][1:] == user_row[behaviour][:-1]
    )
    count["tied_rows"] = int(tied.sum())
    count["max_length"], count["max_candidates"] = (
        int(np.diff(of_user).max()),
        int(length.max()),
    )
    for code, name in enumerate(NAMES):
        mine = split == code
        count[f"requests_{name}"] = int(mine.sum())
        count[f"candidates_{name}"] = int(length[mine].sum())
        count[f"one_class_{name}"] = int(one_class[mine].sum())
        count[f"without_history_{name}"] = int((history_end[mine] == 0).sum())
    return pa.Table.from_arrays(columns, schema=schema), count


def recent_behaviours(
    engaged: np.ndarray, known: np.ndarray, user_row: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of the rows `engaged` the `most` recent of each user, by user and by when they are known (E,); and (E,), at the
    first row of a user who lost some, from when on the others are, NEVER elsewhere."""
    engaged = engaged[np.lexsort((known[engaged], user_row[engaged]))]
    start = runs(user_row[engaged])
    length = np.diff(np.append(start, len(engaged)))
    recent = np.repeat(start + length, length) - np.arange(len(engaged)) <= most
    cut, oldest = length > most, np.full(len(known), NEVER)
    oldest[user_row[engaged[start]][cut]] = known[engaged[(start + length - most)[cut]]]
    return engaged[recent], oldest


def lists(offsets: np.ndarray, values: pa.Array, kind: pa.DataType) -> pa.Array:
    """A list column of flat values."""
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), values, type=kind
    )


def request_lists(
    kind: pa.StructType,
    events: pa.Table,
    of_request: dict[str, pa.Array],
    of_result: dict[str, np.ndarray],
    candidate: np.ndarray,
    offsets: np.ndarray,
) -> pa.Array:
    """(R,) structs of the requests: what each has itself, and lists of what its candidates (C,), rows of the events,
    have: in `of_result` (E,) or (E, F), else in the column of the field's name. `offsets` (R + 1,) are over C."""
    arrays = []
    for field in list(kind):
        if field.name in of_request:
            arrays.append(of_request[field.name])
        elif field.name in of_result:
            flat = of_result[field.name]
            wide = flat.shape[1] if flat.ndim == 2 else 1
            arrays.append(
                lists(offsets * wide, pa.array(flat[candidate].reshape(-1)), field.type)
            )
        else:
            arrays.append(
                lists(
                    offsets,
                    events[field.name].combine_chunks().take(pa.array(candidate)),
                    field.type,
                )
            )
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _write_part(
    sequences_uri: str,
    catalogue: Vocabulary,
    queries: Vocabulary,
    rules: SearchRules,
    as_of: list[Shared],
    uri: str,
    pieces: list[Columns] | None = None,
) -> tuple[Part | None, Counter[str], dict[str, Any]]:
    names = [*IDS, "timestamp_ms", "position"]
    names += [name for name in rules.schema.names if name.startswith(CARRIED)]
    events = read_coded(uri, names, IDS)
    counts = (
        gather(events.num_rows, rules.search, pieces) if pieces is not None else None
    )
    table, count = build_search(
        events, catalogue, queries, counts, rules, [fetch(table) for table in as_of]
    )
    seen = of_training(table, rules.own).record()
    return (write_part(sequences_uri, table) if table.num_rows else None), count, seen


def of_training(sequences: pa.Table, names: list[str]) -> TrainingValues:
    """What the candidates of training requests say of own features."""
    requests = sequences["requests"].combine_chunks().flatten()
    train = requests.filter(pc.equal(pc.struct_field(requests, "split"), "train"))
    return TrainingValues.of(
        {name: pc.struct_field(train, name).flatten() for name in names}
    )


def make_queries(run: Run, events: Manifest) -> Manifest:
    """The table of distinct queries, sorted."""
    inputs = {"events": events.hash}
    if finished := run.finished("queries", {}, inputs):
        return finished
    begin, uri = time.perf_counter(), run.table("queries")
    with run.writing("queries"):
        found, parts = Union(), []
        for _, of_part in run.engine.each(
            _part_queries, [(part,) for part in part_uris(run.table("events"), events)]
        ):
            found.add(of_part)
        queries, _ = found.sorted()
        for low in range(0, len(queries), QUERIES_PER_PART):
            text = queries.slice(low, QUERIES_PER_PART).cast(pa.string())
            index = pa.array(np.arange(low, low + len(text), dtype=np.int32))
            parts.append(
                write_part(uri, pa.Table.from_arrays([index, text], schema=QUERIES))
            )
        manifest = run.commit("queries", QUERIES, parts, {}, inputs)
    run.say(
        f"queries: {len(queries):,} distinct in {time.perf_counter() - begin:.1f} s"
    )
    return manifest


def make_search(
    run: Run, events: Manifest, items: Manifest, split: dict[str, Any]
) -> Manifest:
    """Queries and sequences of a search log; returns the manifest of the sequences."""
    config, source = run.config, run.source
    own_groups = usual_groups(source, config.own.item_features)
    of_items = item_columns(source, config.own.item_features)
    queries = make_queries(run, events)
    settings = {
        "kind": "search",
        "split": config.split.settings(),
        "max_events": config.max_events,
        "core_window": config.core_window,
        "behaviour": config.behaviour,
        "search": asdict(config.own),
    }
    as_of = make_as_of(run)
    inputs = {"events": events.hash, "items": items.hash, "queries": queries.hash}
    inputs |= {name: table.hash for name, table in as_of.items()}
    if finished := run.finished("sequences", settings, inputs):
        return finished
    begin, uri = time.perf_counter(), run.table("sequences")
    rules = SearchRules(
        schema=source.schema,
        split=split,
        max_events=config.max_events,
        labels=bool_labels(source, config.behaviour),
        clock=events.info["clock"],
        search=config.own,
        as_of=pa.schema([*as_of_schema(list(source.as_of.values())), *of_items]),
    )
    with run.writing("sequences"):
        sources, ids = (
            part_uris(run.table("events"), events),
            (run.catalogue(), run.queries()),
        )
        shared = (
            uri,
            *ids,
            rules,
            [*share_as_of(run, as_of), *share_items(run, of_items.names)],
        )
        if rules.windowed:
            windows = SearchWindows(
                config.own,
                rules.labels[0],
                f"known_{rules.labels[0]}" in source.schema.names,
            )
            results = count_in_buckets(
                run.engine, sources, events.rows, windows, ids, _write_part, shared
            )
        else:
            results = run.engine.each(
                _write_part, [(part,) for part in sources], shared
            )
        parts, count, seen = gather_parts(
            results, len(sources), run.progress("sequences")
        )
        own = describe_features(map(TrainingValues.read, seen), rules.own)
        say_missing(run, as_of, events.rows, count)
        if not parts:
            raise UserError(
                f"no request shows an item of the catalogue: {count['requests_outside']:,} are outside it; "
                f"use --core_window all"
            )
        check_positions(source, count)
        per_split = {
            name: {split: count[f"{short}_{split}"] for split in NAMES}
            for name, short in (
                ("requests", "requests"),
                ("candidates", "candidates"),
                ("requests_one_class", "one_class"),
                ("requests_without_history", "without_history"),
            )
        }
        require_training(
            per_split["requests"], count, config.max_events, "request", split["kind"]
        )
        info = {
            **run.sequences_info(events, items, split, count),
            **tied_targets(count),
            "queries": queries.rows,
            "labels": rules.labels,
            "features": rules.features,
            "groups": feature_groups(config.own, rules.features, own_groups),
            "unknown_when_ranking": unknown_features(config.own, own_groups),
            **({"own": own} if rules.own else {}),
            **({"as_of": describe_as_of(as_of)} if as_of else {}),
            **({"item_features": of_items.names} if of_items else {}),
            "windows": [f"{days:g}d" for days in config.own.windows_days]
            if rules.windowed
            else [],
            "search": asdict(config.own),
            "max_candidates": count["max_candidates"],
            **per_split,
            "requests_outside": count["requests_outside"],
            "candidates_outside": count["candidates_outside"],
            "requests_truncated": count["requests_truncated"],
            "requests_without_query": count["requests_without_query"],
            "requests_spread": count["requests_spread"],
            "max_request_spread_ms": count["max_spread_ms"],
            "queries_hash": queries.hash,
        }
        seconds = time.perf_counter() - begin
        sequences = run.commit(
            "sequences",
            rules.output,
            parts,
            settings,
            inputs,
            info,
            build_write_s=seconds,
        )
    say_search(run, sequences, rules, time.perf_counter() - begin)
    return sequences


def check_positions(source: Log, count: Counter[str]) -> None:
    """Raise UserError for positions that the log counts from 1: models and pages count from 0."""
    if source.position and count["at_position_1"] and not count["at_position_0"]:
        raise UserError(
            f"position: '{source.position}' begins at 1, and positions count from 0 (a page is position // "
            f"search.page_size); write position: cast({source.position} as bigint) - 1"
        )


def say_search(
    run: Run, sequences: Manifest, rules: SearchRules, seconds: float
) -> None:
    """What was made and left out, in a line or two."""
    info = sequences.info
    requests, candidates, one_class = (
        sum(info[name].values())
        for name in ("requests", "candidates", "requests_one_class")
    )
    run.say(
        f"sequences: {sequences.rows:,} users, {requests:,} requests with {candidates:,} candidates and "
        f"{len(rules.features) + len(rules.own)} features in {seconds:.1f} s; left out: "
        f"{pluralize(info['requests_outside'], 'request')} and {pluralize(info['candidates_outside'], 'candidate')} "
        f"outside the catalogue, {pluralize(info['requests_truncated'], 'request')} older than the kept behaviours; "
        f"{one_class:,} requests have one class only"
    )
    if without := info["requests_without_query"]:
        run.say(f"note: {without:,} of {requests:,} requests have no query")
    if spread := info["requests_spread"]:
        apart = info["max_request_spread_ms"]
        run.say(
            f"note: the results of {spread:,} requests have times of their own, up to "
            + (
                f"{apart / MINUTE_MS:,.2f} minutes"
                if rules.clock
                else f"{apart:,} places"
            )
            + " apart; a request's time is that of its earliest result"
        )
