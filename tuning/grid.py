"""A grid file: which settings a sweep tries, and what the paper found there.

    trials = load("tuning/grids/sid_mlp_alpha.yaml").trials(sets={"model.teacher": "runs/tiger"})

The file names the base config, the axes, the metric, the scheduler, where the values are documented and the published
results. An axis is a dotted key of jobs.train's config (`model.alpha`, `fit.lr`, `fit.seed`), `sids` or `text`, or, in
grids of kind evaluate, `checkpoint` or an option of jobs.evaluate (`evaluate.beam`). `points` lists settings
that are no product. An axis without values is for the user to fill in (`--axes.sids '[A, B]'`).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from models import registry
from models.config import check_choices, check_known, check_least, hint, instead, naming, read_yaml
from models.fit import FitConfig
from models.tables import UserError
from models.text_encoder import located
from models.uri import absolute

Point = dict[str, Any]
"""Values of the axes, by dotted key."""

FOLDERS = ("sids", "text", "checkpoint")
"""Axes that are no options of model, training or evaluation."""

EPOCH, VALUE, TRIAL = "epoch", "value", "trial"
"""What trials report, and the key of Tune's config that names the trial."""

SEED = "fit.seed"
"""The axis that every grid of trainings has: runs that differ in it alone are one row of a comparison."""


@dataclass
class Scheduler:
    """When trials are stopped early."""

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

    def extra(self, shared: str | None) -> str | None:
        """Its SIDS or TEXT: its own, or else that of the sweep."""
        return self.folders.get("sids") or self.folders.get("text") or shared


@dataclass
class Grid:
    """What a grid file says."""

    name: str
    """Name of the grid: that of the file."""
    source: str
    """Paper and the section, table or figure that documents the values."""
    config: str | list[str] | None = None
    """Base config of jobs.train, relative to the grid file; of several the later ones win."""
    base: dict[str, Any] = field(default_factory=dict)
    """Base config written out, where it has no file of its own; read after `config`."""
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
    mode: str = "max"
    """max; a metric where less is better goes by its negative, as `neg_mse` does."""
    scheduler: Scheduler = field(default_factory=Scheduler)
    """When trials are stopped early."""
    samples: int | None = None
    """Points drawn at random, without repetition; all where absent."""
    stop: dict[str, float] = field(default_factory=dict)
    """Ends a trial once it reports at least this: `epoch`, `seconds` or a validation metric."""
    published: list[dict[str, Any]] = field(default_factory=list)
    """The paper's results: `point`, `dataset`, `metrics` and `source` each."""
    findings: list[str] = field(default_factory=list)
    """What the paper says in words."""
    notes: str = ""
    """What this grid does otherwise than the paper, or what the paper leaves open."""
    smoke: dict[str, Any] = field(default_factory=dict)
    """`fixed`, `axes`, `points`, `samples` and `seeds` of the variant that takes about a minute on 2 cores."""

    def __post_init__(self) -> None:
        if isinstance(self.scheduler, dict):
            self.scheduler = build(Scheduler, self.scheduler, "scheduler")
        check_choices(self)
        if self.mode != "max":
            raise ValueError(f"mode is {self.mode!r}, but checkpoints are kept where the metric is largest; set max")
        check_least(self, ["samples"], 1)
        wanted = "val/" if self.kind == "train" else "test/"
        if not self.metric.startswith(wanted):
            raise ValueError(f"metric is {self.metric!r}, in a grid of kind {self.kind} it starts with {wanted}")

    @property
    def keys(self) -> list[str]:
        """The axes: what differs between trials."""
        return list(dict.fromkeys([*(key for point in self.points for key in point), *self.axes]))

    def varied(self, smoke: bool, axes: dict[str, list[Any]] | None = None) -> Grid:
        """The grid with its smoke settings, and with axes that the user gives; any grid can be repeated over seeds."""
        grid = self
        if smoke:
            known = {"fixed", "axes", "points", "samples", "seeds"}
            check_names(self.smoke, known, f"smoke of {self.name}")
            own = {**self.axes, **self.smoke.get("axes", {})}
            grid = replace(
                grid, fixed={**grid.fixed, **self.smoke.get("fixed", {})}, axes=own, scheduler=Scheduler(),
                **{key: self.smoke[key] for key in ("points", "samples", "seeds") if key in self.smoke},
            )  # fmt: skip
        for key in axes or {}:
            if key not in grid.axes and key != SEED:
                near = hint(key, grid.axes, "it has none")
                raise UserError(f"the grid {self.name} has no axis '{key}' to give values to; {near}")
        grid = replace(grid, axes={**grid.axes, **(axes or {})})
        if grid.seeds:
            several = {SEED: list(grid.seeds)} if len(grid.seeds) > 1 and SEED not in grid.axes else {}
            grid = replace(grid, axes={**grid.axes, **several}, fixed={**grid.fixed, SEED: grid.seeds[0]}, seeds=[])
        return grid

    def all_points(self) -> tuple[int, Iterable[tuple[int, Point]]]:
        """Number of points of the whole grid, and those that are tried, each with its place."""
        for key, values in self.axes.items():
            if values is None:
                raise UserError(
                    f"the axis '{key}' of the grid {self.name} is for you to fill in; give --axes.{key} '[A, B]'"
                )
            if not isinstance(values, list) or not values:
                raise UserError(f"the axis '{key}' of the grid {self.name} has no values; give --axes.{key} '[A, B]'")
        columns = side_by_side(self)
        if self.points:
            columns.insert(0, self.points)
        if not columns:
            raise UserError(f"the grid {self.name} is empty: it has neither axes nor points; add axes to its file")
        size = math.prod(len(column) for column in columns)
        places: Iterable[int] = range(size)
        if self.samples is not None and self.samples < size:
            places = sorted(random.Random(0).sample(range(size), self.samples))
        return size, ((place, at(columns, place)) for place in places)

    def trials(self, sets: Point | None = None, check: bool = True) -> list[Trial]:
        """The trials, in the grid's order; `sets` are settings of all of them that go over the file's.

        Raises UserError for an empty grid, an axis that the model does not have, a value that it refuses or, with
        `check`, a model that is not there.
        """
        sets = sets or {}
        for key in sets:
            if key in self.keys:
                raise UserError(f"'{key}' is an axis of the grid {self.name}; give --axes.{key} '[...]' instead")
        base = {**self.base_settings(), **self.fixed, **sets}
        _, points = self.all_points()
        made = [self._trial({**base, **point}, point, check) for _, point in points]
        twice = [trial.point for i, trial in enumerate(made) if any(trial.id == other.id for other in made[:i])]
        if twice:
            raise UserError(f"the grid {self.name} has the point {json.dumps(twice[0])} twice; remove one")
        return made

    def base_settings(self) -> Point:
        """Dotted settings of the base config."""
        content: dict[str, Any] = {}
        for path in [self.config] if isinstance(self.config, str) else self.config or []:
            content |= dotted(read_yaml(path, EXAMPLE))
        return {**content, **dotted(self.base)}

    def _trial(self, settings: Point, point: Point, check: bool) -> Trial:
        trains = self.kind == "train"
        parts: dict[str, dict[str, Any]] = {part: {} for part in (("model", "fit") if trains else ("evaluate",))}
        folders: dict[str, str] = {}
        places = [name for name in FOLDERS if name != "checkpoint" or not trains]
        entry = registry.MODELS.get(str(settings.get("model.name")))
        places_named = naming(entry.config, "checkpoint", "folder") if entry else set()
        paths = {*FOLDERS, *(f"model.{option}" for option in places_named)}
        for key, value in settings.items():
            head, _, tail = key.partition(".")
            if key in paths and isinstance(value, str) and value:
                value = absolute(value)  # as trials run in other folders
            elif entry and head == "model" and tail in naming(entry.config, "encoder") and isinstance(value, str):
                value = located(value)
            if head in parts and tail:
                nest(parts[head], tail, value)
            elif key in places:
                folders[key] = value
            else:
                known = [f"{part}.…" for part in parts] + places
                raise UserError(
                    f"the grid {self.name} of kind {self.kind} has no use for '{key}'; its settings are "
                    f"{', '.join(known)}"
                )
        model, fit = parts.get("model", {}), parts.get("fit", {})
        if trains:
            fit.setdefault("metric", self.metric.removeprefix("val/"))
            if check:
                self._check(model, fit, settings)
        id_ = hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:8]
        return Trial(id_, f"{short(point)}-{id_}", point, model, fit, folders, parts.get("evaluate", {}))

    def _check(self, model: dict[str, Any], fit: dict[str, Any], settings: Point) -> None:
        """Raises UserError where the model is not there, or model or training have no such option or value."""
        name = str(model.get("name"))
        if name not in registry.MODELS:
            raise UserError(f"the model '{name}' of the grid {self.name} is not there yet; --dry-run shows its trials")
        known = [f"model.{f.name}" for f in fields(registry.model_config(name))] + ["model.name"]
        known += [f"fit.{f.name}" for f in fields(FitConfig)]
        for key in settings:
            stem = ".".join(key.split(".")[:2])
            if stem not in known and key not in FOLDERS:
                what = "has the axis" if key in self.keys else "sets"
                raise UserError(
                    f"the grid {self.name} {what} '{key}', which the model '{name}' does not have; "
                    f"{instead(stem, known)}"
                )
        if f"val/{fit['metric']}" != self.metric:
            raise UserError(f"fit.metric is {fit['metric']}, the grid {self.name} ranks by {self.metric}; leave it out")
        registry.config_from_dict(model)
        try:
            FitConfig(**fit)
        except (ValueError, TypeError) as error:
            raise UserError(f"the grid {self.name}: {error}") from error


EXAMPLE = "give a file such as tuning/grids/sid_mlp.yaml"


def load(path: str) -> Grid:
    """The grid of a YAML file; UserError where it is not one."""
    content = read_yaml(path, EXAMPLE)
    content.setdefault("name", Path(path).stem)
    named = content.get("config") or []
    content["config"] = [str(Path(path).parent / name) for name in ([named] if isinstance(named, str) else named)]
    return build(Grid, content, path)


def build(kind: type, content: dict[str, Any], where: str) -> Any:
    """An instance of a dataclass from a mapping; UserError for an unknown key, with the nearest, or a bad value."""
    check_names(content, {f.name for f in fields(kind)}, where)
    try:
        return kind(**content)
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}") from error


def check_names(content: dict[str, Any], known: set[str], where: str) -> None:
    """UserError for a key of a grid file that is not known."""
    check_known(
        content, sorted(known), lambda key, near: f"unknown key '{key}' in {where}; the nearest key is '{near}'"
    )


def dotted(content: dict[str, Any]) -> Point:
    """The settings of `model` and `fit` of a config under dotted keys, other parts as they are."""
    flat: Point = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def nest(target: dict[str, Any], key: str, value: Any) -> None:
    """Sets `a.b` of nested mappings."""
    head, _, tail = key.partition(".")
    if tail:
        target[head] = dict(target.get(head) or {})
        nest(target[head], tail, value)
    else:
        target[head] = value


def side_by_side(grid: Grid) -> list[list[Point]]:
    """The factors of the product: an axis each, or the axes that go together."""
    columns, done = [], set()
    for key in grid.axes:
        group = next((keys for keys in grid.together if key in keys), [key])
        if key in done:
            continue
        done |= set(group)
        lists = [grid.axes[name] or [] for name in group]
        if len({len(values) for values in lists}) > 1:
            counts = ", ".join(f"{name} has {len(values)}" for name, values in zip(group, lists, strict=True))
            raise UserError(f"axes that go together in {grid.name} need equally many values, but {counts}")
        columns.append([dict(zip(group, values, strict=True)) for values in zip(*lists, strict=True)])
    return columns


def at(columns: list[list[Point]], place: int) -> Point:
    """The point number `place` of the product, the last factor running fastest."""
    chosen: list[Point] = []
    for column in reversed(columns):
        place, index = divmod(place, len(column))
        chosen.append(column[index])
    return {key: value for part in reversed(chosen) for key, value in part.items()}


def short(point: Point) -> str:
    """The values in a few characters that can name a folder, such as `alpha-0.7`."""
    words = []
    for key, value in point.items():
        shown = Path(value).name if isinstance(value, str) and "/" in value else str(value)
        words.append(f"{key.rpartition('.')[2]}-{shown}")
    return re.sub(r"[^A-Za-z0-9._+=-]", "_", "-".join(words))[:60] or "base"


def evaluation_options(name: str) -> list[str]:
    """Options of `recommend` that a grid of kind evaluate can vary for a model, and the batch size."""
    return ["batch_size", *registry.recommend_options(name)]
