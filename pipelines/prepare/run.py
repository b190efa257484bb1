"""One run of `jobs.prepare`: its settings and its output tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import pyarrow as pa
from pyarrow import fs

from core.errors import UserError, pluralize
from core.files import file_info, join
from core.tables import (
    MANIFEST,
    Info,
    Part,
    Table,
    clear,
    fingerprint,
    make_table,
    read_manifest,
    replace_tables,
)
from pipelines.prepare.executor import Executor
from pipelines.prepare.reading.log import Log
from pipelines.prepare.reading.rows import RejectCounts
from pipelines.prepare.settings.config import PrepareConfig

Report = Callable[[str], None]
"""Prints a line that a user reads."""

EXTENSIBLE = ("events", "items", "sequences")
"""Tables whose manifests list the hashes of the versions that they extend. Users and
items keep their row numbers in an extended version."""


@dataclass(frozen=True)
class EventStats:
    """Statistics of the behaviours of one part, or of all parts, of the events."""

    users: int
    """Number of users with an event, whether a behaviour or not."""
    items: pl.DataFrame
    """`id` and `count`, the number of behaviours, of each item with a behaviour; of all
    parts, sorted."""
    hours: dict[int, int]
    """Number of behaviours by the epoch ms of the start of their hour; of all parts,
    ascending."""
    first_ms: int = 0
    """Smallest timestamp of a behaviour; 0 without behaviours."""
    last_ms: int = 0
    """Largest timestamp of a behaviour; 0 without behaviours."""

    @property
    def behaviours(self) -> int:
        """Number of behaviours."""
        return sum(self.hours.values())


@dataclass
class Run:
    """A call of `prepare`, shared by its steps: log, settings and output tables."""

    source: Log
    """Mapping from the columns of the raw files to events, items and users."""
    input: str
    """Folder of the raw files."""
    output: str
    """Folder that the tables are written to."""
    config: PrepareConfig
    """Settings as returned by `resolve_config`."""
    behaviour: str | None
    """Label of the events that the catalogue and the split count; None if they count
    all events."""
    report: Report
    executor: Executor
    grows: bool
    """Whether files may be appended later: `append` was given, possibly for the first
    files."""
    append: bool
    """Extend existing tables. All new versions are put in place together, at the end of
    the run."""
    is_complete: bool
    """Whether the folder holds the tables of a finished run, which must not be replaced
    by tables of other inputs or settings."""
    existing: dict[str, Table]
    """The tables in place, by name; with `overwrite` those of this run alone."""
    pending: dict[str, Table] = field(default_factory=dict)
    """Tables that are written but not yet in place."""
    stats: EventStats | None = None
    """Statistics of the events, if this run has read the events."""

    def table_uri(self, name: str) -> str:
        """Return the folder of a table."""
        return join(self.output, name)

    def find_finished(
        self,
        info_class: type[Info],
        config: dict[str, Any],
        inputs: dict[str, str],
        stamps: dict[str, list[int]] | None = None,
        table: str = "",
    ) -> Table[Info] | None:
        """Return a table that is up to date, or None.

        Args:
            info_class: Type of the table's info.
            config: Settings of the table.
            inputs: Hashes of the inputs of the table, by name.
            stamps: Size and modification time of the raw files that the table is made
                from. A file whose stamp has changed counts as a changed input.
            table: Name of the table, if the type does not name it.
        """
        name = table or info_class.table
        earlier: Table[Info] | None = self.existing.get(name)
        if earlier is None:
            return None
        old_stamps = getattr(earlier.info, "stamps", {})
        for file, stamp in (stamps or {}).items():
            unchanged = old_stamps.get(file) == stamp
            file_hash = earlier.inputs.get(file, "") if unchanged else "changed"
            inputs = {**inputs, file: file_hash}
        if earlier.fingerprint == fingerprint(config, inputs):
            earlier.part_uris()  # raises for a missing or truncated part
            self.report(f"{name}: up to date, {pluralize(earlier.rows, 'row')}")
            return earlier
        if self.append:
            return None
        if self.is_complete:
            earlier.check_made_with(config, inputs)
        self.report(
            f"{name}: replaced, because it was made from other inputs or settings by a "
            f"run that did not finish"
        )
        return None

    def appended_version(self, name: str) -> Table | None:
        """Return the version of a table that this run extends, or None."""
        return self.existing.get(name) if self.append else None

    def current(self, name: str) -> Table:
        """Return a pending or committed table."""
        return self.pending.get(name) or self.existing[name]

    def commit(
        self,
        name: str,
        schema: pa.Schema,
        parts: list[Part],
        settings: dict[str, Any],
        inputs: dict[str, str],
        info: Any = None,
    ) -> Table:
        """Commit a table whose parts are written.

        With `append`, the table stays pending until `put_in_place`.

        Args:
            name: Name of the table.
            schema: Schema of the table.
            parts: Written parts, in the order of the table.
            settings: Settings of the table.
            inputs: Hashes of the tables that the table is made from, by name.
            info: Entries of the manifest's `info`.
        """
        stamps = getattr(info, "stamps", {})
        inputs = {**inputs, **{file: str(stamp) for file, stamp in stamps.items()}}
        table = make_table(
            self.table_uri(name),
            name,
            schema,
            parts,
            config=settings,
            inputs=inputs,
            info=info,
        )
        earlier = self.existing.get(name)
        if self.append and name in EXTENSIBLE and earlier:
            table.extends.extend(earlier.extends)
            if earlier.hash != table.hash:
                table.extends.append(earlier.hash)
        self.pending[name] = table
        if not self.append:
            self.put_in_place()
        return table

    def put_in_place(self) -> None:
        """Put the pending tables in place.

        Rejects come before events, because a later append takes the list of processed
        files from the manifest of events.
        """
        order = sorted(self.pending, key=lambda name: name != "rejects")
        replace_tables([self.pending[name] for name in order])
        self.existing |= self.pending
        self.pending = {}

    @contextmanager
    def clean_up_on_error(self, *names: str) -> Iterator[None]:
        """Remove the parts of uncommitted tables if the body of the context fails."""
        try:
            yield
        except BaseException:
            for name in names:
                uri = self.table_uri(name)
                if file_info(uri).type == fs.FileType.Directory:
                    table = read_manifest(uri)
                    listed = {part.path for part in table.files} if table else set()
                    clear(uri, listed | {MANIFEST})
            raise

    @property
    def is_late(self) -> bool:
        """Whether the behaviour label becomes known later than its event."""
        return self.behaviour in self.source.info.known

    def stamps(self, files: Iterable[str]) -> dict[str, list[int]]:
        """Return [size, modification time in ns] of raw files, to detect changes."""
        infos = {file: file_info(join(self.input, file)) for file in files}
        return {file: [info.size, info.mtime_ns or 0] for file, info in infos.items()}

    def check_rejects(self, rejected: RejectCounts, rows: str = "") -> None:
        """Report rows that are left out or rejected.

        Args:
            rejected: Counts of read and rejected rows.
            rows: Description of the rows that follows the word "rejects", for example
                " of the item files".
        """
        if rejected.left_out:
            # rows of the files; rows are counted as read after lists are exploded
            others = "" if rejected.rows_read else ", and no others read"
            self.report(
                f"where: {pluralize(rejected.left_out, 'row')}{rows} left out{others}"
            )
            if others and not self.append:
                raise UserError(
                    f"where takes none of the {rejected.left_out:,} rows{rows}"
                )
        for line in rejected.lines():
            self.report(f"rejects{rows}: {line}")
        rejected.check(self.config.max_rejects, rows)

    def read_items(self, *columns: str) -> pl.DataFrame:
        """Return ids, indices and other columns of the items."""
        items = self.current("items").read(["item_id", "item_index", *columns])
        return pl.DataFrame(items)

    def split_inputs(self, events: Table) -> list[Any]:
        """Return the inputs of the split's cut times, as manifests record them."""
        return [events.hash, self.config.split.settings(), self.behaviour]
