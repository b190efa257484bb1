"""One run of `jobs.prepare`: where things are, what earlier steps found, and how a step commits its table."""

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
    describe,
    file_info,
    fingerprint,
    has_manifest,
    join,
    open_uri,
    part_uris,
    read_manifest,
    read_table,
    switch,
    up_to_date,
)
from pipelines.data.engine import Engine, Shared
from pipelines.data.events.event_stats import Survey, Vocabulary, survey
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import Log
from pipelines.data.reading.rows import Rejected

Say = Callable[[str], None]

STABLE = ("events", "items", "sequences")
"""Tables that say what they extend: users and items keep their rows and numbers."""


@dataclass
class Run:
    """One call of `prepare`, as its steps see it."""

    source: Log
    """The raw log."""
    input: str
    """Folder of its files."""
    output: str
    """Folder of the tables."""
    config: PrepareConfig
    """The settings, with everything decided that the source decides."""
    counted: str | None
    """The label of the events that make the catalogue and the split; None where all events do."""
    overwrite: bool
    """Whether tables are made again, whatever is there."""
    say: Say
    """Takes the lines that a user reads."""
    whole: bool
    """Whether a run has finished there before: only then is a table of other inputs or settings not replaced."""
    engine: Engine
    """Ray Data, with its settings."""
    append: bool = False
    """Whether new files are joined to tables that are there; the new tables are switched to together, at the end."""
    grows: bool = False
    """Whether more files will be joined later, as `--append` was given, be it on the first day."""
    surveyed: Survey | None = None
    """What is known of the events parts, once they are there."""
    made: dict[str, Manifest] = field(default_factory=dict)
    """By table what has been made and not switched to."""

    def table(self, name: str) -> str:
        """Folder of a table."""
        return join(self.output, name)

    def finished(
        self,
        name: str,
        config: dict[str, Any],
        inputs: dict[str, str],
        stamps: dict[str, list[int]] | None = None,
    ) -> Manifest | None:
        """The table's manifest if it need not be made; UserError if a finished run made it from something else. stamps:
        of the raw files that it is made from too; one with another size or time of change is another file."""
        uri = self.table(name)
        if self.overwrite or not has_manifest(uri):
            return None
        made = read_manifest(uri)
        for file, now in (stamps or {}).items():
            same = made.info.get("stamps", {}).get(file) == now
            inputs = {**inputs, file: made.inputs.get(file, "") if same else "changed"}
        if not up_to_date(uri, fingerprint(config, inputs)):
            if self.append:
                return None
            if self.whole:
                raise UserError(
                    f"{uri} was made from other inputs or settings; add --overwrite to replace it, or choose another "
                    f"--output"
                )
            self.say(
                f"{name}: replaced, as the run that made it from other inputs or settings did not finish"
            )
            return None
        manifest = read_manifest(uri, name)
        part_uris(
            uri, manifest
        )  # a part that is gone or cut short is an error that names it
        self.say(f"{name}: up to date, {pluralize(manifest.rows, 'row')}")
        return manifest

    def before(self, name: str) -> Manifest | None:
        """The version of a table that is appended to; None where there is none."""
        return (
            read_manifest(self.table(name), name)
            if self.append and has_manifest(self.table(name))
            else None
        )

    def read(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """A table of this run, also one that has not been switched to."""
        return read_table(self.table(name), name, columns, self.made.get(name))

    def stamps(self, files: Iterable[str]) -> dict[str, list[int]]:
        """Sizes and times of change of raw files, by which a run that starts again knows them."""
        infos = {file: file_info(join(self.input, file)) for file in files}
        return {file: [info.size, info.mtime_ns or 0] for file, info in infos.items()}

    def reject(self, rejected: Rejected, of: str = "") -> None:
        """Says what was rejected; UserError where that is too much. of: which rows"""
        for line in rejected.lines():
            self.say(f"rejects{of}: {line}")
        rejected.check(self.config.max_rejects, of)

    def progress(self, step: str) -> Say:
        """Says how far a step is, at most every second."""
        last = [time.monotonic()]

        def say(line: str) -> None:
            if time.monotonic() - last[0] >= 1:
                last[0] = time.monotonic()
                self.say(f"{step}: {line}")

        return say

    def survey(self, events: Manifest) -> Survey:
        """What is known of the events parts, which are read for it at most once in a run."""
        if self.surveyed is None:
            parts = part_uris(self.table("events"), events)
            self.surveyed = survey(parts, self.counted, self.engine, self.late)
        return self.surveyed

    @property
    def late(self) -> bool:
        """Whether events say when the label that makes them behaviours is known."""
        return self.counted in self.source.info.get("known", {})

    def split_key(self, events: Manifest) -> list[Any]:
        """What the cut times of a split depend on."""
        return [events.hash, self.config.split.settings(), self.counted]

    def before_ms(self, split: dict[str, Any]) -> int | None:
        """Behaviours earlier than this count for the k-core; None for all, as on the catalogue of other tables."""
        window = self.config.core_window if self.config.catalogue is None else "all"
        return split["val_start_ms"] if window == "train" else None

    def catalogue(self) -> Shared:
        """The ids of the catalogue, whose places are item_index, as a `Vocabulary` that all tasks can read."""
        ids = self.read("items", ["item_id"])["item_id"]
        return self.engine.put(Vocabulary.of(ids.cast("large_string").combine_chunks()))

    def queries(self) -> Shared:
        """Likewise the queries of a search log, whose places are query_index."""
        if not (
            self.made.get("queries") or read_manifest(self.table("queries"), "queries")
        ).files:
            return self.engine.put(Vocabulary.of(pa.array([], pa.large_string())))
        texts = self.read("queries")["query"]
        return self.engine.put(
            Vocabulary.of(texts.cast("large_string").combine_chunks())
        )

    def sequences_info(
        self,
        events: Manifest,
        items: Manifest,
        split: dict[str, Any],
        count: Counter[str],
    ) -> dict[str, Any]:
        """What the manifest of sequences says of every kind of request. count: what was counted on the way."""
        config = self.config
        return {
            "kind": config.kind,
            "users": count["users"],
            "interactions": count["interactions"],
            "pairs": count["pairs"],
            "items": items.rows,
            "split": split,
            "split_made_from": self.split_key(events),
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
        """Commits a table, with what was timed and what Ray Data says; while files are appended, at the end."""
        timings["ray_data"] = self.engine.take_stats()
        made = describe(
            name,
            schema,
            parts,
            config=settings,
            inputs=inputs,
            info=info,
            timings=timings,
        )
        if (before := self.before(name)) and name in STABLE:
            made.extends.extend(
                [*before.extends, *([before.hash] if before.hash != made.hash else [])]
            )
        self.made[name] = made
        if not self.append:
            self.switch()
        return made

    def switch(self) -> None:
        """Makes what has been made the tables; rejects before events, by which an append knows what is there."""
        order = sorted(self.made, key=lambda name: name != "rejects")
        switch({self.table(name): self.made[name] for name in order})
        self.made = {}

    @contextmanager
    def writing(self, *tables: str) -> Iterator[None]:
        """Around a step that writes parts: removes those in the making if it fails."""
        uris = [self.table(name) for name in tables]
        try:
            yield
        except BaseException:
            for uri in uris:
                _discard(uri)
            raise


LARGEST = ("max_length", "max_candidates", "max_spread_ms")
"""Counts of which a table has the largest of its parts, and not the sum."""


def gather_parts(
    results: Iterable[tuple[int, Any]], parts: int, progress: Say
) -> tuple[list[Part], Counter[str], list[Any]]:
    """Of what ran per events part, by the number of the part (the part of sequences or None, what was counted on the
    way, anything else): the parts in the order of the events parts, uncommitted, the counts of all, and the rest."""
    written: list[tuple[Part | None, Any]] = [(None, None)] * parts
    total: Counter[str] = Counter()
    for done, (number, (part, count, other)) in enumerate(results, start=1):
        written[number] = part, other
        largest = {name: max(total[name], count[name]) for name in LARGEST}
        total.update(count)
        for name, value in largest.items():
            total[name] = value
        progress(f"part {done} of {parts} built, {pluralize(total['users'], 'user')}")
    return (
        [part for part, _ in written if part is not None],
        total,
        [other for _, other in written],
    )


def _discard(uri: str) -> None:
    """Removes the parts that no manifest lists."""
    filesystem, root = open_uri(uri)
    if filesystem.get_file_info(root).type != fs.FileType.Directory:
        return
    clear(
        uri,
        {part.path for part in read_manifest(uri).files} | {MANIFEST}
        if has_manifest(uri)
        else (),
    )
