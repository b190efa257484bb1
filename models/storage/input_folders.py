"""Checks that the folders of command-line options have the expected content.

require_folders(tables="runs/shop/tabels")
# UserError: --tables is runs/shop/tabels, which does not exist; give a folder that
# jobs.prepare made
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
    """A kind of folder that an option expects.

    Any folder is of a kind without tables and files.
    """

    description: str
    """Description of the folder and the job that creates it, for messages."""
    tables: tuple[tuple[str, str], ...] = ()
    """Required subfolders, and the name of the table in each."""
    files: tuple[str, ...] = ()
    """Names of files, at least one of which the folder must contain."""

    def matches(self, uri: str) -> bool:
        """Return whether the folder at `uri` is of this kind.

        A folder with a damaged table matches; reading the table reports the damage.
        """
        with suppress(UserError):
            for subfolder, table in self.tables:
                table_uri = join(uri, subfolder)
                if not has_manifest(table_uri):
                    return False
                if read_manifest(table_uri).table != table:
                    return False
        if self.files:
            infos = [file_info(join(uri, name)) for name in self.files]
            return any(info.type == fs.FileType.File for info in infos)
        return bool(self.tables) or file_info(uri).type == fs.FileType.Directory

    @property
    def content(self) -> str:
        """Content that identifies a folder of this kind, for messages."""
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
"""Kind of folder that each option expects."""


def require_folders(**folders: str | None) -> None:
    """Check the input folders of a job before it starts.

    Args:
        folders: Path or URI of each folder, by name of its option; None if not set.

    Raises:
        UserError: If a storage does not respond, or a folder is not of the kind that
            its option expects.
    """
    types = {option: file_info(uri).type for option, uri in folders.items() if uri}
    for option, file_type in types.items():
        uri = str(folders[option])
        kind = FOLDER_KINDS.get(option)
        if kind is None or kind.matches(uri):
            continue
        if file_type == fs.FileType.NotFound:
            reason = "which does not exist"
        elif kind.content:
            reason = f"which holds no {kind.content}"
        else:
            reason = "which is not a folder"
        raise UserError(f"--{option} is {uri}, {reason}; give {kind.description}")
