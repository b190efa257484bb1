"""One run of `jobs.prepare`: its settings, and the tables that its steps find and commit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import fs

from models.config import pluralize
from models.storage.tables import (
    MANIFEST,
    Manifest,
    Part,
    UserError,
    clear,
    file_info,
    fingerprint,
    has_manifest,
    join,
    make_manifest,
    open_uri,
    part_uris,
    read_manifest,
    read_table,
    replace_tables,
    up_to_date,
)
from pipelines.data.engine import Engine, Shared
from pipelines.data.events.columns import Vocabulary
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import Log
from pipelines.data.reading.rows import RejectCounts
from pipelines.data.sequences.splits import train_end_ms

Report = Callable[[str], None]
"""Prints a line that a user reads."""

EXTENSIBLE = ("events", "items", "sequences")
"""Tables that name the versions that they extend: users and items keep their rows and
numbers."""


@dataclass
class OutputTables:
    """The tables under the output folder of one run."""

    uri: str
    """The output folder."""
    report: Report
    engine: Engine
    overwrite: bool = False
    """Make every table again."""
    append: bool = False
    """Add to existing tables; the new versions replace the old ones together, at the
    end."""
    is_complete: bool = False
    """Whether an earlier run finished there: then a table of other inputs or settings
    is not replaced."""
    pending: dict[str, Manifest] = field(default_factory=dict)
    """Manifests of tables that are written and not yet in place."""

    def table_uri(self, name: str) -> str:
        """Return the folder of a table."""
        return join(self.uri, name)

    def find_finished(
        self,
        name: str,
        config: dict[str, Any],
        inputs: dict[str, str],
        stamps: dict[str, list[int]] | None = None,
    ) -> Manifest | None:
        """Return the manifest of a table that need not be made again, or None.

        Args:
            name: Name of the table.
            config: Settings that it is made with.
            inputs: Hashes of its inputs.
            stamps: Size and time of change of the raw files that it is made from. A
                file
                with another stamp counts as another file.

        Raises:
            UserError: if a finished run made the table from other inputs or settings.
        """
        uri = self.table_uri(name)
        if self.overwrite or not has_manifest(uri):
            return None
        earlier = read_manifest(uri)
        for file, stamp in (stamps or {}).items():
            unchanged = earlier.info.get("stamps", {}).get(file) == stamp
            file_hash = earlier.inputs.get(file, "") if unchanged else "changed"
            inputs = {**inputs, file: file_hash}
        if up_to_date(uri, fingerprint(config, inputs)):
            manifest = read_manifest(uri, name)
            part_uris(uri, manifest)  # names a part that is gone or cut short
            self.report(f"{name}: up to date, {pluralize(manifest.rows, 'row')}")
            return manifest
        if self.append:
            return None
        if self.is_complete:
            raise UserError(
                f"{uri} was made from other inputs or settings; add --overwrite to replace it, or choose another "
                f"--output"
            )
        self.report(
            f"{name}: replaced, as the run that made it from other inputs or settings did not finish"
        )
        return None

    def appended_version(self, name: str) -> Manifest | None:
        """Return the version of a table that this run adds to, or None."""
        uri = self.table_uri(name)
        if not self.append or not has_manifest(uri):
            return None
        return read_manifest(uri, name)

    def manifest(self, name: str) -> Manifest:
        """Return a table's manifest, also of a table that is pending."""
        return self.pending.get(name) or read_manifest(self.table_uri(name), name)

    def read(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Read a table, also one that is pending."""
        return read_table(self.table_uri(name), name, columns, self.pending.get(name))

    def read_vocabulary(self, name: str, column: str) -> Shared:
        """Store the `Vocabulary` of a table's column, whose integers are row numbers, for all tasks."""
        if not self.manifest(name).files:
            ids = pa.array([], pa.large_string())
        else:
            ids = self.read(name, [column])[column].cast("large_string")
            ids = ids.combine_chunks()
        return self.engine.put(Vocabulary.from_ids(ids))

    def read_catalogue(self) -> Shared:
        """Store the vocabulary of item ids, whose integers are `item_index`, for all tasks."""
        return self.read_vocabulary("items", "item_id")

    def commit(
        self,
        name: str,
        schema: pa.Schema,
        parts: list[Part],
        settings: dict[str, Any],
        inputs: dict[str, str],
        info: dict[str, Any] | None = None,
        **timings: Any,
    ) -> Manifest:
        """Commit a table with its timings and Ray Data's statistics; with `append`, at the end of the run."""
        timings["ray_data"] = self.engine.take_stats()
        manifest = make_manifest(
            name,
            schema,
            parts,
            config=settings,
            inputs=inputs,
            info=info,
            timings=timings,
        )
        earlier = self.appended_version(name)
        if earlier and name in EXTENSIBLE:
            manifest.extends.extend(earlier.extends)
            if earlier.hash != manifest.hash:
                manifest.extends.append(earlier.hash)
        self.pending[name] = manifest
        if not self.append:
            self.put_in_place()
        return manifest

    def put_in_place(self) -> None:
        """Put the pending tables in place. Rejects come before events, from which an append knows the files."""
        order = sorted(self.pending, key=lambda name: name != "rejects")
        replace_tables({self.table_uri(name): self.pending[name] for name in order})
        self.pending = {}

    @contextmanager
    def clean_up_on_error(self, *names: str) -> Iterator[None]:
        """Remove the parts of unfinished tables if the step inside fails."""
        try:
            yield
        except BaseException:
            for name in names:
                _remove_unlisted_parts(self.table_uri(name))
            raise


def _remove_unlisted_parts(uri: str) -> None:
    """Remove the parts that no manifest lists."""
    filesystem, root = open_uri(uri)
    if filesystem.get_file_info(root).type != fs.FileType.Directory:
        return
    listed: set[str] = set()
    if has_manifest(uri):
        listed = {part.path for part in read_manifest(uri).files} | {MANIFEST}
    clear(uri, listed)


@dataclass(frozen=True)
class Run:
    """Log, settings and tables of a call of `prepare`, shared by its steps."""

    source: Log
    """The raw log."""
    input: str
    """Folder of the log's files."""
    config: PrepareConfig
    """Settings; everything that the source decides is decided."""
    behaviour: str | None
    """Label of the events that make the catalogue and the split; None where all events
    do."""
    report: Report
    engine: Engine
    tables: OutputTables
    grows: bool = False
    """Whether more files will be appended later: `--append` was given, maybe on the
    first day."""

    @property
    def is_late(self) -> bool:
        """Whether the label that makes an event a behaviour has times of its own."""
        return self.behaviour in self.source.info.get("known", {})

    def stamps(self, files: Iterable[str]) -> dict[str, list[int]]:
        """Return size and time of change of raw files, by which a later run recognises them."""
        infos = {file: file_info(join(self.input, file)) for file in files}
        return {file: [info.size, info.mtime_ns or 0] for file, info in infos.items()}

    def check_rejects(self, rejected: RejectCounts, rows: str = "") -> None:
        """Report rejected rows. `rows` says which rows were read, after a space.

        Raises:
            UserError: if more than a share `max_rejects` was rejected.
        """
        for line in rejected.lines():
            self.report(f"rejects{rows}: {line}")
        rejected.check(self.config.max_rejects, rows)

    def report_progress(self, step: str) -> Report:
        """Return a function that reports the progress of a step at most once per second."""
        last = [time.monotonic()]

        def report(line: str) -> None:
            if time.monotonic() - last[0] >= 1:
                last[0] = time.monotonic()
                self.report(f"{step}: {line}")

        return report

    def split_inputs(self, events: Manifest) -> list[Any]:
        """Return the inputs of the cut times of a split, as manifests record them."""
        return [events.hash, self.config.split.settings(), self.behaviour]

    def core_before_ms(self, split: dict[str, Any]) -> int | None:
        """Return the time before which behaviours count for the k-core; None if all count.

        All count on the catalogue of other tables. With several folds only the training
        window that they share counts.
        """
        whole_log = self.config.core_window == "all" or self.config.catalogue
        return None if whole_log else train_end_ms(split)

    def sequences_info(
        self,
        events: Manifest,
        items: Manifest,
        split: dict[str, Any],
        count: Counter[str],
    ) -> dict[str, Any]:
        """Return the entries of the manifest's `info` that sequences of every kind have.

        `count` holds the counts of all parts.
        """
        config = self.config
        return {
            "kind": config.kind,
            "users": count["users"],
            "interactions": count["interactions"],
            "pairs": count["pairs"],
            "items": items.rows,
            "split": split,
            "split_made_from": self.split_inputs(events),
            "ties": config.ties,
            "clock": events.info["clock"],
            "behaviour": config.behaviour,
            "core": config.core,
            "core_window": config.core_window,
            "max_events": config.max_events,
            "max_length": count["max_length"],
            "truncated_users": count["truncated_users"],
            "truncated_events": count["truncated_events"],
            "tied_behaviours": count["tied_rows"],
            "items_hash": items.hash,
            "labels": self.source.info["labels"],
            "numbers": self.source.info["numbers"],
            "categories": self.source.info["categories"],
        }
