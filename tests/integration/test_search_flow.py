"""The search flow from a simulated log to the table that compares, in small: what `--family search` runs."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import quickstart
from jobs.quickstart import FLOWS, Trained
from models.tables import UserError
from pipelines.comparison.runs import select

ROOT = Path(__file__).parents[2]


def test_a_search_log_becomes_a_table_of_models(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = (Trained("qgs", ("qgs", "search/small")),)  # the others go the same way
    monkeypatch.setitem(FLOWS, "search", replace(FLOWS["search"], models=models))
    sizes = {"users": 60, "items": 60, "events": 500, "epochs": 1}
    quickstart.run(quickstart.Config(family="search", output=str(tmp_path), **sizes))
    printed = capsys.readouterr().out
    assert "No violations" in printed
    assert "search/simulated_search" in printed
    assert "simulated data" in printed
    row = next(line for line in printed.splitlines() if line.split()[:2] == ["qgs", "qgs"])  # model, run
    runs = tmp_path / "simulated_search" / "runs"
    found = json.loads((runs / "qgs" / "best" / "evaluation-test.json").read_text())
    assert found["examples"] == 50
    assert f"{found['metrics']['gauc']:.4f}" in row
    assert "Beside the paper" not in printed  # where the log is simulated
    (run,) = select(f"sqlite:///{runs}/mlflow.db", ["search/simulated_search"]).runs
    assert run.data.tags["simulated"] == "true"


def test_a_log_of_another_family_is_refused(tmp_path: Path) -> None:
    source = str(quickstart.CONFIGS / "sources" / "simulated_search.yaml")
    config = quickstart.Config(data=str(tmp_path), source=source)
    with pytest.raises(UserError, match="makes tables of kind 'search', not 'retrieval'; give --family search"):
        quickstart.locate(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data": "{folder}"},
            "there is no mapping file .*/unheard.yaml for .*unheard; name one with --source .make: SOURCE",
        ),
        ({"data": "{folder}", "source": "no.yaml"}, "there is no mapping file no.yaml for .*unheard"),
        ({"data": "nowhere"}, "--data is nowhere, where nothing is; give the folder of a raw log"),
        ({"source": "own.yaml"}, "--source is own.yaml, which describes a real log; give its folder with --data"),
    ],
)
def test_a_log_without_folder_or_mapping_is_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "unheard").mkdir()
    given = {name: value.format(folder=tmp_path / "unheard") for name, value in options.items()}
    with pytest.raises(UserError, match=message) as refused:
        quickstart.locate(quickstart.Config(**given))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ([], ""),
        (["DATA=a log"], "--data 'a log'"),
        (["DATA=shop", "SOURCE=shop.yaml"], "--data 'shop' --source 'shop.yaml'"),
    ],
)
def test_make_hands_on_folder_and_mapping(given: list[str], options: str) -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "quickstart", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.splitlines()[-1].split() == f".venv/bin/python -m jobs.quickstart {options}".split()


def test_runs_are_compared_where_they_were_logged(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    lines: list[tuple[str, ...]] = []
    monkeypatch.setattr(quickstart.Steps, "run", lambda self, title, *words: lines.append(words))
    quickstart.run(quickstart.Config(family="search", output=str(tmp_path)))
    assert "ssh -L 8000:localhost:8000 HOST" in capsys.readouterr().out
    assert lines[-1][0] == "compare"
    assert lines[-1][-2:] == ("--tracking_uri", "http://server:5000")
