"""Folders that options name, and the content that each option takes.

require_folders(tables="runs/shop/tabels")
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
    """A kind of folder that an option takes. Without tables and files it is any folder."""

    description: str
    """The folder and the job that makes it, for messages."""
    tables: tuple[tuple[str, str], ...] = ()
    """Subfolders and the table in each."""
    files: tuple[str, ...] = ()
    """Files of which the folder holds at least one."""

    def matches(self, uri: str) -> bool:
        """Return whether the folder at `uri` is of this kind. Damaged tables match: their readers name the damage."""
        with suppress(UserError):
            for subfolder, table in self.tables:
                where = join(uri, subfolder)
                if not has_manifest(where) or read_manifest(where).table != table:
                    return False
        if self.files:
            infos = [file_info(join(uri, name)) for name in self.files]
            return any(info.type == fs.FileType.File for info in infos)
        return bool(self.tables) or file_info(uri).type == fs.FileType.Directory

    @property
    def content(self) -> str:
        """Content by which a folder of this kind is recognised, for messages."""
        if self.tables:
            return f"table {self.tables[0][1]}"
        return " or ".join(self.files)


TABLES = FolderKind("a folder that jobs.prepare made", tables=(("items", "items"),))
SIDS = FolderKind("a folder that jobs.tokenize made", tables=(("sids", "sids"),))
TEXT = FolderKind("a folder that jobs.encode made", tables=(("items", "embeddings"),))
CHECKPOINT = FolderKind(
    "the folder of a run of jobs.train, or its checkpoint",
    files=("config.json", "run.json"),
)
RAW = FolderKind("the folder of a raw log")

FOLDER_KINDS = {
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
"""Kind of folder that each option takes."""


def require_folders(**folders: str | None) -> None:
    """Check the folders that a job will read, by option, before it starts anything.

    Raises:
        UserError: if a storage does not answer, or a folder is not of the kind that its
            option takes.
    """
    types = {option: file_info(uri).type for option, uri in folders.items() if uri}
    for option, file_type in types.items():
        uri = str(folders[option])
        kind = FOLDER_KINDS.get(option)
        if kind is None or kind.matches(uri):
            continue
        if file_type == fs.FileType.NotFound:
            why = "where nothing is"
        elif kind.content:
            why = f"which holds no {kind.content}"
        else:
            why = "which is no folder"
        raise UserError(f"--{option} is {uri}, {why}; give {kind.description}")
