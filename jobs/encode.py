"""Encode the texts of a log: items, and for a search log queries and shown pairs.

    python -m jobs.encode --tables TABLES --encoder minilm --output TEXT

`--encoder tfidf` needs no weights, `minilm` is a pip package, any other value is the
name or folder of a transformers model. Each distinct text and each distinct pair of
query and item is encoded once. The same command again makes only the tables that are
missing.
"""

from __future__ import annotations

import time
from dataclasses import field

from pydantic.dataclasses import dataclass

from core.files import join
from core.options import STRICT, Folder
from core.schemas import SequencesInfo
from core.tables import open_table
from jobs import cli
from pipelines.encode.config import TextConfig
from pipelines.prepare.kinds.registry import KINDS


@dataclass(config=STRICT)
class Config:
    """Options of jobs.encode."""

    tables: Folder
    """TABLES: the folder that jobs.prepare made, of a search or actions log."""
    output: Folder
    """TEXT: folder for the table items and, for a search log, queries, pairs and tokens
    (no tokens with tfidf)."""
    encoder: str = "minilm"
    """Text encoder: a transformers hub name or folder, `minilm` (a pip package), or
    `tfidf` (no weights)."""
    overwrite: bool = False
    """Replace existing tables."""
    embed: TextConfig = field(default_factory=TextConfig)


def run(config: Config) -> None:
    """Encode the texts, and print the sizes of the tables and the next command."""
    start_s = time.monotonic()
    cli.say_loading("ray")
    from pipelines.encode.texts import encode_log

    def say(message: str) -> None:
        print(f"[{time.monotonic() - start_s:6.1f}s] {message}", flush=True)

    cli.preflight(config)
    written = encode_log(
        config.tables,
        config.output,
        config.encoder,
        config.embed,
        config.overwrite,
        say,
    )
    counts = ", ".join(
        f"{written[name].rows:,} {name}"
        for name in ("items", "queries", "pairs")
        if name in written
    )
    width = written["items"].info.width
    seconds = time.monotonic() - start_s
    print(f"{counts}, width {width}, in {seconds:.0f} s: {config.output}")
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
