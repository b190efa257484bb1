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

import time
from dataclasses import replace

import numpy as np
import torch

from core.errors import UserError, pluralize
from core.files import absolute, join
from core.schemas import (
    SIDS,
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
from models import registry
from models.retrieval.tokenizers import psid
from models.retrieval.tokenizers.codes import (
    collision_groups,
    measure_collisions,
    measure_levels,
)
from pipelines.encode.config import TokenizeConfig
from pipelines.encode.texts import (
    Projection,
    Say,
    embed_origin,
    embed_ranges,
    embeddings_uri,
    find_precomputed,
    item_texts,
    read_embeddings,
    write_vectors,
)
from pipelines.encode.tokenize import (
    read_codes,
    read_quantizer,
    settings_of_codes,
    tokenize,
    write_codes,
    write_quantizer,
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
    config: TokenizeConfig,
    say: Say,
) -> Table[EmbeddingsInfo]:
    """Write the embeddings of old and new items, unless they are up to date.

    Args:
        items: The `items` table, with old and new items.
        uri: The `embeddings` table to write.
        old_uri: The `embeddings` table of the old items.
        num_old: Number of items that have codes; they come first.
        config: Options, the same as of the old embeddings.
        say: Prints a message.
    """
    precomputed = find_precomputed(config)
    settings, inputs = embed_origin(items, config, precomputed)
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
    is_compared = bool(precomputed) or config.encoder == "tfidf"
    encoded = np.zeros((0, old_info.encoder_width), np.float32)
    if precomputed:
        encoded = precomputed.align(item_ids, say)
    else:
        texts = item_texts(rows, config.embed)
        if len(texts) > num_old:
            new_texts = texts if is_compared else texts[num_old:]
            ranges = embed_ranges(new_texts, config.encoder, config.embed, say, num_fit)
            encoded = np.concatenate(list(ranges))
    if encoded.shape[1] != old_info.encoder_width:
        raise UserError(
            f"new embeddings have the width {encoded.shape[1]}, those of {old_uri} "
            f"have {old_info.encoder_width}"
        )
    vectors = projection.project(encoded) if projection else encoded
    if is_compared and len(encoded):
        tolerance = MAX_ROUNDING * np.sqrt(np.square(old, dtype=np.float64).mean())
        has_changed = np.abs(vectors[:num_old] - old).max(1) > tolerance
        if precomputed:
            # an item without a row had zeros, and keeps its codes if it gets a row
            zeros = np.zeros((1, old_info.encoder_width), np.float32)
            missing = projection.project(zeros) if projection else zeros
            has_changed &= np.abs(old - missing).max(1) > tolerance
        if has_changed.any():
            raise UserError(
                f"the embeddings of items of {old_uri}, such as "
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
        info=replace(old_info, fitted_items=num_fit),
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


def make_sids(config: TokenizeConfig) -> Table[SidsInfo]:
    """Make the semantic IDs of all items or of new ones, and print their quality."""
    began = time.monotonic()
    make = extend if config.extend else tokenize
    sids, trie, is_new = make(config)
    print("\n".join(describe_quality(sids, trie)))
    if sids.info.drift:
        print(describe_drift(sids.info.drift))
    if is_new:
        print(
            f"made {config.output}: sids {sids.hash[:12]}, trie {trie.hash[:12]} in "
            f"{time.monotonic() - began:.0f} s"
        )
    else:
        print(f"nothing to do: {config.output} is up to date; overwrite makes it again")
    return sids


def describe_quality(sids: Table[SidsInfo], trie: Table[TrieInfo]) -> list[str]:
    """Return lines on the quality of the SIDs: errors, collisions, use of codes."""
    sizes, measures = sids.info.codebook_sizes, sids.info.measures
    lines = [
        f"{pluralize(sids.rows, 'item')}, {pluralize(len(sizes), 'code')} each, "
        f"codebooks {sizes}"
    ]
    if measures.reconstruction_error is not None:
        lines.append(
            f"share of variance not explained: embeddings, by the nearest codes "
            f"{measures.reconstruction_error:.4f}, quantised space, by the chosen "
            f"codes {measures.quantization_error:.4f}"
        )
    if measures.relaxed_items is not None:
        lines.append(
            f"{pluralize(measures.relaxed_items, 'item')} relaxed; collision rate "
            f"{measures.collision_rate_before:.4f} before, 0 after"
        )
    else:
        lines.append(
            f"collision rate {measures.collision_rate:.4f} before the conflict code: "
            f"{measures.distinct} distinct, "
            f"{pluralize(measures.duplicates, 'duplicate')}, largest group "
            f"{measures.largest_group}"
        )
    for number, level in enumerate(measures.levels, 1):
        lines.append(
            f"level {number}: {level.used} codes in use ({level.use:.1%}), "
            f"entropy {level.entropy_bits:.2f} bits"
        )
    branching = ", ".join(f"{mean:.2f}" for mean in trie.info.branching)
    lines.append(f"branching per level {branching}")
    return lines


def extend(
    config: TokenizeConfig, say: Say = print
) -> tuple[Table[SidsInfo], Table[TrieInfo], bool]:
    """Write SIDs and a trie that add the new items to the existing SIDs `extend`.

    The output may be the folder of the existing SIDs. Tokenizer and origin of the
    embeddings are those of the existing SIDs.

    Returns:
        The tables `sids` and `trie`, and whether anything was written.
    """
    tokenizer = registry.find_tokenizer(config.tokenizer.name)(config.tokenizer)
    items = open_table(join(config.tables, "items"), ItemsInfo)
    output, old_output = absolute(config.output), absolute(config.extend)
    config = replace(config, output=output)
    is_in_place = output == old_output
    sids_uri, trie_uri = join(output, "sids"), join(output, "trie")
    with writing(output):
        old = open_table(join(old_output, "sids"), SidsInfo)
        if tokenizer.reads_file:
            raise UserError(f"{tokenizer.name} has no trained codebooks to extend")
        if old.config != settings_of_codes(tokenizer):
            raise UserError(f"{old.uri} was made with other options of the tokenizer")
        if old.info.items_hash not in items.ancestry:
            raise UserError(f"{items.uri} does not extend the items of {old.uri}")
        sids = old if is_in_place else find_table(sids_uri, SidsInfo)
        is_current = (
            sids is not None
            and sids.info.items_hash == items.hash
            and old.hash in sids.ancestry
        )
        if sids and not (is_current or is_in_place or config.overwrite):
            raise UserError(f"{output} holds other SIDs", "settings")
        old_trie = open_table(join(old_output, "trie"), TrieInfo)
        trie = old_trie if is_in_place else find_table(trie_uri, TrieInfo)
        if sids and is_current:
            if trie and trie.inputs == {"sids": sids.hash}:
                return sids, trie, False
            return sids, write_trie(trie_uri, sids, old_trie.ancestry), True
        embeddings = extend_embeddings(
            items,
            embeddings_uri(config),
            embeddings_uri(replace(config, output=old_output)),
            old.rows,
            config,
            say,
        )
        arrays = read_quantizer(join(old_output, "quantizer"))
        if not is_in_place:
            write_quantizer(
                join(output, "quantizer"),
                arrays,
                old.config,
                old.inputs,
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
        sids = commit(
            sids_uri,
            "sids",
            SIDS,
            [write_codes(sids_uri, codes)],
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
        return sids, write_trie(trie_uri, sids, old_trie.ancestry), True
