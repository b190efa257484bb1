"""Add new items to existing semantic IDs: codebooks and codes stay, so that a model can
continue with them.

    python -m jobs.tokenize --tables TABLES --tokenizer rqkmeans --encoder minilm --pca 128 --extend SIDS --output SIDS

New texts are embedded and projected like the old ones, and get the nearest free codes.
TF-IDF is fitted again on the old texts, and a file of embeddings is read whole: vectors
of old items must be unchanged. The drift of new items from the training data of the
codebooks is measured beside the old items.
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
    collisions,
    level_measures,
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

DRIFT = 1.5
"""Ratio of new to old quantization error, or collision rate, above which new codebooks
are advised.
"""
FEW_COLLISIONS = 0.05
"""Collision rate below which no advice is given."""
SAME = 1e-3
"""Smallest difference of changed embeddings, as a share of their root mean square.

Embeddings of equal texts differ by rounding.
"""


@dataclass(frozen=True)
class Embedder:
    """Options that turn texts into embeddings."""

    encoder: str
    """Name of the encoder, or `tfidf`."""
    pca_width: int
    """Width of the PCA; 0 for none."""
    config: EmbedConfig
    """The other settings."""
    own: OwnEmbeddings | None = None
    """Embeddings that replace the encoder's."""


def extend_embeddings(
    items_uri: str,
    uri: str,
    before_uri: str,
    known: int,
    by: Embedder,
    say: Say,
    start: Callable[[], None],
) -> Manifest:
    """Extend the embeddings of the first `known` items by the embeddings of new items.

    Raises:
        UserError: if old and new embeddings would not share one space.
    """
    old = read_manifest(before_uri, "embeddings")
    used, inputs = embed_origin(items_uri, by.encoder, by.pca_width, by.config, by.own)
    if up_to_date(uri, fingerprint(used, inputs)):
        return read_manifest(uri, "embeddings")
    if old.config != used or old.inputs.get("encoder") != inputs.get("encoder"):
        raise UserError(
            f"{before_uri} was made with another encoder, --pca or --embed; give the same with --extend"
        )
    began = time.monotonic()
    vectors = read_embeddings(before_uri)[:known]
    items = read_table(items_uri, "items")
    fitted = old.info.get("fitted_items", old.rows)
    say(f"{pluralize(len(items) - known, 'new item')} beside {known:,}")
    # these embed old items again
    reads_old_items = by.own is not None or by.encoder == "tfidf"
    counts: dict[str, Any] = {}
    if by.own:
        blocks = [by.own.align(items["item_id"].to_pylist(), say)]
    else:
        texts = item_texts(items, by.config)
        counts = {"distinct_texts": len(set(texts))}
        if not reads_old_items:
            start()
        new_texts = texts if reads_old_items else texts[known:]
        blocks = []
        if len(texts) > known:
            blocks = list(embed_ranges(new_texts, by.encoder, by.config, say, fitted))
    projection = Projection.read(old.info["pca"]) if by.pca_width else None
    has_old_width = all(block.shape[1] == old.info["encoder_width"] for block in blocks)
    if projection and has_old_width:
        blocks = [projection.project(block) for block in blocks]
    new = np.concatenate(blocks) if blocks else vectors[:0]
    if reads_old_items and blocks:
        if not has_old_width:
            raise _changed_embeddings(before_uri, by, "")
        check_unchanged(
            vectors, new[:known], items["item_id"], old, by, before_uri, say
        )
        new = new[known:]
    parts = write_vectors(uri, np.concatenate([vectors, new]))
    info = {**old.info, "items": len(items), **counts, "fitted_items": fitted}
    timings = {"embed_s": round(time.monotonic() - began, 2)}
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


def check_unchanged(
    vectors: np.ndarray,
    again: np.ndarray,
    item_ids: Any,
    old: Manifest,
    by: Embedder,
    before_uri: str,
    say: Say,
) -> None:
    """Raise UserError if embeddings of old items differ from the embeddings of before.

    An item that had no row in a file of embeddings, and so a vector of zeros, may get
    one; its codes stay.

    Args:
        vectors: (known, width) embeddings of the table to extend.
        again: (known, width) embeddings of the same items now.
    """
    tolerance = SAME * np.sqrt(np.square(vectors, dtype=np.float64).mean())
    changed = np.abs(again - vectors).max(1) > tolerance
    if by.own:
        zeros = np.zeros((1, old.info["encoder_width"]), np.float32)
        if by.pca_width:
            zeros = Projection.read(old.info["pca"]).project(zeros)
        late = changed & (np.abs(vectors - zeros).max(1) <= tolerance)
        changed &= ~late
        if late.any():
            count = pluralize(int(late.sum()), "old item")
            say(f"note: {count} without a row till now; codes stay")
    if changed.any():
        first = item_ids[int(np.argmax(changed))].as_py()
        raise _changed_embeddings(before_uri, by, f", such as {first!r},")


def _changed_embeddings(before_uri: str, by: Embedder, example: str) -> UserError:
    made = (
        f"embeddings of {by.own.uri}" if by.own else "texts, on which TF-IDF is fitted,"
    )
    remedy = "give the old embeddings" if by.own else "take an encoder such as minilm"
    return UserError(
        f"the {made} of items of {before_uri}{example} have changed, so that new ones "
        f"are of another space; make the SIDs anew, or {remedy}"
    )


def measure_drift(
    latents: np.ndarray,
    codes: np.ndarray,
    nearest: np.ndarray,
    codebooks: np.ndarray,
    old: int,
) -> dict[str, Any]:
    """Measure how well codes (N, C) explain old and new items.

    Errors are shares of the old items' variance. The first `old` items trained the
    codebooks. Collision rates count items that share their `nearest` codes.
    """
    away = latents - codebooks[np.arange(codebooks.shape[0]), codes].sum(1)
    error = np.square(away, dtype=np.float64).sum(1)
    spread = (
        np.square(latents[:old] - latents[:old].mean(0), dtype=np.float64).sum(1).mean()
        or 1.0
    )
    groups = collision_groups(nearest)
    shared = np.bincount(groups)[groups] > 1
    return {
        "new_items": len(latents) - old,
        "error_old": float(error[:old].mean() / spread),
        "error_new": float(error[old:].mean() / spread) if len(latents) > old else 0.0,
        "collision_rate_old": collisions(nearest[:old])["collision_rate"],
        "collision_rate_new": float(shared[old:].mean()) if len(latents) > old else 0.0,
        "relaxed_new": int((codes != nearest)[old:].any(1).sum()),
    }


def describe_drift(measured: dict[str, Any]) -> list[str]:
    """Describe the drift, and advise to train new codebooks if it is large."""
    lines = [
        f"{pluralize(measured['new_items'], 'item')} since the codebooks were trained: variance not explained "
        f"{measured['error_new']:.4f} (old items {measured['error_old']:.4f}), collision rate "
        f"{measured['collision_rate_new']:.4f} ({measured['collision_rate_old']:.4f}), "
        f"{measured['relaxed_new']:,} without their nearest codes"
    ]
    far = measured["error_new"] > DRIFT * measured["error_old"]
    crowded = measured["collision_rate_new"] > DRIFT * max(
        measured["collision_rate_old"], FEW_COLLISIONS
    )
    if far or crowded:
        why = "are explained worse" if far else "collide more often"
        lines.append(
            f"note: new items {why} than {DRIFT:g} times the old ones; train codebooks anew, without --extend, when "
            f"models are next trained from the start"
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
    """Make the semantic IDs of `before` and of newer items, and their trie, under
    `output`.

    Args:
        before: Semantic IDs to extend; may be the output.
        embeddings: Folder of the embeddings; empty for `output`.
        start: Starts Ray; called only for encoders.

    Returns:
        The manifests of sids and trie, and whether anything was made.

    Raises:
        UserError: if existing codes would change.
    """
    output, before = absolute(output), absolute(before)
    items, old = (
        read_manifest(items_uri, "items"),
        read_manifest(join(before, "sids"), "sids"),
    )
    if config.tokenizer == "published":
        raise UserError(
            "--extend is of trained codebooks; give a --published file that has the new items too"
        )
    if old.config != config.relevant_settings():
        raise UserError(
            f"{before} was made with other settings of the tokenizer; give the same with --extend"
        )
    if old.info["items_hash"] not in (*items.extends, items.hash):
        raise UserError(
            f"{items_uri} does not extend the items of {before}; see jobs.prepare --append"
        )
    sids_uri, trie_uri = join(output, "sids"), join(output, "trie")
    with writing(output):
        there = read_manifest(sids_uri, "sids") if has_manifest(sids_uri) else None
        current = (
            there
            and there.info["items_hash"] == items.hash
            and old.hash in (there.hash, *there.extends)
        )
        if there and not current and output != before and not overwrite:
            raise UserError(
                f"{output} holds other SIDs; use --overwrite, or another --output"
            )
        trie = read_manifest(join(before, "trie"), "trie")
        if not current:
            begin = time.monotonic()
            own = [
                embeddings or join(folder, "embeddings") for folder in (output, before)
            ]
            embedded = extend_embeddings(
                items_uri, own[0], own[1], old.rows, by, say, start
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
                read_embeddings(own[0]),
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
        if current and up_to_date(trie_uri, fingerprint({}, {"sids": sids.hash})):
            return sids, read_manifest(trie_uri, "trie"), False
        return sids, write_trie(trie_uri, sids_uri, [*trie.extends, trie.hash]), True


def _extend_codes(
    embeddings: np.ndarray,
    taken: np.ndarray,
    arrays: dict[str, np.ndarray],
    old: Manifest,
    config: TokenizerConfig,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the codes of all items and their measures for the manifest."""
    codebooks, sizes = arrays.pop("codebooks"), old.info["codebook_sizes"]
    depth, known = len(codebooks), len(taken)
    latents = torch.from_numpy(embeddings)
    if arrays:
        model = Rqvae(embeddings.shape[1], config.rqvae)
        model.encoder.load_state_dict(
            {name: torch.from_numpy(weight) for name, weight in arrays.items()}
        )
        latents = model.latents(latents)
    nearest = encode(latents, torch.from_numpy(codebooks))[0].numpy()
    vectors = latents.numpy()
    doubles = vectors[known:].astype(np.float64), codebooks.astype(np.float64)
    new = psid.extend(
        doubles[0], nearest[known:], taken, doubles[1], sizes[depth:], config.psid
    )
    codes = np.concatenate([taken, new])
    fitted = old.info.get("fitted_items", known)
    return codes, {
        **collisions(codes[:, :depth]),
        "levels": level_measures(codes[:, :depth], sizes[:depth]),
        "branching": branching(codes),
        "fitted_items": fitted,
        "drift": measure_drift(vectors, codes[:, :depth], nearest, codebooks, fitted),
    }
