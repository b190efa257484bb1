"""Items to semantic ids: embeds item texts, makes unique codes and lays them out as a trie.

python -m jobs.tokenize --tables TABLES --tokenizer rqkmeans --encoder minilm --pca 128
--output SIDS python -m jobs.tokenize --tables TABLES --tokenizer rqkmeans --embeddings
FILE.parquet --id item_id --output SIDS python -m jobs.tokenize --tables TABLES
--tokenizer rqkmeans --encoder minilm --pca 128 --extend SIDS --output SIDS python -m
jobs.tokenize --tables TABLES --tokenizer published --published FILE --output SIDS
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs import cli
from models.config import pluralize
from models.retrieval.tokenizers.config import PsidConfig, RqkmeansConfig, RqvaeConfig
from models.storage.input_folders import require_folders
from models.storage.tables import Manifest, join
from models.storage.uri import check_writable
from models.text.text_encoder import check_encoder
from pipelines.data.sids.config import EmbedConfig, TokenizerConfig
from pipelines.data.sids.precomputed import SUFFIXES, read_precomputed

SMALL = 1000
"""Items below which a first training takes the small TIGER."""

ERRORS = {
    "reconstruction_error": "embeddings, by the nearest codes",
    "quantization_error": "quantised space, by the chosen codes",
}


@dataclass
class Config:
    """Items to semantic ids."""

    tables: str
    """TABLES made by jobs.prepare; its items are tokenized."""
    output: str
    """SIDS: folder for the tables embeddings, sids and trie."""
    tokenizer: Literal["rqvae", "rqkmeans", "psid", "published"]
    """How codes are made: trained codebooks with a conflict code, trained and relaxed
    (psid), or read."""
    encoder: str = "minilm"
    """Text encoder: a transformers hub name or folder, `minilm` (a pip package), or
    `tfidf` (no weights)."""
    pca: int = 0
    """Width of the PCA of the embeddings; 0: none. SID-MLP takes 128, whitened."""
    published: str = ""
    """File with published SIDs, for --tokenizer published: CSV or LC-Rec index.json,
    gzipped or not."""
    embeddings: str = ""
    """Folder of the embeddings, made where there are none; OUTPUT/embeddings if not
    given. Tokenizers share it. Or a .parquet or .npy file of your own embeddings, in
    place of --encoder."""
    id: str = ""
    """Of your own embeddings: the column of ids of a .parquet file, or a text file with
    the id of each row of a .npy file."""
    extend: str = ""
    """SIDS of the items that TABLES extend, such as OUTPUT itself: their codes and
    codebooks stay, new items get free codes. All other options must be the same as
    then; a file of your own embeddings has more rows."""
    overwrite: bool = False
    """Replace tables that are there already."""
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    rqkmeans: RqkmeansConfig = field(default_factory=RqkmeansConfig)
    rqvae: RqvaeConfig = field(default_factory=RqvaeConfig)
    psid: PsidConfig = field(default_factory=PsidConfig)

    def __post_init__(self) -> None:
        check_encoder(self.encoder)
        if self.pca < 0:
            raise ValueError(f"pca is {self.pca}; it must be 0 (none) or more")
        if self.embeddings and self.tokenizer == "published":
            raise ValueError(
                f"embeddings is {self.embeddings!r}, but published SIDs need none; leave it out"
            )
        if bool(self.id) != self.own:
            raise ValueError(
                f"embeddings is {self.embeddings!r} and id is {self.id!r}; a .parquet or .npy file and its --id go "
                f"together"
            )
        self.sids_config()

    @property
    def own(self) -> bool:
        """Whether embeddings are a file of the user's own."""
        return self.embeddings.lower().endswith(SUFFIXES)

    def sids_config(self) -> TokenizerConfig:
        """The tokenizer's part of the options."""
        return TokenizerConfig(
            self.tokenizer, self.published, self.rqkmeans, self.rqvae, self.psid
        )


def describe_quality(sids: Manifest, trie: Manifest) -> list[str]:
    """Return lines about the quality of the SIDs."""
    info: dict[str, Any] = sids.info
    sizes = info["codebook_sizes"]
    lines = [
        f"{pluralize(sids.rows, 'item')}, {pluralize(len(sizes), 'code')} each, codebooks {sizes}"
    ]
    errors = [
        f"{label} {info[name]:.4f}" for name, label in ERRORS.items() if name in info
    ]
    if errors:
        lines.append(f"share of variance not explained: {', '.join(errors)}")
    if "relaxed_items" in info:
        lines.append(
            f"{pluralize(info['relaxed_items'], 'item')} relaxed; collision rate {info['collision_rate_before']:.4f} "
            f"before, 0 after"
        )
    else:
        lines.append(
            f"collision rate {info['collision_rate']:.4f} before the conflict code: {info['distinct']} distinct, "
            f"{pluralize(info['duplicates'], 'duplicate')}, largest group {info['largest_group']}"
        )
    for level, measures in enumerate(info["levels"]):
        lines.append(
            f"level {level + 1}: {measures['used']} codes in use ({measures['use']:.1%}), "
            f"entropy {measures['entropy_bits']:.2f} bits"
        )
    lines.append(
        "branching per level "
        + ", ".join(f"{mean:.2f}" for mean in trie.info["branching"])
    )
    return lines


def run(config: Config) -> None:
    """Make semantic IDs, and print the result and the next command."""
    started = time.monotonic()
    cli.say_loading("torch", "ray")
    from pipelines.data.sids.embed import EmbeddingSource, embed_origin
    from pipelines.data.sids.extend import describe_drift, extend
    from pipelines.data.sids.tokenize import (
        TokenizerPaths,
        check_folders,
        check_items,
        tokenize,
    )

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:6.1f}s] {message}", flush=True)

    items, shared = (
        join(config.tables, "items"),
        "" if config.own else config.embeddings,
    )
    # what does not answer is said before Ray starts
    require_folders(tables=config.tables, embeddings=shared, extend=config.extend)
    cli.preflight(
        tables=config.tables,
        embeddings=shared,
        extend=config.extend,
        output=config.output,
    )
    check_writable(config.output)
    check_folders(config.output, shared)
    precomputed = read_precomputed(config.embeddings, config.id) if config.own else None
    source = EmbeddingSource(config.encoder, config.pca, config.embed, precomputed)
    paths = TokenizerPaths(
        items, config.output, shared, join(config.tables, "sequences")
    )
    if (
        config.tokenizer != "published"
    ):  # what is wrong with the input, before Ray starts
        check_items(items, config.sids_config(), None if precomputed else config.embed)
        embed_origin(items, source)
    if config.extend:
        sids, trie, made = extend(
            paths,
            config.extend,
            config.sids_config(),
            source,
            config.overwrite,
            say,
            cli.start_ray,
        )
    else:
        sids, trie, made = tokenize(
            paths,
            config.sids_config(),
            source,
            config.overwrite,
            say,
            cli.start_ray,
        )
    for line in [
        *describe_quality(sids, trie),
        *(describe_drift(sids.info["drift"]) if "drift" in sids.info else []),
    ]:
        print(line)
    if advice := config.sids_config().describe_sparse_codes(
        sids.rows, sids.info["levels"][0]["used"]
    ):
        print(f"note: {advice} --overwrite")
    if made:
        print(
            f"made {config.output}: sids {sids.hash[:12]}, trie {trie.hash[:12]} in {time.monotonic() - started:.0f} s"
        )
    else:
        print(
            f"nothing to do: {config.output} is up to date; --overwrite makes it again"
        )
    tiger = "tiger_small" if sids.rows < SMALL else "tiger"
    train = {
        "config": f"jobs/configs/{tiger}.yaml",
        "tables": config.tables,
        "sids": config.output,
    }
    print(
        f"next: {cli.command_line('jobs.train', **train, storage=cli.suggest_storage(config.output), name='tiger')}"
    )


if __name__ == "__main__":
    cli.main(run, Config)
