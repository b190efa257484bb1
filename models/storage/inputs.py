"""What a run works on: the folder of tables, and the folders beside it that some models read.

Inputs("tables", sids="sids").of("tiger", {"sids": True})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.storage.tables import TableVersion, UserError, join, read_manifest
from models.storage.uri import absolute

MADE = {
    "sids": ("semantic IDs", "jobs.tokenize"),
    "text": ("text embeddings", "jobs.encode"),
}
"""By folder beside the tables: what it holds, and the job that makes it."""


@dataclass(frozen=True)
class Inputs:
    """Absolute paths or URIs. Each is called as the option of the commands that takes it."""

    tables: str
    """TABLES: the folder that jobs.prepare made."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models; models of actions can do without."""

    def __post_init__(self) -> None:
        for option, place in self.given().items():
            object.__setattr__(self, option, absolute(place))

    @property
    def sequences(self) -> str:
        """The table that examples are made of."""
        return join(self.tables, "sequences")

    def given(self) -> dict[str, str]:
        """Those that there are, by option."""
        return {option: place for option, place in vars(self).items() if place}

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
                        job = MADE[option][1] if option in MADE else "jobs.prepare"
                        raise UserError(
                            f"{join(folder, table)} was made from other {name} ({made_from[:12]}, these are "
                            f"{versions[name].hash[:12]}); point at tables that belong together or run {job} again"
                        )
                name = f"text_{table}" if option == "text" else table
                versions[name] = TableVersion.from_manifest(manifest)
        return versions

    def of(self, model: str, reads: Mapping[str, bool]) -> Inputs:
        """Those that the model reads: `reads` has the folders beside the tables, by option, and whether the model
        needs them. UserError where it needs one that is not given."""
        for option, needed in reads.items():
            if needed and not getattr(self, option):
                holds, job = MADE[option]
                raise UserError(
                    f"the model '{model}' needs {holds}; give --{option} with the folder that {job} made"
                )
        return Inputs(
            self.tables, **{option: getattr(self, option) for option in reads}
        )
