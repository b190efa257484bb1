r"""Make tables of a raw log: events, items, sequences, rejects and statistics.json.

    python -m jobs.prepare --source jobs/configs/sources/movielens_small.yaml \
        --input RAW_DIR --output TABLES
    python -m jobs.prepare --suggest RAW_DIR [--kind search] [--output SOURCE.yaml]

The source file describes the log; its `prepare` section has the settings below, which
options of the command line override. `--suggest` guesses a first source file from the
log, and prints it or writes it to `--output`. `--dry-run` reads the first rows of the
log and prints the resulting events. The same command again makes only the tables that
are missing. `--append` adds new files of the log to the tables (docs/days.md).
`--counts_as_of TIME` also makes the table `counts`, which a served search model reads.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from core.errors import UserError
from core.files import file_info, write_file
from core.options import STRICT, Folder, build, check_keys
from jobs import cli
from pipelines.prepare.settings.config import PrepareOptions

Config = PrepareOptions


@dataclass(config=STRICT)
class Suggestion:
    """Options of jobs.prepare --suggest."""

    suggest: Folder
    """Folder of a raw log that no source file describes yet: a local path, s3:// or
    gs://."""
    kind: Literal["retrieval", "search", "actions"] | None = None
    """Kind of request (`prepare.kind`); by default search if the log has queries with
    results, else retrieval."""
    output: str | None = None
    """File for the suggested source file; by default it is printed."""


def build_config(content: dict[str, Any]) -> PrepareOptions | Suggestion:
    """Build the configuration from options and the defaults in the source file."""
    if "suggest" in content:
        return build(Suggestion, content)
    check_keys(PrepareOptions, content)
    cli.say_loading("polars")
    # up to four threads of the executor share the cores: polars' own would spin
    os.environ.setdefault(
        "POLARS_MAX_THREADS", str(len(os.sched_getaffinity(0)) // 4 or 1)
    )
    from pipelines.prepare.prepare import build_options

    return build_options(content)


def run(options: PrepareOptions) -> None:
    """Make the tables, and print the next command; with `--dry_run`, the first rows."""
    from pipelines.prepare.prepare import make_tables

    cli.preflight(options)
    if options.dry_run:
        print_first_rows(options)
        return
    make_tables(options)
    print(f"next: {cli.command_line('jobs.audit', tables=options.output)}")


def print_first_rows(options: PrepareOptions) -> None:
    """Print the events of the first rows of the log, with `--dry_run`."""
    from pipelines.prepare.kinds.registry import resolve_config
    from pipelines.prepare.reading.log import describe_unread, load_source
    from pipelines.prepare.suggest.preview import lines, preview

    source, max_rejects = load_source(options.source)[0], options.max_rejects
    resolve_config(source, options.input, options.settings)
    sample = preview(source, options.input)
    for line in [*lines(sample), *describe_unread(source, options.input)]:
        print(line)
    for part in sample:
        part.rejected.check(max_rejects, f" of the {part.kind}")
    print("next: the same command without --dry-run makes the tables")


def run_suggestion(config: Suggestion) -> None:
    """Guess a source file from a raw log, and print it or write it to a new file."""
    from pipelines.prepare.suggest.suggest import suggest

    text = suggest(config.suggest, config.kind).text
    if config.output is None:
        print(text, end="")
        return
    if file_info(config.output).is_file:
        raise UserError(f"{config.output} exists")
    write_file(config.output, text.encode())
    prepare = cli.command_line(
        "jobs.prepare", source=config.output, input=config.suggest, output="TABLES"
    )
    print(
        f"{config.output} is a guess at the format of {config.suggest}; check each "
        f"line\nnext: {prepare} --dry-run"
    )


def main(config: PrepareOptions | Suggestion) -> None:
    """Prepare tables or suggest a source file, according to the type of `config`."""
    if isinstance(config, Suggestion):
        run_suggestion(config)
    else:
        run(config)


if __name__ == "__main__":
    cli.main(main)
