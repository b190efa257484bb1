"""Test grids: the trials of axes, points and seeds, refused files, documented grids."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import UserError
from models.retrieval.sasrec import SASRecConfig
from models.training.fit_config import FitConfig
from tuning.grid import Grid, Point, load_grid

GRIDS = sorted((Path(__file__).parents[2] / "tuning/grids").glob("*.yaml"))
SASREC: Point = {"model.name": "sasrec", "model.dim": 16, "fit.lr": 0.01}


def build_grid(base: Point = SASREC, fixed: Point | None = None, **fields: Any) -> Grid:
    """Build a grid over two learning rates, unless fields say otherwise."""
    defaults = {
        "name": "g",
        "source": "a test",
        "fixed": {**base, **(fixed or {})},
        "axes": {"fit.lr": [0.1, 0.2]},
    }
    return Grid(**{**defaults, **fields})


@given(
    st.lists(
        st.lists(st.integers(0), min_size=1, max_size=4, unique=True),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 70),
)
def test_points_are_the_product_or_a_sample_of_it(
    values: list[list[int]], samples: int
) -> None:
    keys = ["fit.warmup_steps", "fit.seed", "fit.patience"][: len(values)]
    axes: dict[str, list[Any] | None] = dict(zip(keys, values, strict=True))
    combinations = itertools.product(*values)
    product = [dict(zip(keys, chosen, strict=True)) for chosen in combinations]

    def draw_points() -> list[Point]:
        trials = build_grid(axes=axes, samples=samples).trials()
        return [trial.point for trial in trials]

    assert build_grid(axes=axes).list_points() == product
    drawn = draw_points()
    assert len(drawn) == min(samples, len(product))
    in_order = [point for point in product if point in drawn]
    assert in_order == drawn  # and no point twice
    assert draw_points() == drawn


def test_settings_override_each_other(tmp_path: Path) -> None:
    """An axis overrides the command line, that `fixed`, and that the config file."""
    config = tmp_path / "sasrec.yaml"
    config.write_text(
        "{model: {name: sasrec, dim: 16, num_layers: 1}, fit: {lr: 1.0, eval_options: {k: 5}}}"
    )
    grid = build_grid(
        {},
        {"model.num_layers": 2, "model.dropout": 0.1},
        config=str(config),
        seeds=[7],
        axes={"model.dim": [32, 64]},
    )

    trials = grid.vary(False).trials({"model.dropout": 0.3})

    assert [trial.model.dim for trial in trials] == [32, 64]
    assert trials[0].model == SASRecConfig(
        name="sasrec", dim=32, num_layers=2, dropout=0.3
    )
    assert trials[0].fit == FitConfig(
        lr=1.0, eval_options={"k": 5}, seed=7, metric="ndcg@10"
    )
    assert trials[0].point == {"model.dim": 32}


def test_trials_have_absolute_paths_and_points_the_given_ones() -> None:
    student = {
        "model.name": "sid_mlp",
        "model.teacher": "runs/tiger",
        "model.teacher_cache": "",
    }
    (trial,) = build_grid(base={}, fixed=student, axes={"fit.lr": [0.1]}).trials()
    assert trial.model.teacher == str(Path("runs/tiger").absolute())
    assert trial.model.teacher_cache == ""

    (trial,) = build_grid(axes={"sids": ["here/sids"]}).trials()
    assert trial.folders == {"sids": str(Path("here/sids").absolute())}
    assert trial.point == {"sids": "here/sids"}


def test_names_of_trials_depend_only_on_the_points() -> None:
    def names_by_lr(grid: Grid) -> dict[float, str]:
        return {trial.point["fit.lr"]: trial.name for trial in grid.trials()}

    names = names_by_lr(build_grid())
    reordered = build_grid(axes={"fit.lr": [0.2, 0.1]}, fixed={"model.dim": 8})
    assert names_by_lr(reordered) == names
    assert len(set(names.values())) == 2
    assert names[0.1].startswith("lr-0.1-")


def test_several_seeds_are_an_axis() -> None:
    seeds = build_grid(axes={}, seeds=[1, 2]).vary(False)
    assert seeds.keys == ["fit.seed"]
    assert [trial.fit.seed for trial in seeds.trials()] == [1, 2]

    other_seeds = build_grid(axes={"model.dim": [8]}, seeds=[1, 2])
    trials = other_seeds.vary(False, {"fit.seed": [3, 4]}).trials()
    assert [trial.point for trial in trials] == [
        {"model.dim": 8, "fit.seed": seed} for seed in (3, 4)
    ]
    assert build_grid().vary(True, {"fit.seed": [3]}).trials()[0].fit.seed == 3


def test_axes_in_together_vary_in_parallel() -> None:
    grid = build_grid(
        axes={"fit.lr": [0.1, 0.2], "fit.seed": [5, 6], "model.dim": [8, 4]},
        together=[["fit.lr", "fit.seed"]],
    )
    values = [
        (trial.fit.lr, trial.fit.seed, trial.model.dim) for trial in grid.trials()
    ]
    assert values == [(0.1, 5, 8), (0.1, 5, 4), (0.2, 6, 8), (0.2, 6, 4)]


def test_points_are_crossed_with_axes() -> None:
    grid = build_grid(
        points=[{"model.dim": 8}, {"model.num_layers": 1}], axes={"fit.seed": [1, 2]}
    )
    third = grid.trials()[2]
    assert third.point == {"model.num_layers": 1, "fit.seed": 1}


def test_axes_get_values_only_by_axes_options() -> None:
    with pytest.raises(UserError, match=r"'fit.lr' is an axis of the grid g"):
        build_grid().trials({"fit.lr": 1})
    with pytest.raises(UserError, match=r"unknown 'fit.l' in axes"):
        build_grid().vary(False, {"fit.l": [1]})

    (trial,) = build_grid().vary(False, {"fit.lr": [3]}).trials()
    assert trial.fit.lr == 3


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_documented_grids_have_trials_and_valid_published_values(path: Path) -> None:
    for smoke in (False, True):
        grid = load_grid(str(path))
        open_axes = [key for key, values in grid.axes.items() if values is None]
        grid = grid.vary(smoke, {key: [f"{key}-a", f"{key}-b"] for key in open_axes})
        trials = grid.trials()
        assert 1 <= len(trials) <= (8 if smoke else 100)
        assert grid.name == path.stem
        assert grid.source
        if smoke and grid.job == "train":
            assert max(trial.fit.max_epochs for trial in trials) <= 3

        keys_of_points = {key for point in grid.points for key in point}
        keys = keys_of_points | set(grid.axes) | set(load_grid(str(path)).keys)
        for entry in load_grid(str(path)).published:
            assert set(entry) <= {
                "point",
                "dataset",
                "metrics",
                "source",
                "relative_to",
            }
            assert entry["source"]
            values = entry["metrics"].values()
            assert all(isinstance(value, float) for value in values)
            assert set(entry["point"]) <= keys | {"model.name", "fit.seed"}, entry
