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

from jobs import cli
from pipelines.encode.config import TokenizeConfig

Config = TokenizeConfig

SMALL_CATALOGUE = 1000
"""Number of items below which the small TIGER is the suggested model."""


def run(config: TokenizeConfig) -> None:
    """Make semantic IDs, and print the next command."""
    cli.say_loading("torch", "ray")
    from pipelines.encode.extend import make_sids

    cli.preflight(config)
    sids = make_sids(config)
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
