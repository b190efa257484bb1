"""Embeddings of items: texts of the `items` table through an encoder, then PCA.

Any `transformers` encoder, by hub name or local path, runs in a pool of Ray Data
actors. `minilm` is a model from a pip package; `tfidf` needs no weights. Items are
encoded in ranges of a million: each distinct text of a range is encoded once, and its
embeddings are written before the next range. PCA is optional; only for it the driver
needs the embeddings of all items, items x width floats.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data

from models.config import pluralize
from models.storage.tables import (
    Manifest,
    Part,
    UserError,
    commit,
    fingerprint,
    has_manifest,
    iter_parts,
    read_manifest,
    read_table,
    up_to_date,
    write_part,
)
from models.text.text_encoder import (
    TFIDF_OPTIONS,
    TextEncoder,
    format_item_texts,
    locate_encoder,
    pretrained_source,
    text_columns,
)
from pipelines import cluster
from pipelines.data.engine import quiet_ray_data
from pipelines.data.schemas import embeddings_schema
from pipelines.data.sids.config import EmbedConfig
from pipelines.data.sids.own_embeddings import OwnEmbeddings
from pipelines.ray_inside import has_autoscaler, silence_cpp_log

Say = Callable[[str], None]

TEXTS_PER_BLOCK = 512
ROWS_PER_PART = 262_144
ITEMS_PER_RANGE = 4 * ROWS_PER_PART
"""Items whose embeddings are in the driver's memory at a time."""
MAX_FIT_TEXTS = 1 << 20
"""Most texts that TF-IDF and its SVD are fitted on; of more, a sample."""
MAX_RESTARTS = 3
"""Restarts of a lost encoder, which then continues with its block."""


def item_texts(
    items: pa.Table, config: EmbedConfig, say: Say = lambda line: None
) -> list[str]:
    """Format the text of each item by the template; missing values are empty.

    A message tells if some items have no text, or all have the same.

    Raises:
        UserError: If a column does not exist, no item has a text, or some have none and
            `config.empty` is "error".
    """
    texts, blank = format_item_texts(items, config.template)
    if blank:
        columns = ", ".join(text_columns(items.column_names, config.template))
        what = f"{blank:,} of {len(texts):,} items have no text in {columns}"
        if config.empty == "error" or blank == len(texts):
            raise UserError(f"{what}; use a template with more columns")
        say(f"note: {what}; their codes say nothing of them")
    if len(texts) > 1 and len(set(texts)) == 1:
        say(
            f"note: all {len(texts):,} items have the same text, so that codes tell "
            f"nothing; use a template with more columns"
        )
    return texts


def encoder_version(name: str) -> str:
    """Return the version of an encoder: a hash of its model files, or the hub's commit.

    Raises:
        UserError: If the encoder cannot be read.
    """
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
    for file in sorted(Path(location).iterdir()):
        if file.suffix in (".json", ".safetensors", ".bin", ".txt", ".model"):
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


class EncoderActor(TextEncoder):
    """A Ray Data actor that turns blocks of texts into blocks of embeddings."""

    def __call__(self, block: pa.Table) -> pa.Table:
        vectors = self.encode(block["text"].to_pylist())
        flat = pa.array(vectors.reshape(-1), pa.float32())
        embeddings = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        return pa.table({"text_index": block["text_index"], "embedding": embeddings})


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    """Convert a list column of equal lengths to (rows, width) float32."""
    chunks = [
        chunk.flatten().to_numpy().reshape(len(chunk), -1)
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate(chunks).astype(np.float32, copy=False)


def run_in_actors(
    blocks: list[pa.Table],
    actor: type,
    given: tuple[Any, ...],
    config: EmbedConfig,
    say: Say,
    gpus: bool = True,
) -> Iterator[pa.Table]:
    """Run blocks through a pool of actors, and yield results as they finish.

    Args:
        blocks: Tables, one call of an actor each.
        actor: Class of the actors.
        given: Arguments of its constructor.
        config: Number of actors and their resources.
        say: Prints a message.
        gpus: Whether the actors can use GPUs.
    """
    quiet_ray_data()
    use_gpu = config.use_gpu
    if use_gpu == "auto":
        use_gpu = bool(ray.cluster_resources().get("GPU", 0))
    use_gpu = use_gpu and gpus
    each: dict[str, float] = {"CPU": 1}
    if use_gpu:
        each["GPU"] = 1
    if config.memory_gb:
        each["memory"] = config.memory_gb * 2**30
    remedy = "lower --embed.memory_gb or give --embed.use_gpu false"
    cluster.check_room(1, each, remedy)
    workers = min(len(blocks), config.workers or default_workers(each, len(blocks)))
    say(f"{pluralize(workers, 'encoder actor')} on {'GPU' if use_gpu else 'CPU'}")
    with warnings.catch_warnings(), silence_cpp_log():
        # `map_batches` has no parameter for restarts, and Ray deprecates other keywords
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        dataset = ray.data.from_arrow(blocks).map_batches(
            actor,
            fn_constructor_args=given,
            batch_size=None,  # a block is a batch
            batch_format="pyarrow",
            # all actors are requested at once, and work begins with the first
            compute=ray.data.ActorPoolStrategy(
                min_size=1, max_size=workers, initial_size=workers
            ),
            num_cpus=1,
            num_gpus=1 if use_gpu else 0,
            memory=each.get("memory"),
            # without a limit, a text that ends the actor would restart it forever
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,
        )
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow")


BLOCKS_PER_WORKER = 4
"""Blocks per encoder that an autoscaler is asked for."""

MAX_DEFAULT_WORKERS = 32
"""Most encoders that an autoscaler is asked for by default."""


def default_workers(each: dict[str, float], blocks: int) -> int:
    """Return the number of encoders to request.

    It is the room of the cluster, or more if an autoscaler can start nodes.
    """
    room = cluster.count_room(cluster.alive_nodes(), each)
    if not has_autoscaler():
        return room
    return max(room, min(-(-blocks // BLOCKS_PER_WORKER), MAX_DEFAULT_WORKERS))


def _encode_distributed(
    texts: list[str], name: str, config: EmbedConfig, say: Say
) -> Iterator[pa.Table]:
    """Yield blocks of `text_index` and `embedding` as actors finish them."""
    # longest first: batches have texts of similar length, and the last blocks are short
    order = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), texts[i]))
    table = pa.table(
        {
            "text_index": pa.array(order, pa.int64()),
            "text": pa.array([texts[i] for i in order]),
        }
    )
    per_block = max(1, TEXTS_PER_BLOCK // config.batch_size) * config.batch_size
    blocks = [
        table.slice(start, per_block) for start in range(0, len(texts), per_block)
    ]
    return run_in_actors(
        blocks, EncoderActor, (name, *config.encoder_options()), config, say
    )


def encode_texts(
    texts: list[str], name: str, config: EmbedConfig, say: Say = print
) -> np.ndarray:
    """Return embeddings (texts, width) by a `transformers` encoder.

    Each distinct text is encoded once.

    Args:
        texts: Texts.
        name: Name of the encoder.
        config: Options.
        say: Prints a message.
    """
    distinct: dict[str, int] = {}
    row = np.array([distinct.setdefault(text, len(distinct)) for text in texts])
    say(f"{len(texts)} texts, {len(distinct)} distinct; loading {name}")
    vectors: np.ndarray | None = None
    done, shown = 0, time.monotonic()
    for block in _encode_distributed(list(distinct), name, config, say):
        matrix = _matrix(block["embedding"])
        if vectors is None:
            vectors = np.empty((len(distinct), matrix.shape[1]), dtype=np.float32)
        vectors[block["text_index"].to_numpy()] = matrix
        done += len(matrix)
        if time.monotonic() - shown > 2 or done == len(distinct):
            say(f"encoded {done} of {len(distinct)} texts")
            shown = time.monotonic()
    assert vectors is not None
    assert done == len(distinct)
    return vectors if len(distinct) == len(texts) else vectors[row]


def fit_tfidf(texts: list[str], width: int) -> tuple[Any, Any, np.ndarray]:
    """Fit TF-IDF and truncated SVD.

    Returns:
        Vectorizer, SVD, and the vectors (texts, at most `width`).

    Raises:
        UserError: If there are fewer than 2 words or texts.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(max_features=50_000, **TFIDF_OPTIONS)
    try:
        counts = vectorizer.fit_transform(texts)
    except ValueError as error:
        raise UserError(
            f"TF-IDF finds no words in {len(texts)} texts ({error}); check "
            f"embed.template"
        ) from error
    width = min(width, counts.shape[1] - 1, counts.shape[0] - 1)
    if width < 1:
        raise UserError(
            f"TF-IDF finds {counts.shape[1]} words in {counts.shape[0]} texts; it "
            f"needs 2 of each or more"
        )
    svd = TruncatedSVD(width, random_state=0)
    with np.errstate(invalid="ignore"):  # equal texts have no variance to divide by
        vectors = svd.fit_transform(counts)
    return vectorizer, svd, vectors


def tfidf_embeddings(
    texts: list[str], width: int, fitted: int = 0
) -> Iterator[np.ndarray]:
    """Yield TF-IDF embeddings of ranges of texts, of length 1 unless empty.

    Args:
        texts: Texts.
        width: Largest width of the SVD.
        fitted: Number of the first texts that TF-IDF is fitted on, at most
            `MAX_FIT_TEXTS` of them; 0 for all.
    """
    from sklearn.preprocessing import normalize

    fitted = fitted or len(texts)
    if len(texts) == fitted <= MAX_FIT_TEXTS:
        yield normalize(fit_tfidf(texts, width)[2]).astype(np.float32)
        return
    fit_texts = texts[:fitted]
    if fitted > MAX_FIT_TEXTS:
        sample = np.random.default_rng(0).choice(fitted, MAX_FIT_TEXTS, replace=False)
        fit_texts = [texts[text] for text in sample.tolist()]
    vectorizer, svd, _ = fit_tfidf(fit_texts, width)
    for start in range(0, len(texts), ITEMS_PER_RANGE):
        counts = vectorizer.transform(texts[start : start + ITEMS_PER_RANGE])
        yield normalize(svd.transform(counts)).astype(np.float32)


def embed_ranges(
    texts: list[str], encoder: str, config: EmbedConfig, say: Say, fitted: int = 0
) -> Iterator[np.ndarray]:
    """Yield embeddings (texts, width) of ranges of texts; `fitted` is for TF-IDF."""
    if encoder == "tfidf":
        yield from tfidf_embeddings(texts, config.svd, fitted)
        return
    for start in range(0, len(texts), ITEMS_PER_RANGE):
        if len(texts) > ITEMS_PER_RANGE:
            say(f"items from {start} on, of {len(texts)}")
        yield encode_texts(texts[start : start + ITEMS_PER_RANGE], encoder, config, say)


@dataclass(frozen=True)
class Projection:
    """Fitted principal components."""

    mean: np.ndarray
    """(E,) float64."""
    components: np.ndarray
    """(E, width) float64."""
    scale: np.ndarray
    """(width,) float64."""

    def project(self, vectors: np.ndarray) -> np.ndarray:
        """Project vectors (N, E) to (N, width) float32, computed in float64."""
        projected = np.empty((len(vectors), len(self.scale)), dtype=np.float32)
        for start in range(0, len(vectors), ITEMS_PER_RANGE):
            rows = slice(start, start + ITEMS_PER_RANGE)
            projected[rows] = (
                (vectors[rows].astype(np.float64) - self.mean)
                @ self.components
                / self.scale
            )
        return projected

    def record(self) -> dict[str, str]:
        """Encode the arrays for the manifest of embeddings."""
        return {
            name: b64encode(values.tobytes()).decode()
            for name, values in vars(self).items()
        }

    @classmethod
    def read(cls, record: dict[str, str]) -> Projection:
        """Decode the output of `record`."""
        mean, components, scale = (
            np.frombuffer(b64decode(record[field.name])) for field in fields(cls)
        )
        return cls(mean, components.reshape(len(mean), -1), scale)


def fit_pca(vectors: np.ndarray, width: int, whiten: bool = True) -> Projection:
    """Compute principal components.

    They are the eigenvectors of the covariance in float64 with fixed signs, so that
    equal input gives equal output.

    Args:
        vectors: (N, E) vectors.
        width: Number of components.
        whiten: Whether to scale components to variance 1.

    Raises:
        UserError: If the vectors span fewer than `width` dimensions.
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
            f"--pca {width} is more than the {rank} dimensions that {len(vectors)} "
            f"embeddings of width {vectors.shape[1]} span; use --pca {rank} or less, "
            f"or 0 for none"
        )
    components = components[:, :width]
    signs = np.sign(components[np.abs(components).argmax(0), np.arange(width)])
    scale = np.sqrt(variances[:width]) if whiten else np.ones(width)
    return Projection(mean, np.ascontiguousarray(components * signs), scale)


RUNTIME_SETTINGS = ("batch_size", "workers", "use_gpu", "memory_gb")
"""Settings of the execution, which do not change the embeddings."""


def embed_origin(
    items_uri: str,
    encoder: str,
    pca_width: int,
    config: EmbedConfig,
    own: OwnEmbeddings | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings and the input hashes that embeddings depend on."""
    if own:
        inputs = {"items": read_manifest(items_uri, "items").hash, "own": own.sha256}
        return {"pca": pca_width, "whiten": config.whiten}, inputs
    used = asdict(config)
    for name in RUNTIME_SETTINGS:
        del used[name]
    if encoder == "tfidf":
        used = {name: used[name] for name in ("template", "empty", "svd", "whiten")}
    else:
        del used["svd"]
    inputs = {
        "items": read_manifest(items_uri, "items").hash,
        "encoder": encoder_version(encoder),
    }
    return {"encoder": encoder, "pca": pca_width, **used}, inputs


def find_finished(
    uri: str, table: str, config: dict[str, Any], inputs: dict[str, str]
) -> Manifest | None:
    """Return the manifest of a table, or None if it does not exist.

    Raises:
        UserError: If it was made from other settings or inputs.
    """
    if not has_manifest(uri):
        return None
    if not up_to_date(uri, fingerprint(config, inputs)):
        raise UserError(
            f"{uri} was made from other input or settings; use --overwrite, or another "
            f"--output"
        )
    return read_manifest(uri, table)


def embed_items(
    items_uri: str,
    output_uri: str,
    encoder: str,
    pca_width: int = 0,
    config: EmbedConfig | None = None,
    overwrite: bool = False,
    say: Say = print,
    start: Callable[[], None] = lambda: None,
    own: OwnEmbeddings | None = None,
) -> Manifest:
    """Write the `embeddings` table of the `items` table, unless it is up to date.

    Args:
        items_uri: Table of items.
        output_uri: Table to write.
        encoder: Name of the encoder, or "tfidf".
        pca_width: Width of the PCA; 0 for the encoder's output.
        config: Options.
        overwrite: Whether to replace an existing table.
        say: Prints a message.
        start: Starts Ray, if it is needed.
        own: Embeddings of the user, instead of the encoder's.

    Raises:
        UserError: If texts, encoder or width are not valid, before anything is written.
    """
    config = config or EmbedConfig()
    used, inputs = embed_origin(items_uri, encoder, pca_width, config, own)
    if not overwrite and (
        done := find_finished(output_uri, "embeddings", used, inputs)
    ):
        say(f"{output_uri}: up to date")
        return done
    started = time.monotonic()
    items = read_table(items_uri, "items")
    if own:
        vectors = own.align(items["item_id"].to_pylist(), say)
        blocks, counts = iter([vectors]), {}
    else:
        if encoder != "tfidf":
            start()
        texts = item_texts(items, config, say)
        blocks = embed_ranges(texts, encoder, config, say)
        counts = {"distinct_texts": len(set(texts))}
    if pca_width:
        vectors = np.concatenate(list(blocks))
        projection = fit_pca(vectors, pca_width, config.whiten)
        raw_width, blocks = vectors.shape[1], iter([projection.project(vectors)])
    parts: list[Part] = []
    width = first = 0
    for block in blocks:
        width = block.shape[1]
        parts += write_vectors(output_uri, block, first=first)
        first += len(block)
    return commit(
        output_uri,
        "embeddings",
        embeddings_schema(width),
        parts,
        config=used,
        inputs=inputs,
        info={
            "width": width,
            "encoder_width": raw_width if pca_width else width,
            "items": len(items),
            **counts,
            **({"pca": projection.record()} if pca_width else {}),
        },
        timings={"embed_s": round(time.monotonic() - started, 2)},
    )


def to_list_column(vectors: np.ndarray) -> pa.Array:
    """Convert (rows, width) to a column of fixed-size lists."""
    return pa.FixedSizeListArray.from_arrays(
        pa.array(np.ascontiguousarray(vectors).reshape(-1)), vectors.shape[1]
    )


def write_vectors(
    uri: str, vectors: np.ndarray, key: str = "item_index", first: int = 0
) -> list[Part]:
    """Write parts of a table of embeddings, without a manifest.

    Args:
        uri: Table to write.
        vectors: (rows, width) embeddings.
        key: Name of the key column.
        first: Key of the first row.
    """
    schema, parts = embeddings_schema(vectors.shape[1], [key]), []
    for start in range(0, len(vectors), ROWS_PER_PART):
        rows = vectors[start : start + ROWS_PER_PART]
        index = pa.array(
            np.arange(first + start, first + start + len(rows), dtype=np.int32)
        )
        parts.append(
            write_part(
                uri, pa.Table.from_arrays([index, to_list_column(rows)], schema=schema)
            )
        )
    return parts


def read_embeddings(uri: str) -> np.ndarray:
    """Read a table of embeddings as (N, width) float32 in the order of item_index."""
    manifest = read_manifest(uri, "embeddings")
    vectors = np.empty((manifest.rows, manifest.info["width"]), dtype=np.float32)
    for part in iter_parts(uri, "embeddings"):
        vectors[part["item_index"].to_numpy()] = _matrix(part["embedding"])
    return vectors
