"""Folders that a run reads: the tables, and the folders beside them that some models read.

Inputs("tables", sids="sids").select("tiger", {"sids": True})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.storage.tables import TableVersion, UserError, join, read_manifest
from models.storage.uri import absolute

MADE_BY = {
    "sids": ("semantic IDs", "jobs.tokenize"),
    "text": ("text embeddings", "jobs.encode"),
}
"""Content of each folder beside the tables, and the job that makes it, by option."""


@dataclass(frozen=True)
class Inputs:
    """Folders that a run reads, absolute paths or URIs. Fields are named like the options of the commands."""

    tables: str
    """TABLES: the folder that jobs.prepare made."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models; models of actions can
    do without."""

    def __post_init__(self) -> None:
        for option, folder in self.given().items():
            object.__setattr__(self, option, absolute(folder))

    @property
    def sequences(self) -> str:
        """Folder of the table `sequences`."""
        return join(self.tables, "sequences")

    def given(self) -> dict[str, str]:
        """Return the folders that are given, by option."""
        return {option: folder for option, folder in vars(self).items() if folder}

    def versions(self, tables: Mapping[str, Sequence[str]]) -> dict[str, TableVersion]:
        """Read the versions of tables from their manifests.

        Args:
            tables: Names of the tables by option; a table comes after the tables that
                it is made from.

        Returns:
            The versions by the table's name; names of TEXT's tables begin with `text_`.

        Raises:
            UserError: if a table was made from another table than the given one.
        """
        versions: dict[str, TableVersion] = {}
        for option, folder in self.given().items():
            for table in tables.get(option, ()):
                manifest = read_manifest(
                    join(folder, table), None if option == "text" else table
                )
                for name, made_from in manifest.inputs.items():
                    if name in versions and versions[name].hash != made_from:
                        _, job = MADE_BY.get(option, ("tables", "jobs.prepare"))
                        raise UserError(
                            f"{join(folder, table)} was made from other {name} ({made_from[:12]}, these are "
                            f"{versions[name].hash[:12]}); point at tables that belong together or run {job} again"
                        )
                name = f"text_{table}" if option == "text" else table
                versions[name] = TableVersion.from_manifest(manifest)
        return versions

    def select(self, model: str, reads: Mapping[str, bool]) -> Inputs:
        """Return the inputs that a model reads.

        Args:
            model: Name of the model.
            reads: Folders beside the tables that the model reads, by option, and
                whether it needs them.

        Raises:
            UserError: if a folder that the model needs is not given.
        """
        for option, is_needed in reads.items():
            if is_needed and not getattr(self, option):
                content, job = MADE_BY[option]
                raise UserError(
                    f"the model '{model}' needs {content}; give --{option} with the folder that {job} made"
                )
        folders = {option: getattr(self, option) for option in reads}
        return Inputs(self.tables, **folders)
