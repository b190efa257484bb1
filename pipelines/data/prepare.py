"""Raw log to tables: events and rejects, items, sequences, statistics, each committed when whole.

`python -m jobs.prepare --source YAML --input RAW_DIR --output TABLES` runs it. Each step compares a
fingerprint of its configuration and inputs with the one in the table's manifest, so a run that was
stopped anywhere continues with what is missing, and a finished one does nothing.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from pyarrow import fs

from models.tables import (
    MANIFEST,
    Manifest,
    UserError,
    has_manifest,
    join,
    open_uri,
    part_uris,
    read_manifest,
)
from pipelines.data.actions_config import ActionsConfig
from pipelines.data.actions_steps import check_actions, make_actions
from pipelines.data.catalogue import core_items
from pipelines.data.events import hash_files, ingest, partitions_for
from pipelines.data.items import write_items
from pipelines.data.retrieval_steps import make_retrieval
from pipelines.data.search_steps import check_search, make_search
from pipelines.data.sources.base import Rejected, Source
from pipelines.data.splits import SplitConfig, cut_times
from pipelines.data.statistics import summarise
from pipelines.data.survey import Survey, check_users_once, merge, survey
from pipelines.data.tables import REJECTS, check_writable, clear, commit, fingerprint, up_to_date, write_file, writing
from pipelines.data.windows import SearchConfig

Say = Callable[[str], None]


@dataclass
class PrepareConfig:
    """What is made of a raw log. A source file's `prepare` section sets these; the command line wins."""

    kind: Literal["retrieval", "search", "actions"] = "retrieval"
    """What a request is: `retrieval`, each behaviour asks for itself; `search`, a search with the results it showed;
    `actions`, an impression whose actions are asked for."""
    core: int = 5
    """Iterative k-core: users and items with fewer behaviours are left out. 0 or 1 keeps all."""
    core_window: Literal["all", "train"] = "all"
    """Whether the k-core counts the whole log, as papers do, or the training window of a temporal split only."""
    ties: Literal["strict", "log_order"] = "strict"
    """`strict`: a history holds only what is strictly earlier. `log_order`: events of equal time keep the log's
    order and see the ones before; `position` then is that order."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """How requests are split."""
    max_events: int = 10_000
    """Behaviours per user; of longer histories the most recent are kept."""
    behaviour: str | None = None
    """A bool label that makes an event a behaviour, such as `click`; by default every event is one."""
    partitions: int | None = None
    """Partitions of the shuffle and parts of the tables; by default from the bytes read."""
    max_rejects: float = 0.01
    """Share of rows that may break the schema before the job fails."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """The features of a search log."""
    actions: ActionsConfig = field(default_factory=ActionsConfig)
    """Tasks, inputs and counts of a log of actions."""

    def __post_init__(self) -> None:
        if self.kind not in ("retrieval", "search", "actions"):
            raise ValueError(f"kind is '{self.kind}'; it is one of retrieval, search, actions")
        if self.core < 0:
            raise ValueError(f"core is {self.core}; it must be 0 (keep all) or more")
        if self.core_window not in ("all", "train"):
            raise ValueError(f"core_window is '{self.core_window}'; it is one of all, train")
        if self.ties not in ("strict", "log_order"):
            raise ValueError(f"ties is '{self.ties}'; it is one of strict, log_order")
        if self.max_events < 1:
            raise ValueError(f"max_events is {self.max_events}; a user needs at least 1")
        if self.partitions is not None and self.partitions < 1:
            raise ValueError(f"partitions is {self.partitions}; it must be 1 or more, or left out")
        if not 0 <= self.max_rejects <= 1:
            raise ValueError(f"max_rejects is {self.max_rejects}; it is a share between 0 and 1")

    @classmethod
    def of(cls, *layers: dict[str, Any]) -> PrepareConfig:
        """From plain values; later layers win, None means not given. UserError names an unknown key."""
        values: dict[str, Any] = {}
        nested: dict[str, dict[str, Any]] = {name: {} for name in NESTED}
        for layer in layers:
            _check_keys(layer, cls, "")
            for name, kind in NESTED.items():
                given = layer.get(name) or {}
                if not isinstance(given, dict):
                    raise UserError(f"prepare.{name} is '{given}'; it is a mapping such as {{key: value}}")
                _check_keys(given, kind, f"{name}.")
                nested[name] |= {key: value for key, value in given.items() if value is not None}
            values |= {key: value for key, value in layer.items() if value is not None and key not in NESTED}
        try:
            return cls(**{name: kind(**nested[name]) for name, kind in NESTED.items()}, **values)
        except (ValueError, TypeError) as error:
            raise UserError(str(error)) from error

    @property
    def counted(self) -> str | None:
        """The label of the events that make the catalogue and the split: in a search log all that was shown do."""
        return None if self.kind == "search" else self.behaviour


NESTED: dict[str, Any] = {"split": SplitConfig, "search": SearchConfig, "actions": ActionsConfig}


def _check_keys(values: dict[str, Any], kind: type, where: str) -> None:
    known = [f.name for f in fields(kind)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise UserError(f"unknown key 'prepare.{where}{key}'; the nearest key is '{near}'")


@dataclass
class _Run:
    """One call of `prepare`: where things are, and what earlier steps found."""

    source: Source
    input: str
    output: str
    config: PrepareConfig
    overwrite: bool
    say: Say
    surveyed: Survey | None = None

    def table(self, name: str) -> str:
        return join(self.output, name)

    def finished(self, name: str, config: dict[str, Any], inputs: dict[str, str]) -> Manifest | None:
        """The table's manifest if it need not be made; UserError if it was made from something else."""
        uri = self.table(name)
        if self.overwrite or not has_manifest(uri):
            return None
        if not up_to_date(uri, fingerprint(config, inputs)):
            raise UserError(
                f"{uri} was made from other inputs or settings; add --overwrite to replace it, or choose another "
                f"--output"
            )
        manifest = read_manifest(uri, name)
        part_uris(uri, manifest)  # a part that is gone or cut short is an error that names it
        self.say(f"{name}: up to date, {manifest.rows:,} rows")
        return manifest

    def progress(self, step: str) -> Say:
        """Says how far a step is, at most every second."""
        last = [time.monotonic()]

        def say(line: str) -> None:
            if time.monotonic() - last[0] >= 1:
                last[0] = time.monotonic()
                self.say(f"{step}: {line}")

        return say

    def survey(self, events: Manifest) -> Survey:
        """The arrays of the events parts, read at most once in a run."""
        if self.surveyed is None:
            self.surveyed = survey(part_uris(self.table("events"), events), self.config.counted)
        return self.surveyed

    def clean_on_error(self, uri: str) -> AbstractContextManager[None]:
        """Removes the parts in the making if the step fails."""
        return _clean_on_error(uri)


def prepare(
    source: Source,
    input_uri: str,
    output_uri: str,
    config: PrepareConfig,
    overwrite: bool = False,
    say: Say = print,
) -> dict[str, Any]:
    """Makes the tables of a raw log under `output_uri` and returns their statistics. Needs a running Ray.

    Raises UserError for input, settings or output that cannot be used; the table in the making is then
    removed and finished ones stay as they were.
    """
    config = check(source, input_uri, output_uri, config)
    run = _Run(source, str(input_uri), str(output_uri), config, overwrite, say)
    files, item_files, user_files = (
        kind(run.input) for kind in (source.event_files, source.item_files, source.user_files)
    )
    every = [*files, *item_files, *user_files]
    by_file = dict(zip(every, hash_files([join(run.input, file) for file in every]), strict=True))
    with writing(run.output):
        events = _make_events(run, files, {file: by_file[file] for file in [*files, *user_files]})
        split = _split_rule(run, events)
        items = _make_items(run, events, {file: by_file[file] for file in item_files}, split)
        if config.kind == "search":
            sequences = make_search(run, events, items, split, _split_key(run, events))
        elif config.kind == "actions":
            sequences = make_actions(run, events, items, split, _split_key(run, events))
        else:
            sequences = make_retrieval(run, events, items, split, _split_key(run, events), _before(run, split))
        statistics = summarise(events, items, sequences)
        content = json.dumps(statistics, indent=2) + "\n"
        write_file(join(run.output, "statistics.json"), content.encode())
    return statistics


def check(source: Source, input_uri: str, output_uri: str, config: PrepareConfig) -> PrepareConfig:
    """What can be known before any work, without Ray: the files are there, the output can be written, the
    settings fit the log. Returns the configuration with everything decided that the source decides."""
    labels = source.info["labels"]
    if config.behaviour is not None and labels.get(config.behaviour) != "bool":
        known = ", ".join(name for name, kind in labels.items() if kind == "bool") or "none"
        raise UserError(f"behaviour is '{config.behaviour}', which is no bool label of the log; those are: {known}")
    if config.kind == "actions":
        check_actions(source, config)  # first, as without a clock no split would be right
    kind: Any = config.split.resolve(source.info["clock"])
    if config.core_window == "train" and kind != "temporal":
        raise UserError(
            "core_window is train, which needs a temporal split; use --split.kind temporal or core_window all"
        )
    if kind == "per_user" and config.kind != "actions":
        raise UserError(f"split.kind is per_user, which is of logs of actions; use temporal for kind {config.kind}")
    if config.kind == "search":
        check_search(source, config)
    source.event_files(input_uri)
    source.item_files(input_uri)
    source.user_files(input_uri)
    check_writable(output_uri)
    return replace(config, split=replace(config.split, kind=kind))


@contextmanager
def _clean_on_error(*uris: str) -> Iterator[None]:
    """Removes the parts that no manifest lists if the step fails."""
    try:
        yield
    except BaseException:
        for uri in uris:
            _discard(uri)
        raise


def _discard(uri: str) -> None:
    filesystem, root = open_uri(uri)
    if filesystem.get_file_info(root).type != fs.FileType.Directory:
        return
    clear(uri, {part.path for part in read_manifest(uri).files} | {MANIFEST} if has_manifest(uri) else ())


def _make_events(run: _Run, files: list[str], inputs: dict[str, str]) -> Manifest:
    source, config = run.source, run.config
    uris = [join(run.input, file) for file in files]
    partitions = config.partitions or partitions_for(uris)
    settings = _plain({"source": source.config, "ties": config.ties, "partitions": partitions})
    finished = run.finished("events", settings, inputs)
    finished_rejects = run.finished("rejects", settings, inputs)
    if finished and finished_rejects:
        info = finished.info
        _check_rejects(run, info.get("user_rows", 0), info.get("user_reject_reasons", {}), " of the user files")
        _check_rejects(run, info["rows_read"], info["reject_reasons"])
        return finished
    events_uri, rejects_uri = run.table("events"), run.table("rejects")
    run.say(f"events: reading {_count(len(files), 'file')} into {_count(partitions, 'partition')}")
    begin = time.perf_counter()
    with _clean_on_error(events_uri, rejects_uri):
        check_writable(events_uri)
        check_writable(rejects_uri)
        users = source.read_users(run.input)
        of_users = Rejected.of(users) if users else Rejected()
        _say_rejects(run, of_users, " of the user files")
        _check_rejects(run, of_users.rows_read, of_users.reasons, " of the user files")
        result = ingest(
            source,
            run.input,
            files,
            events_uri,
            rejects_uri,
            partitions,
            config.ties == "log_order",
            config.counted,
            users.rows if users else None,
            run.progress("events"),
        )
        rejected = result.rejected
        rejects = sum(rejected.reasons.values())
        _say_rejects(run, rejected)
        if not rejected.rows_read:
            raise UserError(f"{run.input} holds no rows in {', '.join(files[:3])}; check --input")
        _check_rejects(run, rejected.rows_read, rejected.reasons)
        if not result.parts:
            raise UserError(f"{run.input} holds no valid event; see the reasons above")
        read = time.perf_counter()
        run.surveyed = merge(result.arrays, result.users, config.counted)
        check_users_once(run.surveyed.arrays, run.surveyed.users)
        timings = {"read_shuffle_sort_write_s": read - begin, "survey_s": time.perf_counter() - read}
        info = {
            **source.info,
            "ties": config.ties,
            "rows_read": rejected.rows_read,
            "rejects": rejects,
            "reject_reasons": dict(sorted(rejected.reasons.items())),
            "user_rows": of_users.rows_read,
            "user_rejects": sum(of_users.reasons.values()),
            "user_reject_reasons": dict(sorted(of_users.reasons.items())),
            "duplicates": result.duplicates,
            "users": run.surveyed.users,
        }
        commit(rejects_uri, "rejects", REJECTS, result.rejects, config=settings, inputs=inputs, info={"rows": rejects})
        events = commit(
            events_uri,
            "events",
            source.schema,
            result.parts,
            config=settings,
            inputs=inputs,
            info=info,
            timings=timings,
        )
    run.say(
        f"events: {events.rows:,} rows of {run.surveyed.users:,} users, each in one part "
        f"({result.duplicates:,} duplicates dropped, {rejects:,} rejects) in {time.perf_counter() - begin:.1f} s"
    )
    return events


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _say_rejects(run: _Run, rejected: Rejected, of: str = "") -> None:
    for reason, rows in rejected.reasons.most_common():
        run.say(f"rejects{of}: {rows:,} rows, {reason}; such as {rejected.examples[reason]}")


def _check_rejects(run: _Run, rows: int, reasons: Mapping[str, int], of: str = "") -> None:
    rejects = sum(reasons.values())
    if rejects > run.config.max_rejects * rows:
        raise UserError(
            f"{rejects:,} of {rows:,} rows{of} ({rejects / rows:.2%}) break the schema, over the limit "
            f"max_rejects {run.config.max_rejects:.2%}; most often {max(reasons, key=reasons.__getitem__)}; fix the "
            f"source file or the log, or raise --max_rejects"
        )


def _split_rule(run: _Run, events: Manifest) -> dict[str, Any]:
    """The split as manifests record it. Cut times come from the events, or from a finished table of them."""
    kind, clock = run.config.split.kind, events.info["clock"]
    if kind == "leave_last_out":
        if clock:
            run.say(
                "warning: leave_last_out on a log with clock times: training sees other users' behaviours that are "
                "later than a test request; use --split.kind temporal for an honest estimate"
            )
        return {"kind": "leave_last_out"}
    if kind == "per_user":
        run.say(
            "warning: per_user cuts let training see other users' actions that are later than a test event; use "
            "--split.kind temporal for an honest estimate"
        )
        return {"kind": "per_user", "val_start_ms": None, "test_start_ms": None}
    if run.config.core_window == "all" and run.config.core > 1:
        run.say(
            "note: the k-core counts the whole log, test window included, as papers do; use --core_window train to "
            "count the training window only"
        )
    wanted = _split_key(run, events)
    for name in () if run.overwrite else ("sequences", "items"):
        if has_manifest(run.table(name)):
            info = read_manifest(run.table(name), name).info
            if info.get("split_made_from") == wanted:
                return dict(info["split"])
    return cut_times(run.survey(events), run.config.split)


def _split_key(run: _Run, events: Manifest) -> list[Any]:
    """What the cut times depend on."""
    return [events.hash, run.config.split.settings(), run.config.counted]


def _before(run: _Run, split: dict[str, Any]) -> int | None:
    return split["val_start_ms"] if run.config.core_window == "train" else None


def _make_items(run: _Run, events: Manifest, files: dict[str, str], split: dict[str, Any]) -> Manifest:
    config = run.config
    settings = _plain(
        {
            "source": run.source.config,
            "core": config.core,
            "core_window": config.core_window,
            "behaviour": config.counted,
            **({"split": config.split.settings()} if config.core_window == "train" else {}),
        }
    )
    inputs = {"events": events.hash, **files}
    if finished := run.finished("items", settings, inputs):
        rows, reasons = finished.info.get("metadata_rows", 0), finished.info.get("metadata_reject_reasons", {})
        _check_rejects(run, rows, reasons, " of the item files")
        return finished
    begin = time.perf_counter()
    found = run.survey(events)
    catalogue, rounds = core_items(found, config.core, _before(run, split))
    counted = time.perf_counter()
    uri = run.table("items")
    with _clean_on_error(uri):
        check_writable(uri)
        parts, schema, counts, rejected = write_items(run.source, run.input, list(files), catalogue, uri)
        _say_rejects(run, rejected, " of the item files")
        _check_rejects(run, rejected.rows_read, rejected.reasons, " of the item files")
        info = {
            "core": config.core,
            "core_window": config.core_window,
            "core_rounds": rounds,
            "behaviour": config.counted,
            "split": split,
            "split_made_from": _split_key(run, events),
            "items_before_core": len(found.items),
            "dropped_items": len(found.items) - len(catalogue),
            "metadata_rows": rejected.rows_read,
            "metadata_rejects": sum(rejected.reasons.values()),
            "metadata_reject_reasons": dict(sorted(rejected.reasons.items())),
            **counts,
        }
        timings = {"core_s": counted - begin, "write_s": time.perf_counter() - counted}
        items = commit(uri, "items", schema, parts, config=settings, inputs=inputs, info=info, timings=timings)
    run.say(
        f"items: {items.rows:,} in the catalogue, {info['dropped_items']:,} dropped by the {config.core}-core "
        f"({rounds} rounds), {info['items_without_metadata']:,} without metadata, "
        f"{info['metadata_outside_catalogue']:,} metadata rows of other items left out"
    )
    return items


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as JSON values, as it will read back from a manifest."""
    return dict(json.loads(json.dumps(config, default=str)))
