"""Test the command line of jobs.sweep: free keys and dry runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import UserError
from jobs import cli
from jobs import sweep as job
from pipelines.training.config import RayOptions
from tuning.grid import load_sweep

GRID = str(Path(__file__).parents[2] / "tuning/grids/sid_mlp_alpha.yaml")


def test_keys_below_model_fit_and_axes_are_free():
    words = ["--grid", GRID, "--dry-run", "--model.teacher=runs/tiger"]
    words += ["--fit.lr", "5e-4", "--axes.model.alpha", "[0, 1.0]"]
    words += ["--ray.threads", "2", "--test", "false"]

    sweep = load_sweep(cli.config_from_words(job, words))

    assert not sweep.config.test
    trainings = list(sweep.trials.values())
    assert [config.model.alpha for config in trainings] == [0, 1.0]
    for config in trainings:
        assert config.fit.lr == 5e-4
        assert config.model.head_width == 512  # from the base config
        assert config.ray == RayOptions(threads=2)


def test_a_dry_run_prints_the_trials_and_writes_nothing(tmp_path, capsys):
    grid = tmp_path / "g.yaml"
    grid.write_text(
        "{source: a test, fixed: {model.name: sasrec}, axes: {fit.lr: [0.1, 0.2, 0.3]}}"
    )
    words = ["--grid", str(grid), "--samples", "2"]

    job.run(cli.config_from_words(job, [*words, "--dry-run"]))

    summary = "2 of 3 points; metric val/ndcg@10; scheduler none"
    assert summary in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["g.yaml"]
    with pytest.raises(UserError, match="--tables is missing"):
        cli.config_from_words(job, words)
