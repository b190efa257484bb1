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

import time
from typing import Any, Literal

from pyarrow import fs
from pydantic.dataclasses import dataclass

from core.errors import UserError, pluralize
from core.files import open_uri, write_file
from core.options import STRICT, Folder, as_base, build, check_keys, merge
from jobs import cli
from pipelines.prepare.kinds.registry import KINDS
from pipelines.prepare.kinds.resolve import resolve_config
from pipelines.prepare.prepare import Existing, prepare
from pipelines.prepare.reading.log import load_source
from pipelines.prepare.reading.unread import describe_unread
from pipelines.prepare.settings.config import PrepareConfig
from pipelines.prepare.suggest.preview import lines, preview, warnings
from pipelines.prepare.suggest.suggest import suggest
from pipelines.start import start_ray


@dataclass(config=STRICT, kw_only=True)
class Config(PrepareConfig):
    """Options of jobs.prepare; settings of the tables override the source file's."""

    source: str
    """YAML file that describes the raw log, such as jobs/configs/sources/NAME.yaml."""
    input: Folder
    """Folder of the raw log: a local path, s3:// or gs://."""
    output: Folder
    """Folder for the tables."""
    overwrite: bool = False
    """Replace existing tables."""
    append: bool = False
    """Add new files of events to existing tables; items keep their indices."""
    dry_run: bool = False
    """Read the first rows of the log, print the resulting events, and exit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.append and (self.overwrite or self.catalogue):
            other = "overwrite" if self.overwrite else "catalogue"
            raise ValueError(
                f"append and {other} are both given; append keeps the tables and their "
                "items"
            )

    @property
    def settings(self) -> PrepareConfig:
        """Settings of the tables."""
        return as_base(self, PrepareConfig)


def build_config(content: dict[str, Any]) -> Config | Suggestion:
    """Build the configuration from options and the defaults in the source file."""
    if "suggest" in content:
        return build(Suggestion, content)
    source = content.get("source")
    defaults = load_source(source)[1] if source else {}
    check_keys(PrepareConfig, defaults, "prepare.")
    return build(Config, merge(defaults, content))


def run(config: Config) -> dict[str, Any]:
    """Prepare the tables, and print the result and the next command.

    Returns:
        The content of statistics.json; empty after `--dry_run`.
    """
    start_s = time.perf_counter()
    source, settings = load_source(config.source)[0], config.settings
    print(f"reading {config.input}", flush=True)
    cli.preflight(config)
    # Reports invalid settings before Ray starts.
    resolve_config(source, config.input, settings)
    sample = preview(
        source, config.input, settings.max_rejects, settings.catalogue is None
    )
    if config.dry_run:
        for line in [*lines(sample), *describe_unread(source, config.input)]:
            print(line)
        for part in sample:
            part.rejected.check(settings.max_rejects, f" of the {part.kind}")
        print("next: the same command without --dry-run makes the tables")
        return {}
    for line in warnings(sample):
        print(line)
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
        start=start_ray,
    )
    print()
    for line in describe_statistics(statistics, settings.kind):
        print(line)
    print(
        f"made in {time.perf_counter() - start_s:.1f} s: "
        f"{config.output}/{{events,items,sequences,rejects}} and "
        f"{config.output}/statistics.json\n"
        f"next: {cli.command_line('jobs.audit', tables=config.output)}"
    )
    return statistics


def describe_statistics(statistics: dict[str, Any], kind: str) -> list[str]:
    """Return lines on the size of the tables and on requests without a history.

    Args:
        statistics: Content of statistics.json.
        kind: Kind of the log: retrieval, search or actions.
    """
    users = pluralize(statistics["users"], "user")
    items = pluralize(statistics["items"], "item")
    interactions = pluralize(statistics["interactions"], "interaction")
    described = [
        f"{users}, {items}, {interactions}; sparsity "
        f"{statistics['sparsity']:.2%}, mean length "
        f"{statistics['mean_length']:.2f}; "
        f"requests: {_join_counts(statistics['requests'])}"
    ]
    skipped = statistics.get("requests_without_history", {})
    if KINDS[kind].needs_history and any(skipped.values()):
        described.append(
            f"requests without history (each user's first): {_join_counts(skipped)}; "
            f"skipped in training and evaluation"
        )
    return described


def _join_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


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


def run_suggestion(config: Suggestion) -> None:
    """Guess a source file from a raw log, and print it or write it to a new file."""
    text = suggest(config.suggest, config.kind).text
    if config.output is None:
        print(text, end="")
        return
    filesystem, path = open_uri(config.output)
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        raise UserError(f"{config.output} exists")
    write_file(config.output, text.encode())
    prepare = cli.command_line(
        "jobs.prepare", source=config.output, input=config.suggest, output="TABLES"
    )
    print(
        f"{config.output} is a guess at the format of {config.suggest}; check each "
        f"line\nnext: {prepare} --dry-run"
    )


def main(config: Config | Suggestion) -> None:
    """Prepare tables or suggest a source file, according to the type of `config`."""
    if isinstance(config, Suggestion):
        run_suggestion(config)
    else:
        run(config)


if __name__ == "__main__":
    cli.main(main)
