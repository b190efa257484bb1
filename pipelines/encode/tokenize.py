"""SIDs of items and their trie: embeddings, a tokenizer, unique codes, measures.

`tokenize` writes the tables `embeddings`, `sids` and `trie` to one folder, except those
that are up to date. Codebooks are trained in this process, or on a cluster in one Ray
task: networks on a GPU if there is one, k-means on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch

from core.errors import UserError
from core.files import join
from core.schemas import (
    QUANTIZER,
    SIDS,
    TRIE,
    CodeMeasures,
    EmbeddingsInfo,
    ItemsInfo,
    QuantizerInfo,
    RetrievalInfo,
    SidsInfo,
    TrieInfo,
)
from core.tables import (
    Table,
    check_replaceable,
    clear,
    commit,
    find_table,
    fingerprint,
    has_manifest,
    open_table,
    write_part,
    writing,
)
from models.cpu.matmul import matmul_precision
from models.retrieval import data
from models.retrieval.requests import find_train_items
from models.retrieval.search.trie import Trie
from models.retrieval.tokenizers.codes import (
    MAX_CONFLICT_CODES,
    add_conflict_levels,
    measure_collisions,
    measure_levels,
)
from models.retrieval.tokenizers.published import catalogue_codes, read_published
from models.retrieval.tokenizers.rqkmeans import quantization_error
from models.retrieval.tokenizers.tokenizer import Tokenizer
from pipelines import cluster
from pipelines.encode.texts import (
    EmbeddingSource,
    Say,
    embed_items,
    embed_origin,
    find_finished,
    read_embeddings,
)
from pipelines.start import start_ray


@dataclass(frozen=True)
class TokenizerPaths:
    """The items to tokenize, and folders that tokenization reads and writes."""

    items: Table[ItemsInfo]
    """The `items` table."""
    output: str
    """Folder of the tables `embeddings`, `sids`, `trie` and `quantizer`."""
    shared_embeddings: str = ""
    """The `embeddings` table if tokenizers share it; by default below `output`."""
    sequences: str = ""
    """The `sequences` table, needed only to fit codebooks on its training items."""

    @property
    def embeddings(self) -> str:
        """The `embeddings` table that is read and written."""
        return self.shared_embeddings or join(self.output, "embeddings")

    @property
    def sids(self) -> str:
        """The `sids` table."""
        return join(self.output, "sids")

    @property
    def trie(self) -> str:
        """The `trie` table."""
        return join(self.output, "trie")

    @property
    def quantizer(self) -> str:
        """The `quantizer` table: arrays of the tokenizer."""
        return join(self.output, "quantizer")


@dataclass(frozen=True)
class TrainedCodes:
    """Codes of all items, with the arrays that give codes to later items."""

    codes: np.ndarray
    """(N, C) codes. Items may have equal codes, as conflict codes are added later."""
    arrays: dict[str, np.ndarray]
    """Arrays of the tokenizer by name, such as `codebooks` (C, K, D)."""
    measures: CodeMeasures
    """Quality of the codes, for the manifest."""


def _train_task(
    embeddings: np.ndarray,
    tokenizer: Tokenizer,
    fit_items: np.ndarray | None,
    num_threads: int,
) -> Iterator[str | TrainedCodes]:
    """Train a tokenizer: yield messages, then the codes of all items."""
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with matmul_precision("highest"):
            vectors = torch.tensor(
                embeddings, device="cuda" if torch.cuda.is_available() else "cpu"
            )
            items = None if fit_items is None else torch.tensor(fit_items)
            quantized = yield from tokenizer.fit(vectors, items)
            error = quantization_error(quantized)
    finally:
        torch.set_num_threads(previous_threads)
    measures = replace(
        quantized.measures,
        reconstruction_error=quantized.reconstruction_error,
        quantization_error=error,
    )
    stored = {**tokenizer.arrays, "codebooks": quantized.codebooks}
    arrays = {name: array.numpy() for name, array in stored.items()}
    yield TrainedCodes(quantized.codes.numpy(), arrays, measures)


MAX_STARTS = 3
"""Maximum number of starts of the training task if its worker is lost. A restarted task
ends with the same codes."""


def train_codes(
    embeddings: np.ndarray,
    tokenizer: Tokenizer,
    say: Say = print,
    fit_items: np.ndarray | None = None,
) -> TrainedCodes:
    """Train codebooks in this process, or as a Ray task if RAY_ADDRESS is set.

    Args:
        embeddings: Embeddings (N, width) of all items.
        tokenizer: The tokenizer, which is trained.
        say: Prints progress.
        fit_items: Indices of the items to fit codebooks on, or None for all.
    """
    stream: Iterable[str | TrainedCodes]
    if os.environ.get("RAY_ADDRESS"):
        start_ray()
        has_gpu = ray.cluster_resources().get("GPU", 0) >= 1
        cpus_of_nodes = [
            node["Resources"].get("CPU", 0)
            for node in ray.nodes()
            if node["Alive"] and (not has_gpu or node["Resources"].get("GPU", 0) >= 1)
        ]
        # 1 if an autoscaler has no node yet
        num_cpus = min(4, max([1, *cpus_of_nodes]))
        num_gpus = 1 if has_gpu else 0
        cluster.check_room(1, {"CPU": num_cpus, "GPU": num_gpus})
        task: Any = ray.remote(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            num_returns="streaming",
            max_retries=MAX_STARTS - 1,
        )(_train_task)
        num_threads = max(1, int(num_cpus))
        references = task.remote(embeddings, tokenizer, fit_items, num_threads)
        stream = (ray.get(reference) for reference in references)
    else:
        num_threads = min(4, len(os.sched_getaffinity(0)))
        stream = _train_task(embeddings, tokenizer, fit_items, num_threads)
    for element in stream:
        if isinstance(element, TrainedCodes):
            return element
        say(f"{tokenizer.name} {element}")
    raise RuntimeError("the training task ended without codes")


def _make_unique(
    codes: np.ndarray, info: SidsInfo, say: Say
) -> tuple[np.ndarray, SidsInfo]:
    """Measure codes, and append conflict levels if the info has `conflict_level`."""
    sizes = info.codebook_sizes
    measures = measure_collisions(codes, info.measures)
    measures = replace(measures, levels=measure_levels(codes, sizes))
    if info.conflict_level:
        codes = add_conflict_levels(codes)
        sizes = [*sizes, *(codes[:, len(sizes) :].max(0) + 1).tolist()]
        if measures.largest_group > MAX_CONFLICT_CODES:
            say(
                f"note: {measures.largest_group} items share their codes, so the "
                f"conflict code takes two levels of {MAX_CONFLICT_CODES} codes"
            )
    return codes, replace(info, codebook_sizes=sizes, measures=measures)


def write_quantizer(uri: str, arrays: dict[str, np.ndarray], **manifest: Any) -> None:
    """Write the `quantizer` table, from which new items get their codes.

    Args:
        uri: Folder of the table.
        arrays: Arrays of the tokenizer by name.
        **manifest: Arguments of `commit`.
    """
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
        info=QuantizerInfo(),
        **manifest,
    )


def read_quantizer(uri: str) -> dict[str, np.ndarray]:
    """Read the arrays of the `quantizer` table, by name."""
    table = open_table(uri, QuantizerInfo).read()
    columns = (table["name"].to_pylist(), table["shape"].to_pylist(), table["values"])
    return {
        name: values.values.to_numpy().reshape(shape).copy()
        for name, shape, values in zip(*columns, strict=True)
    }


def write_sids(uri: str, codes: np.ndarray, **manifest: Any) -> Table[SidsInfo]:
    """Write the `sids` table of codes (N, C).

    Args:
        uri: Folder of the table.
        codes: Codes of all items, ordered by item_index.
        **manifest: Arguments of `commit`.
    """
    num_items, num_levels = codes.shape
    offsets = pa.array(np.arange(0, codes.size + 1, num_levels), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.array(codes.reshape(-1), pa.uint16()))
    item_index = pa.array(np.arange(num_items), pa.int32())
    table = pa.Table.from_arrays([item_index, lists], schema=SIDS)
    return commit(uri, "sids", SIDS, [write_part(uri, table)], **manifest)


def read_codes(sids: Table[SidsInfo]) -> np.ndarray:
    """Read the codes of the `sids` table as (N, C) int64, ordered by item_index."""
    return data.read_codes(sids.read()).numpy()


def write_trie(
    uri: str, sids: Table[SidsInfo], extends: Iterable[str] = ()
) -> Table[TrieInfo]:
    """Write the `trie` table of the `sids` table, replacing a trie of other SIDs.

    Args:
        uri: Folder of the `trie` table.
        sids: The `sids` table.
        extends: Hashes of the tries whose items this trie extends, oldest first.
    """
    codes = read_codes(sids)
    sizes = sids.info.codebook_sizes
    trie = Trie(torch.from_numpy(codes), tuple(sizes))
    edges = {name: column.numpy() for name, column in trie.edge_columns().items()}
    leaf = edges["item_index"] >= 0
    columns = [pa.array(edges[f.name], f.type) for f in TRIE if f.name != "item_index"]
    columns.append(pa.array(edges["item_index"], pa.int32(), mask=~leaf))
    part = write_part(uri, pa.Table.from_arrays(columns, schema=TRIE))
    info = TrieInfo(sizes, trie.levels, trie.num_items, trie.branching())
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


def settings_of_codes(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the options that the codes depend on, for the manifest."""
    options = asdict(tokenizer.config)
    del options["name"]
    settings = {"tokenizer": tokenizer.name}
    return settings | {tokenizer.name: options} if options else settings


def tokenize(
    paths: TokenizerPaths,
    tokenizer: Tokenizer,
    source: EmbeddingSource | None = None,
    published: str = "",
    overwrite: bool = False,
    say: Say = print,
) -> tuple[Table[SidsInfo], Table[TrieInfo], bool]:
    """Write `embeddings` (unless SIDs are published), `sids` and `trie`.

    Args:
        paths: Folders to read and write.
        tokenizer: The tokenizer.
        source: Origin of the embeddings; by default the encoder `minilm`.
        published: File of published SIDs, for a tokenizer that reads a file.
        overwrite: Whether to replace existing tables.
        say: Prints a message.

    Returns:
        The tables `sids` and `trie`, and whether anything was written.
    """
    items, settings = paths.items, settings_of_codes(tokenizer)
    inputs = {"items": items.hash}
    embeddings = sequences = sids = trie = None
    with writing(paths.output):
        if overwrite:
            check_replaceable(paths.embeddings, "embeddings")
        if tokenizer.reads_file:
            published_sids, inputs["published"] = read_published(published)
        else:
            uri, shared = paths.embeddings, paths.shared_embeddings
            if not overwrite and not has_manifest(uri) and has_manifest(paths.sids):
                raise UserError(
                    f"{paths.sids} was made from other embeddings", "settings"
                )
            source = source or EmbeddingSource()
            embeddings = find_table(shared, EmbeddingsInfo) if shared else None
            origin = fingerprint(*embed_origin(items, source))
            if embeddings and embeddings.fingerprint == origin:
                say(f"{uri}: up to date")
            else:
                is_elsewhere = shared not in ("", paths.output)
                with writing(uri) if is_elsewhere else nullcontext():
                    embeddings = embed_items(items, uri, source, overwrite, say)
            inputs["embeddings"] = embeddings.hash
        if tokenizer.on_train_items:
            sequences = open_table(paths.sequences, RetrievalInfo)
            inputs["sequences"] = sequences.hash
        if not overwrite:
            sids = find_finished(paths.sids, SidsInfo, settings, inputs)
            trie = find_table(paths.trie, TrieInfo) if sids else None
            if trie and sids and trie.inputs != {"sids": sids.hash}:
                trie = None
        if sids is None:
            if embeddings is None:
                item_ids = items.read(["item_id"])["item_id"].to_pylist()
                codes = catalogue_codes(published_sids, item_ids, published)
                # over all SIDs of the file, so that sizes do not depend on the k-core
                sizes = (np.array(list(published_sids.values())).max(0) + 1).tolist()
                num_unused = len(published_sids) - len(codes)
                measures = CodeMeasures(unused_published=num_unused)
            else:
                fit_items = find_train_items(sequences) if sequences else None
                trained = train_codes(
                    read_embeddings(embeddings), tokenizer, say, fit_items
                )
                codes, measures = trained.codes, trained.measures
                num_levels, codebook_size, _ = trained.arrays["codebooks"].shape
                sizes = [codebook_size] * num_levels
                write_quantizer(
                    paths.quantizer, trained.arrays, config=settings, inputs=inputs
                )
            has_duplicates = measure_collisions(codes).duplicates > 0
            info = SidsInfo(
                codebook_sizes=sizes,
                tokenizer=tokenizer.name,
                items_hash=items.hash,
                conflict_level=has_duplicates or not tokenizer.separates_items,
                measures=measures,
            )
            codes, info = _make_unique(codes, info, say)
            sids = write_sids(
                paths.sids,
                codes,
                config=settings,
                inputs=inputs,
                info=info,
            )
        is_complete = trie is not None
        trie = trie or write_trie(paths.trie, sids)
        if tokenizer.reads_file:
            # published SIDs may replace trained ones, whose tables have no use then
            for unused in (join(paths.output, "embeddings"), paths.quantizer):
                if has_manifest(unused):
                    clear(unused)
        return sids, trie, not is_complete
