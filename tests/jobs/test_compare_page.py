"""Test the rows and the page of jobs.compare."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import UserError
from core.options import parse
from core.schemas import RunRef
from jobs.compare import Config, run
from pipelines import tracking
from pipelines.comparison.load import compare
from pipelines.comparison.over_users import group_rows
from pipelines.comparison.plots import choose_colours, draw_validation, plots
from pipelines.comparison.runs import select


def log_run(
    uri: str,
    folder: Path,
    name: str,
    model: dict,
    values: dict[str, float],
    **options: object,
) -> RunRef:
    """Log a finished run with a short curve.

    Args:
        uri: The MLflow store.
        folder: Folder of the run.
        name: Name of the run.
        model: Options of the model.
        values: Final metrics, with the best validation.
        **options: `seed`, and further arguments of `tracking.open_run`.
    """
    opened = tracking.open_run(
        uri,
        "retrieval/x",
        name,
        str(folder),
        config={"model": model, "fit": {"seed": options.pop("seed", 42)}},
        hashes={"trie": "t"},
        **options,
    )
    logger = tracking.Logger(opened)
    for step in range(1, 4):
        logger.log(
            {
                "train/loss": 3.0 / step,
                "val/ndcg@10": values["best/ndcg@10"] * step / 3,
            },
            step,
        )
    logger.log(values, 4)
    logger.end()
    return opened


@pytest.fixture(scope="module")
def store(
    new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Log a sweep of alpha and heads, a SASRec with two seeds, and an unfinished run."""
    folder = tmp_path_factory.mktemp("sweep")
    uri = new_store(folder)
    axes = json.dumps(["model.alpha", "model.attention_heads"])
    tags = {
        tracking.KIND_TAG: "sweep",
        "sweep.axes": axes,
        "sweep.metric": "val/ndcg@10",
    }
    sweep = tracking.open_run(
        uri, "retrieval/x", "alphas", str(folder), config={}, hashes={}, tags=tags
    )
    trials = []
    for alpha in (0.0, 0.3, 0.7, 1.0):
        for heads in (4, 8):
            value = 0.05 - 0.02 * abs(alpha - 0.7) + heads / 1e4
            metrics = {
                "best/ndcg@10": value + 0.04,
                "test/ndcg@10": value,
                "test/users_per_s": 900.0 + 100 * heads,
            }
            model = {"name": "sid_mlp", "alpha": alpha, "attention_heads": heads}
            trials.append(
                log_run(
                    uri,
                    folder,
                    f"alpha-{alpha}-{heads}",
                    model,
                    metrics,
                    parent=sweep.run_id,
                    tags={
                        "sweep.trial": str(len(trials)),
                        tracking.POINT_TAG: json.dumps(model),
                    },
                )
            )
    tracking.Logger(sweep).tag(**{"sweep.best": trials[5].run_id})
    tracking.Logger(sweep).end()
    for seed in (1, 2):
        log_run(
            uri,
            folder,
            f"sasrec-{seed}",
            {"name": "sasrec"},
            {"best/ndcg@10": 0.05, "test/ndcg@10": 0.03},
            seed=seed,
        )
    tracking.open_run(
        uri,
        "retrieval/begun",
        "begun",
        str(folder),
        config={"model": {"name": "tiger"}},
        hashes={},
    )
    return uri


def test_an_experiment_shows_only_the_best_trial_of_a_sweep(store: str) -> None:
    comparison = compare(select(store, ["retrieval/x"]))

    assert [row.name for row in comparison.rows] == ["alpha-0.7-8", "sasrec-*"]
    (note,) = comparison.selection.notes
    assert "1 of 8 trials" in note
    assert len(compare(select(store, sweep="alphas")).rows) == 8


def test_a_sweep_over_seeds_is_compared_with_its_teacher(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    teacher = log_run(
        uri,
        tmp_path,
        "tiger",
        {"name": "tiger"},
        {"best/ndcg@10": 0.06, "test/ndcg@10": 0.050},
    )
    tracking.Logger(teacher).tag(**{tracking.WEIGHTS_TAG: "W"})
    tags = {
        tracking.KIND_TAG: "sweep",
        "sweep.axes": '["model.alpha", "fit.seed"]',
        "sweep.metric": "val/ndcg@10",
    }
    sweep = tracking.open_run(
        uri, "retrieval/x", "seeds", str(tmp_path), config={}, hashes={}, tags=tags
    )
    # The best single seed has not the best alpha.
    for alpha, values in ((0.5, (0.056, 0.059)), (0.7, (0.058, 0.0585))):
        for seed, value in enumerate(values, 42):
            point = {"model.alpha": alpha, "fit.seed": seed}
            trial = log_run(
                uri,
                tmp_path,
                f"seed-{seed}-{alpha}",
                {"name": "sid_mlp", "alpha": alpha, "teacher_hash": "W"},
                {"best/ndcg@10": value, "test/ndcg@10": value - 0.008},
                parent=sweep.run_id,
                tags={tracking.POINT_TAG: json.dumps(point)},
                seed=seed,
            )
            if (alpha, seed) == (0.7, 43):
                tracking.Logger(sweep).tag(**{"sweep.best": trial.run_id})

    comparison = compare(select(uri, ["retrieval/x"]))
    (note,) = comparison.selection.notes
    assert "2 of 4 trials" in note

    swept = compare(select(uri, sweep="seeds"))
    assert {row.name for row in swept.rows} == {"sid_mlp*"}
    teachers = [group.teacher.name for group in group_rows(swept) if group.teacher]
    assert teachers == ["tiger"] * 2


def test_the_first_plot_shows_the_validation_of_all_models(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    for name, value in (("sasrec", 0.05), ("tiger", 0.02), ("tiger", 0.07)):
        log_run(
            uri,
            tmp_path,
            f"{name}-{value}",
            {"name": name, "dim": value},
            {"best/ndcg@10": value},
        )
    baseline = tracking.Logger(
        tracking.open_run(
            uri,
            "retrieval/x",
            "baseline",
            str(tmp_path),
            config={"model": {"name": "popularity"}},
            hashes={},
        )
    )
    baseline.log({"val/ndcg@10": 0.03, "best/ndcg@10": 0.03}, 1)
    baseline.end()

    comparison = compare(select(uri, ["retrieval/x"]))

    assert plots(comparison)[0].title == "Validation of all models"
    (drawing,) = draw_validation(comparison, choose_colours([comparison]))
    lines = {
        str(line.get_label()): list(line.get_ydata())
        for line in drawing.figure.axes[0].get_lines()
    }
    assert lines == {
        "tiger-0.07 0.0700": pytest.approx([0.07 * step / 3 for step in (1, 2, 3)]),
        "sasrec-0.05 0.0500": pytest.approx([0.05 * step / 3 for step in (1, 2, 3)]),
        "baseline 0.0300": pytest.approx([0.03, 0.03]),
    }


def test_a_smoke_sweep_is_left_out_of_its_experiment(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    tags = {tracking.KIND_TAG: "sweep", tracking.SMOKE_TAG: "true"}
    smoke_sweep = tracking.open_run(
        uri, "retrieval/x", "tried", str(tmp_path), config={}, hashes={}, tags=tags
    )
    log_run(
        uri,
        tmp_path,
        "trial",
        {"name": "sasrec"},
        {"best/ndcg@10": 0.9},
        parent=smoke_sweep.run_id,
    )
    with pytest.raises(
        UserError,
        match=r"has no runs; .*tried: a smoke sweep, left out",
    ):
        select(uri, ["retrieval/x"])

    log_run(uri, tmp_path, "sasrec", {"name": "sasrec"}, {"best/ndcg@10": 0.1})
    comparison = compare(select(uri, ["retrieval/x"]))
    assert [row.name for row in comparison.rows] == ["sasrec"]
    assert comparison.selection.notes == ["tried: a smoke sweep, left out"]
    assert [row.name for row in compare(select(uri, sweep="tried")).rows] == ["trial"]


@pytest.mark.long
def test_the_page_needs_no_other_file_and_is_logged_to_the_sweep(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    page = tmp_path / "new/page.html"
    words = ["--sweep", "alphas", "--tracking_uri", store]
    words += ["--html", str(page), "--markdown", f"{page}.md"]

    for _ in range(2):
        run(parse(Config, words))

    assert "4 plots written to" in capsys.readouterr().out
    text = page.read_text()
    assert not re.search(r"https?://|src=|@import|url\((?!#)", text)
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)
    client = tracking.connect(store)
    (sweep,) = client.search_runs(["1"], "tags.`trieline.kind` = 'sweep'")
    artifacts = {item.path for item in client.list_artifacts(sweep.info.run_id)}
    assert {"compare.html", "compare.md"} <= artifacts


def test_models_of_actions_are_compared_by_their_entropy_over_a_setting(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    for weight in (0.5, 0.75, 1.0):
        metrics = {
            "best/ndcg@10": 0,
            "test/mean/normalised_entropy": 0.9 - weight / 10,
            "test/like/normalised_entropy": 0.8,
            "best/mean/rig": 0.1,
        }
        log_run(
            uri,
            tmp_path,
            f"lambda-{weight}",
            {"name": "attn_mvp", "action_weight": weight},
            metrics,
        )

    comparison = compare(select(uri, ["retrieval/x"]))

    assert comparison.metric == "mean/normalised_entropy"
    names = [row.name for row in comparison.rows]
    assert names == ["lambda-1.0", "lambda-0.75", "lambda-0.5"]  # lower is better
