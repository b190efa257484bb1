"""Test the command line of jobs.sweep: free keys, dry runs and all documented grids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import cli
from jobs import sweep as job
from pipelines.training.config import RayOptions
from tuning.grid import load_grid

GRIDS = Path(__file__).parents[2] / "tuning/grids"


def parse(*words: str) -> job.Config:
    """Parse a command line with the grid of alpha."""
    grid = str(GRIDS / "sid_mlp_alpha.yaml")
    return cli.config_from_words(job, ["--grid", grid, *words])


def test_keys_below_model_fit_and_axes_are_free() -> None:
    config = parse(
        "--dry-run",
        "--model.teacher=runs/tiger",
        "--fit.lr",
        "5e-4",
        "--axes.model.alpha",
        "[0, 1.0]",
        "--ray.threads",
        "2",
        "--options.test",
        "false",
    )

    assert config.dry_run
    assert config.model == {"teacher": "runs/tiger"}
    assert config.fit == {"lr": 5e-4}
    assert config.axes == {"model.alpha": [0, 1.0]}
    assert config.ray == RayOptions(threads=2)

    grid, trials = job.read_trials(config)
    assert [trial.model.alpha for trial in trials] == [0, 1.0]
    assert {trial.fit.lr for trial in trials} == {5e-4}
    assert trials[0].model.head_width == 512  # from the base config
    assert grid.published


@pytest.mark.parametrize(
    "path", sorted(GRIDS.glob("*.yaml")), ids=lambda path: path.stem
)
def test_all_documented_grids_have_trials(path: Path, tmp_path: Path) -> None:
    """Trials share a cache of their teacher's logits if the logits do not change."""
    words = ["--grid", str(path), "--smoke", "--tables", "T"]
    words += ["--storage", str(tmp_path), "--name", "s"]
    for key, values in load_grid(str(path)).axes.items():
        if values is None:
            words += [f"--axes.{key}", f"[{tmp_path}/a, {tmp_path}/b]"]

    _, trials = job.read_trials(cli.config_from_words(job, words))

    assert trials
    for trial in trials:
        name = trial.model.name if trial.model else ""
        if name in ("earn", "nezha", "lc_rec_nezha"):
            assert not trial.model.teacher_cache
        if name in (
            "sid_mlp",
            "gdn",
            "mamba2",
            "one_layer",
            "atspeed_s",
            "lc_rec_sid_mlp",
        ):
            assert trial.model.teacher_cache or path.stem == "beam"


def test_a_dry_run_prints_the_trials_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid: dict[str, Any] = {
        "source": "a test",
        "fixed": {
            "model.name": "sasrec",
            "model.dim": 16,
            "fit.max_epochs": 2,
            "fit.batch_size": 16,
        },
        "axes": {"fit.lr": [0.1, 0.2, 0.3]},
    }
    (tmp_path / "g.yaml").write_text(yaml.safe_dump(grid))
    words = ["--grid", str(tmp_path / "g.yaml"), "--dry-run", "--samples", "2"]

    job.run(cli.config_from_words(job, words))

    summary = "2 of 3 points; metric val/ndcg@10; scheduler none"
    assert summary in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["g.yaml"]
