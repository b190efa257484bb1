"""A raw log to tables: events, items, sequences, rejects and statistics.json.

    python -m jobs.prepare --source jobs/configs/sources/movielens_small.yaml --input RAW_DIR --output TABLES

    python -m jobs.prepare --suggest RAW_DIR [--kind search] [--output SOURCE.yaml]

The second line looks at the files and writes a first source file, with its guesses as
comments, on the screen or to `--output`. `--dry-run` reads the first rows, prints what
they become, and ends. The source file says how to read the log and has a `prepare`
section with the settings below; options on the command line win over it. Run again, it
makes only what is missing or says that all is up to date. With `--append` new files
join the tables (docs/days.md). `--counts_as_of TIME` also makes the table `counts`,
with which a served search model ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pyarrow import fs

from jobs import cli
from jobs.options import Values, exit_with_help, read_values
from models.config import pluralize
from models.storage.input_folders import require_folders
from models.storage.tables import UserError, open_uri
from models.storage.uri import write_file
from pipelines.data.kinds import KINDS
from pipelines.data.prepare import Existing, prepare
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import load_source
from pipelines.data.reading.unread import describe_unread
from pipelines.data.settings import read_config, resolve_config
from pipelines.data.suggestion.preview import check_rejects, lines, preview, warnings
from pipelines.data.suggestion.suggest import suggest


@dataclass
class Config:
    """Options of jobs.prepare."""

    source: str
    """YAML file that describes the raw log, such as jobs/configs/sources/NAME.yaml."""
    input: str
    """Folder of the raw log: a local path, s3:// or gs://."""
    output: str
    """Folder for the tables."""
    settings: PrepareConfig = field(metadata={"inline": True})
    """What is made of the log: the options below, else what the source file's `prepare`
    says."""
    overwrite: bool = False
    """Make all tables again, whatever is there."""
    append: bool = False
    """Join the files of events that are new to the tables that are there, if any; items
    keep their numbers."""
    dry_run: bool = False
    """Read the first rows of the log, print what becomes of them, and end."""
    log: Any = field(default=None, metadata={"hidden": True})
    """The raw log that the source file describes."""

    def __post_init__(self) -> None:
        if self.append and (self.overwrite or self.settings.catalogue):
            other = "--overwrite" if self.overwrite else "--catalogue"
            raise UserError(
                f"--append and {other} are both given; --append keeps the tables and their items: leave one out"
            )


def build_config(values: Values) -> Config:
    """Build the options of jobs.prepare over the defaults of the source file."""
    values.check_required()
    options = dict(values.content)
    given = options.pop("settings", {})
    log, defaults = load_source(options["source"])

    def label(key: str) -> str:
        name = key.removeprefix("prepare.")
        return values.labels.get(f"settings.{name}", f"'{key}'")

    settings = read_config(defaults, given, named=label)
    return Config(**options, settings=settings, log=log)


def run(config: Config) -> dict[str, object]:
    """Prepare the tables, and print the result and the next command."""
    begin = time.perf_counter()
    source, settings = config.log, config.settings
    print(f"reading {config.input}", flush=True)
    require_folders(input=config.input, catalogue=settings.catalogue)
    cli.preflight(
        input=config.input, output=config.output, catalogue=settings.catalogue
    )
    resolve_config(
        source, config.input, config.output, settings
    )  # before Ray takes its seconds to start
    found = preview(
        source, config.input, settings.max_rejects, settings.catalogue is None
    )
    for line in lines(found) if config.dry_run else warnings(found):
        print(line)
    if config.dry_run:
        for line in describe_unread(source, config.input):
            print(line)
        check_rejects(found, settings.max_rejects)
        print("next: the same command without --dry-run makes the tables")
        return {}

    existing: Existing = "continue"
    if config.overwrite:
        existing = "overwrite"
    elif config.append:
        existing = "append"
    statistics = prepare(
        source,
        config.input,
        config.output,
        settings,
        existing,
        start=cli.start_ray,
    )
    unit = "requests" if "requests" in statistics else "events"
    per_split = ", ".join(f"{rows:,} {name}" for name, rows in statistics[unit].items())
    sparsity = (
        f"sparsity {statistics['sparsity']:.2%}, " if "sparsity" in statistics else ""
    )
    without = statistics.get("requests_without_history", {})
    first = ", ".join(f"{rows:,} {name}" for name, rows in without.items())
    left_out = f"no history, such as each user's first request: {first}; models neither train on them nor rank them\n"
    print(
        f"\n{pluralize(statistics['users'], 'user')}, {pluralize(statistics['items'], 'item')}, "
        f"{pluralize(statistics['interactions'], 'interaction')}; "
        f"{sparsity}mean length {statistics['mean_length']:.2f}; {unit}: {per_split}\n"
        f"{left_out if KINDS[settings.kind].needs_history and any(without.values()) else ''}"
        f"made in {time.perf_counter() - begin:.1f} s: {config.output}/{{events,items,sequences,rejects}} and "
        f"{config.output}/statistics.json\n"
        f"next: {cli.command_line('jobs.audit', tables=config.output)}"
    )
    return statistics


@dataclass
class Suggestion:
    """Options of jobs.prepare --suggest."""

    suggest: str
    """Folder of a raw log that no source file describes yet: a local path, s3:// or
    gs://."""
    kind: Literal["retrieval", "search", "actions"] | None = None
    """What a request is to be (`prepare.kind`); by default a search where queries come
    with results, else a behaviour."""
    output: str | None = None
    """File to write the mapping to; by default it is printed."""


def run_suggestion(config: Suggestion) -> None:
    """Print or write a first source file, without Ray."""
    require_folders(suggest=config.suggest)
    text = suggest(config.suggest, config.kind).text
    if config.output is None:
        print(text, end="")
        return
    filesystem, path = open_uri(config.output)
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        raise UserError(
            f"{config.output} exists; name another file as --output, or remove it"
        )
    write_file(config.output, text.encode())
    print(
        f"{config.output} describes {config.suggest} as far as can be guessed; read each line\n"
        f"next: {cli.command_line('jobs.prepare', source=config.output, input=config.suggest, output='TABLES')} --dry-run"
    )


def parse(argv: Sequence[str] | None = None) -> Config | Suggestion:
    """Build the configuration from a command line; `--suggest` has options of its own."""
    argv = sys.argv[1:] if argv is None else argv
    if any(word.split("=")[0] == "--suggest" for word in argv):
        return cli.parse(Suggestion, argv, __name__)
    exit_with_help(Config, argv, __name__)
    return build_config(read_values(Config, [], argv))


def main(config: Config | Suggestion) -> None:
    """Prepare tables or suggest a mapping, as the command line says."""
    if isinstance(config, Suggestion):
        run_suggestion(config)
    else:
        run(config)


if __name__ == "__main__":
    cli.main(main, Config, parse)
