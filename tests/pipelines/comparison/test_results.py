"""Runs exported to a file and read back: the same tables, plots and claims, without the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.compare import parse, run
from models.tables import UserError
from pipelines import tracking


def log_runs(uri: str, folder: Path) -> None:
    """Three trainings, two of them of one setting, and a sweep with two trials."""
    log_trainings(uri, folder)
    log_sweep(uri, folder)


def log_trainings(uri: str, folder: Path) -> None:
    """Two of one setting, and one of another."""
    for name, width, seed, value in [("a-1", 8, 1, 0.1), ("a-2", 8, 2, 0.14), ("b", 16, 1, 0.2)]:
        config = {
            "model": {"name": "sasrec", "dim": width},
            "fit": {"seed": seed, "metric": "ndcg@10"},
            "tables": "/x/y/z",
        }
        ref = tracking.open_run(uri, "retrieval/x", name, str(folder), config=config, hashes={"items": "1"})
        log = tracking.Logger(ref)
        for step in range(250):
            log.log({"train/loss": 1 / (step + 1)}, step)
        log.log({"val/ndcg@10": value, "best/ndcg@10": value, "test/ndcg@10": value / 2}, 250)
        log.log({"test/users_per_s": 900 * value, "train/parameters": 1000}, 250)
        log.end()


def log_sweep(uri: str, folder: Path, finished: bool = True) -> None:
    """One with two trials; the best of one that has not `finished` is not known."""
    sweep = tracking.open_run(
        uri, "retrieval/x", "s", str(folder), config={}, hashes={},
        tags={tracking.KIND_TAG: "sweep", "sweep.axes": '["fit.lr"]', "sweep.metric": "val/ndcg@10"},
    )  # fmt: skip
    tracking.log_yaml(sweep, {"name": "s", "published": []}, "grid.yaml")
    best = ""
    for lr in (0.1, 0.2):
        config = {"model": {"name": "sasrec", "dim": 4}, "fit": {"seed": 1, "lr": lr, "metric": "ndcg@10"}}
        tags = {tracking.KIND_TAG: "trial", tracking.TRIAL_TAG: str(lr), tracking.POINT_TAG: json.dumps({"fit.lr": lr})}
        trial = tracking.open_run(
            uri, "retrieval/x", f"t{lr}", str(folder), config=config, hashes={}, parent=sweep.run_id, tags=tags
        )
        log = tracking.Logger(trial)
        log.log({"best/ndcg@10": lr, "val/ndcg@10": lr}, 1)
        log.end()
        best = trial.run_id
    if finished:
        log = tracking.Logger(sweep)
        log.tag(**{"sweep.best": best})
        log.end()


@pytest.mark.long
def test_what_is_read_back_is_what_was_there(
    new_store: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, file = new_store(tmp_path), tmp_path / "results/x.jsonl"
    log_runs(uri, tmp_path)
    for chosen in (["--experiment", "retrieval/x", "--claims"], ["--sweep", "s"]):
        run(parse("compare", [*chosen, "--tracking_uri", uri, "--export", str(file)]))
        before = capsys.readouterr().out.split(" runs exported")[0].rsplit("\n", 1)[0]
        run(parse("compare", [*chosen, "--from", str(file.parent)]))
        assert capsys.readouterr().out.strip() == before
    assert len(file.read_text().splitlines()) == 3  # of the sweep: itself and its trials


@pytest.mark.long
@pytest.mark.parametrize("finished", [True, False])
def test_an_experiment_may_have_nothing_but_a_sweep(
    finished: bool, new_store: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its view has the best trial, or all of them where the best is not known; from a file as from the store."""
    uri, file = new_store(tmp_path), tmp_path / "x.jsonl"
    log_sweep(uri, tmp_path, finished)
    run(parse("compare", ["--experiment", "retrieval/x", "--tracking_uri", uri, "--export", str(file)]))
    before = capsys.readouterr().out.split(" runs exported")[0].rsplit("\n", 1)[0]
    assert ("t0.1" in before, "t0.2" in before) == (not finished, True)
    assert ("all of them: --sweep s" if finished else "the best settings are not known yet: all trials") in before
    assert len(file.read_text().splitlines()) == 3
    run(parse("compare", ["--from", str(file)]))
    assert capsys.readouterr().out.strip() == before
    run(parse("compare", ["--from", str(file), "--markdown", f"{tmp_path}/pages/"]))
    assert {"retrieval-x.md", "retrieval-x-s.md"} <= {path.name for path in (tmp_path / "pages").iterdir()}


@pytest.mark.long
def test_pages_with_plots_are_the_same_twice_and_hold_no_path_of_the_machine(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri, file = new_store(tmp_path), tmp_path / "x.jsonl"
    log_runs(uri, tmp_path)
    run(parse("compare", ["--experiment", "retrieval/x", "--tracking_uri", uri, "--export", str(file)]))
    assert str(tmp_path) not in file.read_text()
    assert len(json.loads(file.read_text().splitlines()[0])["curves"]["train/loss"]) <= 101
    for name in ("one", "two"):
        run(parse("compare", ["--from", str(file), "--claims", "--markdown", f"{tmp_path}/{name}/"]))
    pages = {path.name: path.read_text() for path in (tmp_path / "one").iterdir()}
    assert {"retrieval-x.md", "claims.md", "retrieval-x-curves.svg"} <= pages.keys()
    assert pages == {path.name: path.read_text() for path in (tmp_path / "two").iterdir()}
    assert "![" in pages["retrieval-x.md"]
    assert ">150</text>" in pages["retrieval-x-pareto.svg"]
    assert "math" not in "".join(pages.values())


@pytest.mark.parametrize(
    ("content", "words"), [(None, "holds no .jsonl files"), ("{}", "line 1 of .* has no curves"), ("x", "cannot read")]
)
def test_what_is_no_export_is_one_line(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        run(parse("compare", ["--from", str(tmp_path)]))
    assert "\n" not in str(caught.value)
