"""Test jobs.quickstart: its flows on small logs, and a log that it refuses."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.errors import UserError
from pipelines import quickstart
from pipelines.quickstart import (
    ModelSteps,
    QuickstartConfig,
    Step,
    run_models,
    run_quickstart,
)

TINY = {"width": 16, "num_layers": 1, "num_heads": 2, "ffn": 16}
FLOWS: dict[str, dict[str, Any]] = {
    "search": {
        "extra": "text",
        "models": [
            {"model": "pair_ctr", "configs": ["search/pair_ctr"]},
            {
                "model": "qgs",
                "configs": ["search/qgs", "search/ablations/small"],
                "options": {"model": TINY},
                "ms": 1e9,
            },
        ],
    },
    "actions": {
        "models": [
            {
                "model": "genrank",
                "configs": ["actions/attn_mvp", "actions/ablations/genrank"],
                "options": {"model": TINY, "fit": {"batch_size": 16}},
                "ms": 1e9,
            }
        ],
    },
}
"""Models by kind of log; by their time per request they are trained for one epoch."""


@pytest.fixture(autouse=True)
def flows(tmp_path, monkeypatch) -> None:
    """Use the small models in place of those of the quickstart."""
    file = tmp_path / "flows.yaml"
    file.write_text(yaml.safe_dump(FLOWS))
    monkeypatch.setattr(quickstart, "FLOWS", file)


@pytest.mark.parametrize(
    ("kind", "log", "model", "metric"),
    [
        ("search", "simulated_search", "qgs", "gauc"),
        ("actions", "simulated_feed", "genrank", "mean/normalised_entropy"),
    ],
)
def test_a_simulated_log_becomes_a_table_of_models(
    ray_local, tmp_path, capsys, kind, log, model, metric
):
    sizes = {"users": 60, "items": 60, "events": 500}
    config = QuickstartConfig(kind=kind, output=str(tmp_path), simulate=sizes)

    run_quickstart(config)

    output = capsys.readouterr().out
    assert "No violations" in output
    assert "--fit.max_epochs 1 " in output
    assert "The log is simulated" in output
    file = tmp_path / log / "runs" / model / "best/evaluation-test.json"
    metrics = json.loads(file.read_text())["metrics"]
    rows = [
        line
        for line in output.split("] Compare ")[1].splitlines()
        if line.startswith(f"| {model} ")
    ]
    assert f"{metrics[metric]:.4f}" in "".join(rows)


def fail(config: QuickstartConfig) -> None:
    """Fail in the way of a training."""
    raise UserError("no step of this width")


def wait(config: QuickstartConfig) -> None:
    """Take longer than the test."""
    time.sleep(600)


@pytest.mark.exhaustive
def test_a_failed_model_ends_the_others_and_its_students_do_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [
        ModelSteps(name, after, [Step("Train", "train", run, QuickstartConfig())])
        for name, after, run in (
            ("bad", set(), fail),
            ("student", {"bad"}, fail),
            ("slow", set(), wait),
        )
    ]

    with pytest.raises(UserError, match="no step of this width"):
        run_models(models, ["[1/3]", "[2/3]", "[3/3]"], tmp_path / "logs", 0.0)

    assert "\n[1/3] Train" in capsys.readouterr().out
    assert not multiprocessing.active_children()
    assert not (tmp_path / "logs/student.txt").exists()


def test_searches_without_texts_are_ranked_by_ids_and_features(
    ray_local, tmp_path, capsys
):
    rows = [
        f"u{user},q,{user + 1_600_000_000},i{item},{int(item == user % 5)}"
        for user in range(100)
        for item in range(5)
    ]
    (tmp_path / "visits").mkdir()
    log = "\n".join(["user,query,time,item,clicked", *rows])
    (tmp_path / "visits/visits.csv").write_text(log)
    source = tmp_path / "visits.yaml"
    source.write_text(
        "{files: visits.csv, user: user, item: item, query: query, "
        "time: {column: time, unit: s}, labels: {click: clicked = '1'}, "
        "prepare: {kind: search, core: 0, behaviour: click}}"
    )
    data = str(tmp_path / "visits")

    config = QuickstartConfig(
        data=data, source=str(source), output=str(tmp_path), epochs=1
    )
    run_quickstart(config)

    output = capsys.readouterr().out
    assert "[3/3] Compare" in output
    assert "without text: items have vectors of their ids" in output
    assert (tmp_path / "visits/compare.html").is_file()


def test_a_doubtful_mapping_is_printed_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "visits").mkdir()
    rows = "".join(
        f"{n % 9},{n % 14 + 50},2024-01-{n % 28 + 1:02} 10:00\n" for n in range(200)
    )
    (tmp_path / "visits/visits.csv").write_text(rows)
    data = str(tmp_path / "visits")
    config = QuickstartConfig(data=data, output=str(tmp_path / "out"))

    with pytest.raises(UserError, match=f"may be wrong for {data}"):
        run_quickstart(config)

    assert "user:" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
