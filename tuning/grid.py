"""Read a grid file: the settings that a sweep tries, and the published results.

    sweep = load_sweep(SweepConfig(grid="tuning/grids/sid_mlp_alpha.yaml", ...))

The file names the base config, the axes, the metric, the scheduler, the source of the
values and the published results. An axis is a dotted key of jobs.train's config
(`model.alpha`, `fit.lr`, `fit.seed`, `sids`), or, in grids of job evaluate,
`checkpoint` or an option of jobs.evaluate (`evaluate.beam`). `points` lists settings
that are not a product of axes. The user gives values to an axis that has none
(`--axes.sids '[A, B]'`).

Importing this module imports neither PyTorch nor Ray, so that a command line is parsed
before their import.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from core.errors import UserError
from core.files import join
from core.options import (
    STRICT,
    AbsolutePath,
    Free,
    build,
    check_keys,
    check_known,
    merge,
    merge_config_files,
    read_yaml,
)
from models.own_code import name_metric
from pipelines import tracking
from pipelines.evaluation.config import EvaluateConfig
from pipelines.training.config import RayOptions, TrainConfig, check_run_name

if TYPE_CHECKING:
    from core.schemas import RunRef

Point = dict[str, Any]
"""Values of the axes, by dotted key."""


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SweepConfig:
    """Options of jobs.sweep."""

    grid: str
    """Grid file, such as tuning/grids/sid_mlp_alpha.yaml."""
    tables: str = ""
    """TABLES: the folder that jobs.prepare made."""
    storage: AbsolutePath = ""
    """Folder for all runs: checkpoints, and MLflow's SQLite store unless tracking_uri
    names another store."""
    name: str = ""
    """Name of this sweep; by default the name of the grid."""
    sids: str | None = None
    """SIDS: the folder that jobs.tokenize made, for models that use semantic IDs."""
    text: str | None = None
    """TEXT: the folder that jobs.encode made, for search models; optional for models of
    actions."""
    smoke: bool = False
    """Run the grid's small variant. Comparisons of the experiment exclude its
    trials."""
    dry_run: bool = False
    """Print the trials without running them."""
    samples: PositiveInt | None = None
    """Number of points drawn from the grid; by default the grid's setting."""
    model: dict[str, Free] = field(default_factory=dict)
    """Model options of all trials, such as --model.teacher."""
    fit: dict[str, Free] = field(default_factory=dict)
    """Training options of all trials, such as --fit.max_epochs."""
    evaluate: dict[str, Free] = field(default_factory=dict)
    """Options of jobs.evaluate of all trials, for a grid of evaluations."""
    axes: dict[str, list[Free]] = field(default_factory=dict)
    """Values of an axis, such as --axes.fit.seed '[42, 43, 44]'; may add an axis."""
    concurrency: NonNegativeInt = 0
    """Largest number of trials that run at once; 0: as many as the cluster holds. For
    trials of several workers that number is taken from the nodes at the start, and is
    at least 16 on a cluster, so that waiting trials make an autoscaler start nodes."""
    test: bool = True
    """Evaluate each finished trial on the test split too. The best trial is chosen on
    the validation split in any case."""
    ray: RayOptions = field(default_factory=RayOptions)
    """Workers and resources of each trial."""
    trust_code: bool = False
    """Whether to run code that a checkpoint contains; by default only code equal to a
    file that the sweep names runs."""
    tracking_uri: str | None = None
    """MLflow tracking URI; by default MLFLOW_TRACKING_URI, else a SQLite file in the
    storage folder."""
    experiment: str | None = None
    """MLflow experiment; by default KIND/DATASET."""

    def __post_init__(self) -> None:
        for name in ("tables", "storage"):
            if not (self.dry_run or getattr(self, name)):
                raise ValueError(
                    f"--{name} is missing; it is required without --dry_run"
                )


@dataclass(config=STRICT)
class Scheduler:
    """Rule by which trials are stopped early."""

    name: Literal["none", "asha"] = "none"
    """none: no trial is stopped; asha: asynchronous successive halving (Li et al.,
    2020)."""
    grace: PositiveInt = 1
    """asha: number of epochs before a trial can be stopped."""
    reduction: Annotated[int, Field(ge=2)] = 3
    """asha: at epochs grace, grace * reduction, grace * reduction^2, ... only the best
    1 / reduction of the trials continue."""


@dataclass(config=STRICT, kw_only=True)
class Published:
    """A result of a paper."""

    point: Point
    relative_to: Point = field(default_factory=dict)
    """Point to which the metrics are relative changes, if any."""
    dataset: str
    metrics: dict[str, float]
    """Values by name, such as `test/ndcg@10`."""
    source: str
    """Table or figure of the paper."""


@dataclass(config=STRICT)
class Grid:
    """The content of a grid file."""

    name: str
    """Name of the grid; by default the name of the file."""
    source: str
    """Paper and the section, table or figure that documents the values."""
    config: str = ""
    """Base config of jobs.train, relative to the grid file."""
    job: Literal["train", "evaluate"] = "train"
    """Whether a trial trains a model or evaluates a trained checkpoint."""
    axes: dict[str, list[Any] | None] = field(default_factory=dict)
    """Values by dotted key; the trials are their product. The user gives the values of
    an axis that has none."""
    together: list[Annotated[list[str], Field(min_length=1)]] = field(
        default_factory=list
    )
    """Groups of axes that are zipped instead of multiplied: the first value of one goes
    with the first value of the others, and so on."""
    points: list[Point] = field(default_factory=list)
    """Settings listed one by one, each combined with all values of the axes."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Settings of all trials, which replace settings of the base config. By dotted key
    in the file; `load_sweep` adds the base config and the command line, nested."""
    metric: Annotated[str, Field(pattern="^(val|test)/")] = "val/ndcg@10"
    """Metric that ranks the trials, larger is better. It begins with `val/`, in grids
    of job evaluate with `test/`."""
    scheduler: Scheduler = field(default_factory=Scheduler)
    """Rule by which trials are stopped early."""
    samples: PositiveInt | None = None
    """Number of points that are drawn at random, without repetition; None: all."""
    published: list[Published] = field(default_factory=list)
    """The paper's results."""
    findings: list[str] = field(default_factory=list)
    """Findings of the paper that are not figures."""
    notes: str = ""
    """Differences from the paper, and details that the paper does not give."""
    smoke: dict[str, Any] = field(default_factory=dict)
    """Other values of the keys above for a smoke test that takes about a minute on 2
    cores."""

    @property
    def keys(self) -> list[str]:
        """Keys of `points` and `axes`."""
        return list(merge({}, *self.points, self.axes))

    def list_points(self) -> list[Point]:
        """Return the points of the whole grid, the last axis varying fastest."""
        grouped = list(itertools.chain(*self.together))
        if len(set(grouped)) < len(grouped):
            raise UserError(f"together is {self.together}; an axis is in two groups")
        single = [[key] for key in self.axes if key not in grouped]
        factors = [self.points] if self.points else []
        for keys in [*self.together, *single]:
            axes = [self.axes.get(key) or [] for key in keys]
            if not axes[0] or len({len(values) for values in axes}) > 1:
                raise UserError(
                    f"{' and '.join(keys)} of the grid {self.name} have "
                    f"{[len(values) for values in axes]} values; each needs as many as "
                    "the others, at least one",
                    "axes",
                )
            rows = zip(*axes, strict=True)
            factors.append([dict(zip(keys, row, strict=True)) for row in rows])
        return [merge({}, *parts) for parts in itertools.product(*factors)]


class Sweep(NamedTuple):
    """A sweep, as every trial receives it."""

    config: SweepConfig
    """Options of the command line, with the sweep's name."""
    grid: Grid
    """The grid, with the options of the command line."""
    points: dict[str, Point]
    """Values of the axes of all trials, by name of the folder and the MLflow run."""
    trials: dict[str, TrainConfig | EvaluateConfig]
    """The training or evaluation of each point, by the same names."""
    run: RunRef
    """MLflow run of the sweep; without its id and experiment until it is open."""
    command: str
    """Command line of the sweep."""

    @property
    def folder(self) -> str:
        """Folder of the sweep."""
        return join(self.config.storage, self.config.name)

    @property
    def metric(self) -> str:
        """Metric that ranks the trials, without the prefix `val/`."""
        return self.grid.metric.removeprefix("val/")

    @property
    def num_workers(self) -> int:
        """Number of workers of a trial."""
        return 1 if self.grid.job == "evaluate" else self.config.ray.num_workers

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Device type of a trial's model."""
        from pipelines.training.backends import wants_gpu

        return "cuda" if wants_gpu(self.config.ray) else "cpu"


def load_sweep(config: SweepConfig) -> Sweep:
    """Load the grid of a sweep, and build the configuration of each trial."""
    from core.schemas import RunRef

    content = {"name": Path(config.grid).stem, **read_yaml(config.grid)}
    grid = build(Grid, content)
    check_keys(Grid, grid.smoke, "smoke.")
    known = [*grid.keys, "model.name", "fit.seed"]
    for result in grid.published:
        check_known(result.point, known, "published.point")
    if config.smoke:
        grid = build(Grid, merge({**content, "scheduler": {}}, grid.smoke))
    grid.axes |= config.axes
    grid.samples = config.samples or grid.samples
    split, _, metric = grid.metric.partition("/")
    grid.metric = f"{split}/{name_metric(metric)}"
    sections = ("model", "fit", "evaluate")
    for key in [*grid.keys, "fit.metric"]:
        section, _, option = key.partition(".")
        if section in sections and option in getattr(config, section):
            cause = "axes" if key in grid.keys else ""
            raise UserError(f"'{key}' is set by the grid {grid.name}", cause)
    given = {name: getattr(config, name) for name in sections if getattr(config, name)}
    files = [str(Path(config.grid).parent / grid.config)] if grid.config else []
    base = merge_config_files({"config": files})
    grid.fixed = merge(base, nest(grid.fixed), given)

    name = config.name or grid.name
    check_run_name(name)
    config = replace(config, name=name)
    uri = tracking.resolve_uri(config.tracking_uri, config.storage)
    sweep = Sweep(config, grid, {}, {}, RunRef(uri, "", ""), tracking.command_line())
    points = grid.list_points()
    if grid.samples and grid.samples < len(points):
        drawn = random.Random(0).sample(range(len(points)), grid.samples)
        points = [points[index] for index in sorted(drawn)]
    for point in points:
        text = json.dumps(point, sort_keys=True).encode()
        values = [
            f"{key.rpartition('.')[2]}-{Path(str(value)).name}"
            for key, value in point.items()
        ]
        short = re.sub(r"[^A-Za-z0-9._+=-]", "_", "-".join(values))[:60] or "base"
        name = f"{short}-{hashlib.sha256(text).hexdigest()[:8]}"
        sweep.points[name] = point
        sweep.trials[name] = build_config(name, point, sweep)
    return sweep


def build_config(name: str, point: Point, sweep: Sweep) -> TrainConfig | EvaluateConfig:
    """Build the configuration of the trial of a point."""
    config, ray = sweep.config, sweep.config.ray
    content: dict[str, Any] = {
        "tables": config.tables or "TABLES",  # a dry run may name none
        "sids": config.sids,
        "text": config.text,
        "trust_code": config.trust_code,
    }
    fixed = {
        "storage": sweep.folder,
        "name": name,
        "ray": replace(ray, threads=ray.threads or max(1, int(ray.cpus_per_worker))),
        "tracking_uri": sweep.run.uri,
        "experiment": config.experiment,
        "log_model": False,
    }
    for key in point:
        if key in ("fit", "evaluate") or key.startswith((*fixed, "fit.metric")):
            raise UserError(f"'{key}' is set by the sweep, and is no axis")
    content = merge(content, sweep.grid.fixed, nest(point))
    if sweep.grid.job == "evaluate":
        content |= content.pop("evaluate", {})
        return build(EvaluateConfig, content, "evaluate.")
    metric = {"fit": {"metric": sweep.metric}}
    return build(TrainConfig, merge(content, metric, fixed))


def nest(settings: Point) -> dict[str, Any]:
    """Return settings by section: {"fit.lr": 1} gives {"fit": {"lr": 1}}."""
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        nested = merge(nested, value)
    return nested
