"""Embeddings of a log's texts: items, and for searches queries and pairs of both.

`python -m jobs.encode --tables TABLES --encoder minilm --output TEXT` writes the tables
that the kind of requests needs (`Kind.texts`). Each distinct text, and each distinct
pair of a query and a shown document, is encoded once in Ray Data actors that write
their parts themselves: the driver has the keys of the pairs but not their embeddings. A
further table contains the documents' tokens, for models that train the encoder (HLLM's
item tower); not for TF-IDF.

Models are conditioned on the query alone. The paper takes the [SEP] state of one pass
over query and document; as the encoder is bidirectional, this state contains the
document to predict. `query_condition: joint` stores it too, for comparison, with a
warning.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray

from models.config import pluralize
from models.storage.tables import (
    Manifest,
    Part,
    UserError,
    check_output,
    clear,
    commit,
    has_manifest,
    join,
    part_uris,
    read_manifest,
    read_parquet,
    read_table,
    write_part,
    writing,
)
from models.storage.uri import absolute
from models.text.text_encoder import TextEncoder, TfidfEncoder, load_tokenizer
from pipelines.data.engine import Engine
from pipelines.data.events.columns import sorted_unique
from pipelines.data.kinds import KINDS
from pipelines.data.schemas import TOKENS, embeddings_schema
from pipelines.data.sids.config import TextConfig
from pipelines.data.sids.embed import (
    ROWS_PER_PART,
    RUNTIME_SETTINGS,
    encode_texts,
    encoder_version,
    find_finished,
    fit_tfidf,
    item_texts,
    read_embeddings,
    run_in_actors,
    to_list_column,
    write_vectors,
)

Say = Callable[[str], None]

MAX_PART_PAIRS = 1 << 15
"""Most pairs of a part. Of few pairs, smaller parts keep all actors busy."""
MIN_PART_PAIRS, TARGET_PARTS = 2048, 64
PAIR = ("item_index", "query_index")
CHECKED_DOCUMENTS, MAX_DIFFERENCE = 64, {"fp32": 1e-4, "bf16": 0.05}
"""Documents on which a saved encoder is checked, and differences that count as
rounding."""
WARNING = (
    "warning: query_condition joint stores the [SEP] state of query and document "
    "together, which has seen the document: a model that is conditioned on it reads "
    "its own target; use it for comparison only"
)


def fit_tfidf_encoder(texts: list[str], width: int) -> TfidfEncoder:
    """Fit TF-IDF and truncated SVD on texts."""
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
            shared: References to the texts of `items` and `queries`, and as `encoder` a
                name or a fitted TfidfEncoder.
            config: Options.
            output_uri: Table to write.
        """
        self.items, self.queries, encoder = (
            ray.get(shared[name]) for name in ("items", "queries", "encoder")
        )
        joint = config.query_condition == "joint"
        self.encoder = encoder
        if isinstance(encoder, str):
            self.encoder = TextEncoder(encoder, *config.encoder_options())
            if joint and self.encoder.tokenizer.sep_token_id is None:
                raise UserError(
                    f"{encoder} has no [SEP] token; use --embed.query_condition query"
                )
        self.output_uri, self.joint = output_uri, joint

    def __call__(self, block: pa.Table) -> pa.Table:
        item, query = (block[name].to_numpy() for name in PAIR)
        documents = [self.items[i] for i in item]
        queries = [self.queries[i] if i >= 0 else "" for i in query]
        # sorted by length, as a batch is padded to its longest pair
        lengths = [len(a) + len(b) for a, b in zip(queries, documents, strict=True)]
        order = np.argsort(-np.array(lengths), kind="stable")
        vectors = self.encoder.encode(
            [queries[i] for i in order], [documents[i] for i in order], self.joint
        )
        unsorted = np.empty_like(vectors)
        unsorted[order] = vectors
        columns = np.split(unsorted, 2, axis=1) if self.joint else [unsorted]
        schema = embeddings_schema(
            columns[0].shape[1], PAIR, ("embedding", "joint")[: len(columns)]
        )
        lists = [to_list_column(column) for column in columns]
        part = write_part(
            self.output_uri,
            pa.Table.from_arrays(
                [pa.array(item), pa.array(query), *lists], schema=schema
            ),
        )
        first = int(item[0]) << 32 | int(query[0]) + 1
        return pa.table(
            {
                "first": [first],
                "width": [columns[0].shape[1]],
                "part": [json.dumps(asdict(part))],
            }
        )


def _part_pairs(uri: str) -> np.ndarray:
    """Return the distinct pairs of a part of sequences, as int64 keys.

    The upper 32 bits are item_index, the lower query_index + 1.
    """
    table = read_parquet(uri, ["item_index", "query_index", "requests"])
    requests = table["requests"].combine_chunks().flatten()
    shown, asked = (
        pc.struct_field(requests, name) for name in ("candidates", "query_index")
    )
    of_candidates = [
        shown.flatten().to_numpy(),
        np.repeat(asked.to_numpy(), pc.list_value_length(shown).to_numpy()),
    ]
    of_behaviours = [table[name].combine_chunks().flatten().to_numpy() for name in PAIR]
    item, query = (
        np.concatenate(both).astype(np.int64)
        for both in zip(of_candidates, of_behaviours, strict=True)
    )
    return sorted_unique(item << 32 | query + 1)


def distinct_pairs(parts: list[str]) -> np.ndarray:
    """Return the keys of all pairs of a behaviour or a candidate, ascending."""
    keys = np.zeros(0, dtype=np.int64)
    for _, pairs in Engine().map_unordered(_part_pairs, [(uri,) for uri in parts]):
        keys = sorted_unique(np.concatenate([keys, pairs]))
    return keys


@dataclass
class _Encoding:
    """Arguments and steps of one call of `encode_log`."""

    tables: str
    output: str
    encoder: str
    config: TextConfig
    overwrite: bool
    say: Say
    start: Callable[[], None]

    def origin(self, names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the settings and the input hashes that a table depends on."""
        used = asdict(self.config)
        for name in (*RUNTIME_SETTINGS, "whiten"):  # there is no PCA
            del used[name]
        if self.encoder == "tfidf":
            used = {name: used[name] for name in ("template", "empty", "svd")}
        else:
            del used["svd"]
            if "sequences" not in names:
                del used["query_condition"]  # of pairs alone
        inputs = {
            name: read_manifest(join(self.tables, name), name).hash for name in names
        }
        return {"encoder": self.encoder, **used}, inputs | {
            "encoder": encoder_version(self.encoder)
        }

    def find_finished(
        self, name: str, inputs: tuple[str, ...], kind: str = "embeddings"
    ) -> Manifest | None:
        """Return the manifest of a table that is up to date, otherwise None."""
        if self.overwrite:
            return None
        uri = join(self.output, name)
        manifest = find_finished(uri, kind, *self.origin(inputs))
        if manifest:
            self.say(f"{name}: up to date")
        return manifest

    def encode_alone(
        self, texts: dict[str, list[str]], fitted: TfidfEncoder | None
    ) -> dict[str, Manifest]:
        """Write the tables of single texts, with one pass over all missing tables.

        Args:
            texts: Texts by name of the table.
            fitted: TF-IDF encoder, or None.
        """
        begin = time.monotonic()
        manifests: dict[str, Manifest] = {}
        for name in texts:
            if manifest := self.find_finished(name, self.inputs(name)):
                manifests[name] = manifest
        missing = [name for name in texts if name not in manifests]
        all_texts = [text for name in missing for text in texts[name]]
        if not all_texts:
            width = manifests["items"].info["width"] if manifests else 0
            vectors = np.zeros((0, width), np.float32)
        elif fitted is not None:
            vectors = fitted.encode(all_texts)
        else:
            self.start()
            vectors = encode_texts(all_texts, self.encoder, self.config, self.say)
        for name in missing:
            table_vectors, vectors = np.split(vectors, [len(texts[name])])
            manifests[name] = self.commit_texts(name, texts[name], table_vectors, begin)
        return manifests

    def inputs(self, name: str) -> tuple[str, ...]:
        """Return the tables that a table of embeddings is made from."""
        only = {
            "items": ("items",),
            "tokens": ("items",),
            "queries": ("items", "queries"),
        }
        return only.get(name, ("items", "queries", "sequences"))

    def commit_texts(
        self, name: str, texts: list[str], vectors: np.ndarray, begin: float
    ) -> Manifest:
        """Write a table with one row per text, in the order of the texts."""
        uri = join(self.output, name)
        key = "item_index" if name == "items" else "query_index"
        parts = write_vectors(uri, vectors, key)
        schema = embeddings_schema(vectors.shape[1], [key])
        config, hashes = self.origin(self.inputs(name))
        extends = []  # earlier tables, if their texts have the same vectors here
        if has_manifest(uri) and self.encoder != "tfidf":
            before = read_manifest(uri)
            items = read_manifest(join(self.tables, "items"), "items")
            same_encoder = before.inputs["encoder"] == hashes["encoder"]
            extends_items = before.inputs["items"] in items.extends
            if before.config == config and same_encoder and extends_items:
                extends = [*before.extends, before.hash]
        unknown = int((~vectors.any(axis=1)).sum())
        info = {
            "encoder": self.encoder,
            "width": vectors.shape[1],
            "texts": len(texts),
            "distinct_texts": len(set(texts)),
            "texts_without_known_word": unknown,
        }
        manifest = commit(
            uri,
            "embeddings",
            schema,
            parts,
            config=config,
            inputs=hashes,
            info=info,
            extends=extends,
            timings={"encode_s": round(time.monotonic() - begin, 2)},
        )
        note = f", {unknown:,} of no known word (zeros)" if unknown else ""
        self.say(
            f"{name}: {len(texts):,} texts, {info['distinct_texts']:,} distinct, width "
            f"{vectors.shape[1]}{note}"
        )
        return manifest

    def tokens(self, documents: list[str]) -> Manifest:
        """Write the table of the documents' tokens, with one row per document."""
        inputs = self.inputs("tokens")
        if find_finished := self.find_finished("tokens", inputs, "tokens"):
            return find_finished
        begin, uri = time.monotonic(), join(self.output, "tokens")
        tokenizer, longest = load_tokenizer(self.encoder, self.config.max_tokens)
        parts, total = [], 0
        for start in range(0, len(documents), ROWS_PER_PART):
            rows = documents[start : start + ROWS_PER_PART]
            tokens = pa.array(
                tokenizer(rows, truncation=True, max_length=longest)["input_ids"],
                TOKENS.field(1).type,
            )
            index = pa.array(np.arange(start, start + len(rows), dtype=np.int32))
            parts.append(
                write_part(uri, pa.Table.from_arrays([index, tokens], schema=TOKENS))
            )
            total += len(tokens.flatten())
        config, hashes = self.origin(inputs)
        manifest = commit(
            uri,
            "tokens",
            TOKENS,
            parts,
            config=config,
            inputs=hashes,
            info={
                "encoder": self.encoder,
                "pooling": self.config.pooling,
                "normalize": self.config.normalize,
            },
            timings={"tokens_s": round(time.monotonic() - begin, 2)},
        )
        self.say(
            f"tokens: {total:,} of {len(documents):,} documents, "
            f"{total / max(1, len(documents)):.1f} in the mean"
        )
        return manifest

    def pairs(
        self, items: list[str], queries: list[str], fitted: TfidfEncoder | None
    ) -> Manifest:
        """Write the table of pairs, sorted by item, then query.

        query_index -1 is the empty query.
        """
        inputs = self.inputs("pairs")
        if find_finished := self.find_finished("pairs", inputs):
            return find_finished
        self.start()
        begin, uri = time.monotonic(), join(self.output, "pairs")
        sequences = join(self.tables, "sequences")
        keys = distinct_pairs(
            part_uris(sequences, read_manifest(sequences, "sequences"))
        )
        item = (keys >> 32).astype(np.int32)
        query = ((keys & 0xFFFFFFFF) - 1).astype(np.int32)
        size = min(max(len(keys) // TARGET_PARTS, MIN_PART_PAIRS), MAX_PART_PAIRS)
        blocks = [
            pa.table(
                {
                    "item_index": item[low : low + size],
                    "query_index": query[low : low + size],
                }
            )
            for low in range(0, len(keys), size)
        ]
        texts = {"items": items, "queries": queries, "encoder": fitted or self.encoder}
        self.say(f"pairs: {len(keys):,} distinct in {pluralize(len(blocks), 'part')}")
        given = (
            {name: ray.put(value) for name, value in texts.items()},
            self.config,
            uri,
        )
        written, width, done = [], 0, 0
        for block in run_in_actors(
            blocks, PairEncoder, given, self.config, self.say, gpus=fitted is None
        ):
            for record in block.to_pylist():
                part, width = Part(**json.loads(record["part"])), record["width"]
                written.append((record["first"], part))
                done += part.rows
            rate = done / (time.monotonic() - begin)
            self.say(f"pairs: {done:,} of {len(keys):,} encoded, {rate:,.0f} a second")
        config, hashes = self.origin(inputs)
        vectors = (
            ("embedding", "joint")
            if self.config.query_condition == "joint"
            else ("embedding",)
        )
        return commit(
            uri,
            "embeddings",
            embeddings_schema(width, PAIR, vectors),
            [part for _, part in sorted(written)],
            config=config,
            inputs=hashes,
            info={"encoder": self.encoder, "width": width, "pairs": len(keys)},
            timings={"encode_s": round(time.monotonic() - begin, 2)},
        )


def encode_log(
    tables_uri: str,
    output_uri: str,
    encoder: str,
    config: TextConfig | None = None,
    overwrite: bool = False,
    say: Say = print,
    start: Callable[[], None] = lambda: None,
) -> dict[str, Manifest]:
    """Write the tables of embeddings for a log's kind of requests.

    These are `items`, and for searches also `queries`, `pairs` and, except for TF-IDF,
    the `tokens` of documents. Tables that are up to date are not written again.

    Args:
        tables_uri: Folder of the log's tables.
        output_uri: Folder to write to.
        encoder: Name of the encoder, or "tfidf".
        config: Options.
        overwrite: Whether to replace existing tables.
        say: Prints a message.
        start: Starts Ray, if it is needed.

    Returns:
        Manifests by name of the table.

    Raises:
        UserError: If models of this kind read no texts, texts or encoder are not valid,
            or another job writes to the output.
    """
    config = config or TextConfig()
    # tasks may run in other folders
    tables_uri, output_uri = absolute(tables_uri), absolute(output_uri)
    run = _Encoding(tables_uri, output_uri, encoder, config, overwrite, say, start)
    wanted = check_texts(tables_uri, encoder, config, output_uri)
    if config.query_condition == "joint":
        say(WARNING)
    texts = {
        "items": item_texts(read_table(join(tables_uri, "items"), "items"), config, say)
    }
    if "queries" in wanted:
        texts["queries"] = []
        queries_uri = join(tables_uri, "queries")
        if read_manifest(queries_uri, "queries").rows:
            table = read_table(queries_uri, "queries")
            texts["queries"] = table["query"].to_pylist()
    fitted = (
        fit_tfidf_encoder(texts["items"], config.svd) if encoder == "tfidf" else None
    )
    with writing(output_uri):
        manifests = run.encode_alone(texts, fitted)
        if "tokens" in wanted and fitted is None:
            manifests["tokens"] = run.tokens(texts["items"])
        elif has_manifest(join(output_uri, "tokens")):
            clear(join(output_uri, "tokens"))  # of another encoder
        if "pairs" in wanted:
            manifests["pairs"] = run.pairs(texts["items"], texts["queries"], fitted)
        return manifests


def check_texts(
    tables_uri: str, encoder: str, config: TextConfig, output_uri: str
) -> tuple[str, ...]:
    """Check texts, encoder, options and output before Ray starts.

    Returns:
        Names of the tables to write.

    Raises:
        UserError: If models of this kind read no texts, or an argument is not valid.
    """
    kind = KINDS[read_manifest(join(tables_uri, "sequences"), "sequences").info["kind"]]
    if not kind.texts:
        kinds = " and ".join(
            f"'{other.name}'" for other in KINDS.values() if other.texts
        )
        raise UserError(
            f"{tables_uri} is of kind '{kind.name}', whose models read no text by "
            f"jobs.encode, which takes {kinds}; jobs.tokenize makes semantic IDs"
        )
    check_output(
        output_uri,
        {name: "tokens" if name == "tokens" else "embeddings" for name in kind.texts},
    )
    if config.query_condition == "joint" and "pairs" not in kind.texts:
        raise UserError(
            f"query_condition joint is of searches, and {tables_uri} is of kind "
            f"'{kind.name}'; leave it out"
        )
    if encoder == "tfidf" and config.query_condition == "joint":
        raise UserError(
            "tfidf has no [SEP] token for query_condition joint; use a transformers "
            "encoder, or query"
        )
    item_texts(read_table(join(tables_uri, "items"), "items"), config)
    encoder_version(encoder)
    return kind.texts


def save_encoder(tables_uri: str, text_uri: str, folder: Path) -> None:
    """Save the encoder of a log's texts to a new folder, with the items' documents.

    Raises:
        UserError: If the encoder does not exist any more, or gives other vectors now.
    """
    manifest = read_manifest(join(text_uri, "items"), "embeddings")
    settings = dict(manifest.config)
    name = settings.pop("encoder", None)
    if name is None:
        raise UserError(
            f"{text_uri} does not say by which encoder it was made; run jobs.encode "
            f"again"
        )
    config = TextConfig(**settings)
    documents = item_texts(read_table(join(tables_uri, "items"), "items"), config)
    encoder = (
        fit_tfidf_encoder(documents, config.svd)
        if name == "tfidf"
        else TextEncoder(name, *config.encoder_options())
    )
    sample = np.linspace(
        0, len(documents) - 1, min(CHECKED_DOCUMENTS, len(documents))
    ).astype(np.int64)
    before = read_embeddings(join(text_uri, "items"))[sample]
    difference = np.abs(encoder.encode([documents[i] for i in sample]) - before).max()
    if difference > MAX_DIFFERENCE[config.precision]:
        raise UserError(
            f"the encoder {name} gives other vectors than those of {text_uri}, by up "
            f"to {difference:.2g}; run jobs.encode again with this one"
        )
    folder.mkdir(parents=True)
    encoder.save(folder)
    if has_manifest(join(text_uri, "pairs")):  # new pairs need the documents
        pq.write_table(pa.table({"text": documents}), folder / "documents.parquet")
