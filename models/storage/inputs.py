"""Input folders of a run: the tables, and folders that only some models read.

Inputs("tables", sids="sids").select("tiger", {"sids": True})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.storage.tables import TableVersion, UserError, join, read_manifest
from models.storage.uri import absolute

MADE_BY = {
    "sids": "semantic IDs; give --sids, the output of jobs.tokenize",
    "text": "text embeddings; give --text, the output of jobs.encode",
}
"""Content of each optional folder, for messages."""


@dataclass(frozen=True)
class Inputs:
    """Input folders of a run, as absolute paths or URIs.

    Fields have the names of command-line options.
    """

    tables: str
    """Output folder of jobs.prepare."""
    sids: str | None = None
    """Output folder of jobs.tokenize, for models that use semantic IDs."""
    text: str | None = None
    """Output folder of jobs.encode, required by search models and optional for actions
    models."""

    def __post_init__(self) -> None:
        for option, folder in self.folders().items():
            object.__setattr__(self, option, absolute(folder))

    @property
    def sequences(self) -> str:
        """Folder of the table `sequences`."""
        return join(self.tables, "sequences")

    def folders(self) -> dict[str, str]:
        """Return the folders by option, without options that are not set."""
        return {option: folder for option, folder in vars(self).items() if folder}

    def versions(self, tables: Mapping[str, Sequence[str]]) -> dict[str, TableVersion]:
        """Read the versions of tables from their manifests.

        Args:
            tables: Names of the tables in each folder, by option. A table comes after
                the tables from which it was made.

        Returns:
            The versions by name of the table. The names of tables in the `text` folder
            have the prefix `text_`.

        Raises:
            UserError: If a table was made from another version of a table than the one
                in these folders.
        """
        versions: dict[str, TableVersion] = {}
        for option, folder in self.folders().items():
            for table in tables.get(option, ()):
                manifest = read_manifest(
                    join(folder, table), None if option == "text" else table
                )
                for name, made_from in manifest.inputs.items():
                    if name in versions and versions[name].hash != made_from:
                        raise UserError(
                            f"{join(folder, table)} was made from other {name} "
                            f"({made_from[:12]}, these are "
                            f"{versions[name].hash[:12]})"
                        )
                name = f"text_{table}" if option == "text" else table
                versions[name] = TableVersion.from_manifest(manifest)
        return versions

    def select(self, model: str, reads: Mapping[str, bool]) -> Inputs:
        """Return the inputs that a model reads.

        Args:
            model: Name of the model.
            reads: Options of the folders that the model reads in addition to the
                tables, and whether each is required.

        Raises:
            UserError: If a required folder is not set.
        """
        for option, is_required in reads.items():
            if is_required and not getattr(self, option):
                raise UserError(f"the model '{model}' needs {MADE_BY[option]}")
        folders = {option: getattr(self, option) for option in reads}
        return Inputs(self.tables, **folders)
