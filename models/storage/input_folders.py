"""Folders that options name, and what each option takes.

reach(tables="runs/shop/tabels")
# UserError: --tables is runs/shop/tabels, where nothing is; give a folder that jobs.prepare made
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from pyarrow import fs

from models.storage.tables import (
    UserError,
    file_info,
    has_manifest,
    join,
    read_manifest,
)


@dataclass(frozen=True)
class FolderKind:
    """What an option takes."""

    words: str
    """What it is, and which job makes it."""
    tables: tuple[tuple[str, str], ...] = ()
    """A folder in it, and the table that it holds."""
    files: tuple[str, ...] = ()
    """Files of which it holds one; neither tables nor files: it is any folder."""

    def is_at(self, uri: str) -> bool:
        """Whether it is at the place. What is damaged counts: who reads it says how."""
        with suppress(UserError):
            for folder, table in self.tables:
                if (
                    not has_manifest(join(uri, folder))
                    or read_manifest(join(uri, folder)).table != table
                ):
                    return False
        if self.files:
            return any(
                file_info(join(uri, name)).type == fs.FileType.File
                for name in self.files
            )
        return bool(self.tables) or file_info(uri).type == fs.FileType.Directory

    @property
    def holds(self) -> str:
        """What shows that it is one."""
        return f"table {self.tables[0][1]}" if self.tables else " or ".join(self.files)


TABLES = FolderKind("a folder that jobs.prepare made", tables=(("items", "items"),))
SIDS = FolderKind("a folder that jobs.tokenize made", tables=(("sids", "sids"),))
TEXT = FolderKind("a folder that jobs.encode made", tables=(("items", "embeddings"),))
CHECKPOINT = FolderKind(
    "the folder of a run of jobs.train, or its checkpoint",
    files=("config.json", "run.json"),
)
RAW = FolderKind("the folder of a raw log")

PLACES = {
    "tables": TABLES,
    "catalogue": TABLES,
    "sids": SIDS,
    "extend": SIDS,
    "text": TEXT,
    "checkpoint": CHECKPOINT,
    "input": RAW,
    "suggest": RAW,
    "data": RAW,
}
"""By option."""


def reach(**places: str | None) -> None:
    """First contact with what a job will read, by its options, before it starts anything: UserError for what does not
    answer, and for what is none of what the option takes."""
    given = {
        option: (uri, file_info(uri).type) for option, uri in places.items() if uri
    }
    for option, (uri, found) in given.items():
        place = PLACES.get(option)
        if place is None or place.is_at(uri):
            continue
        if found == fs.FileType.NotFound:
            why = "where nothing is"
        else:
            why = (
                f"which holds no {place.holds}" if place.holds else "which is no folder"
            )
        raise UserError(f"--{option} is {uri}, {why}; give {place.words}")
