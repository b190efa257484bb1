"""The quickstart of next items: semantic IDs, popularity, SASRec, TIGER, and SID-MLP distilled from it."""

from __future__ import annotations

from pathlib import Path

from models.tables import UserError, join, read_manifest
from pipelines.data.kinds.base import Extra, Flow, Trained


def published_sids(folder: Path) -> Path | None:
    """The file of published semantic IDs in a raw folder, if it has one."""
    found = sorted([*folder.glob("*index*.json*"), *folder.glob("published_sids.csv*")])
    return found[0] if found else None


def tokenizer(tables: str, encoder: str, data: str | None) -> list[str]:
    """Options of jobs.tokenize: codes of the items' texts, or those that were published with the log."""
    if read_manifest(join(tables, "items"), "items").info["texts"]:
        size = [] if data else ["--rqkmeans.codebook_size", "32"]  # a simulated catalogue is small
        return ["--tokenizer", "rqkmeans", "--encoder", encoder, *size]
    if data and (published := published_sids(Path(data).absolute())):
        return ["--tokenizer", "published", "--published", str(published)]
    raise UserError(f"{data} has neither item texts nor published semantic IDs; TIGER needs one of them")


FLOW = Flow(
    models=(
        Trained("popularity", ("popularity",)),
        Trained("sasrec", ("sasrec",)),
        Trained("tiger", ("tiger_small",)),
        Trained("sid_mlp", ("sid_mlp_small",), teacher="tiger"),
    ),
    epochs=20,
    extra=Extra("sids", "semantic IDs", "tokenize", "Items to semantic IDs and a trie", tokenizer),
)
