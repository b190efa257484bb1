"""Test exporting runs to a file and reading tables, plots and claims from the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from models.storage.tables import UserError
from papers import kept, pages
from pipelines import tracking
from pipelines.comparison.load import compare
from pipelines.comparison.runs import select
from pipelines.comparison.tables import tables


def log_runs(uri: str, folder: Path) -> None:
    """Log three trainings, two with the same options, and a sweep with two trials."""
    log_trainings(uri, folder)
    log_sweep(uri, folder)


def log_trainings(uri: str, folder: Path) -> None:
    """Log two trainings with the same options, and one with others."""
    for name, width, seed, value in [
        ("a-1", 8, 1, 0.1),
        ("a-2", 8, 2, 0.14),
        ("b", 16, 1, 0.2),
    ]:
        config = {
            "model": {"name": "sasrec", "dim": width},
            "fit": {"seed": seed, "metric": "ndcg@10"},
            "tables": "/x/y/z",
        }
        ref = tracking.open_run(
            uri, "retrieval/x", name, str(folder), config=config, hashes={"items": "1"}
        )
        log = tracking.Logger(ref)
        for step in range(250):
            log.log({"train/loss": 1 / (step + 1)}, step)
        log.log(
            {"val/ndcg@10": value, "best/ndcg@10": value, "test/ndcg@10": value / 2},
            250,
        )
        log.log(
            {
                "test/users_per_s": 900 * value,
                "train/parameters": 1000,
                "train/steps": 250,
            },
            250,
        )
        log.end()


def log_sweep(uri: str, folder: Path, finished: bool = True) -> None:
    """Log a sweep with two trials; its best trial is recorded only if it `finished`."""
    sweep = tracking.open_run(
        uri,
        "retrieval/x",
        "s",
        str(folder),
        config={},
        hashes={},
        tags={
            tracking.KIND_TAG: "sweep",
            "sweep.axes": '["fit.lr"]',
            "sweep.metric": "val/ndcg@10",
        },
    )
    tracking.log_yaml(sweep, {"name": "s", "published": []}, "grid.yaml")
    best = ""
    for lr in (0.1, 0.2):
        config = {
            "model": {"name": "sasrec", "dim": 4},
            "fit": {"seed": 1, "lr": lr, "metric": "ndcg@10"},
        }
        tags = {
            tracking.KIND_TAG: "trial",
            tracking.TRIAL_TAG: str(lr),
            tracking.POINT_TAG: json.dumps({"fit.lr": lr}),
        }
        trial = tracking.open_run(
            uri,
            "retrieval/x",
            f"t{lr}",
            str(folder),
            config=config,
            hashes={},
            parent=sweep.run_id,
            tags=tags,
        )
        log = tracking.Logger(trial)
        log.log({"best/ndcg@10": lr, "val/ndcg@10": lr, "train/steps": 1}, 1)
        log.end()
        best = trial.run_id
    if finished:
        log = tracking.Logger(sweep)
        log.tag(**{"sweep.best": best})
        log.end()


def render_tables(uri: str, sweep: str | None = None) -> str:
    """Return the text of all tables that compare an experiment or a sweep."""
    comparison = compare(select(uri, ["retrieval/x"], sweep))
    return "\n".join(table.text() for table in tables(comparison))


@pytest.mark.long
def test_exported_runs_have_the_tables_of_the_store(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    file = str(tmp_path / "results/x.jsonl")
    log_runs(uri, tmp_path)
    for sweep in (None, "s"):
        kept.run(kept.Config(uri, file, "retrieval/x", sweep))
        lines = kept.read(file)[0]
        with kept.store(lines) as exported_uri:
            assert render_tables(exported_uri, sweep) == render_tables(uri, sweep)
    assert len(lines) == 3  # the sweep and its two trials


@pytest.mark.long
@pytest.mark.parametrize("finished", [True, False])
def test_an_experiment_with_only_a_sweep_shows_its_best_trial_or_all(
    finished: bool, new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    """All trials are compared as long as the best one is unknown."""
    uri = new_store(tmp_path)
    file = str(tmp_path / "x.jsonl")
    log_sweep(uri, tmp_path, finished)

    kept.run(kept.Config(uri, file, "retrieval/x"))

    text = render_tables(uri)
    assert ("t0.1" in text, "t0.2" in text) == (not finished, True)
    if finished:
        assert "all of them: --sweep s" in text
    else:
        assert "the best settings are not known yet: all trials" in text
    lines = kept.read(file)[0]
    assert len(lines) == 3
    with kept.store(lines) as exported_uri:
        assert render_tables(exported_uri) == text


@pytest.mark.long
def test_pages_are_reproducible_and_contain_no_path_of_the_machine(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    file = tmp_path / "kept/x.jsonl"
    log_runs(uri, tmp_path)
    kept.run(kept.Config(uri, str(file), "retrieval/x"))
    assert str(tmp_path) not in file.read_text()
    first_run = json.loads(file.read_text().splitlines()[0])
    assert len(first_run["curves"]["train/loss"]) <= 101
    timing = {
        "benchmark": "decode",
        "variant": "a",
        "params": {"batch": 1},
        "runs": 3,
        "median_s": 0.1,
        "min_s": 0.1,
    }
    (file.parent / "decode.jsonl").write_text(
        json.dumps({**timing, "max_s": 0.2, "items_per_s": 10.0})
    )

    for name in ("one", "two"):
        pages.run(pages.Config(str(file.parent), f"{tmp_path}/{name}"))

    first = {path.name: path.read_text() for path in (tmp_path / "one").iterdir()}
    second = {path.name: path.read_text() for path in (tmp_path / "two").iterdir()}
    assert first == second
    assert {
        "retrieval-x.md",
        "retrieval-x-s.md",
        "claims.md",
        "benchmark-decode.md",
    } <= first.keys()
    assert "![" in first["retrieval-x.md"]
    assert ">150</text>" in first["retrieval-x-pareto.svg"]
    assert "math" not in "".join(first.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no runs"),
        ("{}", "neither a run nor a timing"),
        ("x", "cannot read"),
    ],
)
def test_a_file_that_is_no_export_is_refused_in_one_line(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        kept.read(tmp_path)
    assert "\n" not in str(error.value)
