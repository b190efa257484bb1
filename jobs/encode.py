"""Encode the texts of a log: items, and for a search log queries and shown pairs.

    python -m jobs.encode --tables TABLES --encoder minilm --output TEXT

`--encoder tfidf` needs no weights, `minilm` is a pip package, any other value is the
name or folder of a transformers model. Each distinct text and each distinct pair of
query and item is encoded once. The same command again makes only the tables that are
missing.
"""

from __future__ import annotations

from core.files import join
from jobs import cli
from pipelines.encode.config import EncodeConfig

Config = EncodeConfig


def run(config: EncodeConfig) -> None:
    """Encode the texts, and print the next command."""
    cli.say_loading("ray")
    from core.schemas import SequencesInfo
    from core.tables import open_table
    from pipelines.encode.texts import encode_log
    from pipelines.prepare.kinds.registry import KINDS

    cli.preflight(config)
    encode_log(config)
    sequences = open_table(join(config.tables, "sequences"), SequencesInfo)
    kind = sequences.info.kind
    model = KINDS[kind].first_model
    train = cli.command_line(
        "jobs.train",
        config=f"jobs/configs/{kind}/{model}.yaml",
        tables=config.tables,
        text=config.output,
        storage=cli.suggest_storage(config.output),
        name=model,
    )
    print(f"next: {train}")


if __name__ == "__main__":
    cli.main(run)
