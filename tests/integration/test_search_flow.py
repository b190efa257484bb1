"""The search flow from a simulated log to the table that compares, in small: what `--family search` runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import quickstart
from models.tables import UserError
from pipelines.comparison.runs import select
from pipelines.data.kinds.base import Trained
from pipelines.data.kinds.search.flow import FLOW
from pipelines.data.kinds.search.kind import SEARCH
from pipelines.data.kinds.table import KINDS


def test_a_search_log_becomes_a_table_of_models(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = (Trained("qgs", ("qgs", "search/small")),)  # the others go the same way
    monkeypatch.setitem(KINDS, "search", replace(SEARCH, flow=replace(FLOW, models=models)))
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


def test_runs_are_compared_where_they_were_logged(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    lines: list[tuple[str, ...]] = []
    monkeypatch.setattr(quickstart.Steps, "run", lambda self, title, *words: lines.append(words))
    quickstart.run(quickstart.Config(family="search", output=str(tmp_path)))
    assert lines[-1][0] == "compare"
    assert lines[-1][-2:] == ("--tracking_uri", "http://server:5000")
