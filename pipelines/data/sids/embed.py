"""Items to embeddings: texts of the `items` table through an encoder, optionally whitened PCA.

Any `transformers` encoder by hub name or local path runs in a pool of Ray Data actors; `minilm` is the
model that a pip package carries, `tfidf` needs no weights. Of a range of a million items each distinct text is
encoded once, and its embeddings are written before the next range begins. Only for PCA those of all items meet on
the driver: items x width floats.
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
RANGE = 4 * ROWS_PER_PART
"""Items whose embeddings the driver holds at once."""
FIT_TEXTS = 1 << 20
"""Texts that TF-IDF and its SVD are fitted on, at most: of more a sample."""
TRIES = 3
"""How often an encoder that is lost is started again, with the block that it had."""


def item_texts(
    items: pa.Table, config: EmbedConfig, say: Say = lambda line: None
) -> list[str]:
    """Return the text of each item, formatted by the template.

    A missing column value counts as empty.

    Raises:
        UserError: if the table lacks a column, no item has a text, or some have none
            and `config.empty` is `error`.
    """
    found, blank = format_item_texts(items, config.template)
    if blank:
        columns = ", ".join(text_columns(items.column_names, config.template))
        what = f"{blank:,} of {len(found):,} items have no text in {columns}"
        if config.empty == "error" or blank == len(found):
            raise UserError(f"{what}; use a template with more columns")
        say(f"note: {what}; their codes say nothing of them")
    if len(found) > 1 and len(set(found)) == 1:
        say(
            f"note: all {len(found):,} items have the same text, so that codes tell nothing; use a template with more "
            "columns"
        )
    return found


def encoder_version(name: str) -> str:
    """Return the hash of a folder's model files, or the commit of a model of the hub.

    Raises:
        UserError: if the encoder cannot be read; names the remedies.
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
    """A `transformers` encoder as a Ray Data actor: blocks of texts to blocks of embeddings."""

    def __call__(self, block: pa.Table) -> pa.Table:
        vectors = self.encode(block["text"].to_pylist())
        flat = pa.array(vectors.reshape(-1), pa.float32())
        embeddings = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        return pa.table({"text_index": block["text_index"], "embedding": embeddings})


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    """Convert a list column of equal lengths to a (rows, width) float32 array."""
    chunks = [
        chunk.flatten().to_numpy().reshape(len(chunk), -1)
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate(chunks).astype(np.float32, copy=False)


def in_actors(
    blocks: list[pa.Table],
    actor: type,
    given: tuple[Any, ...],
    config: EmbedConfig,
    say: Say,
    gpus: bool = True,
) -> Iterator[pa.Table]:
    """Yield the results of actors for the blocks, in the order in which actors finish them.

    Args:
        blocks: Tables, each a call of an actor.
        actor: Class of the actors.
        given: Arguments of its constructor.
        config: Number of actors and their resources.
        say: Prints a line.
        gpus: Whether the actors can use GPUs.
    """
    quiet_ray_data()
    use_gpu = gpus and (
        bool(ray.cluster_resources().get("GPU", 0))
        if config.use_gpu == "auto"
        else config.use_gpu
    )
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
        # Ray deprecates keywords without a parameter of `map_batches`, and has none for restarts
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        dataset = ray.data.from_arrow(
            blocks
        ).map_batches(
            actor,
            fn_constructor_args=given,
            batch_size=None,  # a block is a batch
            batch_format="pyarrow",
            # all are asked for at once, and work begins with the first
            compute=ray.data.ActorPoolStrategy(
                min_size=1, max_size=workers, initial_size=workers
            ),
            num_cpus=1,
            num_gpus=1 if use_gpu else 0,
            memory=each.get("memory"),
            max_restarts=TRIES,  # Ray Data's default is for ever, also where a text is what ends the actor
            max_task_retries=TRIES,
        )
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow")


BLOCKS_PER_WORKER = 4
"""Blocks for which another encoder is asked of an autoscaler."""

MAX_DEFAULT_WORKERS = 32
"""Encoders that are asked of an autoscaler by default."""


def default_workers(each: dict[str, float], blocks: int) -> int:
    """Return the number of encoders to ask for: the room of the cluster, or more if an autoscaler can start nodes."""
    room = cluster.count_room(cluster.alive_nodes(), each)
    if not has_autoscaler():
        return room
    return max(room, min(-(-blocks // BLOCKS_PER_WORKER), MAX_DEFAULT_WORKERS))


def _encode_distributed(
    texts: list[str], name: str, config: EmbedConfig, say: Say
) -> Iterator[pa.Table]:
    """Yield blocks of `text_index` and `embedding` in the order in which actors finish
    them.
    """
    # longest first: batches hold texts of like length, and the last blocks to run are short ones
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
    return in_actors(
        blocks, EncoderActor, (name, *config.encoder_options()), config, say
    )


def encode_texts(
    texts: list[str], name: str, config: EmbedConfig, say: Say = print
) -> np.ndarray:
    """Encode texts with the `transformers` encoder `name`, each distinct text once.

    Returns:
        (texts, width) float32.
    """
    distinct: dict[str, int] = {}
    which = np.array([distinct.setdefault(text, len(distinct)) for text in texts])
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
    return vectors if len(distinct) == len(texts) else vectors[which]


def fit_tfidf(texts: list[str], width: int) -> tuple[Any, Any, np.ndarray]:
    """Fit TF-IDF and a truncated SVD.

    Returns:
        The vectorizer, the SVD, and the (texts, at most width) vectors.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(max_features=50_000, **TFIDF_OPTIONS)
    try:
        counts = vectorizer.fit_transform(texts)
    except ValueError as error:
        raise UserError(
            f"TF-IDF finds no words in {len(texts)} texts ({error}); check embed.template"
        ) from error
    width = min(width, counts.shape[1] - 1, counts.shape[0] - 1)
    if width < 1:
        raise UserError(
            f"TF-IDF finds {counts.shape[1]} words in {counts.shape[0]} texts; it needs 2 of each or more"
        )
    svd = TruncatedSVD(width, random_state=0)
    with np.errstate(invalid="ignore"):  # equal texts have no variance to divide by
        vectors = svd.fit_transform(counts)
    return vectorizer, svd, vectors


def tfidf_embeddings(
    texts: list[str], width: int, fitted: int = 0
) -> Iterator[np.ndarray]:
    """Yield the TF-IDF and SVD vectors of each range of texts, rows scaled to length 1.

    The model is fitted on at most `FIT_TEXTS` of the texts, or of the first `fitted`.
    """
    from sklearn.preprocessing import normalize

    fitted = fitted or len(texts)
    if len(texts) == fitted <= FIT_TEXTS:
        yield normalize(fit_tfidf(texts, width)[2]).astype(np.float32)
        return
    known = texts[:fitted]
    if fitted > FIT_TEXTS:
        drawn = np.random.default_rng(0).choice(fitted, FIT_TEXTS, replace=False)
        known = [texts[text] for text in drawn.tolist()]
    vectorizer, svd, _ = fit_tfidf(known, width)
    for start in range(0, len(texts), RANGE):
        counts = vectorizer.transform(texts[start : start + RANGE])
        yield normalize(svd.transform(counts)).astype(np.float32)


def embed_ranges(
    texts: list[str], encoder: str, config: EmbedConfig, say: Say, fitted: int = 0
) -> Iterator[np.ndarray]:
    """Yield the (texts, width) embeddings of each range of texts."""
    if encoder == "tfidf":
        yield from tfidf_embeddings(texts, config.svd, fitted)
        return
    for start in range(0, len(texts), RANGE):
        if len(texts) > RANGE:
            say(f"items from {start} on, of {len(texts)}")
        yield encode_texts(texts[start : start + RANGE], encoder, config, say)


@dataclass(frozen=True)
class Projection:
    """Fitted principal components, which also project later vectors."""

    mean: np.ndarray
    """(E,) float64."""
    components: np.ndarray
    """(E, width) float64."""
    scale: np.ndarray
    """(width,) float64."""

    def project(self, vectors: np.ndarray) -> np.ndarray:
        """Project `vectors` (N, E) to (N, width) float32, computed in float64 range by
        range.
        """
        projected = np.empty((len(vectors), len(self.scale)), dtype=np.float32)
        for start in range(0, len(vectors), RANGE):
            rows = slice(start, start + RANGE)
            projected[rows] = (
                (vectors[rows].astype(np.float64) - self.mean)
                @ self.components
                / self.scale
            )
        return projected

    def record(self) -> dict[str, str]:
        """Encode the arrays as text for the manifest."""
        return {
            name: b64encode(values.tobytes()).decode()
            for name, values in vars(self).items()
        }

    @classmethod
    def read(cls, record: dict[str, str]) -> Projection:
        """Decode the arrays of a manifest."""
        mean, components, scale = (
            np.frombuffer(b64decode(record[field.name])) for field in fields(cls)
        )
        return cls(mean, components.reshape(len(mean), -1), scale)


def pca(vectors: np.ndarray, width: int, whiten: bool = True) -> Projection:
    """Fit the first `width` principal components of `vectors` (N, E), with variance 1
    if `whiten`.

    They are eigenvectors of the float64 covariance with fixed signs, so equal input
    gives equal output.

    Raises:
        UserError: if the vectors span fewer dimensions than `width`.
    """
    mean, covariance = (
        vectors.mean(0, dtype=np.float64),
        np.zeros((vectors.shape[1],) * 2),
    )
    ranges = [slice(start, start + RANGE) for start in range(0, len(vectors), RANGE)]
    for rows in ranges:  # in float64 a range at a time
        centred = vectors[rows].astype(np.float64) - mean
        covariance += centred.T @ centred
    variances, components = np.linalg.eigh(covariance / max(1, len(vectors) - 1))
    variances, components = variances[::-1], components[:, ::-1]  # largest first
    rank = int((variances > 1e-9 * variances[0]).sum()) if variances[0] > 0 else 0
    if width > rank:
        raise UserError(
            f"--pca {width} is more than the {rank} dimensions that {len(vectors)} embeddings of width "
            f"{vectors.shape[1]} span; use --pca {rank} or less, or 0 for none"
        )
    components = components[:, :width]
    signs = np.sign(components[np.abs(components).argmax(0), np.arange(width)])
    scale = np.sqrt(variances[:width]) if whiten else np.ones(width)
    return Projection(mean, np.ascontiguousarray(components * signs), scale)


RUNS_ONLY = ("batch_size", "workers", "use_gpu", "memory_gb")
"""Options of the execution, which do not change the embeddings."""


def embed_origin(
    items_uri: str,
    encoder: str,
    pca_width: int,
    config: EmbedConfig,
    own: OwnEmbeddings | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings and input hashes that the embeddings' fingerprint is made of."""
    if own:
        inputs = {"items": read_manifest(items_uri, "items").hash, "own": own.sha256}
        return {"pca": pca_width, "whiten": config.whiten}, inputs
    used = asdict(config)
    for name in RUNS_ONLY:
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
    """Return the manifest of a table, or None if the table does not exist.

    Raises:
        UserError: if the table has other settings or inputs.
    """
    if not has_manifest(uri):
        return None
    if not up_to_date(uri, fingerprint(config, inputs)):
        raise UserError(
            f"{uri} was made from other input or settings; use --overwrite, or another --output"
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
    """Make the `embeddings` table of the `items` table; keep a finished table of the
    same input.

    Args:
        pca_width: Width of the PCA; 0 for the encoder's output.
        start: Starts Ray; called only if it is needed.
        own: Embeddings that replace the encoder's.

    Raises:
        UserError: for unusable texts, encoders or widths, before anything is written.
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
        blocks, counts = iter([own.align(items["item_id"].to_pylist(), say)]), {}
    else:
        if encoder != "tfidf":
            start()
        texts = item_texts(items, config, say)
        blocks, counts = (
            embed_ranges(texts, encoder, config, say),
            {"distinct_texts": len(set(texts))},
        )
    if pca_width:
        vectors = np.concatenate(list(blocks))
        projection = pca(vectors, pca_width, config.whiten)
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
    """Convert a (rows, width) array to a column of fixed-size lists."""
    return pa.FixedSizeListArray.from_arrays(
        pa.array(np.ascontiguousarray(vectors).reshape(-1)), vectors.shape[1]
    )


def write_vectors(
    uri: str, vectors: np.ndarray, key: str = "item_index", first: int = 0
) -> list[Part]:
    """Write the parts of an embeddings table (rows, width) without committing them.

    Args:
        key: Name of the index column, which counts from `first`.
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
    """Return the whole table as (N, width) float32, sorted by item_index."""
    manifest = read_manifest(uri, "embeddings")
    vectors = np.empty((manifest.rows, manifest.info["width"]), dtype=np.float32)
    for part in iter_parts(uri, "embeddings"):
        vectors[part["item_index"].to_numpy()] = _matrix(part["embedding"])
    return vectors
