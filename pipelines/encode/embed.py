"""Embeddings of items: texts of the `items` table through an encoder, then PCA.

Any encoder of `sentence-transformers` or `transformers`, by hub name or path, runs in a
pool of Ray Data actors. `minilm` is a model from a pip package; `tfidf` needs no
weights. Items are encoded in ranges of a million: each distinct text of a range is
encoded once, and its embeddings are written before the next range. The optional PCA
needs the embeddings of all items in the driver's memory, items x width floats.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data

from core.errors import UserError, one_line, pluralize
from core.schemas import EmbeddingsInfo, ItemsInfo, embeddings_schema
from core.tables import (
    Info,
    Part,
    Table,
    commit,
    find_table,
    read_parquet,
    write_part,
)
from models.text.pretrained import locate_encoder, pretrained_source
from models.text.text_encoder import (
    TFIDF_OPTIONS,
    TextEncoder,
    check_encoder,
    format_item_texts,
    text_columns,
)
from pipelines import cluster
from pipelines.encode.config import EmbedConfig
from pipelines.encode.precomputed import PrecomputedEmbeddings
from pipelines.prepare.executor import quiet_ray_data
from pipelines.start import start_ray

Say = Callable[[str], None]

TEXTS_PER_BLOCK = 512
ROWS_PER_PART = 262_144
ITEMS_PER_RANGE = 4 * ROWS_PER_PART
"""Number of items whose embeddings the driver holds in memory at a time."""
MAX_FIT_TEXTS = 1 << 20
"""Maximum number of texts that TF-IDF and its SVD are fitted on. A larger catalogue is
sampled."""
MAX_RESTARTS = 3
"""Restarts of a lost encoder actor, which then retries its block."""


@dataclass(frozen=True)
class EmbeddingSource:
    """Where item embeddings come from: an encoder of texts, or the user's file."""

    encoder: str = "minilm"
    """Name of the encoder, or `tfidf`."""
    pca_width: int = 0
    """Width of the PCA, or 0 to store the encoder's output."""
    config: EmbedConfig = field(default_factory=EmbedConfig)
    """Options of the encoder and the PCA."""
    precomputed: PrecomputedEmbeddings | None = None
    """Embeddings from the user's file, which replace the embeddings of the encoder."""


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
        if config.empty == "error" or num_empty == len(texts):
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
    from transformers import AutoConfig

    location = locate_encoder(name)
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


def fit_tfidf(texts: list[str], width: int) -> tuple[Any, Any, np.ndarray]:
    """Fit TF-IDF and a truncated SVD of at most `width` components.

    Returns:
        The fitted TfidfVectorizer, the fitted TruncatedSVD, and the vectors (texts,
        components) of the texts.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(max_features=50_000, **TFIDF_OPTIONS)
    try:
        counts = vectorizer.fit_transform(texts)
        svd = TruncatedSVD(min(width, *(np.array(counts.shape) - 1)), random_state=0)
        with np.errstate(invalid="ignore"):  # equal texts have no variance to divide by
            vectors = svd.fit_transform(counts)
    except ValueError as error:  # fewer than two words or texts
        raise UserError(
            f"TF-IDF cannot be fitted to {len(texts)} texts ({one_line(error)})"
        ) from error
    return vectorizer, svd, vectors


def tfidf_embeddings(
    texts: list[str], width: int, num_fit: int = 0
) -> Iterator[np.ndarray]:
    """Yield TF-IDF embeddings (texts, components) of consecutive ranges of texts.

    Embeddings are scaled to length 1; a text without a known word gets zeros.

    Args:
        texts: All texts.
        width: Maximum number of components of the SVD.
        num_fit: TF-IDF is fitted on the first `num_fit` texts, or on a sample of
            `MAX_FIT_TEXTS` of them; 0 for all texts.
    """
    from sklearn.preprocessing import normalize

    num_fit = num_fit or len(texts)
    if len(texts) == num_fit <= MAX_FIT_TEXTS:
        yield normalize(fit_tfidf(texts, width)[2]).astype(np.float32)
        return
    fit_texts = texts[:num_fit]
    if num_fit > MAX_FIT_TEXTS:
        sample = np.random.default_rng(0).choice(num_fit, MAX_FIT_TEXTS, replace=False)
        fit_texts = [texts[index] for index in sample.tolist()]
    vectorizer, svd, _ = fit_tfidf(fit_texts, width)
    for start in range(0, len(texts), ITEMS_PER_RANGE):
        counts = vectorizer.transform(texts[start : start + ITEMS_PER_RANGE])
        yield normalize(svd.transform(counts)).astype(np.float32)


def embed_ranges(
    texts: list[str], encoder: str, config: EmbedConfig, say: Say, num_fit: int = 0
) -> Iterator[np.ndarray]:
    """Yield embeddings (texts, width) of consecutive ranges of texts.

    Args:
        texts: All texts.
        encoder: Name of the encoder, or `tfidf`.
        config: Options of the encoder.
        say: Prints progress.
        num_fit: Number of texts that TF-IDF is fitted on; see `tfidf_embeddings`.
    """
    if encoder == "tfidf":
        yield from tfidf_embeddings(texts, config.svd, num_fit)
        return
    for start in range(0, len(texts), ITEMS_PER_RANGE):
        if len(texts) > ITEMS_PER_RANGE:
            say(f"encoding from item {start:,} of {len(texts):,}")
        yield encode_texts(texts[start : start + ITEMS_PER_RANGE], encoder, config, say)


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
    """Fit a PCA: the eigenvectors of the covariance matrix, in float64.

    The largest entry of each component is positive, so equal input gives equal output.

    Args:
        vectors: Embeddings (N, E).
        width: Number of components.
    """
    mean = vectors.mean(0, dtype=np.float64)
    covariance = np.zeros((vectors.shape[1],) * 2)
    for start in range(0, len(vectors), ITEMS_PER_RANGE):
        rows = slice(start, start + ITEMS_PER_RANGE)
        centred = vectors[rows].astype(np.float64) - mean
        covariance += centred.T @ centred
    variances, components = np.linalg.eigh(covariance / max(1, len(vectors) - 1))
    variances, components = variances[::-1], components[:, ::-1]  # largest first
    rank = int((variances > 1e-9 * variances[0]).sum()) if variances[0] > 0 else 0
    if width > rank:
        raise UserError(
            f"pca is {width}, more than the {rank} dimensions that {len(vectors)} "
            f"embeddings of width {vectors.shape[1]} span"
        )
    components = components[:, :width]
    signs = np.sign(components[np.abs(components).argmax(0), np.arange(width)])
    scale = np.sqrt(variances[:width])  # whitened: projections have variance 1
    return Projection(mean, np.ascontiguousarray(components * signs), scale)


def text_settings(encoder: str, config: EmbedConfig) -> dict[str, Any]:
    """Return the encoder and the options that embeddings of texts depend on."""
    unused = {"batch_size", "workers", "use_gpu", "memory_gb", "svd"}
    if encoder == "tfidf":
        unused = config.__dict__.keys() - {"template", "empty", "svd"}
    options = asdict(config)
    return {"encoder": encoder} | {
        name: options[name] for name in options.keys() - unused
    }


def embed_origin(
    items: Table[ItemsInfo], source: EmbeddingSource
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings and the input hashes that embeddings depend on."""
    inputs = {"items": items.hash}
    if source.precomputed:
        settings = {"pca": source.pca_width}
        return settings, {**inputs, "own": source.precomputed.sha256}
    settings = text_settings(source.encoder, source.config)
    settings["pca"] = source.pca_width
    return settings, {**inputs, "encoder": encoder_version(source.encoder)}


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
    source: EmbeddingSource,
    overwrite: bool = False,
    say: Say = print,
) -> Table[EmbeddingsInfo]:
    """Write the `embeddings` table of the `items` table, unless it is up to date.

    Args:
        items: Table of the items.
        output_uri: Folder of the `embeddings` table.
        source: Encoder or precomputed embeddings, and options.
        overwrite: Whether to replace an existing table.
        say: Prints a message.
    """
    config = source.config
    settings, inputs = embed_origin(items, source)
    if not overwrite:
        finished = find_finished(output_uri, EmbeddingsInfo, settings, inputs)
        if finished:
            say(f"{output_uri}: up to date")
            return finished
    started = time.monotonic()
    rows = items.read()
    info = EmbeddingsInfo(width=0)
    if source.precomputed:
        blocks = iter([source.precomputed.align(rows["item_id"].to_pylist(), say)])
    else:
        texts = item_texts(rows, config, say)
        info.distinct_texts = len(set(texts))
        if source.encoder != "tfidf":
            check_encoder(source.encoder, *config.encoder_options())
        blocks = embed_ranges(texts, source.encoder, config, say)
    if source.pca_width:
        vectors = np.concatenate(list(blocks))
        projection = fit_pca(vectors, source.pca_width)
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
        timings={"embed_s": round(time.monotonic() - started, 2)},
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
