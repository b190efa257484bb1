r"""SIDs of new items beside existing ones.

    python -m jobs.tokenize --tables TABLES --tokenizer rqkmeans --encoder minilm \
        --pca 128 --extend SIDS --output SIDS

Codebooks and codes do not change, so models can be trained further. New texts are
embedded and projected like the old texts, and get the nearest free codes. TF-IDF is
fitted again on the old texts, and a file of precomputed embeddings is read as a whole;
both must reproduce the embeddings of the old items. The drift of the new items from the
training items of the codebooks is measured.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from core.errors import UserError, pluralize
from core.files import absolute
from core.schemas import (
    Drift,
    EmbeddingsInfo,
    ItemsInfo,
    SidsInfo,
    TrieInfo,
    embeddings_schema,
)
from core.tables import (
    Table,
    commit,
    find_table,
    fingerprint,
    open_table,
    writing,
)
from models.retrieval.tokenizers import psid
from models.retrieval.tokenizers.codes import (
    collision_groups,
    measure_collisions,
    measure_levels,
)
from models.retrieval.tokenizers.tokenizer import Tokenizer
from pipelines.encode.texts import (
    EmbeddingSource,
    Projection,
    Say,
    embed_origin,
    embed_ranges,
    item_texts,
    read_embeddings,
    write_vectors,
)
from pipelines.encode.tokenize import (
    TokenizerPaths,
    read_codes,
    read_quantizer,
    settings_of_codes,
    write_quantizer,
    write_sids,
    write_trie,
)

MAX_ROUNDING = 1e-3
"""Differences of embeddings up to this share of their root mean square count as
rounding: encoding equal texts again gives slightly different embeddings."""


def extend_embeddings(
    items: Table[ItemsInfo],
    uri: str,
    old_uri: str,
    num_old: int,
    source: EmbeddingSource,
    say: Say,
) -> Table[EmbeddingsInfo]:
    """Write the embeddings of old and new items, unless they are up to date.

    Args:
        items: The `items` table, with old and new items.
        uri: The `embeddings` table to write.
        old_uri: The `embeddings` table of the old items.
        num_old: Number of items that have codes; they come first.
        source: Origin of the new embeddings, the same as of the old embeddings.
        say: Prints a message.
    """
    settings, inputs = embed_origin(items, source)
    earlier = open_table(old_uri, EmbeddingsInfo)
    current = earlier if uri == old_uri else find_table(uri, EmbeddingsInfo)
    if current and current.fingerprint == fingerprint(settings, inputs):
        return current
    if earlier.config != settings or earlier.inputs.get("encoder") != inputs.get(
        "encoder"
    ):
        raise UserError(f"{old_uri} was made with another encoder, pca or embed")
    old_info = earlier.info
    old = read_embeddings(earlier)[:num_old]
    projection = Projection.from_record(old_info.pca) if old_info.pca else None
    rows = items.read()
    item_ids = rows["item_id"].to_pylist()
    num_fit = old_info.fitted_items or earlier.rows
    say(f"{pluralize(items.rows - num_old, 'new item')} in addition to {num_old:,}")
    info = replace(old_info, fitted_items=num_fit)
    precomputed = source.precomputed
    is_compared = bool(precomputed) or source.encoder == "tfidf"
    encoded = np.zeros((0, old_info.encoder_width), np.float32)
    if precomputed:
        encoded = precomputed.align(item_ids, say)
    else:
        texts = item_texts(rows, source.config)
        info.distinct_texts = len(set(texts))
        if len(texts) > num_old:
            new_texts = texts if is_compared else texts[num_old:]
            ranges = embed_ranges(
                new_texts, source.encoder, source.config, say, num_fit
            )
            encoded = np.concatenate(list(ranges))
    has_old_width = encoded.shape[1] == old_info.encoder_width
    vectors = projection.project(encoded) if projection and has_old_width else encoded
    if is_compared and len(encoded):
        has_changed = np.ones(num_old, bool)
        if has_old_width:
            tolerance = MAX_ROUNDING * np.sqrt(np.square(old, dtype=np.float64).mean())
            has_changed = np.abs(vectors[:num_old] - old).max(1) > tolerance
        if precomputed and has_old_width:
            zeros = np.zeros((1, old_info.encoder_width), np.float32)
            missing = projection.project(zeros) if projection else zeros
            was_missing = np.abs(old - missing).max(1) <= tolerance
            num_filled = int((has_changed & was_missing).sum())
            if num_filled:
                count = pluralize(num_filled, "old item")
                say(f"note: {count} had no row before; codes do not change")
            has_changed &= ~was_missing
        if has_changed.any():
            subject = "texts, on which TF-IDF is fitted,"
            if precomputed:
                subject = f"embeddings of {precomputed.uri}"
            raise UserError(
                f"the {subject} of items of {old_uri}, such as "
                f"{item_ids[int(np.argmax(has_changed))]!r}, have changed, so new "
                f"embeddings would not be comparable with the old ones"
            )
        vectors = vectors[num_old:]
    parts = write_vectors(uri, np.concatenate([old, vectors]))
    return commit(
        uri,
        "embeddings",
        embeddings_schema(old_info.width),
        parts,
        config=settings,
        inputs=inputs,
        info=info,
        extends=earlier.ancestry,
    )


def measure_drift(
    latents: np.ndarray,
    codes: np.ndarray,
    nearest: np.ndarray,
    codebooks: np.ndarray,
    num_old: int,
) -> Drift:
    """Measure how well codes explain old and new items, and how many items collide.

    Args:
        latents: Vectors (N, D) that the codes quantise.
        codes: Codes (N, C) of the items, without conflict levels.
        nearest: Nearest codes (N, C), which several items may share.
        codebooks: Centroids (C, K, D).
        num_old: Number of items that the codebooks were trained on; they come first.
    """
    levels = np.arange(codebooks.shape[0])
    residual = latents - codebooks[levels, codes].sum(1)  # (N, D)
    error = np.square(residual, dtype=np.float64).sum(1)  # (N,)
    centred = latents[:num_old] - latents[:num_old].mean(0)
    variance = np.square(centred, dtype=np.float64).sum(1).mean() or 1.0
    groups = collision_groups(nearest)
    collides = np.bincount(groups)[groups] > 1  # (N,)
    num_new = len(latents) - num_old
    old_rate = measure_collisions(nearest[:num_old]).collision_rate
    return Drift(
        new_items=num_new,
        error_old=float(error[:num_old].mean() / variance),
        error_new=float(error[num_old:].mean() / variance) if num_new else 0.0,
        collision_rate_old=old_rate,
        collision_rate_new=float(collides[num_old:].mean()) if num_new else 0.0,
        relaxed_new=int((codes != nearest)[num_old:].any(1).sum()),
    )


def describe_drift(measured: Drift) -> str:
    """Format the measures of `measure_drift`."""
    return (
        f"{pluralize(measured.new_items, 'item')} since the codebooks were trained: "
        f"variance not explained "
        f"{measured.error_new:.4f} (old items {measured.error_old:.4f}), "
        f"collision rate "
        f"{measured.collision_rate_new:.4f} ({measured.collision_rate_old:.4f}), "
        f"{measured.relaxed_new:,} without their nearest codes"
    )


def extend(
    paths: TokenizerPaths,
    old_output: str,
    tokenizer: Tokenizer,
    source: EmbeddingSource,
    overwrite: bool = False,
    say: Say = print,
) -> tuple[Table[SidsInfo], Table[TrieInfo], bool]:
    """Write SIDs and a trie that add the new items of `paths.items` to existing SIDs.

    Args:
        paths: Folders to read and write; the output may be `old_output`.
        old_output: Folder of the existing SIDs.
        tokenizer: Tokenizer with the same options as for the existing SIDs.
        source: Origin of the embeddings, the same as for the existing SIDs.
        overwrite: Whether to replace other SIDs in the output.
        say: Prints a message.

    Returns:
        The tables `sids` and `trie`, and whether anything was written.
    """
    paths = replace(paths, output=absolute(paths.output))
    old_paths = replace(paths, output=absolute(old_output))
    is_in_place = paths.output == old_paths.output
    with writing(paths.output):
        old = open_table(old_paths.sids, SidsInfo)
        if tokenizer.reads_file:
            raise UserError(f"{tokenizer.name} has no trained codebooks to extend")
        if old.config != settings_of_codes(tokenizer):
            raise UserError(f"{old.uri} was made with other options of the tokenizer")
        if old.info.items_hash not in paths.items.ancestry:
            raise UserError(f"{paths.items.uri} does not extend the items of {old.uri}")
        sids = old if is_in_place else find_table(paths.sids, SidsInfo)
        is_current = (
            sids is not None
            and sids.info.items_hash == paths.items.hash
            and old.hash in sids.ancestry
        )
        if sids and not (is_current or is_in_place or overwrite):
            raise UserError(f"{paths.output} holds other SIDs", "settings")
        old_trie = open_table(old_paths.trie, TrieInfo)
        trie = old_trie if is_in_place else find_table(paths.trie, TrieInfo)
        if sids and is_current:
            if trie and trie.inputs == {"sids": sids.hash}:
                return sids, trie, False
            return sids, write_trie(paths.trie, sids, old_trie.ancestry), True
        embeddings = extend_embeddings(
            paths.items, paths.embeddings, old_paths.embeddings, old.rows, source, say
        )
        arrays = read_quantizer(old_paths.quantizer)
        if not is_in_place:
            write_quantizer(
                paths.quantizer, arrays, config=old.config, inputs=old.inputs
            )
        codebooks = arrays["codebooks"]
        sizes = old.info.codebook_sizes
        num_levels = len(codebooks)
        num_old = old.rows
        tokenizer.arrays = {
            name: torch.from_numpy(array) for name, array in arrays.items()
        }
        latents, nearest_codes = tokenizer.assign(
            torch.from_numpy(read_embeddings(embeddings))
        )
        vectors, nearest = latents.numpy(), nearest_codes.numpy()
        old_codes = read_codes(old)
        new_codes = psid.extend_codes(
            vectors[num_old:].astype(np.float64),
            nearest[num_old:],
            old_codes,
            codebooks.astype(np.float64),
            sizes[num_levels:],
        )
        codes = np.concatenate([old_codes, new_codes])
        quantized = codes[:, :num_levels]  # without conflict levels
        num_fit = old.info.fitted_items or num_old
        measures = measure_collisions(quantized, old.info.measures)
        levels = measure_levels(quantized, sizes[:num_levels])
        drift = measure_drift(vectors, quantized, nearest, codebooks, num_fit)
        items_hash = embeddings.inputs["items"]
        sids = write_sids(
            paths.sids,
            codes,
            config=old.config,
            inputs={"items": items_hash, "embeddings": embeddings.hash},
            info=replace(
                old.info,
                items_hash=items_hash,
                measures=replace(measures, levels=levels),
                fitted_items=num_fit,
                drift=drift,
            ),
            extends=old.ancestry,
        )
        return sids, write_trie(paths.trie, sids, old_trie.ancestry), True
