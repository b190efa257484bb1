r"""SIDs of new items beside existing ones.

    python -m jobs.tokenize --tables TABLES --tokenizer rqkmeans --encoder minilm \
        --pca 128 --extend SIDS --output SIDS

Codebooks and codes do not change, so models can be trained further. New texts are
embedded and projected as the old ones were, and get the nearest free codes. TF-IDF is
fitted again on the old texts, and a file of own embeddings is read as a whole; the
embeddings of old items must not have changed. The drift of the new items from the
training items of the codebooks is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from models.config import pluralize
from models.retrieval.tokenizers import psid
from models.retrieval.tokenizers.codes import (
    branching,
    collision_groups,
    measure_collisions,
    measure_levels,
)
from models.retrieval.tokenizers.rqkmeans import encode
from models.retrieval.tokenizers.rqvae import Rqvae
from models.storage.tables import (
    Manifest,
    UserError,
    commit,
    fingerprint,
    has_manifest,
    join,
    read_manifest,
    read_table,
    up_to_date,
    writing,
)
from models.storage.uri import absolute
from pipelines.data.schemas import embeddings_schema
from pipelines.data.sids.config import EmbedConfig, TokenizerConfig
from pipelines.data.sids.embed import (
    Projection,
    Say,
    embed_origin,
    embed_ranges,
    item_texts,
    read_embeddings,
    write_vectors,
)
from pipelines.data.sids.own_embeddings import OwnEmbeddings
from pipelines.data.sids.tokenize import (
    read_codes,
    read_quantizer,
    write_quantizer,
    write_sids,
    write_trie,
)

MAX_DRIFT = 1.5
"""Ratio of the errors (or collision rates) of new and old items above which codebooks
should be trained again."""
MIN_COLLISION_RATE = 0.05
"""Collision rate below which there is no advice about it."""
MAX_ROUNDING = 1e-3
"""Largest difference of equal embeddings, relative to their root mean square; those of
equal texts differ by rounding."""


@dataclass(frozen=True)
class Embedder:
    """Options by which texts become embeddings."""

    encoder: str
    """Name of the encoder, or `tfidf`."""
    pca_width: int
    """Width of their PCA, 0 for none."""
    config: EmbedConfig
    """The other settings."""
    own: OwnEmbeddings | None = None
    """Embeddings of the user, instead of the encoder's."""


def extend_embeddings(
    items_uri: str,
    uri: str,
    before_uri: str,
    known: int,
    by: Embedder,
    say: Say,
    start: Callable[[], None],
) -> Manifest:
    """Write the embeddings of old and new items.

    Args:
        items_uri: Table of all items.
        uri: Table to write.
        before_uri: Embeddings of the old items.
        known: Number of old items that have codes.
        by: Options of the embeddings.
        say: Prints a message.
        start: Starts Ray, for encoders.

    Raises:
        UserError: If old and new embeddings are not of one space.
    """
    old = read_manifest(before_uri, "embeddings")
    used, inputs = embed_origin(items_uri, by.encoder, by.pca_width, by.config, by.own)
    if up_to_date(uri, fingerprint(used, inputs)):
        return read_manifest(uri, "embeddings")
    if old.config != used or old.inputs.get("encoder") != inputs.get("encoder"):
        raise UserError(
            f"{before_uri} was made with another encoder, --pca or --embed; give the "
            f"same with --extend"
        )
    begin = time.monotonic()
    vectors = read_embeddings(before_uri)[:known]
    items = read_table(items_uri, "items")
    fitted = old.info.get("fitted_items", old.rows)
    say(f"{pluralize(len(items) - known, 'new item')} beside {known:,}")
    # own embeddings and TF-IDF give embeddings of the old items too
    has_old_items = by.own is not None or by.encoder == "tfidf"
    counts, blocks = {}, []
    if by.own:
        blocks = [by.own.align(items["item_id"].to_pylist(), say)]
    else:
        texts = item_texts(items, by.config)
        counts = {"distinct_texts": len(set(texts))}
        if not has_old_items:
            start()
        if len(texts) > known:
            rest = texts if has_old_items else texts[known:]
            encoded = embed_ranges(rest, by.encoder, by.config, say, fitted)
            blocks = list(encoded)
    projection = Projection.read(old.info["pca"]) if by.pca_width else None
    fits = all(block.shape[1] == old.info["encoder_width"] for block in blocks)
    if projection and fits:
        blocks = [projection.project(block) for block in blocks]
    new = np.concatenate(blocks) if blocks else vectors[:0]
    if has_old_items and blocks:
        zeros = np.zeros((1, old.info["encoder_width"]), np.float32)
        if projection:
            zeros = projection.project(zeros)
        ids = items["item_id"].to_pylist()
        new_of_old = new[:known] if fits else None
        _check_unchanged(vectors, new_of_old, zeros, ids, before_uri, by.own, say)
        new = new[known:]
    parts = write_vectors(uri, np.concatenate([vectors, new]))
    info = {**old.info, "items": len(items), **counts, "fitted_items": fitted}
    timings = {"embed_s": round(time.monotonic() - begin, 2)}
    return commit(
        uri,
        "embeddings",
        embeddings_schema(vectors.shape[1]),
        parts,
        config=used,
        inputs=inputs,
        info=info,
        timings=timings,
        extends=[*old.extends, old.hash],
    )


def _check_unchanged(
    old: np.ndarray,
    new: np.ndarray | None,
    zeros: np.ndarray,
    ids: list[str],
    before_uri: str,
    own: OwnEmbeddings | None,
    say: Say,
) -> None:
    """Raise a UserError if the embeddings of old items have changed.

    Args:
        old: (n, width) embeddings that the codes were made from.
        new: (n, width) embeddings of the same items now; None if the width differs.
        zeros: (1, width) embedding of an item without a row in own embeddings.
        ids: Ids of the items.
        before_uri: Table of the old embeddings, for the message.
        own: Embeddings of the user, or None for TF-IDF.
        say: Prints a message.
    """
    remedy = "give the old embeddings" if own else "take an encoder such as minilm"
    what = f"embeddings of {own.uri}" if own else "texts, on which TF-IDF is fitted,"
    example = ""
    if new is not None:
        tolerance = MAX_ROUNDING * np.sqrt(np.square(old, dtype=np.float64).mean())
        changed = np.abs(new - old).max(1) > tolerance
        if own:
            was_missing = changed & (np.abs(old - zeros).max(1) <= tolerance)
            changed &= ~was_missing
            if was_missing.any():
                number = pluralize(int(was_missing.sum()), "old item")
                say(f"note: {number} without a row till now; codes stay")
        if not changed.any():
            return
        example = f", such as {ids[int(np.argmax(changed))]!r},"
    raise UserError(
        f"the {what} of items of {before_uri}{example} have changed, so that new ones "
        f"are of another space; make the SIDs anew, or {remedy}"
    )


def measure_drift(
    latents: np.ndarray,
    codes: np.ndarray,
    nearest: np.ndarray,
    codebooks: np.ndarray,
    old: int,
) -> dict[str, Any]:
    """Measure how well codes explain old and new items, and how many items collide.

    Errors are shares of the variance of the old items.

    Args:
        latents: (N, D) quantised vectors.
        codes: (N, C) codes.
        nearest: (N, C) nearest codes.
        codebooks: (C, K, D) centroids.
        old: Number of items that the codebooks were trained on, which come first.
    """
    residual = latents - codebooks[np.arange(codebooks.shape[0]), codes].sum(1)
    error = np.square(residual, dtype=np.float64).sum(1)
    spread = (
        np.square(latents[:old] - latents[:old].mean(0), dtype=np.float64).sum(1).mean()
        or 1.0
    )
    groups = collision_groups(nearest)
    collides = np.bincount(groups)[groups] > 1
    return {
        "new_items": len(latents) - old,
        "error_old": float(error[:old].mean() / spread),
        "error_new": float(error[old:].mean() / spread) if len(latents) > old else 0.0,
        "collision_rate_old": measure_collisions(nearest[:old])["collision_rate"],
        "collision_rate_new": float(collides[old:].mean())
        if len(latents) > old
        else 0.0,
        "relaxed_new": int((codes != nearest)[old:].any(1).sum()),
    }


def describe_drift(measured: dict[str, Any]) -> list[str]:
    """Describe the drift, with advice to train codebooks again if it is large."""
    lines = [
        f"{pluralize(measured['new_items'], 'item')} since the codebooks were trained: "
        f"variance not explained "
        f"{measured['error_new']:.4f} (old items {measured['error_old']:.4f}), "
        f"collision rate "
        f"{measured['collision_rate_new']:.4f} ({measured['collision_rate_old']:.4f}), "
        f"{measured['relaxed_new']:,} without their nearest codes"
    ]
    far = measured["error_new"] > MAX_DRIFT * measured["error_old"]
    crowded = measured["collision_rate_new"] > MAX_DRIFT * max(
        measured["collision_rate_old"], MIN_COLLISION_RATE
    )
    if far or crowded:
        why = "are explained worse" if far else "collide more often"
        lines.append(
            f"note: new items {why} than {MAX_DRIFT:g} times the old ones; train "
            f"codebooks anew, without --extend, when models are next trained from the "
            f"start"
        )
    return lines


def extend(
    items_uri: str,
    output: str,
    before: str,
    config: TokenizerConfig,
    by: Embedder,
    overwrite: bool = False,
    say: Say = print,
    embeddings: str = "",
    start: Callable[[], None] = lambda: None,
) -> tuple[Manifest, Manifest, bool]:
    """Write SIDs and a trie with the items that were added since `before`.

    Args:
        items_uri: Table of all items.
        output: Folder to write to; may be `before`.
        before: Folder of the existing SIDs.
        config: Options of the tokenizer, which must not have changed.
        by: Options of the embeddings.
        overwrite: Whether to replace other SIDs in `output`.
        say: Prints a message.
        embeddings: Folder of the embeddings; by default in `output`.
        start: Starts Ray, for encoders.

    Returns:
        Manifests of sids and trie, and whether anything was written.

    Raises:
        UserError: If existing codes would change.
    """
    output, before = absolute(output), absolute(before)
    items = read_manifest(items_uri, "items")
    old = read_manifest(join(before, "sids"), "sids")
    if config.tokenizer == "published":
        raise UserError(
            "--extend is of trained codebooks; give a --published file that has the "
            "new items too"
        )
    if old.config != config.relevant_settings():
        raise UserError(
            f"{before} was made with other settings of the tokenizer; give the same "
            f"with --extend"
        )
    if old.info["items_hash"] not in (*items.extends, items.hash):
        raise UserError(
            f"{items_uri} does not extend the items of {before}; see jobs.prepare "
            f"--append"
        )
    sids_uri, trie_uri = join(output, "sids"), join(output, "trie")
    with writing(output):
        existing = read_manifest(sids_uri, "sids") if has_manifest(sids_uri) else None
        is_current = (
            existing is not None
            and existing.info["items_hash"] == items.hash
            and old.hash in (existing.hash, *existing.extends)
        )
        if existing and not is_current and output != before and not overwrite:
            raise UserError(
                f"{output} holds other SIDs; use --overwrite, or another --output"
            )
        trie = read_manifest(join(before, "trie"), "trie")
        if not is_current:
            begin = time.monotonic()
            embeddings_uris = [
                embeddings or join(folder, "embeddings") for folder in (output, before)
            ]
            embedded = extend_embeddings(
                items_uri,
                embeddings_uris[0],
                embeddings_uris[1],
                old.rows,
                by,
                say,
                start,
            )
            arrays = read_quantizer(join(before, "quantizer"))
            inputs = {"items": items.hash, "embeddings": embedded.hash}
            if output != before:
                write_quantizer(
                    join(output, "quantizer"),
                    arrays,
                    config=old.config,
                    inputs=old.inputs,
                )
            codes, measures = _extend_codes(
                read_embeddings(embeddings_uris[0]),
                read_codes(join(before, "sids")),
                arrays,
                old,
                config,
            )
            info = {**old.info, **measures, "items_hash": items.hash}
            write_sids(
                sids_uri,
                codes,
                config=old.config,
                inputs=inputs,
                info=info,
                timings={"tokenize_s": round(time.monotonic() - begin, 2)},
                extends=[*old.extends, old.hash],
            )
        sids = read_manifest(sids_uri, "sids")
        if is_current and up_to_date(trie_uri, fingerprint({}, {"sids": sids.hash})):
            return sids, read_manifest(trie_uri, "trie"), False
        return sids, write_trie(trie_uri, sids_uri, [*trie.extends, trie.hash]), True


def _extend_codes(
    embeddings: np.ndarray,
    old_codes: np.ndarray,
    arrays: dict[str, np.ndarray],
    old: Manifest,
    config: TokenizerConfig,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Assign codes to the items after the first M.

    Args:
        embeddings: (N, width) embeddings of all items.
        old_codes: (M, C) codes of the first M items, which stay.
        arrays: The quantizer: `codebooks`, and the weights of an encoder, if it has
            one.
        old: Manifest of the codes to extend.

    Returns:
        The codes (N, C) of all items, and measures for the manifest.
    """
    codebooks, sizes = arrays["codebooks"], old.info["codebook_sizes"]
    depth, known = len(codebooks), len(old_codes)
    latents = torch.from_numpy(embeddings)
    weights = {
        name: torch.from_numpy(weight)
        for name, weight in arrays.items()
        if name != "codebooks"
    }
    if weights:
        model = Rqvae(embeddings.shape[1], config.rqvae)
        model.encoder.load_state_dict(weights)
        latents = model.latents(latents)
    nearest = encode(latents, torch.from_numpy(codebooks))[0].numpy()
    vectors = latents.numpy()
    doubles = vectors[known:].astype(np.float64), codebooks.astype(np.float64)
    new = psid.extend(
        doubles[0], nearest[known:], old_codes, doubles[1], sizes[depth:], config.psid
    )
    codes = np.concatenate([old_codes, new])
    fitted = old.info.get("fitted_items", known)
    return codes, {
        **measure_collisions(codes[:, :depth]),
        "levels": measure_levels(codes[:, :depth], sizes[:depth]),
        "branching": branching(codes),
        "fitted_items": fitted,
        "drift": measure_drift(vectors, codes[:, :depth], nearest, codebooks, fitted),
    }
