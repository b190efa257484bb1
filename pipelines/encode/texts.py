"""Embeddings of a log's texts: items, and for searches queries and pairs of both.

`python -m jobs.encode --tables TABLES --encoder minilm --output TEXT` writes the tables
that the kind of requests needs (`Kind.text_tables`). Each distinct text, and each
distinct pair of a query and a shown document, is encoded once in Ray Data actors that
write their parts themselves: the driver has the keys of the pairs but not their
embeddings. A further table contains the documents' tokens, for models that train the
encoder (HLLM's item tower); not for TF-IDF.

Models are conditioned on the query alone. The QGS paper takes the [SEP] state of one
pass over query and document; as the encoder is bidirectional, this state contains the
document to predict. `query_condition: joint` stores it too, for comparison, with a
warning.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray

from core.errors import UserError, pluralize
from core.files import absolute, join
from core.schemas import (
    TOKENS,
    EmbeddingsInfo,
    ItemsInfo,
    QueriesInfo,
    SequencesInfo,
    TokensInfo,
    embeddings_schema,
)
from core.tables import (
    Part,
    Table,
    check_replaceable,
    clear,
    commit,
    has_manifest,
    open_table,
    read_manifest,
    read_parquet,
    write_part,
    writing,
)
from models.text.text_encoder import TextEncoder, TfidfEncoder, check_encoder
from pipelines.encode.config import TextConfig
from pipelines.encode.embed import (
    ROWS_PER_PART,
    encode_texts,
    encoder_version,
    find_finished,
    fit_tfidf,
    item_texts,
    read_embeddings,
    run_in_actors,
    text_settings,
    to_list_column,
    write_vectors,
)
from pipelines.prepare.events.columns import sorted_unique
from pipelines.prepare.executor import Executor
from pipelines.prepare.kinds.registry import KINDS
from pipelines.start import start_ray

Say = Callable[[str], None]

TARGET_PARTS = 64
"""Desired number of parts of the `pairs` table, so that all actors are busy."""
MIN_PART_PAIRS = 2048
"""Minimum number of pairs per part, even if there are fewer parts then."""
MAX_PART_PAIRS = 1 << 15
"""Maximum number of pairs per part, even if there are more parts then."""
PAIR = ("item_index", "query_index")
"""Key columns of the `pairs` table."""
NUM_CHECKED_DOCUMENTS = 64
"""Documents on which an encoder is compared with its stored embeddings."""
MAX_DIFFERENCE = {"fp32": 1e-4, "bf16": 0.05}
"""Differences of embeddings, by precision, up to which they count as rounding."""
JOINT_WARNING = (
    "warning: query_condition joint stores the [SEP] state of query and document "
    "together, which leaks the document: a model that is conditioned on it reads its "
    "own target; use it for comparison only"
)


def fit_tfidf_encoder(texts: list[str], width: int) -> TfidfEncoder:
    """Fit TF-IDF and a truncated SVD of at most `width` components."""
    vectorizer, svd, _ = fit_tfidf(texts, width)
    return TfidfEncoder(
        vectorizer.get_feature_names_out().tolist(), vectorizer.idf_, svd.components_
    )


class PairEncoder:
    """A Ray Data actor that turns blocks of pairs into parts of the `pairs` table."""

    def __init__(
        self, shared: dict[str, ray.ObjectRef], config: TextConfig, output_uri: str
    ) -> None:
        """Load the encoder.

        Args:
            shared: Object references to the texts of `items` and `queries`, and to the
                `encoder`: its name, or a fitted TfidfEncoder.
            config: Options of the encoder.
            output_uri: Folder of the `pairs` table.
        """
        self.items = ray.get(shared["items"])
        self.queries = ray.get(shared["queries"])
        self.encoder = ray.get(shared["encoder"])
        self.output_uri = output_uri
        self.joint = config.query_condition == "joint"
        if isinstance(self.encoder, str):
            name = self.encoder
            self.encoder = TextEncoder(name, *config.encoder_options())
            if self.joint and self.encoder.tokenizer.sep_token_id is None:
                raise UserError(f"{name} has no [SEP] token")

    def __call__(self, block: pa.Table) -> pa.Table:
        """Encode a block of pairs and write it as a part.

        Args:
            block: Columns `item_index` and `query_index`; a query of -1 is empty.

        Returns:
            One row: the key of the `first` pair, the `width`, and the `part` as JSON.
        """
        items, queries = (block[name].to_numpy() for name in PAIR)
        documents = [self.items[item] for item in items]
        query_texts = [self.queries[query] if query >= 0 else "" for query in queries]
        # sorted by length, as a batch is padded to its longest pair
        lengths = np.array([len(text) for text in query_texts])
        lengths += np.array([len(text) for text in documents])
        order = np.argsort(-lengths, kind="stable")
        sorted_vectors = self.encoder.encode(
            [query_texts[pair] for pair in order],
            [documents[pair] for pair in order],
            self.joint,
        )
        vectors = np.empty_like(sorted_vectors)  # (pairs, width), or twice the width
        vectors[order] = sorted_vectors
        columns = np.split(vectors, 2, axis=1) if self.joint else [vectors]
        width = columns[0].shape[1]
        schema = embeddings_schema(width, PAIR, _vector_columns(self.joint))
        lists = [to_list_column(column) for column in columns]
        keys = [pa.array(items), pa.array(queries)]
        table = pa.Table.from_arrays([*keys, *lists], schema=schema)
        part = write_part(self.output_uri, table)
        first_key = _pair_keys(items[:1], queries[:1])
        return pa.table(
            {
                "first": first_key,
                "width": [width],
                "part": [json.dumps(asdict(part))],
            }
        )


def _vector_columns(joint: bool) -> tuple[str, ...]:
    """Return the names of the vectors in the `pairs` table."""
    return ("embedding", "joint") if joint else ("embedding",)


def _pair_keys(items: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Pack pairs into int64 keys (pairs,) that sort by item, then query."""
    return items.astype(np.int64) << 32 | queries.astype(np.int64) + 1


def _part_pairs(uri: str) -> np.ndarray:
    """Return the ascending keys of the distinct pairs in a part of `sequences`."""
    table = read_parquet(uri, ["item_index", "query_index", "requests"])
    requests = table["requests"].combine_chunks().flatten()
    candidates = pc.struct_field(requests, "candidates")
    request_queries = pc.struct_field(requests, "query_index").to_numpy()
    num_candidates = pc.list_value_length(candidates).to_numpy()
    behaviour_items, behaviour_queries = (
        table[name].combine_chunks().flatten().to_numpy() for name in PAIR
    )
    items = np.concatenate([candidates.flatten().to_numpy(), behaviour_items])
    queries = np.concatenate(
        [np.repeat(request_queries, num_candidates), behaviour_queries]
    )
    return sorted_unique(_pair_keys(items, queries))


INPUT_TABLES = {
    "items": ("items",),
    "tokens": ("items",),
    "queries": ("items", "queries"),
    "pairs": ("items", "queries", "sequences"),
}
"""Tables that each table of text embeddings is made from."""


def encode_log(
    tables_uri: str,
    output_uri: str,
    encoder: str,
    config: TextConfig | None = None,
    overwrite: bool = False,
    say: Say = print,
) -> dict[str, Table]:
    """Write the text embeddings that the log's kind of requests needs.

    The tables are `items`, and for searches also `queries`, `pairs` and, except for
    TF-IDF, the `tokens` of documents. Tables that are up to date are not written again.

    Args:
        tables_uri: Folder of the log's tables.
        output_uri: Folder to write to.
        encoder: Name of the encoder, or "tfidf".
        config: Options of the encoder; by default `TextConfig()`.
        overwrite: Whether to replace existing tables.
        say: Prints a message.

    Returns:
        The tables, by name.
    """
    config = config or TextConfig()
    # tasks may run in other folders
    tables_uri, output_uri = absolute(tables_uri), absolute(output_uri)
    sequences = open_table(join(tables_uri, "sequences"), SequencesInfo)
    kind = KINDS[sequences.info.kind]
    names = [
        name for name in kind.text_tables if (name, encoder) != ("tokens", "tfidf")
    ]
    is_joint = config.query_condition == "joint"
    if not names:
        raise UserError(
            f"{sequences.uri} is of kind {kind.name}, whose models read no texts"
        )
    if is_joint and (encoder == "tfidf" or "pairs" not in names):
        raise UserError(
            f"query_condition is joint, but kind {kind.name} has no queries"
            if "pairs" not in names
            else "query_condition is joint, but tfidf has no [SEP] token"
        )
    for name in kind.text_tables:
        table = "tokens" if name == "tokens" else "embeddings"
        check_replaceable(join(output_uri, name), table)
    version = encoder_version(encoder)  # raises for an unknown encoder
    items = open_table(join(tables_uri, "items"), ItemsInfo)
    documents = item_texts(items.read(), config, say)
    texts = {"items": documents}
    hashes = {"items": items.hash, "sequences": sequences.hash}
    if is_joint:
        say(JOINT_WARNING)
    if "queries" in names:
        queries = open_table(join(tables_uri, "queries"), QueriesInfo)
        hashes["queries"] = queries.hash
        texts["queries"] = []
        if queries.rows:  # an empty table has no files
            texts["queries"] = queries.read()["query"].to_pylist()
    origins: dict[str, Any] = {}
    for name in names:
        settings = text_settings(encoder, config)
        if name != "pairs":
            settings.pop("query_condition", None)
        inputs = {table: hashes[table] for table in INPUT_TABLES[name]}
        origins[name] = {"config": settings, "inputs": {**inputs, "encoder": version}}
    tfidf = fit_tfidf_encoder(documents, config.svd) if encoder == "tfidf" else None
    written: dict[str, Table] = {}
    with writing(output_uri):
        if tfidf and has_manifest(join(output_uri, "tokens")):
            clear(join(output_uri, "tokens"))  # tokens of an earlier encoder
        for name in [] if overwrite else names:
            info_class: Any = TokensInfo if name == "tokens" else EmbeddingsInfo
            uri = join(output_uri, name)
            finished = find_finished(uri, info_class, **origins[name])
            if finished:
                say(f"{name}: up to date")
                written[name] = finished
        started = time.monotonic()
        missing = [name for name in names if name not in written]
        missing_texts = [text for name in missing for text in texts.get(name, [])]
        if not missing_texts:
            width = written["items"].info.width
            vectors = np.zeros((0, width), np.float32)
        elif tfidf:
            vectors = tfidf.encode(missing_texts)
        else:
            check_encoder(encoder, *config.encoder_options())
            vectors = encode_texts(missing_texts, encoder, config, say)
        for name in missing:
            uri, origin = join(output_uri, name), origins[name]
            if name == "tokens":
                written[name] = _write_tokens(
                    uri, documents, encoder, config, say, origin
                )
            elif name == "pairs":
                shared = {"items": documents, "queries": texts["queries"]}
                written[name] = _write_pairs(
                    uri,
                    sequences,
                    shared,
                    tfidf or encoder,
                    config,
                    say,
                    origin,
                )
            else:
                own_vectors, vectors = np.split(vectors, [len(texts[name])])
                earlier = read_manifest(uri)
                # old texts keep their embeddings
                extends = (
                    earlier is not None
                    and encoder != "tfidf"
                    and earlier.config == origin["config"]
                    and earlier.inputs["encoder"] == version
                    and earlier.inputs["items"] in items.extends
                )
                written[name] = _write_texts(
                    uri,
                    texts[name],
                    own_vectors,
                    say,
                    started,
                    extends=earlier.ancestry if earlier and extends else [],
                    **origin,
                )
        return written


def _write_texts(
    uri: str,
    texts: list[str],
    vectors: np.ndarray,
    say: Say,
    started: float,
    **manifest: Any,
) -> Table:
    """Write a table of embeddings with one row per text."""
    name = uri.rsplit("/", 1)[-1]
    key = "item_index" if name == "items" else "query_index"
    width = vectors.shape[1]
    num_unknown = int((~vectors.any(axis=1)).sum())
    info = EmbeddingsInfo(
        width=width,
        distinct_texts=len(set(texts)),
        texts_without_known_word=num_unknown,
    )
    note = f", {num_unknown:,} without a known word (zeros)" if num_unknown else ""
    say(
        f"{name}: {len(texts):,} texts, {info.distinct_texts:,} distinct, width "
        f"{width}{note}"
    )
    return commit(
        uri,
        "embeddings",
        embeddings_schema(width, [key]),
        write_vectors(uri, vectors, key),
        info=info,
        timings={"encode_s": round(time.monotonic() - started, 2)},
        **manifest,
    )


def _write_tokens(
    uri: str,
    documents: list[str],
    name: str,
    config: TextConfig,
    say: Say,
    manifest: dict[str, Any],
) -> Table:
    """Write the table of the documents' tokens, with one row per document."""
    started = time.monotonic()
    encoder = TextEncoder(name, *config.encoder_options())
    parts: list[Part] = []
    num_tokens = 0
    for start in range(0, len(documents), ROWS_PER_PART):
        rows = documents[start : start + ROWS_PER_PART]
        encoded = encoder.tokenizer(
            rows, truncation=True, max_length=encoder.max_tokens
        )
        tokens = pa.array(encoded["input_ids"], TOKENS.field(1).type)
        index = pa.array(np.arange(start, start + len(rows), dtype=np.int32))
        table = pa.Table.from_arrays([index, tokens], schema=TOKENS)
        parts.append(write_part(uri, table))
        num_tokens += len(tokens.flatten())
    say(
        f"tokens: {num_tokens:,} in {len(documents):,} documents, "
        f"{num_tokens / max(1, len(documents)):.1f} per document"
    )
    return commit(
        uri,
        "tokens",
        TOKENS,
        parts,
        info=TokensInfo(config.pooling),
        timings={"tokens_s": round(time.monotonic() - started, 2)},
        **manifest,
    )


def _write_pairs(
    uri: str,
    sequences: Table,
    texts: dict[str, list[str]],
    encoder: str | TfidfEncoder,
    config: TextConfig,
    say: Say,
    manifest: dict[str, Any],
) -> Table:
    """Write the pairs, sorted by item, then query; -1 is the empty query."""
    started = time.monotonic()
    keys = np.zeros(0, dtype=np.int64)  # of the distinct pairs, ascending
    executor = Executor(start=start_ray)
    calls = [(part_uri,) for part_uri in sequences.part_uris()]
    for _, pairs in executor.map_unordered(_part_pairs, calls):
        keys = sorted_unique(np.concatenate([keys, pairs]))
    size = min(max(len(keys) // TARGET_PARTS, MIN_PART_PAIRS), MAX_PART_PAIRS)
    items_of_keys = (keys >> 32).astype(np.int32)
    queries_of_keys = ((keys & 0xFFFFFFFF) - 1).astype(np.int32)
    all_pairs = pa.table([items_of_keys, queries_of_keys], names=PAIR)
    blocks = [all_pairs.slice(first, size) for first in range(0, len(keys), size)]
    say(f"pairs: {len(keys):,} distinct in {pluralize(len(blocks), 'part')}")
    shared = {name: ray.put(value) for name, value in texts.items()}
    shared["encoder"] = ray.put(encoder)
    results = run_in_actors(
        blocks,
        PairEncoder,
        (shared, config, uri),
        config,
        say,
        gpus=isinstance(encoder, str),
    )
    parts_by_key: list[tuple[int, Part]] = []
    width = num_encoded = 0
    for block in results:
        for record in block.to_pylist():
            part = Part(**json.loads(record["part"]))
            width = record["width"]
            parts_by_key.append((record["first"], part))
            num_encoded += part.rows
        rate = num_encoded / (time.monotonic() - started)
        say(f"pairs: {num_encoded:,} of {len(keys):,} encoded, {rate:,.0f} pairs/s")
    columns = _vector_columns(config.query_condition == "joint")
    return commit(
        uri,
        "embeddings",
        embeddings_schema(width, PAIR, columns),
        [part for _, part in sorted(parts_by_key)],
        info=EmbeddingsInfo(width=width),
        timings={"encode_s": round(time.monotonic() - started, 2)},
        **manifest,
    )


def save_encoder(tables_uri: str, text_uri: str, folder: Path) -> None:
    """Save the encoder of a log's texts, so that a served model can encode new texts.

    If there are pairs, the items' documents are saved too: new pairs contain them.

    Args:
        tables_uri: Folder of the log's tables.
        text_uri: Folder of the text embeddings.
        folder: New folder to write.
    """
    text = open_table(join(text_uri, "items"), EmbeddingsInfo)
    settings = dict(text.config)
    name = settings.pop("encoder", None)
    if name is None:
        raise UserError(f"{text_uri} does not record the encoder it was made with")
    config = TextConfig(**settings)
    items = open_table(join(tables_uri, "items"), ItemsInfo)
    documents = item_texts(items.read(), config)
    encoder = (
        fit_tfidf_encoder(documents, config.svd)
        if name == "tfidf"
        else TextEncoder(name, *config.encoder_options())
    )
    num_checked = min(NUM_CHECKED_DOCUMENTS, len(documents))
    sample = np.linspace(0, len(documents) - 1, num_checked).astype(np.int64)
    stored = read_embeddings(text)[sample]
    recomputed = encoder.encode([documents[index] for index in sample])
    difference = np.abs(recomputed - stored).max()
    if difference > MAX_DIFFERENCE[config.precision]:
        raise UserError(
            f"the encoder {name} gives vectors that differ from those of {text_uri} by "
            f"up to {difference:.2g}"
        )
    folder.mkdir(parents=True)
    encoder.save(folder)
    if has_manifest(join(text_uri, "pairs")):
        pq.write_table(pa.table({"text": documents}), folder / "documents.parquet")
