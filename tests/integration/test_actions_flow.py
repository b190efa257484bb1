"""The actions flow from a simulated feed to the table that compares, in small: what `--family actions` runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs import quickstart


def test_a_feed_becomes_a_table_of_models(
    ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--model.width", "16", "--model.num_layers", "1", "--model.num_heads", "2", "--model.ffn", "16")
    monkeypatch.setattr(quickstart, "ACTIONS_MODELS", {"genrank": ("genrank", small)})  # the others go the same way
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
    assert compared.split("Parameters\n")[1].splitlines()[0].split()[-1] == "total"
