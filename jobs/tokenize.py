r"""Make the semantic IDs (SIDs) of items: embeddings, unique codes, and their trie.

    python -m jobs.tokenize --tables TABLES --tokenizer rqkmeans --encoder minilm \
        --pca 128 --output SIDS
    python -m jobs.tokenize --tables TABLES --tokenizer rqkmeans \
        --embeddings FILE.parquet --id item_id --output SIDS
    python -m jobs.tokenize --tables TABLES --tokenizer rqkmeans --encoder minilm \
        --pca 128 --extend SIDS --output SIDS
    python -m jobs.tokenize --tables TABLES --tokenizer published --published FILE \
        --output SIDS

The commands make SIDs from item texts, from your own embeddings, for items that
`jobs.prepare --append` has added, and from a file of published SIDs.
"""

from __future__ import annotations

import time
from dataclasses import field

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass

from core.errors import pluralize
from core.files import join
from core.options import STRICT, Folder
from core.schemas import ItemsInfo, SidsInfo, TrieInfo
from core.tables import Table, open_table
from jobs import cli
from models import registry
from pipelines.encode.config import EmbedConfig
from pipelines.encode.precomputed import SUFFIXES, read_precomputed

SMALL_CATALOGUE = 1000
"""Number of items below which the small TIGER is the suggested model."""

ERROR_LABELS = {
    "reconstruction_error": "embeddings, by the nearest codes",
    "quantization_error": "quantised space, by the chosen codes",
}
"""Printed labels of the errors that the manifest of SIDs records."""


@dataclass(config=STRICT)
class Config:
    """Options of jobs.tokenize."""

    tables: Folder
    """TABLES: the folder that jobs.prepare made."""
    output: Folder
    """SIDS: folder for the tables embeddings, sids and trie."""
    tokenizer: registry.TokenizerSection
    """Tokenizer, and its options such as `--tokenizer.levels 4`: trained codebooks with
    a conflict code (rqvae, rqkmeans), trained codebooks with relaxed codes (psid), or
    codes of a file (published)."""
    encoder: str = "minilm"
    """Text encoder: a transformers hub name or folder, `minilm` (a pip package), or
    `tfidf` (no weights)."""
    pca: NonNegativeInt = 0
    """Width of the embeddings after PCA; 0: no PCA. SID-MLP uses 128, whitened."""
    published: str = ""
    """File with published SIDs, for --tokenizer published: CSV or LC-Rec's index.json,
    optionally gzipped."""
    embeddings: str = ""
    """Folder of the embeddings, which are computed if it is empty and may be shared by
    several tokenizers; by default OUTPUT/embeddings. Or a .parquet or .npy file with
    your own embeddings, which replaces --encoder."""
    id: str = ""
    """Ids of your own embeddings: the column of ids in a .parquet file, or a text file
    with the id of each row of a .npy file."""
    extend: str = ""
    """SIDS made for an earlier version of TABLES, such as OUTPUT itself: the codes and
    codebooks are kept, and new items get unused codes. The other options must equal
    those of the earlier command; a file of your own embeddings must contain the new
    items too."""
    overwrite: bool = False
    """Replace existing tables."""
    embed: EmbedConfig = field(default_factory=EmbedConfig)

    def __post_init__(self) -> None:
        reads_file = registry.find_tokenizer(self.tokenizer.name).reads_file
        if reads_file != bool(self.published) or (reads_file and self.embeddings):
            raise ValueError(
                f"tokenizer is {self.tokenizer.name!r}, published {self.published!r} "
                f"and embeddings {self.embeddings!r}; --tokenizer published needs "
                f"--published FILE and no embeddings, and no other takes a file"
            )
        if bool(self.id) != self.has_custom_embeddings:
            raise ValueError(
                f"embeddings is {self.embeddings!r} and id is {self.id!r}; a .parquet "
                f"or .npy file needs --id, and --id needs such a file"
            )

    @property
    def has_custom_embeddings(self) -> bool:
        """Whether `embeddings` is a file with the user's own embeddings."""
        return self.embeddings.lower().endswith(SUFFIXES)


def describe_quality(sids: Table[SidsInfo], trie: Table[TrieInfo]) -> list[str]:
    """Return lines on the quality of the SIDs: errors, collisions, use of codes."""
    sizes, info = sids.info.codebook_sizes, sids.info.measures
    lines = [
        f"{pluralize(sids.rows, 'item')}, {pluralize(len(sizes), 'code')} each, "
        f"codebooks {sizes}"
    ]
    errors = [
        f"{label} {info[name]:.4f}"
        for name, label in ERROR_LABELS.items()
        if name in info
    ]
    if errors:
        lines.append(f"share of variance not explained: {', '.join(errors)}")
    if "relaxed_items" in info:
        lines.append(
            f"{pluralize(info['relaxed_items'], 'item')} relaxed; collision rate "
            f"{info['collision_rate_before']:.4f} before, 0 after"
        )
    else:
        lines.append(
            f"collision rate {info['collision_rate']:.4f} before the conflict code: "
            f"{info['distinct']} distinct, "
            f"{pluralize(info['duplicates'], 'duplicate')}, largest group "
            f"{info['largest_group']}"
        )
    for level, measures in enumerate(info["levels"]):
        lines.append(
            f"level {level + 1}: {measures['used']} codes in use "
            f"({measures['use']:.1%}), entropy {measures['entropy_bits']:.2f} bits"
        )
    branching = ", ".join(f"{mean:.2f}" for mean in trie.info.branching)
    lines.append(f"branching per level {branching}")
    return lines


def run(config: Config) -> None:
    """Make semantic IDs, and print their quality and the next command."""
    start_s = time.monotonic()
    cli.say_loading("torch", "ray")
    from pipelines.encode.extend import describe_drift, extend
    from pipelines.encode.texts import EmbeddingSource
    from pipelines.encode.tokenize import TokenizerPaths, tokenize

    def say(message: str) -> None:
        print(f"[{time.monotonic() - start_s:6.1f}s] {message}", flush=True)

    shared = "" if config.has_custom_embeddings else config.embeddings
    paths = TokenizerPaths(
        open_table(join(config.tables, "items"), ItemsInfo),
        config.output,
        shared,
        join(config.tables, "sequences"),
    )
    tokenizer = registry.find_tokenizer(config.tokenizer.name)(config.tokenizer)
    cli.preflight(config)
    precomputed = None
    if config.has_custom_embeddings:
        precomputed = read_precomputed(config.embeddings, config.id)
    source = EmbeddingSource(config.encoder, config.pca, config.embed, precomputed)
    if config.extend:
        sids, trie, is_new = extend(
            paths,
            config.extend,
            tokenizer,
            source,
            config.overwrite,
            say,
        )
    else:
        sids, trie, is_new = tokenize(
            paths,
            tokenizer,
            source,
            config.published,
            config.overwrite,
            say,
        )
    lines = describe_quality(sids, trie)
    if sids.info.drift:
        lines.append(describe_drift(sids.info.drift))
    print("\n".join(lines))
    if is_new:
        seconds = time.monotonic() - start_s
        print(
            f"made {config.output}: sids {sids.hash[:12]}, trie {trie.hash[:12]} in "
            f"{seconds:.0f} s"
        )
    else:
        print(
            f"nothing to do: {config.output} is up to date; --overwrite makes it again"
        )
    tiger = "tiger_small" if sids.rows < SMALL_CATALOGUE else "tiger"
    train = cli.command_line(
        "jobs.train",
        config=f"jobs/configs/retrieval/{tiger}.yaml",
        tables=config.tables,
        sids=config.output,
        storage=cli.suggest_storage(config.output),
        name="tiger",
    )
    print(f"next: {train}")


if __name__ == "__main__":
    cli.main(run)
