"""Test grids: the trials of axes and points, refused files, documented grids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import UserError
from core.options import build
from models.retrieval.sasrec import SASRecConfig
from models.training.fit_config import FitConfig
from tuning.grid import Sweep, SweepConfig, load_sweep

GRIDS = sorted((Path(__file__).parents[2] / "tuning/grids").glob("*.yaml"))
SASREC = {"model.name": "sasrec", "model.dim": 16, "fit.lr": 0.01}

Load = Callable[..., Sweep]


@pytest.fixture
def load(tmp_path) -> Load:
    """Return a function that loads a sweep over the axes, or over other keys."""

    def load(
        axes: dict[str, Any], options: dict[str, Any] | None = None, **keys: Any
    ) -> Sweep:
        content = {"source": "a test", "axes": axes, "fixed": SASREC, **keys}
        (tmp_path / "g.yaml").write_text(json.dumps(content))
        file = str(tmp_path / "g.yaml")
        given = {"grid": file, "dry_run": True, **(options or {})}
        return load_sweep(build(SweepConfig, given))

    return load


def list_points(sweep: Sweep) -> list[dict[str, Any]]:
    return list(sweep.points.values())


def test_a_sample_has_no_point_twice_and_is_always_the_same(load):
    axes = {"fit.seed": list(range(10)), "fit.lr": [0.1, 0.2]}
    points = load(axes).grid.list_points()

    drawn = list_points(load(axes, samples=7))

    assert len(drawn) == 7
    assert [point for point in points if point in drawn] == drawn
    assert list_points(load(axes, {"samples": 7}, samples=3)) == drawn


def test_settings_override_each_other(load, tmp_path):
    """An axis overrides the command line, that `fixed`, and that the config file."""
    (tmp_path / "sasrec.yaml").write_text(
        "{model: {name: sasrec, dim: 16, num_layers: 1}, fit: {lr: 1.0, eval_options: {k: 5}}}"
    )
    sweep = load(
        {"model.dim": [32, 64]},
        {"model": {"dropout": 0.3}},
        config="sasrec.yaml",
        fixed={"model.num_layers": 2, "model.dropout": 0.1, "fit.seed": 7},
    )

    trial, other = sweep.trials.values()
    assert other.model.dim == 64
    assert trial.model == SASRecConfig(name="sasrec", dim=32, num_layers=2, dropout=0.3)
    assert trial.fit == FitConfig(
        lr=1.0, eval_options={"k": 5}, seed=7, metric="ndcg@10"
    )
    assert list_points(sweep)[0] == {"model.dim": 32}


def test_trials_have_absolute_paths_and_points_the_given_ones(load):
    student = {"model.name": "sid_mlp", "model.teacher": "runs/tiger"}
    sweep = load({"sids": ["here/sids"]}, {"storage": "runs"}, fixed=student)
    (trial,) = sweep.trials.values()

    assert trial.model.teacher == str(Path("runs/tiger").absolute())
    assert trial.sids == str(Path("here/sids").absolute())
    assert list_points(sweep) == [{"sids": "here/sids"}]


def test_names_of_trials_depend_only_on_the_points(load):
    names = set(load({"fit.lr": [0.1, 0.2]}).trials)

    assert set(load({"fit.lr": [0.2, 0.1]}, {"model": {"dim": 8}}).trials) == names
    assert sum(name.startswith("lr-0.1-") for name in names) == 1


def test_axes_in_together_vary_in_parallel(load):
    axes = {"fit.lr": [0.1, 0.2], "fit.seed": [5, 6], "model.dim": [8, 4]}
    sweep = load(axes, together=[["fit.lr", "fit.seed"]])
    values = [tuple(point.values()) for point in list_points(sweep)]
    assert values == [(0.1, 5, 8), (0.1, 5, 4), (0.2, 6, 8), (0.2, 6, 4)]


@pytest.mark.parametrize(
    ("message", "axes", "options", "keys"),
    [
        ("'fit.lr' is set by the grid", {"fit.lr": [1]}, {"fit": {"lr": 1}}, {}),
        ("'fit' is set by the sweep", {"fit": [1, 2]}, {}, {}),
        ("unknown key 'fit.l'", {"fit.l": [1]}, {}, {}),
        (r"fit.lr of the grid g have \[0\] values", {"fit.lr": []}, {}, {}),
        (
            r"fit.lr and fit.seed of the grid g have \[1, 2\] values",
            {"fit.lr": [1], "fit.seed": [1, 2]},
            {},
            {"together": [["fit.lr", "fit.seed"]]},
        ),
        ("missing: evaluate.checkpoint", {}, {}, {"job": "evaluate", "fixed": {}}),
        ("in two groups", {}, {}, {"together": [["fit.lr"], ["fit.lr"]]}),
        ("'evaluate' is set by", {"evaluate": [1]}, {}, {"job": "evaluate"}),
        ("unknown key 'smoke.axe'", {}, {}, {"smoke": {"axe": {}}}),
    ],
)
def test_wrong_grids_are_refused(message, axes, options, keys, load):
    with pytest.raises(UserError, match=message):
        load(axes, options, **keys)


@pytest.mark.parametrize("is_smoke", [False, True])
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_documented_grids_have_trials_and_valid_published_values(path, is_smoke):
    values = {
        key: [f"{key}-a", f"{key}-b"] for key in ("sids", "model.teacher", "checkpoint")
    }
    content = path.read_text()
    axes = {key: paths for key, paths in values.items() if f"\n  {key}:  " in content}
    sweep = load_sweep(
        SweepConfig(grid=str(path), axes=axes, smoke=is_smoke, dry_run=True)
    )

    trials = list(sweep.trials.values())
    assert 1 <= len(trials) <= (8 if is_smoke else 100)
    if sweep.grid.job == "train":
        assert not is_smoke or max(t.fit.max_epochs for t in trials) <= 3
