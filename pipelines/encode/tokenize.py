"""SIDs of items and their trie: embeddings, a tokenizer, unique codes, measures.

`tokenize` writes the tables `embeddings`, `sids` and `trie` to one folder, except those
that are up to date. Codebooks are trained in this process, or on a cluster in one Ray
task: networks on a GPU if there is one, k-means on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import polars as pl
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
    Part,
    Table,
    check_replaceable,
    clear,
    commit,
    find_table,
    fingerprint,
    open_table,
    read_manifest,
    write_part,
    writing,
)
from models import registry
from models.cpu.weights import matmul_precision
from models.retrieval import data
from models.retrieval.requests import find_train_items
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
from pipelines.encode.config import TokenizeConfig
from pipelines.encode.texts import (
    Say,
    embed_items,
    embed_origin,
    embeddings_uri,
    find_finished,
    find_precomputed,
    read_embeddings,
    to_list_column,
)
from pipelines.start import start_ray

TrainedCodes = tuple[np.ndarray, dict[str, np.ndarray], CodeMeasures]
"""(N, C) codes of all items, several of which may have equal codes; arrays of the
tokenizer that give codes to later items, by name, such as `codebooks` (C, K, D); and
measures of the codes, for the manifest."""


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
    yield quantized.codes.numpy(), arrays, measures


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
        num_threads = int(num_cpus)
        references = task.remote(embeddings, tokenizer, fit_items, num_threads)
        stream = (ray.get(reference) for reference in references)
    else:
        num_threads = min(4, len(os.sched_getaffinity(0)))
        stream = _train_task(embeddings, tokenizer, fit_items, num_threads)
    for element in stream:
        if not isinstance(element, str):
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


def write_quantizer(
    uri: str,
    arrays: dict[str, np.ndarray],
    config: dict[str, Any],
    inputs: dict[str, str],
) -> None:
    """Write the `quantizer` table, from which new items get their codes.

    Args:
        uri: Folder of the table.
        arrays: Arrays of the tokenizer by name.
        config: Settings of the codes.
        inputs: Hashes of the tables that the arrays were fitted on, by name.
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
        config=config,
        inputs=inputs,
    )


def read_quantizer(uri: str) -> dict[str, np.ndarray]:
    """Read the arrays of the `quantizer` table, by name."""
    table = open_table(uri, QuantizerInfo).read()
    columns = (table["name"].to_pylist(), table["shape"].to_pylist(), table["values"])
    return {
        name: values.values.to_numpy().reshape(shape).copy()
        for name, shape, values in zip(*columns, strict=True)
    }


def write_codes(uri: str, codes: np.ndarray) -> Part:
    """Write the part of the `sids` table; the manifest is left to the caller.

    Args:
        uri: Folder of the table.
        codes: Codes (N, C) of all items, ordered by item_index.
    """
    columns = [pa.array(np.arange(len(codes))), to_list_column(codes)]
    return write_part(uri, pa.Table.from_arrays(columns, SIDS.names).cast(SIDS))


def read_codes(sids: Table[SidsInfo]) -> np.ndarray:
    """Read the codes of the `sids` table as (N, C) int64, ordered by item_index."""
    return data.read_codes(sids.read()).numpy()


def write_trie(
    uri: str, sids: Table[SidsInfo], extends: Iterable[str] = ()
) -> Table[TrieInfo]:
    """Write the `trie` table of the `sids` table, replacing a trie of other SIDs.

    There is a row per edge. Rows are sorted by `level` and `child`, the rank of the
    edge within its level. `node` is the rank of the parent's edge (0 at the root),
    `token` the code, and `item_index` the item at the last level, null above it.

    Args:
        uri: Folder of the `trie` table.
        sids: The `sids` table.
        extends: Hashes of the tries whose items this trie extends, oldest first.
    """
    codes = read_codes(sids)
    order = np.lexsort(codes.T[::-1])
    ordered = codes[order]
    # (N, C): whether the item's prefix differs from the one before
    differs = np.ones(codes.shape, bool)
    differs[1:] = (ordered[1:] != ordered[:-1]).cumsum(1) > 0
    # (N, C + 1): rank of each item's prefix of 0 to C codes
    ranks = np.column_stack([np.zeros(len(codes), int), differs.cumsum(0) - 1])
    levels = []
    for level, is_new in enumerate(differs.T):
        columns = {
            "node": ranks[is_new, level],
            "token": ordered[is_new, level],
            "child": ranks[is_new, level + 1],
        }
        item = pl.Series(order) if level == codes.shape[1] - 1 else pl.lit(None)
        edges = pl.DataFrame(columns).with_columns(level=level, item_index=item)
        levels.append(edges.select(TRIE.names).to_arrow().cast(TRIE))
    part = write_part(uri, pa.concat_tables(levels).combine_chunks())
    num_edges = differs.sum(0)
    branching = num_edges / np.append(1, num_edges[:-1])
    sizes = sids.info.codebook_sizes
    info = TrieInfo(sizes, len(num_edges), len(codes), branching.tolist())
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
    config: TokenizeConfig, say: Say = print
) -> tuple[Table[SidsInfo], Table[TrieInfo], bool]:
    """Write `embeddings` (unless SIDs are published), `sids` and `trie`.

    Returns:
        The tables `sids` and `trie`, and whether anything was written.
    """
    tokenizer = registry.find_tokenizer(config.tokenizer.name)(config.tokenizer)
    output = config.output
    items = open_table(join(config.tables, "items"), ItemsInfo)
    size = getattr(tokenizer.config, "codebook_size", 0)
    if size > items.rows:
        raise UserError(
            f"tokenizer.codebook_size is {size}, it must be at most {items.rows}, the "
            f"number of items"
        )
    settings, inputs = settings_of_codes(tokenizer), {"items": items.hash}
    quantizer_uri, sids_uri = join(output, "quantizer"), join(output, "sids")
    embeddings = sequences = sids = trie = None
    with writing(output):
        uri = embeddings_uri(config)
        if config.overwrite:
            check_replaceable(uri, "embeddings")
        if tokenizer.reads_file:
            published, inputs["published"] = read_published(config.published)
        else:
            precomputed = find_precomputed(config)
            is_shared = uri != join(output, "embeddings")
            embeddings = find_table(uri, EmbeddingsInfo) if is_shared else None
            origin = fingerprint(*embed_origin(items, config, precomputed))
            if embeddings and embeddings.fingerprint == origin:
                say(f"{uri}: up to date")
            else:
                with writing(uri) if is_shared else nullcontext():
                    embeddings = embed_items(items, uri, config, precomputed, say)
            inputs["embeddings"] = embeddings.hash
        if tokenizer.on_train_items:
            sequences = open_table(join(config.tables, "sequences"), RetrievalInfo)
            inputs["sequences"] = sequences.hash
        if not config.overwrite:
            sids = find_finished(sids_uri, SidsInfo, settings, inputs)
            trie = find_table(join(output, "trie"), TrieInfo) if sids else None
            if trie and sids and trie.inputs != {"sids": sids.hash}:
                trie = None
        if sids is None:
            if embeddings is None:
                item_ids = items.read(["item_id"])["item_id"].to_pylist()
                codes = catalogue_codes(published, item_ids, config.published)
                # over all SIDs of the file, so that sizes do not depend on the k-core
                sizes = (np.array(list(published.values())).max(0) + 1).tolist()
                num_unused = len(published) - len(codes)
                measures = CodeMeasures(unused_published=num_unused)
            else:
                fit_items = find_train_items(sequences) if sequences else None
                codes, arrays, measures = train_codes(
                    read_embeddings(embeddings), tokenizer, say, fit_items
                )
                num_levels, codebook_size, _ = arrays["codebooks"].shape
                sizes = [codebook_size] * num_levels
                write_quantizer(quantizer_uri, arrays, settings, inputs)
            has_duplicates = measure_collisions(codes).duplicates > 0
            info = SidsInfo(
                codebook_sizes=sizes,
                tokenizer=tokenizer.name,
                items_hash=items.hash,
                conflict_level=has_duplicates or not tokenizer.separates_items,
                measures=measures,
            )
            codes, info = _make_unique(codes, info, say)
            sids = commit(
                sids_uri,
                "sids",
                SIDS,
                [write_codes(sids_uri, codes)],
                config=settings,
                inputs=inputs,
                info=info,
            )
        is_complete = trie is not None
        trie = trie or write_trie(join(output, "trie"), sids)
        if tokenizer.reads_file:
            # published SIDs may replace trained ones, whose tables have no use then
            for unused in (join(output, "embeddings"), quantizer_uri):
                if read_manifest(unused):
                    clear(unused)
        return sids, trie, not is_complete
