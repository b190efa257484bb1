"""Encode the texts of a log: its items; of a search log also the queries, and the pairs that were shown.

    python -m jobs.encode --tables TABLES --encoder minilm --output TEXT

`--encoder tfidf` needs no weights, `minilm` is a pip package, anything else is a
transformers name or folder. Each distinct text and each distinct pair is encoded once.
Run again, it makes only what is missing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from jobs import cli
from models.storage.input_folders import require_folders
from models.storage.tables import join, read_manifest
from models.storage.uri import check_writable
from models.text.text_encoder import check_encoder
from pipelines.data.kinds import KINDS
from pipelines.data.sids.config import TextConfig


@dataclass
class Config:
    """Options of jobs.encode."""

    tables: str
    """TABLES of a log of searches or of actions, made by jobs.prepare."""
    output: str
    """TEXT: folder for the table items and, of searches, queries, pairs and (but for
    tfidf) tokens."""
    encoder: str = "minilm"
    """Text encoder: a transformers hub name or folder, `minilm` (a pip package), or
    `tfidf` (no weights)."""
    overwrite: bool = False
    """Replace tables that are there already."""
    embed: TextConfig = field(default_factory=TextConfig)

    def __post_init__(self) -> None:
        check_encoder(self.encoder)


def run(config: Config) -> None:
    """Encode the texts, and print the result and the next command."""
    started = time.monotonic()
    cli.say_loading("ray")
    from pipelines.data.sids.texts import encode_log

    require_folders(tables=config.tables)

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:6.1f}s] {message}", flush=True)

    check_writable(config.output)
    cli.preflight(tables=config.tables, output=config.output)
    made = encode_log(
        config.tables,
        config.output,
        config.encoder,
        config.embed,
        config.overwrite,
        say,
        cli.start_ray,
    )
    counts = ", ".join(
        f"{made[name].rows:,} {name}"
        for name in ("items", "queries", "pairs")
        if name in made
    )
    print(
        f"{counts}, width {made['items'].info['width']}, in {time.monotonic() - started:.0f} s: {config.output}"
    )
    model = KINDS[
        read_manifest(join(config.tables, "sequences"), "sequences").info["kind"]
    ].first_model
    train = {
        "config": f"jobs/configs/{model}.yaml",
        "tables": config.tables,
        "text": config.output,
    }
    print(
        f"next: {cli.line('jobs.train', **train, storage=cli.runs_beside(config.output), name=model)}"
    )


if __name__ == "__main__":
    cli.main(run, Config)
