"""SIDs of items and their trie: embeddings, a tokenizer, unique codes, measures.

`tokenize` writes the tables `embeddings`, `sids` and `trie` to one folder, except those
that are up to date. Codebooks are trained in this process, or on a cluster in one Ray
task, on a GPU if there is one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch

from models.dataset.folds import count_folds, find_train_end
from models.retrieval.data import RetrievalDataset
from models.retrieval.search.trie import Trie
from models.retrieval.tokenizers import rqkmeans, rqvae
from models.retrieval.tokenizers.codes import (
    MAX_CONFLICT_CODES,
    add_conflict_levels,
    branching,
    measure_collisions,
    measure_levels,
)
from models.retrieval.tokenizers.psid import assign
from models.retrieval.tokenizers.published import catalogue_codes, read_published
from models.retrieval.tokenizers.rqkmeans import (
    Progress,
    Training,
    limit_progress,
    quantization_error,
)
from models.storage.tables import (
    Manifest,
    UserError,
    check_output,
    clear,
    commit,
    fingerprint,
    has_earlier_table,
    has_manifest,
    join,
    read_manifest,
    read_table,
    up_to_date,
    write_part,
    writing,
)
from pipelines.data.schemas import QUANTIZER, SIDS, TRIE
from pipelines.data.sids.config import EmbedConfig, TokenizerConfig
from pipelines.data.sids.embed import (
    Say,
    embed_items,
    embed_origin,
    find_finished,
    item_texts,
    read_embeddings,
)
from pipelines.data.sids.own_embeddings import OwnEmbeddings


def find_train_items(sequences_uri: str) -> np.ndarray:
    """Return the items (n,) that are targets or in histories of training requests.

    They are ascending. With several folds the training requests are those of the
    first, which all folds train on.
    """
    info = read_manifest(sequences_uri, "sequences").info
    fold = 1 if count_folds(info) else None
    train = RetrievalDataset.load(sequences_uri, "train", fold=fold)
    return train.visited_items()


def _train_task(
    embeddings: np.ndarray,
    config: TokenizerConfig,
    chosen: np.ndarray | None,
    threads: int,
) -> Iterator[Progress | tuple[dict[str, Any], np.ndarray]]:
    """Train codebooks; yields progress, then measures and codes.

    The stream is the same each time, as Ray may start it again. Threads and precision
    are set because the worker process may have run another task, and sums in another
    order would end in other codes.

    Args:
        embeddings: (N, width) embeddings.
        config: Options.
        chosen: Items to fit codebooks on, None for all.
        threads: Number of threads.

    Yields:
        Progress; at the end measures, with the `sizes` and `arrays` of the codebooks,
        and the codes (N, C) without a conflict code.
    """
    torch.set_num_threads(threads)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        vectors = torch.tensor(
            embeddings, device="cuda" if torch.cuda.is_available() else "cpu"
        )
        if config.quantizer == "rqvae":
            quantized = yield from rqvae.fit(vectors, config.rqvae)
        else:
            items = None if chosen is None else torch.tensor(chosen)
            quantized = yield from rqkmeans.fit(vectors, config.rqkmeans, items)
        codes = quantized.codes.numpy()
        if config.tokenizer == "psid":
            taken = measure_collisions(codes)["duplicates"]
            yield Progress(1, 1, f"other codes for {taken} items whose codes are taken")
            codes = assign(quantized, config.psid)
    finally:
        torch.set_float32_matmul_precision(before)
    measures: dict[str, Any] = {
        "sizes": [quantized.codebooks.shape[1]] * quantized.codebooks.shape[0],
        "reconstruction_error": quantized.reconstruction_error,
        "quantization_error": quantization_error(quantized, codes),
        "arrays": {
            "codebooks": quantized.codebooks.numpy(),
            **{k: v.numpy() for k, v in quantized.encoder.items()},
        },
    }
    if config.tokenizer == "psid":
        greedy = quantized.codes.numpy()
        measures["collision_rate_before"] = measure_collisions(greedy)["collision_rate"]
        measures["relaxed_items"] = int((greedy != codes).any(1).sum())
    yield measures, codes


def _forward_progress(
    stream: Iterator[Any],
) -> Training[tuple[dict[str, Any], np.ndarray]]:
    """Yield the progress in the stream of `_train_task`, and return its result."""
    for element in stream:
        if isinstance(element, tuple):
            return element
        yield element
    raise RuntimeError("the training task ended without a result")


MAX_STARTS = 3
"""Most starts of the training of codes if its worker is lost. It ends with the same
codes."""


def train_codes(
    embeddings: np.ndarray,
    config: TokenizerConfig,
    say: Say = print,
    chosen: np.ndarray | None = None,
) -> tuple[dict[str, Any], np.ndarray]:
    """Run `_train_task` in this process, or as a task of the cluster.

    Args:
        embeddings: (N, width) embeddings.
        config: Options.
        say: Prints a message.
        chosen: Items to fit codebooks on, None for all.

    Returns:
        Measures and codes (N, C) without a conflict code.
    """
    if os.environ.get("RAY_ADDRESS"):
        gpu = ray.cluster_resources().get("GPU", 0) >= 1
        cpus_of_nodes = [
            node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]
        ]
        cpus = min(4, max(1, *cpus_of_nodes))  # 1 where an autoscaler has no node yet
        task: Any = ray.remote(
            num_cpus=cpus,
            num_gpus=1 if gpu else 0,
            num_returns="streaming",
            max_retries=MAX_STARTS - 1,
        )(_train_task)
        stream: Iterator[Any] = (
            ray.get(reference)
            for reference in task.remote(embeddings, config, chosen, max(1, int(cpus)))
        )
    else:
        stream = _train_task(
            embeddings, config, chosen, min(4, len(os.sched_getaffinity(0)))
        )
    training = limit_progress(_forward_progress(stream))
    while True:
        try:
            progress = next(training)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        say(f"{config.quantizer} {progress.step}/{progress.steps}: {progress.message}")


@dataclass(frozen=True)
class _Codes:
    """SIDs before they are written."""

    codes: np.ndarray
    """(N, C), with conflict levels if there are any."""
    sizes: list[int]
    """Number of codes per level."""
    conflict_level: bool
    measures: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Codebooks and encoder, for new items."""


def _finish(
    codes: np.ndarray,
    sizes: list[int],
    conflict: bool,
    measures: dict[str, Any],
    say: Say,
) -> _Codes:
    """Add conflict levels if requested, and measure the codes."""
    before = {
        **measures,
        **measure_collisions(codes),
        "levels": measure_levels(codes, sizes),
    }
    if conflict:
        codes = add_conflict_levels(codes)
        sizes = [*sizes, *(codes[:, len(sizes) :].max(0) + 1).tolist()]
        if before["largest_group"] > MAX_CONFLICT_CODES:
            say(
                f"note: {before['largest_group']} items share their codes, so the "
                f"conflict code takes two levels of {MAX_CONFLICT_CODES} codes; more "
                f"levels, a larger codebook or a richer --embed.template may spare one"
            )
    return _Codes(codes, sizes, conflict, {**before, "branching": branching(codes)})


def _published_codes(
    items: pa.Table, sids: dict[str, list[int]], uri: str, say: Say
) -> _Codes:
    codes = catalogue_codes(sids, items["item_id"].to_pylist(), uri)
    # over all of the file's SIDs, so that sizes do not depend on the k-core
    sizes = (np.array(list(sids.values())).max(0) + 1).tolist()
    measures = {"unused_published": len(sids) - len(codes)}
    return _finish(
        codes, sizes, bool(measure_collisions(codes)["duplicates"]), measures, say
    )


def _trained_codes(
    embeddings_uri: str, config: TokenizerConfig, say: Say, chosen: np.ndarray | None
) -> _Codes:
    measures, codes = train_codes(read_embeddings(embeddings_uri), config, say, chosen)
    sizes = measures.pop("sizes")
    unique = config.tokenizer == "psid"
    if config.tokenizer == "rqvae" and config.rqvae.sinkhorn:
        # items with equal codes were spread, as far as there are codes
        unique = not measure_collisions(codes)["duplicates"]
    arrays = measures.pop("arrays")
    return replace(_finish(codes, sizes, not unique, measures, say), arrays=arrays)


def write_quantizer(uri: str, arrays: dict[str, np.ndarray], **manifest: Any) -> None:
    """Write the `quantizer` table: codebooks and encoder, for codes of new items."""
    rows = [
        {"name": name, "shape": values.shape, "values": values.ravel()}
        for name, values in sorted(arrays.items())
    ]
    table = pa.Table.from_pylist(rows, schema=QUANTIZER)
    commit(
        uri,
        "quantizer",
        QUANTIZER,
        [write_part(uri, table, use_dictionary=False)],
        **manifest,
    )


def read_quantizer(uri: str) -> dict[str, np.ndarray]:
    """Read the arrays of the `quantizer` table."""
    table = read_table(uri, "quantizer")
    columns = (table["name"].to_pylist(), table["shape"].to_pylist(), table["values"])
    return {
        name: values.values.to_numpy().reshape(shape).copy()
        for name, shape, values in zip(*columns, strict=True)
    }


def write_sids(uri: str, codes: np.ndarray, **manifest: Any) -> Manifest:
    """Write the `sids` table of codes (N, C)."""
    items, depth = codes.shape
    offsets = pa.array(np.arange(0, items * depth + 1, depth), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.array(codes.reshape(-1), pa.uint16()))
    table = pa.Table.from_arrays(
        [pa.array(np.arange(items), pa.int32()), lists], schema=SIDS
    )
    return commit(uri, "sids", SIDS, [write_part(uri, table)], **manifest)


def read_codes(uri: str) -> np.ndarray:
    """Read the codes of the `sids` table as (N, C) int64, by item_index."""
    table = read_table(uri, "sids")
    codes = table["codes"].combine_chunks()
    matrix = codes.flatten().to_numpy().reshape(len(codes), -1).astype(np.int64)
    return matrix[np.argsort(table["item_index"].to_numpy())]


def write_trie(uri: str, sids_uri: str, extends: Iterable[str] = ()) -> Manifest:
    """Write the `trie` table of the `sids` table, in place of a trie of other SIDs."""
    sids = read_manifest(sids_uri, "sids")
    codes = read_codes(sids_uri)
    sizes = sids.info["codebook_sizes"]
    trie = Trie(torch.from_numpy(codes), tuple(sizes))
    edges = {name: column.numpy() for name, column in trie.edge_columns().items()}
    leaf = edges["item_index"] >= 0
    columns = [pa.array(edges[f.name], f.type) for f in TRIE if f.name != "item_index"]
    columns.append(pa.array(edges["item_index"], pa.int32(), mask=~leaf))
    part = write_part(uri, pa.Table.from_arrays(columns, schema=TRIE))
    info = {
        "codebook_sizes": sizes,
        "levels": trie.levels,
        "items": trie.num_items,
        "branching": trie.branching(),
    }
    return commit(
        uri,
        "trie",
        TRIE,
        [part],
        config={},
        inputs={"sids": sids.hash},
        info=info,
        extends=extends,
    )


def _embed_first(
    origin: tuple[str, str, int, EmbedConfig, OwnEmbeddings | None],
    output: str,
    shared: str,
    overwrite: bool,
    say: Say,
    start: Callable[[], None],
) -> str:
    """Write the embeddings and return their hash.

    Embeddings that tokenizers share are not written again if they are up to date.

    Args:
        origin: Arguments of `embed_origin`.
        output: Folder of the SIDs.
        shared: Folder of shared embeddings, or "".
        overwrite: Whether to replace existing tables.
        say: Prints a message.
        start: Starts Ray, if it is needed.

    Raises:
        UserError: If the output has SIDs of other embeddings.
    """
    uri = shared or join(output, "embeddings")
    if not overwrite and not has_manifest(uri) and has_manifest(join(output, "sids")):
        raise UserError(
            f"{join(output, 'sids')} was made from other embeddings; use --overwrite, "
            f"or another --output"
        )
    whole = shared and up_to_date(uri, fingerprint(*embed_origin(*origin)))
    items_uri, encoder, width, embed, own = origin
    with writing(shared) if shared not in ("", output) and not whole else nullcontext():
        return embed_items(
            items_uri,
            uri,
            encoder,
            width,
            embed,
            overwrite and not whole,
            say,
            start,
            own,
        ).hash


def check_items(
    items_uri: str, config: TokenizerConfig, embed: EmbedConfig | None
) -> None:
    """Raise a UserError if the catalogue does not fit the tokenizer or its texts."""
    if few := config.too_few_items(items_uri):
        raise UserError(few)
    if embed:
        item_texts(read_table(items_uri, "items"), embed)


def check_folders(output: str, embeddings: str = "") -> None:
    """Raise a UserError if the output or the folder of embeddings has other content."""
    if embeddings != output:
        check_output(
            output, {name: name for name in ("sids", "trie", "embeddings", "quantizer")}
        )
    if embeddings:
        has_earlier_table(embeddings, "embeddings")


def tokenize(
    items_uri: str,
    output: str,
    config: TokenizerConfig,
    encoder: str = "minilm",
    pca_width: int = 0,
    embed: EmbedConfig | None = None,
    overwrite: bool = False,
    say: Say = print,
    embeddings: str = "",
    sequences_uri: str = "",
    start: Callable[[], None] = lambda: None,
    own: OwnEmbeddings | None = None,
) -> tuple[Manifest, Manifest, bool]:
    """Write `embeddings` (unless SIDs are published), `sids` and `trie` to `output`.

    Args:
        items_uri: Table of items.
        output: Folder to write to.
        config: Options of the tokenizer.
        encoder: Name of the encoder, or "tfidf".
        pca_width: Width of the PCA; 0 for the encoder's output.
        embed: Options of the embeddings.
        overwrite: Whether to replace existing tables.
        say: Prints a message.
        embeddings: Folder of embeddings that tokenizers share; by default in `output`.
        sequences_uri: Table of requests, if codebooks are fitted on the items of
            training requests only.
        start: Starts Ray, if it is needed.
        own: Embeddings of the user, instead of the encoder's.

    Returns:
        Manifests of sids and trie, and whether anything was written.

    Raises:
        UserError: If the input is not valid, the output was made from other input
            (unless `overwrite`), or another job writes to it.
    """
    started = time.monotonic()
    items = read_manifest(items_uri, "items")
    check_folders(output, embeddings)
    own_embeddings_uri, sids_uri, trie_uri = (
        join(output, name) for name in ("embeddings", "sids", "trie")
    )
    published: dict[str, list[int]] = {}
    inputs = {"items": items.hash}
    with writing(output):
        if config.tokenizer == "published":
            published, inputs["published"] = read_published(config.published)
        else:
            origin = (items_uri, encoder, pca_width, embed or EmbedConfig(), own)
            inputs["embeddings"] = _embed_first(
                origin, output, embeddings, overwrite, say, start
            )
        chosen = None
        if config.on_train_items:
            sequences = read_manifest(sequences_uri, "sequences")
            inputs["sequences"] = sequences.hash
            if count_folds(sequences.info):
                inputs["train_end_ms"] = str(find_train_end(sequences.info, 1))
            chosen = find_train_items(sequences_uri)
        options = config.relevant_settings()
        up_to_date_sids = (
            None if overwrite else find_finished(sids_uri, "sids", options, inputs)
        )
        if up_to_date_sids is None:
            if config.tokenizer == "published":
                result = _published_codes(
                    read_table(items_uri, "items"), published, config.published, say
                )
            else:
                if os.environ.get("RAY_ADDRESS"):
                    start()
                result = _trained_codes(
                    embeddings or own_embeddings_uri, config, say, chosen
                )
            info = {
                "codebook_sizes": result.sizes,
                "tokenizer": config.tokenizer,
                "items_hash": items.hash,
                "conflict_level": result.conflict_level,
                **result.measures,
            }
            timings = {"tokenize_s": round(time.monotonic() - started, 2)}
            if result.arrays:
                write_quantizer(
                    join(output, "quantizer"),
                    result.arrays,
                    config=options,
                    inputs=inputs,
                )
            write_sids(
                sids_uri,
                result.codes,
                config=options,
                inputs=inputs,
                info=info,
                timings=timings,
            )
        sids = read_manifest(sids_uri, "sids")
        complete = up_to_date_sids is not None and up_to_date(
            trie_uri, fingerprint({}, {"sids": sids.hash})
        )
        if complete:
            trie = read_manifest(trie_uri, "trie")
        else:
            trie = write_trie(trie_uri, sids_uri)
        if config.tokenizer == "published":
            for unused in (own_embeddings_uri, join(output, "quantizer")):
                if has_manifest(unused):
                    clear(unused)  # of replaced SIDs
        return sids, trie, not complete
