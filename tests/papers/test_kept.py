"""Runs exported to a file and read back: the same tables, plots and claims, without the
store.
"""

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
    """Three trainings, two of them of one setting, and a sweep with two trials."""
    log_trainings(uri, folder)
    log_sweep(uri, folder)


def log_trainings(uri: str, folder: Path) -> None:
    """Two of one setting, and one of another."""
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
    """One with two trials; the best of one that has not `finished` is not known."""
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


def shown(uri: str, sweep: str | None = None) -> str:
    return "\n".join(
        table.text() for table in tables(compare(select(uri, ["retrieval/x"], sweep)))
    )


@pytest.mark.long
def test_what_is_read_back_is_what_was_there(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri, file = new_store(tmp_path), str(tmp_path / "results/x.jsonl")
    log_runs(uri, tmp_path)
    for sweep in (None, "s"):
        kept.run(kept.Config(uri, file, "retrieval/x", sweep))
        lines = kept.read(file)[0]
        with kept.store(lines) as again:
            assert shown(again, sweep) == shown(uri, sweep)
    assert len(lines) == 3  # of the sweep: itself and its trials


@pytest.mark.long
@pytest.mark.parametrize("finished", [True, False])
def test_an_experiment_may_have_nothing_but_a_sweep(
    finished: bool, new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    """Its view has the best trial, or all of them where the best is not known; from a
    file as from the store.
    """
    uri, file = new_store(tmp_path), str(tmp_path / "x.jsonl")
    log_sweep(uri, tmp_path, finished)
    kept.run(kept.Config(uri, file, "retrieval/x"))
    before = shown(uri)
    assert ("t0.1" in before, "t0.2" in before) == (not finished, True)
    assert (
        "all of them: --sweep s"
        if finished
        else "the best settings are not known yet: all trials"
    ) in before
    lines = kept.read(file)[0]
    assert len(lines) == 3
    with kept.store(lines) as again:
        assert shown(again) == before


@pytest.mark.long
def test_pages_with_plots_are_the_same_twice_and_hold_no_path_of_the_machine(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri, file = new_store(tmp_path), tmp_path / "kept/x.jsonl"
    log_runs(uri, tmp_path)
    kept.run(kept.Config(uri, str(file), "retrieval/x"))
    assert str(tmp_path) not in file.read_text()
    assert (
        len(json.loads(file.read_text().splitlines()[0])["curves"]["train/loss"]) <= 101
    )
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
    made = {path.name: path.read_text() for path in (tmp_path / "one").iterdir()}
    assert {
        "retrieval-x.md",
        "retrieval-x-s.md",
        "claims.md",
        "benchmark-decode.md",
    } <= made.keys()
    assert made == {
        path.name: path.read_text() for path in (tmp_path / "two").iterdir()
    }
    assert "![" in made["retrieval-x.md"]
    assert ">150</text>" in made["retrieval-x-pareto.svg"]
    assert "math" not in "".join(made.values())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "holds no runs"),
        ("{}", "neither a run nor a timing"),
        ("x", "cannot read"),
    ],
)
def test_what_is_no_export_is_one_line(
    tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        kept.read(tmp_path)
    assert "\n" not in str(caught.value)
