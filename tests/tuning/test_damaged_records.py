"""Damaged files of a sweep are one line that names the file and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.tables import UserError
from pipelines.training.record import read_record
from tuning.record import best_checkpoint, read_sweep
from tuning.trial import read_reports

RUN = {"uri": "sqlite:///store.db", "experiment": "retrieval/small", "run_id": "f" * 32}
SWEEP = {"status": "running", "trials": [{"name": "one"}], "tracking": RUN}
WRONG: list[dict] = [{"tracking": {}}, {"trials": [1]}, {"trials": [{"name": 1}]}, {"status": "finished"}]
DAMAGED = ["{", "", "[1, 2", "3", "null", '["a", "b"]', '"text"', '{"status": "finished"}', "\x00\x00"]


@pytest.mark.parametrize("text", [*DAMAGED, *(json.dumps({**SWEEP, **wrong}) for wrong in WRONG)])
def test_sweep_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    for read in (read_sweep, best_checkpoint):
        with pytest.raises(
            UserError, match=r"^\S+/sweep\.json is damaged \(.+\); remove the folder .* another --name$"
        ):
            read(str(tmp_path))


@pytest.mark.parametrize("text", [*DAMAGED, "[[1, 0.5], [2]]", '[[1, "a"]]', "[3]"])
def test_reports_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "reports.json").write_text(text)
    with pytest.raises(UserError, match=r"^\S+/reports\.json is damaged \(.+\); remove the folder .* give --resume"):
        read_reports(str(tmp_path))


@pytest.mark.parametrize("text", [*DAMAGED, json.dumps({"tracking": RUN}), json.dumps({"status": 1, "tracking": RUN})])
def test_run_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"^\S+/run\.json is damaged \(.+\); train again with --overwrite, .*resume$"):
        read_record(str(tmp_path))


def test_whole_ones_are_read(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP))
    (tmp_path / "reports.json").write_text("[[1, 0.5], [2, 0.25]]")
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "tracking": RUN}))
    assert read_sweep(str(tmp_path)) == SWEEP
    assert read_reports(str(tmp_path)) == [[1, 0.5], [2, 0.25]]
    assert read_record(str(tmp_path)) == {"status": "running", "tracking": RUN}
