"""Embeddings of texts: items for semantic IDs, and all texts of a log for rankers.

Any encoder of `sentence-transformers` or `transformers`, by hub name or path, runs in a
pool of Ray Data actors. `minilm` is a model from a pip package; `tfidf` needs no
weights. Items are encoded in ranges of a million: each distinct text of a range is
encoded once, and its embeddings are written before the next range. The optional PCA
needs the embeddings of all items in the driver's memory, items x width floats.

`python -m jobs.encode --tables TABLES --encoder minilm --output TEXT` writes the tables
that the kind of requests needs (`Kind.text_tables`). Each distinct text, and each
distinct pair of a query and a shown document, is encoded once in Ray Data actors that
write their parts themselves: the driver has the keys of the pairs but not their
embeddings. A further table contains the documents' tokens, for models that train the
encoder (HLLM's item tower); not for TF-IDF.

Models are conditioned on the query alone. The QGS paper takes the [SEP] state of one
pass over query and document; as the encoder is bidirectional, this state contains the
document to predict.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
import ray.data

from core.errors import UserError, one_line, pluralize
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
    Info,
    Part,
    Table,
    check_replaceable,
    clear,
    commit,
    find_table,
    open_table,
    read_manifest,
    read_parquet,
    write_part,
    writing,
)
from models.text.pretrained import locate_encoder, pretrained_source
from models.text.text_encoder import (
    TFIDF_OPTIONS,
    TextEncoder,
    TfidfEncoder,
    check_encoder,
    format_item_texts,
    text_columns,
)
from pipelines import cluster
from pipelines.encode.config import (
    EmbedConfig,
    EncodeConfig,
    TextConfig,
    TokenizeConfig,
)
from pipelines.encode.precomputed import PrecomputedEmbeddings, read_precomputed
from pipelines.prepare.executor import Executor, quiet_ray_data
from pipelines.prepare.kinds.registry import KINDS
from pipelines.start import start_ray

Say = Callable[[str], None]

TEXTS_PER_BLOCK = 512
ROWS_PER_PART = 262_144
ITEMS_PER_RANGE = 4 * ROWS_PER_PART
"""Number of items whose embeddings the driver holds in memory at a time."""
MAX_FIT_TEXTS = 1 << 20
"""Maximum number of texts that TF-IDF, its SVD and the PCA are fitted on. A larger
catalogue is sampled."""
MAX_RESTARTS = 3
"""Restarts of a lost encoder actor, which then retries its block."""


def item_texts(
    items: pa.Table, config: EmbedConfig, say: Say = lambda line: None
) -> list[str]:
    """Format the text of each item by the template; missing values are empty.

    Items without text, and a catalogue of equal texts, are reported by `say`.
    """
    texts, num_empty = format_item_texts(items, config.template)
    if num_empty:
        columns = ", ".join(text_columns(items.column_names, config.template))
        summary = f"{num_empty:,} of {len(texts):,} items have no text in {columns}"
        if num_empty == len(texts):
            raise UserError(f"{summary}")
        say(f"note: {summary}; their embeddings carry no information about them")
    if len(texts) > 1 and len(set(texts)) == 1:
        say(
            f"note: all {len(texts):,} items have the same text, so their embeddings "
            f"carry no information; use a template with more columns"
        )
    return texts


def encoder_version(name: str) -> str:
    """Return the hash of an encoder's model files, or its commit on the hub."""
    if name == "tfidf":
        import sklearn

        return f"scikit-learn {sklearn.__version__}"
    location = locate_encoder(name)
    from transformers import AutoConfig

    with pretrained_source(name) as source:
        config = AutoConfig.from_pretrained(**source)
    if not Path(location).is_dir():
        return str(getattr(config, "_commit_hash", None))
    digest = hashlib.sha256()
    for file in sorted(Path(location).rglob("*")):
        if file.suffix in (".json", ".safetensors", ".bin", ".txt", ".model"):
            digest.update(str(file.relative_to(location)).encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


class EncoderActor(TextEncoder):
    """A Ray Data actor that turns blocks of texts into blocks of embeddings."""

    def __call__(self, block: pa.Table) -> pa.Table:
        """Return `text_index` and `embedding` of the texts of a block."""
        vectors = self.encode(block["text"].to_pylist())
        flat = pa.array(vectors.reshape(-1), pa.float32())
        embeddings = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        return pa.table({"text_index": block["text_index"], "embedding": embeddings})


def _to_matrix(column: pa.ChunkedArray) -> np.ndarray:
    """Convert a list column of equal lengths to a (rows, width) float32 array."""
    chunks = [
        chunk.flatten().to_numpy().reshape(len(chunk), -1)
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate(chunks).astype(np.float32, copy=False)


def run_in_actors(
    blocks: list[pa.Table],
    actor_class: type,
    constructor_args: tuple[Any, ...],
    config: EmbedConfig,
    say: Say,
    gpus: bool = True,
) -> Iterator[pa.Table]:
    """Map blocks through a pool of Ray Data actors, and yield results as they finish.

    Args:
        blocks: Tables; each is the argument of one call of an actor.
        actor_class: Class whose instances map a table to a table.
        constructor_args: Arguments of its constructor.
        config: Number of actors and their resources.
        say: Prints a message.
        gpus: Whether an actor can use a GPU.
    """
    start_ray()
    quiet_ray_data()
    use_gpu = config.use_gpu
    if use_gpu == "auto":
        use_gpu = bool(ray.cluster_resources().get("GPU", 0))
    resources: dict[str, float] = {"CPU": 1}
    if use_gpu and gpus:
        resources["GPU"] = 1
    if config.memory_gb:
        resources["memory"] = config.memory_gb * 2**30
    cluster.check_room(1, resources)
    num_actors = cluster.count_room(resources)
    if cluster.may_grow():
        num_useful = math.ceil(len(blocks) / BLOCKS_PER_ACTOR)
        num_actors = max(num_actors, min(num_useful, MAX_DEFAULT_ACTORS))
    num_actors = min(len(blocks), config.workers or num_actors)
    device = "GPU" if "GPU" in resources else "CPU"
    say(f"{pluralize(num_actors, 'encoder actor')} on {device}")
    with warnings.catch_warnings(), cluster.silence_cpp_log():
        # `map_batches` has no parameter for restarts, and Ray deprecates other keywords
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        dataset = ray.data.from_arrow(blocks).map_batches(
            actor_class,
            fn_constructor_args=constructor_args,
            batch_size=None,  # a block is a batch
            batch_format="pyarrow",
            # all actors are requested at once, and work begins with the first
            compute=ray.data.ActorPoolStrategy(
                min_size=1, max_size=num_actors, initial_size=num_actors
            ),
            num_cpus=1,
            num_gpus=resources.get("GPU", 0),
            memory=resources.get("memory"),
            # without a limit, a text that ends the actor would restart it forever
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,
        )
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow")


BLOCKS_PER_ACTOR = 4
"""Blocks that justify one more encoder actor on a cluster with an autoscaler."""

MAX_DEFAULT_ACTORS = 32
"""Maximum number of encoder actors requested from a growing cluster by default."""


def encode_texts(
    texts: list[str], name: str, config: EmbedConfig, say: Say = print
) -> np.ndarray:
    """Encode texts with a `transformers` encoder in a pool of actors.

    Each distinct text is encoded once.

    Args:
        texts: At least one text.
        name: Hub name or folder of the encoder, or `minilm`.
        config: Options of the encoder and the pool.
        say: Prints progress.

    Returns:
        The embeddings (texts, width) float32.
    """
    row_of_text: dict[str, int] = {}
    rows = [row_of_text.setdefault(text, len(row_of_text)) for text in texts]
    distinct = list(row_of_text)
    say(f"{len(texts)} texts, {len(distinct)} distinct; loading {name}")
    # longest first: batches have texts of similar length, and the last blocks are short
    order = sorted(range(len(distinct)), key=lambda i: (-len(distinct[i]), distinct[i]))
    table = pa.table({"text_index": order, "text": [distinct[i] for i in order]})
    per_block = max(1, TEXTS_PER_BLOCK // config.batch_size) * config.batch_size
    blocks = [
        table.slice(start, per_block) for start in range(0, len(order), per_block)
    ]
    results = run_in_actors(
        blocks, EncoderActor, (name, *config.encoder_options()), config, say
    )
    vectors = np.empty((0, 0), np.float32)
    num_encoded = 0
    reported_at = time.monotonic()
    for block in results:
        matrix = _to_matrix(block["embedding"])
        if not num_encoded:
            vectors = np.empty((len(distinct), matrix.shape[1]), np.float32)
        vectors[block["text_index"].to_numpy()] = matrix
        num_encoded += len(matrix)
        if time.monotonic() - reported_at > 2 or num_encoded == len(distinct):
            say(f"encoded {num_encoded} of {len(distinct)} texts")
            reported_at = time.monotonic()
    return vectors if len(distinct) == len(texts) else vectors[rows]


def fit_tfidf(texts: list[str], width: int) -> TfidfEncoder:
    """Fit TF-IDF and a truncated SVD of at most `width` components.

    They are fitted on the texts, or on a sample of `MAX_FIT_TEXTS` of them.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    if len(texts) > MAX_FIT_TEXTS:
        draw = np.random.default_rng(0)
        sample = draw.choice(len(texts), MAX_FIT_TEXTS, replace=False)
        texts = [texts[index] for index in sample.tolist()]
    vectorizer = TfidfVectorizer(max_features=50_000, **TFIDF_OPTIONS)
    try:
        counts = vectorizer.fit_transform(texts)
        svd = TruncatedSVD(min(width, *(np.array(counts.shape) - 1)), random_state=0)
        with np.errstate(invalid="ignore"):  # equal texts have no variance to divide by
            svd.fit(counts)
    except ValueError as error:  # fewer than two words or texts
        raise UserError(
            f"TF-IDF cannot be fitted to {len(texts)} texts ({one_line(error)})"
        ) from error
    words = vectorizer.get_feature_names_out().tolist()
    return TfidfEncoder(words, vectorizer.idf_, svd.components_)


def embed_ranges(
    texts: list[str], encoder: str, config: EmbedConfig, say: Say, num_fit: int = 0
) -> Iterator[np.ndarray]:
    """Yield embeddings (texts, width) of consecutive ranges of texts.

    Args:
        texts: All texts.
        encoder: Name of the encoder, or `tfidf`.
        config: Options of the encoder.
        say: Prints progress.
        num_fit: Number of first texts that TF-IDF is fitted on; 0 for all.
    """
    if encoder == "tfidf":
        encode = fit_tfidf(texts[: num_fit or None], config.svd).encode
    else:
        encode = partial(encode_texts, name=encoder, config=config, say=say)
    for start in range(0, len(texts), ITEMS_PER_RANGE):
        if len(texts) > ITEMS_PER_RANGE:
            say(f"encoding from text {start:,} of {len(texts):,}")
        yield encode(texts[start : start + ITEMS_PER_RANGE])


@dataclass(frozen=True)
class Projection:
    """A fitted PCA: (vector - mean) @ components / scale."""

    mean: np.ndarray
    """(E,) float64: mean of the embeddings."""
    components: np.ndarray
    """(E, width) float64: orthonormal columns, by descending variance."""
    scale: np.ndarray
    """(width,) float64: standard deviations of the components."""

    def project(self, vectors: np.ndarray) -> np.ndarray:
        """Project vectors (N, E) to (N, width) float32; computed in float64."""
        projected = np.empty((len(vectors), len(self.scale)), dtype=np.float32)
        for start in range(0, len(vectors), ITEMS_PER_RANGE):
            rows = slice(start, start + ITEMS_PER_RANGE)
            projected[rows] = (
                (vectors[rows].astype(np.float64) - self.mean)
                @ self.components
                / self.scale
            )
        return projected

    def to_record(self) -> dict[str, str]:
        """Encode the arrays in base64, for the manifest of the embeddings."""
        return {
            name: b64encode(values.tobytes()).decode()
            for name, values in vars(self).items()
        }

    @classmethod
    def from_record(cls, record: dict[str, str]) -> Projection:
        """Decode the arrays that `to_record` encoded."""
        mean, components, scale = (
            np.frombuffer(b64decode(record[array.name])) for array in fields(cls)
        )
        return cls(mean, components.reshape(len(mean), -1), scale)


def fit_pca(vectors: np.ndarray, width: int) -> Projection:
    """Fit a whitened PCA in float64, by the eigenvectors of the covariance matrix.

    More than `MAX_FIT_TEXTS` embeddings are sampled.

    Args:
        vectors: Embeddings (N, E).
        width: Number of components.
    """
    from sklearn.decomposition import PCA

    if len(vectors) > MAX_FIT_TEXTS:
        draw = np.random.default_rng(0)
        vectors = vectors[draw.choice(len(vectors), MAX_FIT_TEXTS, replace=False)]
    pca = PCA(width, svd_solver="covariance_eigh")
    try:
        pca.fit(vectors.astype(np.float64))
    except ValueError as error:  # more components than items or dimensions
        raise UserError(f"pca is {width}: {one_line(error)}") from error
    variances = pca.explained_variance_
    if not variances[-1] > 1e-9 * variances[0]:
        raise UserError(
            f"pca is {width}, more than the dimensions that {len(vectors)} embeddings "
            f"of width {vectors.shape[1]} span"
        )
    # whitened: projections have variance 1
    return Projection(pca.mean_, pca.components_.T.copy(), np.sqrt(variances))


def text_settings(encoder: str, config: EmbedConfig) -> dict[str, Any]:
    """Return the encoder and the options that embeddings of texts depend on."""
    unused = {"batch_size", "workers", "use_gpu", "memory_gb", "svd"}
    if encoder == "tfidf":
        unused = config.__dict__.keys() - {"template", "svd"}
    options = asdict(config)
    return {"encoder": encoder} | {
        name: options[name] for name in options.keys() - unused
    }


def embeddings_uri(config: TokenizeConfig) -> str:
    """Return the folder of the `embeddings` table, which tokenizers may share."""
    shared = "" if config.has_custom_embeddings else config.embeddings
    return shared or join(config.output, "embeddings")


def find_precomputed(config: TokenizeConfig) -> PrecomputedEmbeddings | None:
    """Read the user's own embeddings, if the config names a file of them."""
    if not config.has_custom_embeddings:
        return None
    return read_precomputed(config.embeddings, config.id)


def embed_origin(
    items: Table[ItemsInfo],
    config: TokenizeConfig,
    precomputed: PrecomputedEmbeddings | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings and the input hashes that embeddings depend on."""
    inputs = {"items": items.hash}
    if precomputed:
        return {"pca": config.pca}, {**inputs, "own": precomputed.sha256}
    settings = text_settings(config.encoder, config.embed)
    settings["pca"] = config.pca
    return settings, {**inputs, "encoder": encoder_version(config.encoder)}


def find_finished(
    uri: str, info_class: type[Info], config: dict[str, Any], inputs: dict[str, str]
) -> Table[Info] | None:
    """Open a table that was made with these settings and inputs, if it exists."""
    table = find_table(uri, info_class)
    if table:
        table.check_made_with(config, inputs)
    return table


def embed_items(
    items: Table[ItemsInfo],
    output_uri: str,
    config: TokenizeConfig,
    precomputed: PrecomputedEmbeddings | None = None,
    say: Say = print,
) -> Table[EmbeddingsInfo]:
    """Write the `embeddings` table of the `items` table, unless it is up to date.

    Args:
        items: Table of the items.
        output_uri: Folder of the `embeddings` table.
        config: Encoder, PCA and other options.
        precomputed: The user's own embeddings, which replace the encoder.
        say: Prints a message.
    """
    settings, inputs = embed_origin(items, config, precomputed)
    if not config.overwrite:
        finished = find_finished(output_uri, EmbeddingsInfo, settings, inputs)
        if finished:
            say(f"{output_uri}: up to date")
            return finished
    rows = items.read()
    info = EmbeddingsInfo(width=0)
    if precomputed:
        blocks = iter([precomputed.align(rows["item_id"].to_pylist(), say)])
    else:
        texts = item_texts(rows, config.embed, say)
        if config.encoder != "tfidf":
            check_encoder(config.encoder, *config.embed.encoder_options())
        blocks = embed_ranges(texts, config.encoder, config.embed, say)
    if config.pca:
        vectors = np.concatenate(list(blocks))
        projection = fit_pca(vectors, config.pca)
        info.encoder_width = vectors.shape[1]
        info.pca = projection.to_record()
        blocks = iter([projection.project(vectors)])
    parts: list[Part] = []
    num_items = 0
    for block in blocks:
        info.width = block.shape[1]
        parts += write_vectors(output_uri, block, first=num_items)
        num_items += len(block)
    info.encoder_width = info.encoder_width or info.width
    return commit(
        output_uri,
        "embeddings",
        embeddings_schema(info.width),
        parts,
        config=settings,
        inputs=inputs,
        info=info,
    )


def to_list_column(vectors: np.ndarray) -> pa.Array:
    """Convert an array (rows, width) to a column of fixed-size lists."""
    return pa.FixedSizeListArray.from_arrays(
        pa.array(np.ascontiguousarray(vectors).reshape(-1)), vectors.shape[1]
    )


def write_vectors(
    uri: str, vectors: np.ndarray, key: str = "item_index", first: int = 0
) -> list[Part]:
    """Write the parts of a table of embeddings; the manifest is left to the caller.

    Args:
        uri: Folder of the table.
        vectors: Embeddings (rows, width).
        key: Name of the key column, which counts the rows.
        first: Key of the first row.
    """
    schema = embeddings_schema(vectors.shape[1], [key])
    parts: list[Part] = []
    for start in range(0, len(vectors), ROWS_PER_PART):
        rows = vectors[start : start + ROWS_PER_PART]
        first_key = first + start
        keys = np.arange(first_key, first_key + len(rows), dtype=np.int32)
        columns = [pa.array(keys), to_list_column(rows)]
        parts.append(write_part(uri, pa.Table.from_arrays(columns, schema=schema)))
    return parts


def read_embeddings(table: Table[EmbeddingsInfo]) -> np.ndarray:
    """Read a table of embeddings as (items, width) float32, ordered by item_index."""
    vectors = np.empty((table.rows, table.info.width), dtype=np.float32)
    for uri in table.part_uris():
        part = read_parquet(uri)
        vectors[part["item_index"].to_numpy()] = _to_matrix(part["embedding"])
    return vectors


TARGET_PARTS = 64
"""Desired number of parts of the `pairs` table, so that all actors are busy."""
MIN_PART_PAIRS = 2048
"""Minimum number of pairs per part, even if there are fewer parts then."""
MAX_PART_PAIRS = 1 << 15
"""Maximum number of pairs per part, even if there are more parts then."""
PAIR = ("item_index", "query_index")
"""Key columns of the `pairs` table."""


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
        if isinstance(self.encoder, str):
            self.encoder = TextEncoder(self.encoder, *config.encoder_options())

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
        )
        vectors = np.empty_like(sorted_vectors)  # (pairs, width)
        vectors[order] = sorted_vectors
        width = vectors.shape[1]
        schema = embeddings_schema(width, PAIR)
        columns = [pa.array(items), pa.array(queries), to_list_column(vectors)]
        table = pa.Table.from_arrays(columns, schema=schema)
        part = write_part(self.output_uri, table)
        first_key = _pair_keys(items[:1], queries[:1])
        return pa.table(
            {
                "first": first_key,
                "width": [width],
                "part": [json.dumps(asdict(part))],
            }
        )


def _pair_keys(items: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Pack pairs into int64 keys (pairs,) that sort by item, then query."""
    return items.astype(np.int64) << 32 | queries.astype(np.int64) + 1


def _sort_unique(keys: np.ndarray) -> np.ndarray:
    """Return the distinct keys, ascending; `np.unique` takes 7 to 45 times as long."""
    return pl.Series(keys).unique().sort().to_numpy()


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
    return _sort_unique(_pair_keys(items, queries))


INPUT_TABLES = {
    "items": ("items",),
    "tokens": ("items",),
    "queries": ("items", "queries"),
    "pairs": ("items", "queries", "sequences"),
}
"""Tables that each table of text embeddings is made from."""


def encode_log(options: EncodeConfig, say: Say = print) -> dict[str, Table]:
    """Write the text embeddings that the log's kind of requests needs.

    The tables are `items`, and for searches also `queries`, `pairs` and, except for
    TF-IDF, the `tokens` of documents. Tables that are up to date are not written again;
    those that were made from earlier tables are replaced.

    Returns:
        The tables, by name.
    """
    encoder, config = options.encoder, options.embed
    # tasks may run in other folders
    tables_uri, output_uri = absolute(options.tables), absolute(options.output)
    sequences = open_table(join(tables_uri, "sequences"), SequencesInfo)
    kind = KINDS[sequences.info.kind]
    names = [
        name for name in kind.text_tables if (name, encoder) != ("tokens", "tfidf")
    ]
    if not names:
        raise UserError(
            f"{sequences.uri} is of kind {kind.name}, whose models read no texts"
        )
    for name in kind.text_tables:
        table = "tokens" if name == "tokens" else "embeddings"
        check_replaceable(join(output_uri, name), table)
    version = encoder_version(encoder)  # raises for an unknown encoder
    items = open_table(join(tables_uri, "items"), ItemsInfo)
    documents = item_texts(items.read(), config, say)
    texts = {"items": documents}
    hashes = {"items": items.hash, "sequences": sequences.hash}
    if "queries" in names:
        queries = open_table(join(tables_uri, "queries"), QueriesInfo)
        hashes["queries"] = queries.hash
        texts["queries"] = []
        if queries.rows:  # an empty table has no files
            texts["queries"] = queries.read()["query"].to_pylist()
    settings = text_settings(encoder, config)
    tfidf = fit_tfidf(documents, config.svd) if encoder == "tfidf" else None
    written: dict[str, Table] = {}
    with writing(output_uri):
        if tfidf and read_manifest(join(output_uri, "tokens")):
            clear(join(output_uri, "tokens"))  # tokens of an earlier encoder
        for name in names:
            uri = join(output_uri, name)
            inputs = {table: hashes[table] for table in INPUT_TABLES[name]}
            inputs["encoder"] = version
            origin: dict[str, Any] = {"config": settings, "inputs": inputs}
            info_class: Any = TokensInfo if name == "tokens" else EmbeddingsInfo
            earlier = None if options.overwrite else find_table(uri, info_class)
            if earlier:  # only its tables may have changed
                earlier.check_made_with(settings, earlier.inputs)
            if earlier and earlier.inputs == inputs:
                say(f"{name}: up to date")
                written[name] = earlier
            elif name == "tokens":
                written[name] = _write_tokens(
                    uri, documents, encoder, config, say, origin
                )
            elif name == "pairs":
                shared = {"items": documents, "queries": texts["queries"]}
                written[name] = _write_pairs(
                    uri, sequences, shared, tfidf or encoder, config, say, origin
                )
            else:
                if not texts[name]:  # a log without queries
                    vectors = np.zeros((0, written["items"].info.width), np.float32)
                elif tfidf:
                    vectors = tfidf.encode(texts[name])
                else:
                    check_encoder(encoder, *config.encoder_options())
                    vectors = encode_texts(texts[name], encoder, config, say)
                written[name] = _write_texts(
                    uri, items, texts[name], vectors, say, origin
                )
        return written


def _write_texts(
    uri: str,
    items: Table[ItemsInfo],
    texts: list[str],
    vectors: np.ndarray,
    say: Say,
    manifest: dict[str, Any],
) -> Table:
    """Write a table of embeddings with one row per text."""
    name = uri.rsplit("/", 1)[-1]
    key = "item_index" if name == "items" else "query_index"
    width = vectors.shape[1]
    num_unknown = int((~vectors.any(axis=1)).sum())
    note = f", {num_unknown:,} without a known word (zeros)" if num_unknown else ""
    say(
        f"{name}: {len(texts):,} texts, {len(set(texts)):,} distinct, width "
        f"{width}{note}"
    )
    earlier = read_manifest(uri)
    # old texts keep their embeddings
    extends = (
        earlier is not None
        and earlier.config["encoder"] != "tfidf"
        and earlier.config == manifest["config"]
        and earlier.inputs["encoder"] == manifest["inputs"]["encoder"]
        and earlier.inputs["items"] in items.extends
    )
    return commit(
        uri,
        "embeddings",
        embeddings_schema(width, [key]),
        write_vectors(uri, vectors, key),
        info=EmbeddingsInfo(width=width),
        extends=earlier.ancestry if earlier and extends else [],
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
    executor = Executor()
    calls = [(part_uri,) for part_uri in sequences.part_uris()]
    for _, pairs in executor.map_unordered(_part_pairs, calls):
        keys = _sort_unique(np.concatenate([keys, pairs]))
    size = min(max(len(keys) // TARGET_PARTS, MIN_PART_PAIRS), MAX_PART_PAIRS)
    items_of_keys = (keys >> 32).astype(np.int32)
    queries_of_keys = ((keys & 0xFFFFFFFF) - 1).astype(np.int32)
    all_pairs = pa.table([items_of_keys, queries_of_keys], names=PAIR)
    blocks = [all_pairs.slice(first, size) for first in range(0, len(keys), size)]
    say(f"pairs: {len(keys):,} distinct in {pluralize(len(blocks), 'part')}")
    values: dict[str, Any] = {**texts, "encoder": encoder}
    shared = {name: ray.put(value) for name, value in values.items()}
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
    return commit(
        uri,
        "embeddings",
        embeddings_schema(width, PAIR),
        [part for _, part in sorted(parts_by_key)],
        info=EmbeddingsInfo(width=width),
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
    name = settings.pop("encoder", "")
    config = TextConfig(**settings)
    items = open_table(join(tables_uri, "items"), ItemsInfo)
    if not name or text.inputs != {
        "items": items.hash,
        "encoder": encoder_version(name),
    }:
        raise UserError(f"{text_uri} was made of other items or by another encoder")
    documents = item_texts(items.read(), config)
    encoder = (
        fit_tfidf(documents, config.svd)
        if name == "tfidf"
        else TextEncoder(name, *config.encoder_options())
    )
    folder.mkdir(parents=True)
    encoder.save(folder)
    if read_manifest(join(text_uri, "pairs")):
        pq.write_table(pa.table({"text": documents}), folder / "documents.parquet")
