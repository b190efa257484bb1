"""A raw log to tables: events, items, sequences, rejects and statistics.json.

    python -m jobs.prepare --source jobs/configs/sources/movielens_small.yaml --input RAW_DIR --output TABLES

    python -m jobs.prepare --suggest RAW_DIR [--output SOURCE.yaml]

The second line looks at the files and writes a first source file, with its guesses as comments, on the screen or to
`--output`. `--dry-run` reads the first rows, prints what they become, and ends. The source file says how to read the
log and has a `prepare` section with the settings below; options on the command line win over it. Run again, it makes
only what is missing or says that all is up to date. `--counts_as_of TIME` also makes the table `counts`, with which a
served search model ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields

from pyarrow import fs

from jobs import cli
from models.config import nearest
from models.places import reach
from models.tables import UserError, open_uri
from models.uri import write_file
from models.words import number_of
from pipelines.data.kinds import KINDS
from pipelines.data.log import load_source
from pipelines.data.prepare import prepare
from pipelines.data.preview import check_rejects, lines, preview, warnings
from pipelines.data.settings import check, read_config
from pipelines.data.suggest import suggest

SOURCES = cli.CONFIGS / "sources"


@dataclass
class SplitOptions:
    """How requests are split."""

    kind: str | None = None
    """temporal, leave_last_out, or auto: temporal where the log has clock times."""
    val_fraction: float | None = None
    """Share of the behaviours in the validation window of a temporal split (0.1)."""
    test_fraction: float | None = None
    """Share of the behaviours in the test window of a temporal split (0.1)."""
    val_start: str | None = None
    """First moment of the validation window, as ISO 8601 or epoch ms; with test_start, instead of the fractions."""
    test_start: str | None = None
    """First moment of the test window."""


@dataclass
class RayDataOptions:
    """How Ray Data runs; nothing of it changes the tables."""

    shuffle_batch_mb: int | None = None
    """MiB of rows that one task cuts by partition (64)."""
    compression: str | None = None
    """Of rows between tasks: none, lz4, zstd, or auto: none on one node, lz4 between nodes (auto)."""
    read_mb: int | None = None
    """MiB of a plain file that one task reads; a compressed file is read by one task (128)."""


@dataclass
class Config:
    """Options of jobs.prepare; those left out come from the source file, then from the defaults."""

    source: str
    """YAML file that describes the raw log, such as jobs/configs/sources/NAME.yaml."""
    input: str
    """Folder of the raw log: a local path, s3:// or gs://."""
    output: str
    """Folder for the tables."""
    overwrite: bool = False
    """Make all tables again, whatever is there."""
    dry_run: bool = False
    """Read the first rows of the log, print what becomes of them, and end."""
    kind: str | None = None
    """`retrieval`: each behaviour is a request of its own. `search`: requests are searches with what they showed.
    `actions`: impressions with their actions."""
    core: int | None = None
    """k of the iterative k-core; 0 keeps all users and items (5)."""
    core_window: str | None = None
    """Count the k-core on `all` of the log or on the training window (`train`) of a temporal split (all)."""
    ties: str | None = None
    """`strict`: histories hold strictly earlier events. `log_order`: events of equal time keep the log's order."""
    split: SplitOptions = field(default_factory=SplitOptions)
    """How requests are split."""
    max_events: int | None = None
    """Most recent behaviours kept of each user (10000)."""
    behaviour: str | None = None
    """A bool label that makes an event a behaviour, such as `click` (every event is one)."""
    partitions: int | None = None
    """Partitions of the shuffle (from the bytes read)."""
    max_rejects: float | None = None
    """Share of rows that may break the schema before the job fails (0.01)."""
    min_matched: float | None = None
    """Share of the items, and of the users where there are user files, that must have a row in those files (0.5);
    0 accepts any."""
    duplicates: str | None = None
    """`drop` events that repeat another in every column, or `keep` them as real, such as two purchases of a day
    (drop)."""
    catalogue: str | None = None
    """TABLES of a training, whose catalogue these tables get: a fresh log, for jobs.evaluate with models from there."""
    counts_as_of: str | None = None
    """Of logs of kind search: a moment, as ISO 8601 or epoch ms. Also makes the table `counts` of what is counted
    before it, for a served model; one of another moment is replaced."""
    ray_data: RayDataOptions = field(default_factory=RayDataOptions)
    """How Ray Data runs."""


def run(config: Config) -> dict[str, object]:
    """Prepares the tables and prints what was made and what to run next."""
    begin = time.perf_counter()
    source, defaults = load_source(config.source, cli.remedy_for(config.source, SOURCES, "check --source"))
    options = {
        key: value
        for key, value in asdict(config).items()
        if key not in ("source", "input", "output", "overwrite", "dry_run")
    }
    settings = read_config(defaults, options)
    reach(input=config.input, catalogue=settings.catalogue)
    cli.preflight(input=config.input, output=config.output, catalogue=settings.catalogue)
    check(source, config.input, config.output, settings)  # before Ray takes its seconds to start
    found = preview(source, config.input, settings.max_rejects, settings.catalogue is None)
    for line in lines(found) if config.dry_run else warnings(found):
        print(line)
    if config.dry_run:
        check_rejects(found, settings.max_rejects)
        print("next: the same command without --dry-run makes the tables")
        return {}
    statistics = prepare(source, config.input, config.output, settings, config.overwrite, start=cli.start_ray)
    unit = "requests" if "requests" in statistics else "events"
    per_split = ", ".join(f"{rows:,} {name}" for name, rows in statistics[unit].items())
    sparsity = f"sparsity {statistics['sparsity']:.2%}, " if "sparsity" in statistics else ""
    without = statistics.get("requests_without_history", {})
    first = ", ".join(f"{rows:,} {name}" for name, rows in without.items())
    left_out = f"no history, such as each user's first request: {first}; models neither train on them nor rank them\n"
    print(
        f"\n{number_of(statistics['users'], 'user')}, {number_of(statistics['items'], 'item')}, "
        f"{number_of(statistics['interactions'], 'interaction')}; "
        f"{sparsity}mean length {statistics['mean_length']:.2f}; {unit}: {per_split}\n"
        f"{left_out if KINDS[settings.kind].needs_history and any(without.values()) else ''}"
        f"made in {time.perf_counter() - begin:.1f} s: {config.output}/{{events,items,sequences,rejects}} and "
        f"{config.output}/statistics.json\n"
        f"next: {cli.line('jobs.audit', tables=config.output)}"
    )
    return statistics


@dataclass
class Suggestion:
    """Options of jobs.prepare --suggest."""

    suggest: str
    """Folder of a raw log that no source file describes yet: a local path, s3:// or gs://."""
    output: str | None = None
    """File to write the mapping to; by default it is printed."""


def run_suggestion(config: Suggestion) -> None:
    """Prints or writes a first source file, without Ray."""
    reach(suggest=config.suggest)
    text = suggest(config.suggest)
    if config.output is None:
        print(text, end="")
        return
    filesystem, path = open_uri(config.output)
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        raise UserError(f"{config.output} exists; name another file as --output, or remove it")
    write_file(config.output, text.encode())
    print(
        f"{config.output} describes {config.suggest} as far as can be guessed; read each line\n"
        f"next: {cli.line('jobs.prepare', source=config.output, input=config.suggest, output='TABLES')} --dry-run"
    )


def parse(job: str, argv: Sequence[str] | None = None) -> Config | Suggestion:
    """The command line; `--suggest` has options of its own."""
    words = list(sys.argv[1:] if argv is None else argv)
    given = [word.split("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    suggesting = "suggest" in given
    for name in [] if suggesting else given:
        if nearest(name, ["suggest", *(option.name for option in fields(Config))]) == "suggest":
            raise UserError(f"unknown key '{name}'; the nearest key is 'suggest'; see --help for all")
    return cli.parse(Suggestion, job, words) if suggesting else cli.parse(Config, job, words)


def main(config: Config | Suggestion) -> None:
    """What the command line asks for."""
    if isinstance(config, Suggestion):
        run_suggestion(config)
    else:
        run(config)


if __name__ == "__main__":
    cli.main(main, Config, parse)
