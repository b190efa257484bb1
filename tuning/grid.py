"""Read a grid file: the settings that a sweep tries, and the published results.

    trials = load("tuning/grids/sid_mlp_alpha.yaml").trials({"model.teacher": "runs/tiger"})

The file names the base config, the axes, the metric, the scheduler, where the values
are documented and the published results. An axis is a dotted key of jobs.train's config
(`model.alpha`, `fit.lr`, `fit.seed`), `sids` or `text`, or, in grids of kind evaluate,
`checkpoint` or an option of jobs.evaluate (`evaluate.beam`). `points` lists settings
that are no product. An axis without values is for the user to fill in (`--axes.sids
'[A, B]'`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from models import registry
from models.config import (
    build,
    check_choices,
    check_least,
    did_you_mean,
    path_fields,
    read_configs,
    read_yaml,
)
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.storage.uri import absolute
from models.text.text_encoder import resolve_encoder_path
from models.training.fit import FitConfig

Point = dict[str, Any]
"""Values of the axes, by dotted key."""

SEED = "fit.seed"
FOLD = "fit.fold"
"""The axis that every grid of trainings has: runs that differ in it alone are one row
of a comparison."""

INPUTS = ("sids", "text")
"""Folders that a point can name beside the tables."""

SMOKE = ("fixed", "axes", "points", "samples", "seeds")
"""What a grid's small variant can change."""

EXAMPLE = "give a file such as tuning/grids/sid_mlp.yaml"


@dataclass
class Scheduler:
    """When trials are stopped early."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    name: Literal["none", "asha"] = "none"
    """none: all run to their end; asha: asynchronous successive halving (Li et al.,
    2020)."""
    grace: int = 1
    """asha: epochs that every trial gets."""
    reduction: int = 3
    """asha: at epochs grace, grace * reduction, ... only the best 1 / reduction go
    on."""

    def __post_init__(self) -> None:
        check_choices(self, "scheduler.")
        check_least(self, ["grace"], 1, "scheduler.")
        check_least(self, ["reduction"], 2, "scheduler.")


@dataclass(frozen=True)
class Trial:
    """A point of the grid, with everything that it needs to run."""

    id: str
    """Stable hash of the axes' values."""
    name: str
    """Folder and MLflow name: the values in short, and the id."""
    point: Point
    """Values of the axes."""
    model: Any
    """Config of the model; None in a grid of kind evaluate."""
    fit: FitConfig
    """Options of the training loop."""
    folders: dict[str, str]
    """The trial's `sids`, `text` or `checkpoint`, if the point names them."""
    evaluate: dict[str, Any]
    """Options of the evaluation."""

    def inputs(self, shared: Inputs) -> Inputs:
        """Return the trial's own SIDS or TEXT, beside the folders of the sweep."""
        own = {name: self.folders[name] for name in INPUTS if name in self.folders}
        return replace(shared, **own)


@dataclass
class Grid:
    """The content of a grid file."""

    name: str
    """Name of the grid: that of the file."""
    source: str
    """Paper and the section, table or figure that documents the values."""
    config: str | list[str] | None = None
    """Base config of jobs.train, relative to the grid file; of several the later ones
    win."""
    kind: Literal["train", "evaluate"] = "train"
    """What a trial does: trains a model, or measures a trained checkpoint."""
    axes: dict[str, list[Any] | None] = field(default_factory=dict)
    """Values by dotted key; the trials are their product. Without values: to be given
    by the user."""
    together: list[list[str]] = field(default_factory=list)
    """Axes that run side by side instead of crosswise: the first value with the first,
    and so on."""
    points: list[Point] = field(default_factory=list)
    """Settings one by one, crossed with the axes."""
    fixed: Point = field(default_factory=dict)
    """Settings of all trials, over the base config."""
    seeds: list[int] = field(default_factory=list)
    """Values of fit.seed; more than one make an axis."""
    metric: str = "val/ndcg@10"
    """What the trials are ranked by, larger is better: `val/` or, in grids of kind
    evaluate, `test/`."""
    scheduler: Scheduler = field(default_factory=Scheduler)
    """When trials are stopped early."""
    samples: int | None = None
    """Points drawn at random, without repetition; all where absent."""
    published: list[dict[str, Any]] = field(default_factory=list)
    """The paper's results: `point`, `dataset`, `metrics` and `source` each."""
    findings: list[str] = field(default_factory=list)
    """What the paper says in words."""
    notes: str = ""
    """What this grid does otherwise than the paper, or what the paper leaves open."""
    smoke: dict[str, Any] = field(default_factory=dict)
    """`fixed`, `axes`, `points`, `samples` and `seeds` of the variant that takes about
    a minute on 2 cores."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_least(self, ["samples"], 1)
        wanted = "val/" if self.kind == "train" else "test/"
        if not self.metric.startswith(wanted):
            raise ValueError(
                f"metric is {self.metric!r}, in a grid of kind {self.kind} it starts with {wanted}"
            )
        if unknown := self.smoke.keys() - set(SMOKE):
            raise ValueError(
                f"smoke has the key '{unknown.pop()}'; it takes {', '.join(SMOKE)}"
            )

    @property
    def keys(self) -> list[str]:
        """Keys of the axes."""
        return list(
            dict.fromkeys(
                [*(key for point in self.points for key in point), *self.axes]
            )
        )

    def vary(self, smoke: bool, axes: dict[str, list[Any]] | None = None) -> Grid:
        """Return the grid with its smoke settings, and with the values of axes that the user gives.

        Any grid can be repeated over seeds, and over the folds of tables that have some.
        """
        grid = self
        if smoke:
            nested = {
                key: {**getattr(self, key), **self.smoke.get(key, {})}
                for key in ("fixed", "axes")
            }
            grid = replace(grid, scheduler=Scheduler(), **{**self.smoke, **nested})
        for key in axes or {}:
            if key not in grid.axes and key not in (SEED, FOLD):
                near = did_you_mean(key, grid.axes, "it has none")
                raise UserError(
                    f"the grid {self.name} has no axis '{key}' to give values to; {near}"
                )
        grid = replace(grid, axes={**grid.axes, **(axes or {})})
        if FOLD in grid.axes and grid.scheduler.name != "none":
            raise UserError(
                f"the grid {self.name} has the axis {FOLD} and the scheduler {grid.scheduler.name}, which would stop the "
                f"trials of harder folds; leave one of them out"
            )
        if grid.seeds:
            several = (
                {SEED: list(grid.seeds)}
                if len(grid.seeds) > 1 and SEED not in grid.axes
                else {}
            )
            grid = replace(
                grid,
                axes={**grid.axes, **several},
                fixed={**grid.fixed, SEED: grid.seeds[0]},
                seeds=[],
            )
        return grid

    def all_points(self) -> list[Point]:
        """Return the points of the whole grid, with the last axis running fastest."""
        columns = [self.points] if self.points else []
        done: set[str] = set()
        for key in self.axes:
            if key in done:
                continue
            group = next((keys for keys in self.together if key in keys), [key])
            done |= set(group)
            for name in group:
                if not self.axes.get(name):
                    raise UserError(
                        f"the axis '{name}' of the grid {self.name} has no values; give --axes.{name} '[A, B]'"
                    )
            lists = [self.axes[name] or [] for name in group]
            if len({len(values) for values in lists}) > 1:
                counts = ", ".join(
                    f"{name} has {len(values)}"
                    for name, values in zip(group, lists, strict=True)
                )
                raise UserError(
                    f"axes that go together in {self.name} need equally many values, but {counts}"
                )
            columns.append(
                [
                    dict(zip(group, values, strict=True))
                    for values in zip(*lists, strict=True)
                ]
            )
        if not columns:
            raise UserError(
                f"the grid {self.name} is empty: it has neither axes nor points; add axes to its file"
            )
        return [
            {key: v for part in parts for key, v in part.items()}
            for parts in itertools.product(*columns)
        ]

    def trials(self, sets: Point | None = None) -> list[Trial]:
        """Return the trials, in the grid's order.

        Args:
            sets: Settings of all trials, which win over the file's.

        Raises:
            UserError: for an empty grid, an axis that the model does not have, or a
                value that it refuses.
        """
        for key in sets or {}:
            if key in self.keys:
                raise UserError(
                    f"'{key}' is an axis of the grid {self.name}; give --axes.{key} '[...]' instead"
                )
        files = [self.config] if isinstance(self.config, str) else self.config or []
        base = {
            **flatten_sections(read_configs(files, EXAMPLE)),
            **self.fixed,
            **(sets or {}),
        }
        points = self.all_points()
        if self.samples is not None and self.samples < len(points):
            points = [
                points[at]
                for at in sorted(
                    random.Random(0).sample(range(len(points)), self.samples)
                )
            ]
        made = [self._trial({**base, **point}, point) for point in points]
        if len({trial.id for trial in made}) < len(made):
            raise UserError(f"the grid {self.name} has a point twice; remove one")
        return made

    def _trial(self, settings: Point, point: Point) -> Trial:
        """Build the trial of a point.

        Args:
            settings: Values of all settings, by dotted key.
            point: Values of the axes alone.
        """
        is_training = self.kind == "train"
        sections: dict[str, dict[str, Any]] = {"model": {}, "fit": {}, "evaluate": {}}
        used = ("model", "fit") if is_training else ("evaluate",)
        names = INPUTS if is_training else (*INPUTS, "checkpoint")
        folders: dict[str, str] = {}
        for key, value in settings.items():
            head, _, tail = key.partition(".")
            if tail and head in used:
                sections[head][tail] = value
            elif key in names:
                folders[key] = absolute(value)  # as trials run in other folders
            else:
                known = ", ".join([*(f"{section}.…" for section in used), *names])
                raise UserError(
                    f"the grid {self.name} of kind {self.kind} has no use for '{key}'; it takes {known}"
                )
        if not is_training and "checkpoint" not in folders:
            raise UserError(
                "a grid of kind evaluate needs checkpoints; give --axes.checkpoint '[RUN, ...]'"
            )
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
        """Build a model's config, with absolute paths."""
        if "name" not in options:
            raise UserError(
                f"the grid {self.name} names no model; give it a config, or fixed.model.name"
            )
        config_class = registry.find(str(options.pop("name"))).config_class
        folders = path_fields(config_class, "checkpoint", "folder")
        encoders = path_fields(config_class, "encoder")
        for key, value in options.items():
            if key in folders and isinstance(value, str) and value:
                options[key] = absolute(value)
            elif key in encoders and isinstance(value, str) and value:
                options[key] = resolve_encoder_path(value)
        return self._build(config_class, options, "model.")

    def _build_fit(self, options: dict[str, Any]) -> FitConfig:
        """Build the options of the training loop, whose metric is the grid's."""
        metric = self.metric.removeprefix("val/")
        if options.setdefault("metric", metric) != metric:
            raise UserError(
                f"fit.metric is {options['metric']}, the grid {self.name} ranks by {self.metric}; leave it out"
            )
        fit: FitConfig = self._build(FitConfig, options, "fit.")
        return fit

    def _build(self, kind: type, options: dict[str, Any], where: str) -> Any:
        try:
            return build(kind, options, where)
        except ValueError as error:
            raise UserError(f"the grid {self.name}: {error}") from error


def load(path: str) -> Grid:
    """Read the grid of a YAML file."""
    content = {"name": Path(path).stem, **read_yaml(path, EXAMPLE)}
    named = content.get("config") or []
    content["config"] = [
        str(Path(path).parent / name)
        for name in ([named] if isinstance(named, str) else named)
    ]
    try:
        grid: Grid = build(Grid, content)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    return grid


def flatten_sections(content: dict[str, Any]) -> Point:
    """Return the settings of a config's sections under dotted keys."""
    flat: Point = {}
    for key, value in content.items():
        flat |= (
            {f"{key}.{name}": inner for name, inner in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
    return flat


def format_point(point: Point) -> str:
    """Format values in a few characters that can name a folder: `alpha-0.7`."""
    words = []
    for key, value in point.items():
        shown = (
            Path(value).name if isinstance(value, str) and "/" in value else str(value)
        )
        words.append(f"{key.rpartition('.')[2]}-{shown}")
    return re.sub(r"[^A-Za-z0-9._+=-]", "_", "-".join(words))[:60] or "base"
