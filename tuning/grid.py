"""Read a grid file: the settings that a sweep tries, and the published results.

    grid = load_grid("tuning/grids/sid_mlp_alpha.yaml")
    trials = grid.trials({"model.teacher": "runs/tiger"})

The file names the base config, the axes, the metric, the scheduler, the source of the
values and the published results. An axis is a dotted key of jobs.train's config
(`model.alpha`, `fit.lr`, `fit.seed`), `sids` or `text`, or, in grids of job evaluate,
`checkpoint` or an option of jobs.evaluate (`evaluate.beam`). `points` lists settings
that are not a product of axes. The user gives values to an axis that has none
(`--axes.sids '[A, B]'`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from core.errors import UserError
from core.files import absolute
from core.options import (
    STRICT,
    build,
    check_known,
    path_fields,
    read_configs,
    read_yaml,
)
from core.schemas import Inputs
from models import registry
from models.text.pretrained import resolve_encoder_path
from models.training.fit_config import FitConfig

Point = dict[str, Any]
"""Values of the axes, by dotted key."""

SEED = "fit.seed"
"""Key of the seed, which every grid of trainings can have as an axis. Runs that differ
only in the seed are one row of a comparison."""

INPUTS = ("sids", "text")
"""Input folders that a point can replace."""

SMOKE = ("fixed", "axes", "points", "samples", "seeds")
"""Keys that the `smoke` section of a grid file can replace."""


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


@dataclass(config=STRICT, frozen=True)
class Trial:
    """A point of the grid with the resolved configuration of its run."""

    id: str
    """Hash of the point, the same in every call."""
    name: str
    """Name of the folder and the MLflow run: the point in short, and the id."""
    point: Point
    """Values of the axes."""
    model: Any
    """Config of the model; None in a grid of job evaluate."""
    fit: FitConfig
    """Options of the training loop."""
    folders: dict[str, str]
    """Folders named `sids`, `text` or `checkpoint`, if the settings have them."""
    evaluate: dict[str, Any]
    """Options of the evaluation."""

    def inputs(self, shared: Inputs) -> Inputs:
        """Return the sweep's inputs, with `sids` and `text` of the trial, if any."""
        folders = {name: self.folders[name] for name in INPUTS if name in self.folders}
        return replace(shared, **folders)


@dataclass(config=STRICT)
class Grid:
    """The content of a grid file."""

    name: str
    """Name of the grid; by default the name of the file."""
    source: str
    """Paper and the section, table or figure that documents the values."""
    config: str | list[str] | None = None
    """Base configs of jobs.train, relative to the grid file; later files win."""
    job: Literal["train", "evaluate"] = "train"
    """Whether a trial trains a model or evaluates a trained checkpoint."""
    axes: dict[str, list[Any] | None] = field(default_factory=dict)
    """Values by dotted key; the trials are their product. The user gives the values of
    an axis that has none."""
    together: list[list[str]] = field(default_factory=list)
    """Groups of axes that are zipped instead of multiplied: the first value of one goes
    with the first value of the others, and so on."""
    points: list[Point] = field(default_factory=list)
    """Settings listed one by one, each combined with all values of the axes."""
    fixed: Point = field(default_factory=dict)
    """Settings of all trials, which replace settings of the base config."""
    seeds: list[int] = field(default_factory=list)
    """Values of fit.seed; two or more become an axis."""
    metric: str = "val/ndcg@10"
    """Metric that ranks the trials, larger is better. It begins with `val/`, in grids
    of job evaluate with `test/`."""
    scheduler: Scheduler = field(default_factory=Scheduler)
    """Rule by which trials are stopped early."""
    samples: PositiveInt | None = None
    """Number of points that are drawn at random, without repetition; None: all."""
    published: list[dict[str, Any]] = field(default_factory=list)
    """The paper's results, each with `point`, `dataset`, `metrics` and `source`."""
    findings: list[str] = field(default_factory=list)
    """Findings of the paper that are not figures."""
    notes: str = ""
    """Differences from the paper, and details that the paper does not give."""
    smoke: dict[str, Any] = field(default_factory=dict)
    """`fixed`, `axes`, `points`, `samples` and `seeds` of a smoke test that takes about
    a minute on 2 cores."""

    def __post_init__(self) -> None:
        prefix = "val/" if self.job == "train" else "test/"
        if not self.metric.startswith(prefix):
            raise ValueError(
                f"metric is {self.metric!r}, in a grid of job {self.job} it starts "
                f"with {prefix}"
            )
        unknown = self.smoke.keys() - set(SMOKE)
        if unknown:
            raise ValueError(
                f"smoke has the key '{unknown.pop()}'; it takes {', '.join(SMOKE)}"
            )

    @property
    def keys(self) -> list[str]:
        """Keys of `points` and `axes`."""
        keys = dict.fromkeys(key for point in self.points for key in point)
        return list(keys | dict.fromkeys(self.axes))

    def vary(self, smoke: bool, axes: dict[str, list[Any]] | None = None) -> Grid:
        """Return the grid with other values of its axes.

        Args:
            smoke: Whether to apply the `smoke` section of the grid file.
            axes: Values that the user gives, by key. Every grid accepts `fit.seed`.
        """
        grid = self
        if smoke:
            nested = {
                key: {**getattr(self, key), **self.smoke.get(key, {})}
                for key in ("fixed", "axes")
            }
            grid = replace(grid, scheduler=Scheduler(), **{**self.smoke, **nested})
        check_known(axes or {}, [*grid.axes, SEED], f"axes of the grid {self.name}")
        return replace(grid, axes={**grid.axes, **(axes or {})}).expand_seeds()

    def expand_seeds(self) -> Grid:
        """Return the grid with `seeds` turned into a fixed setting and an axis."""
        if not self.seeds:
            return self
        axes = self.axes
        if len(self.seeds) > 1 and SEED not in axes:
            axes = {**axes, SEED: list(self.seeds)}
        fixed = {**self.fixed, SEED: self.seeds[0]}
        return replace(self, axes=axes, fixed=fixed, seeds=[])

    def list_points(self) -> list[Point]:
        """Return the points of the whole grid, the last axis varying fastest."""
        factors = [self.points] if self.points else []
        listed: set[str] = set()
        for key in self.axes:
            if key in listed:
                continue
            group = next((keys for keys in self.together if key in keys), [key])
            listed |= set(group)
            factors.append(self._zip_axes(group))
        if not factors:
            raise UserError(
                f"the grid {self.name} is empty: it has neither axes nor points"
            )
        points = []
        for parts in itertools.product(*factors):
            point: Point = {}
            for part in parts:
                point |= part
            points.append(point)
        return points

    def _zip_axes(self, keys: list[str]) -> list[Point]:
        """Return the points of axes that go together: i-th values with i-th values."""
        for key in keys:
            if not self.axes.get(key):
                raise UserError(
                    f"the axis '{key}' of the grid {self.name} has no values", "axes"
                )
        axes = {key: self.axes[key] or [] for key in keys}
        if len({len(values) for values in axes.values()}) > 1:
            counts = ", ".join(f"{key} has {len(axes[key])}" for key in keys)
            raise UserError(
                f"axes that go together in {self.name} need equally many values, but "
                f"{counts}"
            )
        rows = zip(*axes.values(), strict=True)
        return [dict(zip(keys, row, strict=True)) for row in rows]

    def trials(self, settings: Point | None = None) -> list[Trial]:
        """Return the trials, in the grid's order.

        Args:
            settings: Settings of all trials, which replace settings of the grid file.
        """
        settings = settings or {}
        for key in settings:
            if key in self.keys:
                raise UserError(f"'{key}' is an axis of the grid {self.name}", "axes")
        files = [self.config] if isinstance(self.config, str) else self.config or []
        base = flatten_sections(read_configs(files))
        base = {**base, **self.fixed, **settings}
        points = self.list_points()
        if self.samples is not None and self.samples < len(points):
            drawn = random.Random(0).sample(range(len(points)), self.samples)
            points = [points[index] for index in sorted(drawn)]
        trials = [self._build_trial({**base, **point}, point) for point in points]
        if len({trial.id for trial in trials}) < len(trials):
            raise UserError(f"the grid {self.name} has a point twice")
        return trials

    def _build_trial(self, settings: Point, point: Point) -> Trial:
        """Build the trial of a point."""
        is_training = self.job == "train"
        sections: dict[str, dict[str, Any]] = {"model": {}, "fit": {}, "evaluate": {}}
        section_names = ("model", "fit") if is_training else ("evaluate",)
        folder_names = INPUTS if is_training else (*INPUTS, "checkpoint")
        folders: dict[str, str] = {}
        for key, value in settings.items():
            section, _, option = key.partition(".")
            if option and section in section_names:
                sections[section][option] = value
            elif key in folder_names:
                folders[key] = absolute(value)  # as trials run in other folders
            else:
                patterns = [f"{name}.…" for name in section_names]
                raise UserError(
                    f"the grid {self.name} of job {self.job} has no use for '{key}'; "
                    f"it takes {', '.join([*patterns, *folder_names])}"
                )
        if not is_training and "checkpoint" not in folders:
            raise UserError("a grid of job evaluate needs checkpoints", "axes")
        hash_ = hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()
        return Trial(
            id=hash_[:8],
            name=f"{format_point(point)}-{hash_[:8]}",
            point=point,
            model=self._build_model(sections["model"]) if is_training else None,
            fit=self._build_fit(sections["fit"]) if is_training else FitConfig(),
            folders=folders,
            evaluate=sections["evaluate"],
        )

    def _build_model(self, options: dict[str, Any]) -> Any:
        """Build a model's config, with its paths made absolute."""
        if "name" not in options:
            raise UserError(f"the grid {self.name} names no model")
        config_class = registry.find(str(options["name"])).config_class
        folders = path_fields(config_class, "checkpoint", "folder")
        encoders = path_fields(config_class, "encoder")
        for key, value in options.items():
            if key in folders and isinstance(value, str) and value:
                options[key] = absolute(value)
            elif key in encoders and isinstance(value, str) and value:
                options[key] = resolve_encoder_path(value)
        return build(config_class, options, "model.")

    def _build_fit(self, options: dict[str, Any]) -> FitConfig:
        """Build the options of the training loop, with the grid's metric."""
        metric = self.metric.removeprefix("val/")
        if options.setdefault("metric", metric) != metric:
            raise UserError(
                f"fit.metric is {options['metric']}, the grid {self.name} ranks by "
                f"{self.metric}"
            )
        return build(FitConfig, options, "fit.")


def load_grid(path: str) -> Grid:
    """Load the grid in a YAML file."""
    content = {"name": Path(path).stem, **read_yaml(path)}
    files = content.get("config") or []
    if isinstance(files, str):
        files = [files]
    content["config"] = [str(Path(path).parent / file) for file in files]
    return build(Grid, content)


def flatten_sections(content: dict[str, Any]) -> Point:
    """Return a config's settings by dotted key: {"fit": {"lr": 1}} gives {"fit.lr": 1}.

    Only the first level is flattened.
    """
    settings: Point = {}
    for section, value in content.items():
        if isinstance(value, dict):
            settings |= {f"{section}.{key}": nested for key, nested in value.items()}
        else:
            settings[section] = value
    return settings


def format_point(point: Point) -> str:
    """Format a point as a short file name: {"model.alpha": 0.7} gives `alpha-0.7`.

    The name of an empty point is `base`.
    """
    parts = []
    for key, value in point.items():
        is_path = isinstance(value, str) and "/" in value
        text = Path(value).name if is_path else str(value)
        parts.append(f"{key.rpartition('.')[2]}-{text}")
    return re.sub(r"[^A-Za-z0-9._+=-]", "_", "-".join(parts))[:60] or "base"
