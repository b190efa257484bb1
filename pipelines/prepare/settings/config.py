"""Settings and options of `jobs.prepare`.

prepare:
  kind: search
  search: {windows_days: [1, 7, 30], delay_minutes: 60}
"""

from __future__ import annotations

from dataclasses import asdict, field
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from core.errors import UserError
from core.options import (
    STRICT,
    Folder,
    Fraction,
    Free,
    as_base,
)
from core.settings import SearchCounts
from pipelines.prepare.settings.actions import ActionsConfig, WindowSettings
from pipelines.prepare.settings.names import check_names


def epoch_ms(moment: Any, name: str) -> int:
    """Parse a time as epoch ms.

    Args:
        moment: Epoch ms, or ISO 8601, which is in UTC unless it has an offset.
        name: Name of the setting, for the error message.

    Raises:
        ValueError: If the time has another format.
    """
    text = str(moment)
    if text.isdecimal():
        return int(text)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{name} is '{moment}'; give a moment such as 2022-05-07 or epoch ms"
        ) from None
    if not parsed.tzinfo:
        parsed = parsed.replace(tzinfo=UTC)
    return round(parsed.timestamp() * 1000)


@dataclass(config=STRICT)
class SplitConfig:
    """Settings of the split of requests."""

    by: Literal["auto", "leave_last_out", "temporal"] = "auto"
    """`temporal`: two cut times for all users. `leave_last_out`: each user's last
    request is for test, the one before it for validation. Users with fewer than three
    requests have all in training; a hash breaks ties between equal timestamps. `auto`:
    `temporal` if the log has clock times, else `leave_last_out`."""
    val_fraction: Fraction = 0.1
    """Share of all behaviours, before the k-core, in the validation window of a
    temporal split."""
    test_fraction: Fraction = 0.1
    """Share of all behaviours, before the k-core, in the test window of a temporal
    split."""
    val_start: Free = None
    """Start of the validation window, as ISO 8601 (UTC) or epoch ms; replaces the
    fractions, together with `test_start`."""
    test_start: Free = None
    """Start of the test window."""
    val_days: PositiveFloat | None = None
    """Days of the validation window; replaces the fractions, together with `test_days`.
    The cuts move with the end of the log."""
    test_days: PositiveFloat | None = None
    """Days of the test window, which ends with the last behaviour."""

    def __post_init__(self) -> None:
        for val, test in (("val_start", "test_start"), ("val_days", "test_days")):
            if (getattr(self, val) is None) != (getattr(self, test) is None):
                raise ValueError(f"split has one of {val} and {test}, it needs both")
            if getattr(self, val) is not None and self.by == "leave_last_out":
                raise ValueError(
                    f"split.{val} splits by time, but split.by is {self.by}"
                )
        if self.val_start is not None and self.val_days is not None:
            raise ValueError("split has both val_start and val_days")
        if self.val_start is not None:
            self.val_start = epoch_ms(self.val_start, "split.val_start")
            self.test_start = epoch_ms(self.test_start, "split.test_start")
            if self.val_start >= self.test_start:
                raise ValueError("split.val_start is not before split.test_start")
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"split.val_fraction is {self.val_fraction:g} and split.test_fraction "
                f"{self.test_fraction:g}, which leaves nothing for training"
            )

    def settings(self) -> dict[str, Any]:
        """Return the settings that are set, as plain values."""
        return {
            name: value for name, value in asdict(self).items() if value is not None
        }

    def resolve(self, has_clock_times: bool) -> str:
        """Return `by` for a log with or without clock times."""
        if self.by == "temporal" and not has_clock_times:
            raise UserError(
                f"split.by is {self.by}, but the log has no clock times, only an "
                f"order of events within each user"
            )
        if self.by == "auto":
            return "temporal" if has_clock_times else "leave_last_out"
        return self.by


@dataclass(config=STRICT, frozen=True)
class SearchConfig(SearchCounts, WindowSettings):
    """Settings of the features of a search log (Sec. 3.1 of QGS)."""

    page_size: PositiveInt = 10
    """Results per page; the page is position // page_size."""
    max_request_minutes: NonNegativeFloat = 60.0
    """Maximum time from the first to the last result of one request id; more is an
    error, as it means that ids are reused."""

    item_features: list[str] = field(default_factory=list)
    """Attributes and numbers of the item files that models read for results and
    behaviours; their values hold at all times."""
    unknown_when_ranking: list[str] = field(default_factory=list)
    """Custom features that, like the position, are unknown when a result is ranked.
    Models read them of behaviours only."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Groups of features for HFG-Attention (Sec. 3.6 of QGS), {group: [feature]}.
    Features are counts such as pair_ctr_7d, and the log's numbers and categories. The
    default groups are cross, document, query and context, by what a feature counts,
    `own`, `items`, and the names of tables with a time of their own."""

    def __post_init__(self) -> None:
        self.check_windows("search")
        check_names(self.groups, "search.groups")
        group_of: dict[str, str] = {}
        for group, names in self.groups.items():
            for name in names:
                if name in group_of:
                    raise ValueError(
                        f"search.groups has '{name}' in '{group_of[name]}' and again "
                        f"in '{group}'"
                    )
                group_of[name] = group


@dataclass(config=STRICT)
class RayDataConfig:
    """Settings of Ray Data. They do not change the contents of the tables."""

    shuffle_batch_mb: PositiveInt = 64
    """MiB of rows that one shuffle task splits by partition."""
    read_mb: PositiveInt = 128
    """MiB of a plain file that one task reads; a compressed file is read by one
    task."""
    memory_gb: NonNegativeFloat = 0
    """GiB of memory that Ray reserves for each task, which limits the tasks per node;
    0: only CPUs limit the tasks per node."""
    max_cpus: NonNegativeInt = 0
    """CPUs of a shared cluster that all tasks together use; 0: all CPUs."""


@dataclass(config=STRICT)
class SequencesConfig:
    """Settings that decide the table `sequences`, which its manifest records."""

    kind: str = "retrieval"
    """Kind of request: `retrieval` (predict the item of a behaviour), `search` (rank
    the results of a search) or `actions` (predict the actions on an impression)."""
    core: NonNegativeInt = 5
    """Iterative k-core: users and items with fewer behaviours are dropped. 0 and 1 keep
    all users and items with a behaviour in `core_window`."""
    core_window: Literal["all", "train"] = "all"
    """Events that the k-core counts: `all`, the whole log, as in the papers; `train`,
    the training window of a temporal split."""
    ties: Literal["strict", "log_order"] = "strict"
    """`strict`: a history holds only strictly earlier events. `log_order`: it also
    holds events of the same time that come earlier in the log; `position` is then the
    order in the log."""
    baskets: Literal["equal_times", "request"] | None = None
    """Kind `retrieval`: behaviours of a user that are one request with a set of
    targets: those of the same `request` id, or those of the same time. `request` is the
    default if the mapping names a `request` and ties are strict."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Split of the requests."""
    max_events: PositiveInt = 10_000
    """Maximum number of behaviours per user; the most recent ones are kept."""
    behaviour: str | None = None
    """Bool label that makes an event a behaviour, such as `click`; by default every
    event is a behaviour."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """Features of a log of searches."""
    actions: ActionsConfig = field(default_factory=ActionsConfig)
    """Tasks, inputs and counts of a log of actions."""


@dataclass(config=STRICT)
class PrepareConfig(SequencesConfig):
    """Settings of the tables of a raw log.

    They are the `prepare` section of a source file, overridden by the command line.
    """

    partitions: PositiveInt | None = None
    """Number of partitions of the shuffle, and of parts of the tables; by default from
    the size of the log."""
    max_rejects: Fraction = 0.01
    """Maximum share of rows that break the schema; above it the job fails."""
    min_matched: Fraction = 0.5
    """Minimum share of items (and of users, if there are user files) with a row in
    their files, both of distinct ids and of events; below it the job fails. 0 accepts
    any share."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Events that repeat another in every column that the mapping reads: `drop` treats
    them as logged twice; `keep` treats them as real, such as two purchases of a day."""
    counts_as_of: Free = None
    """Time as ISO 8601 (UTC) or epoch ms: also writes the table `counts`, with counts
    of all strictly earlier events, for a served model. Kind `search` only."""
    ray_data: RayDataConfig = field(default_factory=RayDataConfig)
    """Settings of Ray Data."""

    def __post_init__(self) -> None:
        if self.counts_as_of is not None:
            self.counts_as_of = epoch_ms(self.counts_as_of, "counts_as_of")


@dataclass(config=STRICT, kw_only=True)
class PrepareOptions(PrepareConfig):
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
        if self.append and self.overwrite:
            raise ValueError("append and overwrite are both given")

    @property
    def settings(self) -> PrepareConfig:
        """Settings of the tables."""
        return as_base(self, PrepareConfig)
