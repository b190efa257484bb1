"""A grid file: which settings a sweep tries, and what the paper found there.

    trials = load("tuning/grids/sid_mlp_alpha.yaml").trials({"model.teacher": "runs/tiger"})

The file names the base config, the axes, the metric, the scheduler, where the values are documented and the published
results. An axis is a dotted key of jobs.train's config (`model.alpha`, `fit.lr`, `fit.seed`), `sids` or `text`, or, in
grids of kind evaluate, `checkpoint` or an option of jobs.evaluate (`evaluate.beam`). `points` lists settings
that are no product. An axis without values is for the user to fill in (`--axes.sids '[A, B]'`).
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
    hint,
    naming,
    read_configs,
    read_yaml,
    typed,
)
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.storage.uri import absolute
from models.text.text_encoder import resolve_encoder_path
from models.training.fit import FitConfig

Point = dict[str, Any]
"""Values of the axes, by dotted key."""

SEED = "fit.seed"
"""The axis that every grid of trainings has: runs that differ in it alone are one row of a comparison."""

SMOKE = ("fixed", "axes", "points", "samples", "seeds")
"""What a grid's small variant can change."""

EXAMPLE = "give a file such as tuning/grids/sid_mlp.yaml"


@dataclass
class Scheduler:
    """When trials are stopped early."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    name: Literal["none", "asha"] = "none"
    """none: all run to their end; asha: asynchronous successive halving (Li et al., 2020)."""
    grace: int = 1
    """asha: epochs that every trial gets."""
    reduction: int = 3
    """asha: at epochs grace, grace * reduction, ... only the best 1 / reduction go on."""

    def __post_init__(self) -> None:
        check_choices(self, "scheduler.")
        check_least(self, ["grace"], 1, "scheduler.")
        check_least(self, ["reduction"], 2, "scheduler.")


@dataclass(frozen=True)
class Trial:
    """One point of the grid with all that it needs to run."""

    id: str
    """Stable hash of the axes' values."""
    name: str
    """Folder and MLflow name: the values in short, and the id."""
    point: Point
    """Values of the axes."""
    model: dict[str, Any]
    """`name` and fields of the model's config."""
    fit: dict[str, Any]
    """Fields of `FitConfig`."""
    folders: dict[str, str]
    """Its own `sids`, `text` or `checkpoint`, where the point names them."""
    evaluate: dict[str, Any]
    """Options of the evaluation."""

    def inputs(self, shared: Inputs) -> Inputs:
        """What it works on: its own SIDS or TEXT, or else those of the sweep."""
        return replace(
            shared,
            **{
                name: self.folders[name]
                for name in ("sids", "text")
                if name in self.folders
            },
        )


@dataclass
class Grid:
    """What a grid file says."""

    name: str
    """Name of the grid: that of the file."""
    source: str
    """Paper and the section, table or figure that documents the values."""
    config: str | list[str] | None = None
    """Base config of jobs.train, relative to the grid file; of several the later ones win."""
    kind: Literal["train", "evaluate"] = "train"
    """What a trial does: trains a model, or measures a trained checkpoint."""
    axes: dict[str, list[Any] | None] = field(default_factory=dict)
    """Values by dotted key; the trials are their product. Without values: to be given by the user."""
    together: list[list[str]] = field(default_factory=list)
    """Axes that run side by side instead of crosswise: the first value with the first, and so on."""
    points: list[Point] = field(default_factory=list)
    """Settings one by one, crossed with the axes."""
    fixed: Point = field(default_factory=dict)
    """Settings of all trials, over the base config."""
    seeds: list[int] = field(default_factory=list)
    """Values of fit.seed; more than one make an axis."""
    metric: str = "val/ndcg@10"
    """What the trials are ranked by, larger is better: `val/` or, in grids of kind evaluate, `test/`."""
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
    """`fixed`, `axes`, `points`, `samples` and `seeds` of the variant that takes about a minute on 2 cores."""

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
        """The axes: what differs between trials."""
        return list(
            dict.fromkeys(
                [*(key for point in self.points for key in point), *self.axes]
            )
        )

    def varied(self, smoke: bool, axes: dict[str, list[Any]] | None = None) -> Grid:
        """The grid with its smoke settings, and with axes that the user gives; any grid can be repeated over seeds."""
        grid = self
        if smoke:
            nested = {
                key: {**getattr(self, key), **self.smoke.get(key, {})}
                for key in ("fixed", "axes")
            }
            grid = replace(grid, scheduler=Scheduler(), **{**self.smoke, **nested})
        for key in axes or {}:
            if key not in grid.axes and key != SEED:
                near = hint(key, grid.axes, "it has none")
                raise UserError(
                    f"the grid {self.name} has no axis '{key}' to give values to; {near}"
                )
        grid = replace(grid, axes={**grid.axes, **(axes or {})})
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
        """The points of the whole grid, the last axis running fastest."""
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
        """The trials, in the grid's order; `sets` are settings of all of them that go over the file's.

        Raises UserError for an empty grid, an axis that the model does not have, or a value that it refuses.
        """
        for key in sets or {}:
            if key in self.keys:
                raise UserError(
                    f"'{key}' is an axis of the grid {self.name}; give --axes.{key} '[...]' instead"
                )
        files = [self.config] if isinstance(self.config, str) else self.config or []
        base = {**dotted(read_configs(files, EXAMPLE)), **self.fixed, **(sets or {})}
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
        parts: dict[str, dict[str, Any]] = (
            {"model": {}, "fit": {}} if self.kind == "train" else {"evaluate": {}}
        )
        places = (
            ("sids", "text") if self.kind == "train" else ("sids", "text", "checkpoint")
        )
        folders: dict[str, str] = {}
        for key, value in settings.items():
            head, _, tail = key.partition(".")
            if tail and head in parts:
                parts[head][tail] = value
            elif key in places:
                folders[key] = absolute(value)  # as trials run in other folders
            else:
                known = ", ".join([*(f"{part}.…" for part in parts), *places])
                raise UserError(
                    f"the grid {self.name} of kind {self.kind} has no use for '{key}'; it takes {known}"
                )
        model, fit = parts.get("model", {}), parts.get("fit", {})
        if self.kind == "train":
            self._check(model, fit)
        elif "checkpoint" not in folders:
            raise UserError(
                "a grid of kind evaluate needs checkpoints; give --axes.checkpoint '[RUN, ...]'"
            )
        id_ = hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:8]
        return Trial(
            id_,
            f"{short(point)}-{id_}",
            point,
            model,
            fit,
            folders,
            parts.get("evaluate", {}),
        )

    def _check(self, model: dict[str, Any], fit: dict[str, Any]) -> None:
        """Raises UserError where model or training have no such option or value; makes the model's paths absolute."""
        if "name" not in model:
            raise UserError(
                f"the grid {self.name} names no model; give it a config, or fixed.model.name"
            )
        config = registry.find(str(model["name"])).config_class
        places, encoders = (
            naming(config, "checkpoint", "folder"),
            naming(config, "encoder"),
        )
        for key, value in model.items():
            if key in places | encoders and isinstance(value, str) and value:
                model[key] = (
                    absolute(value) if key in places else resolve_encoder_path(value)
                )
        metric = self.metric.removeprefix("val/")
        if fit.setdefault("metric", metric) != metric:
            raise UserError(
                f"fit.metric is {fit['metric']}, the grid {self.name} ranks by {self.metric}; leave it out"
            )
        try:
            model |= typed(
                config,
                {key: value for key, value in model.items() if key != "name"},
                "model.",
            )
            fit |= typed(FitConfig, fit, "fit.")
        except ValueError as error:
            raise UserError(f"the grid {self.name}: {error}") from error


def load(path: str) -> Grid:
    """The grid of a YAML file; UserError where it is not one."""
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


def dotted(content: dict[str, Any]) -> Point:
    """The settings of `model` and `fit` of a config under dotted keys, other parts as they are."""
    flat: Point = {}
    for key, value in content.items():
        flat |= (
            {f"{key}.{name}": inner for name, inner in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
    return flat


def short(point: Point) -> str:
    """The values in a few characters that can name a folder, such as `alpha-0.7`."""
    words = []
    for key, value in point.items():
        shown = (
            Path(value).name if isinstance(value, str) and "/" in value else str(value)
        )
        words.append(f"{key.rpartition('.')[2]}-{shown}")
    return re.sub(r"[^A-Za-z0-9._+=-]", "_", "-".join(words))[:60] or "base"
