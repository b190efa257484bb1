"""A sweep that is checked as far as that goes without Ray and MLflow, whose imports take seconds."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from models import checkpoint, registry
from models.config import hint, naming
from models.fit import FitConfig
from models.setup import check_fit, load_catalogue
from models.setup import hashes_of as table_hashes
from models.tables import UserError, join
from models.uri import absolute
from pipelines.tracking import RunRef, resolve_uri
from pipelines.training.checked import check_name
from pipelines.training.options import RayOptions
from pipelines.training.record import find_checkpoint
from tuning.grid import EPOCH, Grid, Trial, evaluation_options
from tuning.options import Options
from tuning.record import check_same, check_tables, read_sweep


@dataclass(frozen=True)
class Checked:
    """A sweep that may begin or go on."""

    grid: Grid
    """What it varies, and how."""
    trials: list[Trial]
    """Its trials."""
    name: str
    """Its name."""
    storage: str
    """Folder of all runs, absolute."""
    tables: str
    """TABLES, absolute."""
    extra: str | None
    """SIDS or TEXT, absolute, for trials whose point names none."""
    hashes: dict[str, str]
    """Of the tables that the trials read."""
    family: str
    """Of the trials' models; empty for a sweep that is finished."""
    uri: str
    """MLflow's tracking URI."""
    opened: dict[str, Any] | None
    """`sweep.json` of a sweep of this name that was killed before it had an MLflow run."""
    begun: dict[str, Any] | None
    """`sweep.json` of one that got further."""
    ray: RayOptions
    """Workers and resources of each trial."""
    workers: int
    """Training processes of each trial."""
    options: Options
    """How it is run."""
    resume: bool
    """Whether it goes on with what was begun."""

    @property
    def folder(self) -> str:
        """The sweep's folder."""
        return join(self.storage, self.name)


def check(
    grid: Grid, trials: list[Trial], *, tables: str, extra: str | None, storage: str, name: str,
    ray_options: RayOptions, options: Options, tracking_uri: str | None = None, resume: bool = False,
) -> Checked:  # fmt: skip
    """The sweep, or UserError for what the user can mend and is known without Ray. Nothing is written."""
    check_name(name)
    tables, storage = absolute(tables), absolute(storage)
    extra = absolute(extra) if extra else None
    before = read_sweep(join(storage, name))
    opened, begun = (before, None) if before and before["status"] == "opening" else (None, before)
    if begun:
        check_same(begun, trials, name, storage, resume)
    hashes = hashes_of(grid, trials, tables, extra)
    if begun:
        check_tables(begun, hashes, name)
    uri = RunRef(**begun["tracking"]).uri if begun else resolve_uri(tracking_uri, storage)
    workers, family = 1 if grid.kind == "evaluate" else ray_options.num_workers, ""
    if not begun or begun["status"] != "finished" or options.again:  # else it no longer needs what it was made from
        family = check_settings(grid, trials, tables, extra, workers)
    return Checked(
        grid, trials, name, storage, tables, extra, hashes, family, uri, opened, begun, ray_options, workers, options,
        resume,
    )  # fmt: skip


def check_settings(grid: Grid, trials: list[Trial], tables: str, extra: str | None, workers: int) -> str:
    """The family of the trials' models: refuses what tables, checkpoints and settings tell without a model built."""
    catalogues: dict[tuple[str, str | None], Any] = {}
    families, resolved = set(), set()
    for trial in trials:
        name, taken = evaluated(trial) if grid.kind == "evaluate" else (str(trial.model["name"]), None)
        entry, own = registry.find(name), trial.extra(extra)
        if (name, own) not in catalogues:
            catalogues[name, own] = load_catalogue(entry, name, tables, own)
        catalogue = catalogues[name, own]
        families.add(entry.family.name)
        if taken is None:
            known = registry.metrics_of(entry, catalogue)
            check_metric(grid, known)
            check_fit(FitConfig(**trial.fit), name, catalogue, workers if entry.gradient else 1)
            checkpoints = (trial.model.get(key) for key in sorted(naming(entry.config, "checkpoint")))
            if (named := (name, own, *checkpoints)) not in resolved:
                registry.resolve(registry.config_from_dict(trial.model), catalogue)  # reads the checkpoints it names
                resolved.add(named)
            for key in grid.stop:
                if key.removeprefix("val/") not in (EPOCH, "seconds", *known):
                    raise UserError(
                        f"the grid {grid.name} stops by '{key}', which no trial reports; choose epoch, seconds or one "
                        f"of {', '.join(known)}"
                    )
            continue
        options = evaluation_options(name)
        for key in trial.evaluate:
            if key not in options:
                raise UserError(
                    f"the grid {grid.name} has the axis 'evaluate.{key}', which the model '{name}' does not have; "
                    f"it takes {', '.join(options)}"
                )
        checkpoint.check(taken, trial.folders["checkpoint"], dict(catalogue.hashes))
        check_metric(grid, [*taken.metrics, "users_per_s", "peak_memory_mb"])
    if len(families) > 1:
        raise UserError(f"the grid {grid.name} mixes models of {', '.join(sorted(families))}; sweep them apart")
    return families.pop()


def check_metric(grid: Grid, known: list[str]) -> None:
    """UserError for a metric that trials, which measure `known`, do not report."""
    split, _, metric = grid.metric.partition("/")
    if metric not in known:
        raise UserError(
            f"the metric of the grid {grid.name} is {grid.metric}, which no trial reports; choose {split}/ and one of "
            f"{', '.join(known)}; {hint(metric, known)}"
        )


def evaluated(trial: Trial) -> tuple[str, checkpoint.Checkpoint]:
    """(model, checkpoint) of a trial that measures one."""
    if "checkpoint" not in trial.folders:
        raise UserError("a grid of kind evaluate needs checkpoints; give --axes.checkpoint '[RUN, ...]'")
    about = checkpoint.read(find_checkpoint(trial.folders["checkpoint"]))
    return about.name, about


def hashes_of(grid: Grid, trials: list[Trial], tables: str, extra: str | None) -> dict[str, str]:
    """Hashes of the tables that the trials read; where a table is of several folders, one over all of them."""
    read = {(evaluated(t)[0] if grid.kind == "evaluate" else t.model["name"], t.extra(extra)) for t in trials}
    found: dict[str, set[str]] = {}
    for name, own in read:
        for table, value in table_hashes(registry.find(name), name, tables, own).items():
            found.setdefault(table, set()).add(value)
    return {
        table: values.pop() if len(values) == 1 else sha256("".join(sorted(values)).encode()).hexdigest()
        for table, values in found.items()
    }
