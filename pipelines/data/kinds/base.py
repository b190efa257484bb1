"""What a kind of request is: one row of `table.py`, whose parts are in the kind's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.tables import Manifest
from pipelines.data.audit.base import KindRules
from pipelines.data.kinds.simulation import Settings
from pipelines.data.log import Log
from pipelines.data.prepare_config import PrepareConfig

if TYPE_CHECKING:  # it imports Ray, which takes seconds, and settings are checked before
    from pipelines.data.run import Run


@dataclass(frozen=True)
class Simulator:
    """Raw logs of a kind with known causes, as `jobs.simulate` writes them."""

    name: str
    """What `--kind` calls it."""
    source: str
    """Name of the mapping file that reads its logs."""
    settings: type[Settings]
    """Dataclass of sizes, seed and causes."""
    simulate: Callable[..., Any]
    """`simulate(output_dir, **settings)` writes a log and returns its causes."""
    unit: str = "events"
    """What `events` counts."""
    described: Callable[[Any], str] = lambda settings: ""
    """Of settings: what they say of the causes, after the sizes."""
    reachable: Callable[[Any], list[str]] = lambda causes: []
    """Of the causes: lines that say what models can reach on this log."""
    always: str = ""
    """A line that says so of every log."""


@dataclass(frozen=True)
class Extra:
    """The folder of what models need beside the tables."""

    folder: str
    """Its name, which is that of the option too: `sids` or `text`."""
    label: str
    """What it holds."""
    job: str
    """The command that makes it."""
    title: str
    """What the command does."""
    options: Callable[[str, str, str | None], list[str]]
    """`options(tables, encoder, data)`: the command's options; data is the folder of a real log, None of a simulated
    one. UserError for a log that models cannot be trained on."""


@dataclass(frozen=True)
class Trained:
    """A model that the quickstart trains and evaluates."""

    model: str
    """Its name in the registry."""
    configs: tuple[str, ...]
    """Files under `jobs/configs`, without their ending; later ones win."""
    options: tuple[str, ...] = ()
    """Options of jobs.train that win over the files."""
    name: str = ""
    """Name of the run; by default the model's."""
    teacher: str = ""
    """The run of this flow that it learns from, in half as many epochs as others."""


@dataclass(frozen=True)
class Flow:
    """What the quickstart does with audited tables."""

    models: tuple[Trained, ...]
    """In the order of training; a teacher comes before its student."""
    epochs: int
    """Most epochs of each model."""
    extra: Extra | None = None
    """What is made before the first training."""
    events: int = 1
    """Events of the simulated log per event that is asked for."""


@dataclass(frozen=True)
class RequestKind:
    """All that differs between kinds of request, from the raw log to trained models."""

    name: str
    """Name in source files, and of the models' family."""
    check: Callable[[Log, PrepareConfig], Any]
    """The kind's own settings with what the log decides; UserError for settings that such a log cannot have."""
    sequences: Callable[[Run, Manifest, Manifest, dict[str, Any]], Manifest]
    """`sequences(run, events, items, split)`: makes the table, with others that it needs; returns its manifest. Models
    of the family with the kind's name read it, or of that which its `info` names as `family`."""
    audit: KindRules
    """Rules on its tables."""
    simulator: Simulator
    """Logs with known causes."""
    flow: Flow
    """The quickstart."""
    notices: Callable[[Manifest, dict[str, Any]], Iterator[str]] = lambda events, info: iter(())
    """Of the manifest of events and the `info` of sequences: what may surprise, beside what is so of every kind."""
    config: type | None = None
    """Dataclass of its own settings: the section of a source's `prepare` that has the kind's name."""
    statistics: tuple[str, ...] = ()
    """Entries of the `info` of sequences that statistics.json repeats."""
    needs_history: bool = False
    """Whether models are neither trained on nor measured by requests without a history."""
    repeats: bool = False
    """Whether a user may have the same event twice."""
    per_user: bool = False
    """Whether each user's events may be cut at times of his own."""
    all_shown: bool = False
    """Whether all that was shown makes the catalogue and the split, and not the behaviours alone."""
    texts: tuple[str, ...] = ()
    """Tables of text that `jobs.encode` makes of its logs; none where its models read no text."""
    as_of: bool = False
    """Whether its models read features with a time of their own."""
    counts: Callable[[Run, Manifest, Manifest, int], None] | None = None
    """`counts(run, events, items, moment)`: makes the table of counts as of a moment in ms, in the layout of served
    models; None where there is none."""
