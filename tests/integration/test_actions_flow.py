"""The actions flow from a simulated feed to the table that compares, in small: what `--family actions` runs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from jobs import quickstart, train
from jobs.quickstart import FLOWS, SMALL, Trained


def test_a_feed_becomes_a_table_of_models(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (*SMALL, "--model.width", "16", "--model.num_layers", "1", "--model.num_heads", "2", "--model.ffn", "16")
    models = (Trained("genrank", ("attn_mvp", "actions/genrank"), small),)  # the others go the same way
    monkeypatch.setitem(FLOWS, "actions", replace(FLOWS["actions"], models=models))
    # by this process: test_search_flow.py trains by a worker of Ray
    monkeypatch.setattr(train, "run_training", partial(train.run_training, heard=lambda about: None))
    sizes = {"users": 60, "items": 40, "events": 300, "epochs": 1}
    quickstart.run(quickstart.Config(family="actions", output=str(tmp_path), **sizes))
    printed = capsys.readouterr().out
    assert "No violations" in printed
    assert "simulated data" in printed
    found = json.loads((tmp_path / "simulated_feed/runs/genrank/best/evaluation-test.json").read_text())
    assert found["examples"] > 0
    compared = printed.split("] Compare ")[1]
    row = next(line for line in compared.splitlines() if line.startswith("genrank "))
    assert f"{found['metrics']['mean/normalised_entropy']:.4f}" in row
    assert "Normalised entropy by task" in compared
