"""Grid files: what they make of axes, points and seeds, what they refuse, and that the
documented ones are whole.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from models.retrieval.sasrec import SASRecConfig
from models.storage.tables import UserError
from models.training.fit_config import FitConfig
from tuning.grid import Grid, Point, load_grid

GRIDS = sorted((Path(__file__).parents[2] / "tuning/grids").glob("*.yaml"))
SASREC: Point = {"model.name": "sasrec", "model.dim": 16, "fit.lr": 0.01}


def grid(base: Point = SASREC, fixed: Point | None = None, **fields: Any) -> Grid:
    settings = {**base, **(fixed or {})}
    return Grid(
        **{
            "name": "g",
            "source": "a test",
            "fixed": settings,
            "axes": {"fit.lr": [0.1, 0.2]},
            **fields,
        }
    )


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
    keys = [f"fit.{name}" for name in ("warmup_steps", "seed", "patience")][
        : len(values)
    ]
    axes: dict[str, list[Any] | None] = dict(zip(keys, values, strict=True))
    product = [
        dict(zip(keys, chosen, strict=True)) for chosen in itertools.product(*values)
    ]
    assert grid(axes=axes).list_points() == product
    drawn = [trial.point for trial in grid(axes=axes, samples=samples).trials()]
    assert len(drawn) == min(samples, len(product))
    assert [
        point for point in product if point in drawn
    ] == drawn  # in order, none twice
    assert drawn == [trial.point for trial in grid(axes=axes, samples=samples).trials()]


def test_settings_go_over_each_other(tmp_path: Path) -> None:
    config = tmp_path / "sasrec.yaml"
    config.write_text(
        "{model: {name: sasrec, dim: 16, num_layers: 1}, fit: {lr: 1.0, eval_options: {k: 5}}}"
    )
    made = (
        grid(
            {},
            {"model.num_layers": 2, "model.dropout": 0.1},
            config=str(config),
            seeds=[7],
            axes={"model.dim": [32, 64]},
        )
        .vary(False)
        .trials({"model.dropout": 0.3})
    )
    assert [trial.model.dim for trial in made] == [32, 64]
    assert made[0].model == SASRecConfig(dim=32, num_layers=2, dropout=0.3)
    assert made[0].fit == FitConfig(
        lr=1.0, eval_options={"k": 5}, seed=7, metric="ndcg@10"
    )
    assert made[0].point == {"model.dim": 32}


def test_paths_are_made_absolute_and_the_point_stays() -> None:
    student = {
        "model.name": "sid_mlp",
        "model.teacher": "runs/tiger",
        "model.teacher_cache": "",
    }
    (taught,) = grid(base={}, fixed=student, axes={"fit.lr": [0.1]}).trials()
    assert (taught.model.teacher, taught.model.teacher_cache) == (
        str(Path("runs/tiger").absolute()),
        "",
    )
    (one,) = grid(axes={"sids": ["here/sids"]}).trials()
    assert one.folders == {"sids": str(Path("here/sids").absolute())}
    assert one.point == {"sids": "here/sids"}


def test_encoders_that_are_folders_are_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bert").mkdir()
    monkeypatch.chdir(tmp_path)
    hllm = {"model.name": "hllm", "model.item_tower": "google/bert"}
    made = grid(
        base={},
        fixed=hllm,
        axes={"model.pretrained": ["bert", "minilm", ""]},
        metric="val/gauc",
    ).trials()
    assert [trial.model.pretrained for trial in made] == [
        str(tmp_path / "bert"),
        "minilm",
        "",
    ]
    assert made[0].model.item_tower == "google/bert"
    assert made[0].point == {"model.pretrained": "bert"}


def test_ids_are_of_the_values_alone() -> None:
    one = grid().trials()
    other = grid(axes={"fit.lr": [0.2, 0.1]}, fixed={"model.dim": 8}).trials()
    assert {trial.point["fit.lr"]: trial.name for trial in one} == {
        t.point["fit.lr"]: t.name for t in other
    }
    assert len({trial.name for trial in one}) == 2
    assert one[0].name.startswith("lr-0.1-")


def test_several_seeds_are_an_axis_and_some_axes_go_together() -> None:
    made = grid(axes={}, seeds=[1, 2]).vary(False)
    assert made.keys == ["fit.seed"]
    assert [trial.fit.seed for trial in made.trials()] == [1, 2]
    repeated = grid(axes={"model.dim": [8]}, seeds=[1, 2]).vary(
        False, {"fit.seed": [3, 4]}
    )
    assert [trial.point for trial in repeated.trials()] == [
        {"model.dim": 8, "fit.seed": seed} for seed in (3, 4)
    ]
    assert grid().vary(True, {"fit.seed": [3]}).trials()[0].fit.seed == 3
    pairs = grid(
        axes={"fit.lr": [0.1, 0.2], "fit.seed": [5, 6], "model.dim": [8, 4]},
        together=[["fit.lr", "fit.seed"]],
    )
    found = [(t.fit.lr, t.fit.seed, t.model.dim) for t in pairs.trials()]
    assert found == [(0.1, 5, 8), (0.1, 5, 4), (0.2, 6, 8), (0.2, 6, 4)]
    crossed = grid(
        points=[{"model.dim": 8}, {"model.num_layers": 1}], axes={"fit.seed": [1, 2]}
    )
    assert [trial.point for trial in crossed.trials()][2] == {
        "model.num_layers": 1,
        "fit.seed": 1,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axes": {}}, "the grid g is empty: it has neither axes nor points"),
        (
            {"axes": {"fit.lr": []}},
            r"the axis 'fit.lr' of the grid g has no values; give --axes.fit.lr '\[A, B\]'",
        ),
        ({"axes": {"sids": None}}, "the axis 'sids' of the grid g has no values"),
        (
            {"axes": {"model.dimm": [1]}},
            "unknown key 'model.dimm'; the nearest key is 'model.dim'",
        ),
        ({"axes": {"fit.lrr": [1]}}, "the nearest key is 'fit.lr'"),
        (
            {"fixed": {"evaluate.beam": 5}},
            "of kind train has no use for 'evaluate.beam'",
        ),
        (
            {"fixed": {"checkpoint": "runs/x"}},
            "of kind train has no use for 'checkpoint'",
        ),
        (
            {
                "kind": "evaluate",
                "metric": "test/ndcg@10",
                "base": {},
                "axes": {"fit.lr": [1]},
            },
            r"of kind evaluate has no use for 'fit\.lr'; it takes evaluate\.…, sids, text, checkpoint",
        ),
        (
            {
                "kind": "evaluate",
                "metric": "test/ndcg@10",
                "base": {},
                "axes": {"evaluate.beam": [1]},
            },
            "needs checkpoints; give --axes.checkpoint",
        ),
        (
            {"axes": {"dim": [1]}},
            r"of kind train has no use for 'dim'; it takes model\.",
        ),
        ({"axes": {"fit.lr": [0.1, -1]}}, r"fit.lr is -1.0, it must be above 0"),
        ({"axes": {"model.dropout": [2]}}, "the grid g: dropout 2.0 is not in"),
        ({"axes": {"fit.lr": [0.1, 0.1]}}, "has a point twice"),
        (
            {
                "axes": {"fit.lr": [1], "fit.seed": [1, 2]},
                "together": [["fit.lr", "fit.seed"]],
            },
            r"fit\.lr has 1, fit\.seed has 2",
        ),
        ({"fixed": {"model.name": "gru"}}, "'gru'"),
        (
            {"fixed": {"fit.metric": "recall@5"}},
            "fit.metric is recall@5, the grid g ranks by val/ndcg@10",
        ),
    ],
)
def test_what_no_sweep_could_do_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        grid(**fields).trials()


def test_a_setting_of_an_axis_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"'fit.lr' is an axis of the grid g; give --axes.fit.lr"
    ):
        grid().trials({"fit.lr": 1})
    with pytest.raises(
        UserError,
        match=r"has no axis 'fit.l' to give values to; the nearest is 'fit.lr'",
    ):
        grid().vary(False, {"fit.l": [1]})
    assert [t.fit.lr for t in grid().vary(False, {"fit.lr": [3]}).trials()] == [3]


def test_files_are_read_with_care(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none\.yaml"):
        load_grid(str(tmp_path / "none.yaml"))
    for content, message in [
        ("[1, 2]", "holds list, not a mapping"),
        ("axes: {", "is not valid YAML"),
        (
            "source: x\nfixed: {a: 1}\nfixed: {b: 2}",
            "the key 'fixed' is duplicated.*line 3",
        ),
        (
            "source: x\naxis: {}",
            "g.yaml: unknown key 'axis'; the nearest key is 'axes'",
        ),
        ("axes: {}", "source"),
        (
            "source: x\nscheduler: {name: asha, grase: 1}",
            "unknown key 'scheduler.grase'; the nearest key is 'scheduler.grace'",
        ),
        ("source: x\nsmoke: {fixd: 1}", "smoke has the key 'fixd'; it takes fixed"),
        ("source: x\nmetric: ndcg@10", "starts with val/"),
    ]:
        (tmp_path / "g.yaml").write_text(content)
        with pytest.raises(UserError, match=message):
            load_grid(str(tmp_path / "g.yaml"))


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_documented_grids_are_whole(path: Path) -> None:
    for smoke in (False, True):
        one = load_grid(str(path))
        one = one.vary(
            smoke,
            {
                key: [f"{key}-a", f"{key}-b"]
                for key, values in one.axes.items()
                if values is None
            },
        )
        trials = one.trials()
        assert 1 <= len(trials) <= (8 if smoke else 100)
        assert one.name == path.stem
        assert one.source
        if smoke and one.kind == "train":
            assert max(trial.fit.max_epochs for trial in trials) <= 3
        points = (
            {key for point in one.points for key in point}
            | set(one.axes)
            | {"model.name"}
        )
        for entry in load_grid(str(path)).published:
            assert set(entry) <= {
                "point",
                "dataset",
                "metrics",
                "source",
                "relative_to",
            }
            assert entry["source"]
            assert set(entry["point"]) <= points | set(load_grid(str(path)).keys) | {
                "fit.seed"
            }, entry


def test_published_values_are_numbers() -> None:
    for path in GRIDS:
        for entry in yaml.safe_load(path.read_text()).get("published") or []:
            assert all(
                isinstance(value, float) for value in entry["metrics"].values()
            ), path
