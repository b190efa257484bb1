"""Tokenizers side by side, from what `jobs.tokenize` wrote in the manifests of their SIDs.

    python -m papers.tokenizers --sids '[SIDS, OTHER_SIDS]'

Branching is Table 7 of SID-MLP: the mean number of valid next codes after a valid prefix, per level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jobs import cli
from models.places import reach
from models.tables import UserError, join, read_manifest
from pipelines.comparison.table import Table

LEVELS: dict[str, tuple[str, Callable[[float], str]]] = {
    "codes in use": ("used", "{:,}".format),
    "share in use": ("use", "{:.0%}".format),
    "entropy, bits": ("entropy_bits", "{:.2f}".format),
}
"""Column -> key of a level's measures, and how it is shown."""


def sids_table(uris: Sequence[str]) -> Table:
    """One row per folder of SIDs; UserError for a folder without them."""
    header = ["SIDs", "tokenizer", "items", "branching", *LEVELS, "distinct", "collision rate", "largest group"]
    cells = []
    for uri in uris:
        sids, trie = read_manifest(join(uri, "sids"), "sids"), read_manifest(join(uri, "trie"), "trie")
        if trie.inputs.get("sids") != sids.hash:
            raise UserError(f"the trie of {uri} was made from other sids; run jobs.tokenize again")
        info: dict[str, Any] = sids.info
        per_level = [" / ".join(show(level[key]) for level in info["levels"]) for key, show in LEVELS.values()]
        branching = " / ".join(f"{mean:.3g}" for mean in trie.info["branching"])
        cells.append(
            [
                uri,
                info["tokenizer"],
                f"{sids.rows:,}",
                branching,
                *per_level,
                f"{info['distinct']:,}",
                f"{info['collision_rate']:.4f}",
                f"{info['largest_group']:,}",
            ]
        )
    notes = [
        "a / b / ...: level by level. branching: mean number of valid next codes after a valid prefix.",
        "use, entropy and collisions are of the codes before any conflict code; collision rate: share of items whose "
        "codes another item has too.",
    ]
    return Table("Semantic IDs", header, cells, notes)


@dataclass
class Config:
    """Options."""

    sids: list[str]
    """SIDS: folders that jobs.tokenize made."""


def run(config: Config) -> None:
    """Prints the table."""
    for folder in config.sids:
        reach(sids=folder)
    print(sids_table(config.sids).text())


if __name__ == "__main__":
    cli.main(run, Config)
