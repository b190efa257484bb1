"""The flows of `jobs.quickstart --family`, from a small simulated log to the table that
compares models.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import quickstart
from jobs.options import merge_options
from jobs.quickstart import FLOWS, SMALL_ACTIONS, ModelRun
from models.storage.tables import UserError
from pipelines.comparison.runs import select

ROOT = Path(__file__).parents[2]


SMALLER = merge_options(
    SMALL_ACTIONS, {"model": {"width": 16, "num_layers": 1, "num_heads": 2, "ffn": 16}}
)
FLOWN = {
    "search": (ModelRun("qgs", ("qgs", "search/small")), "simulated_search", "gauc"),
    "actions": (
        ModelRun("genrank", ("attn_mvp", "actions/genrank"), SMALLER),
        "simulated_feed",
        "mean/normalised_entropy",
    ),
}
"""One model of each family, the log, and what its models are compared by; the other
models go the same way."""


@pytest.mark.parametrize("family", FLOWN)
def test_a_log_becomes_a_table_of_models(
    ray_local: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    family: str,
) -> None:
    model, log, metric = FLOWN[family]
    monkeypatch.setitem(FLOWS, family, replace(FLOWS[family], models=(model,)))
    sizes = {"users": 60, "items": 60, "events": 500, "epochs": 1}
    quickstart.run(quickstart.Config(family=family, output=str(tmp_path), **sizes))
    printed = capsys.readouterr().out
    assert "No violations" in printed
    assert "The log is simulated" in printed
    runs = tmp_path / log / "runs"
    found = json.loads((runs / model.model / "best/evaluation-test.json").read_text())
    assert found["examples"] > 0
    row = next(
        line
        for line in printed.split("] Compare ")[1].splitlines()
        if line.startswith(f"{model.model} ")
    )
    assert f"{found['metrics'][metric]:.4f}" in row
    assert "Beside the paper" not in printed  # where the log is simulated
    (run,) = select(f"sqlite:///{runs}/mlflow.db", [f"{family}/{log}"]).runs
    assert run.data.tags["simulated"] == "true"
    if family == "search":  # another seed joins what is there
        quickstart.run(
            quickstart.Config(family=family, output=str(tmp_path), seed=43, **sizes)
        )
        printed = capsys.readouterr().out
        assert "events: up to date" in printed
        row = next(
            line
            for line in printed.split("] Compare ")[1].splitlines()
            if line.startswith(f"{model.model} ")
        )
        assert "2" in row.split()
        assert "±" in row


def test_a_log_of_another_family_is_refused(tmp_path: Path) -> None:
    source = str(quickstart.CONFIGS / "sources" / "simulated_search.yaml")
    config = quickstart.Config(family="retrieval", data=str(tmp_path), source=source)
    with pytest.raises(
        UserError,
        match="makes tables of kind 'search', not 'retrieval'; give --family search",
    ):
        quickstart.locate(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data": "{folder}"},
            "unheard holds no file that can be read as a log: it is empty",
        ),
        (
            {"data": "{folder}", "source": "no.yaml"},
            "the source file no.yaml for .*unheard does not exist; remove",
        ),
        (
            {"data": "nowhere"},
            "--data is nowhere, which does not exist; give the folder of a raw log",
        ),
        (
            {"source": "own.yaml"},
            "--source is own.yaml, which describes a real log; give its folder with --data",
        ),
    ],
)
def test_a_log_without_folder_or_mapping_is_refused(
    options: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "unheard").mkdir()
    given = {
        name: value.format(folder=tmp_path / "unheard")
        for name, value in options.items()
    }
    with pytest.raises(UserError, match=message) as refused:
        quickstart.locate(quickstart.Config(**given))
    assert "\n" not in str(refused.value)


def test_a_doubtful_guess_stops_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "visits").mkdir()
    rows = "".join(
        f"{n % 9},{n % 14 + 50},2024-01-{n % 28 + 1:02} 10:00\n" for n in range(200)
    )
    (tmp_path / "visits/visits.csv").write_text(rows)
    config = quickstart.Config(
        data=str(tmp_path / "visits"), output=str(tmp_path / "out"), epochs=3
    )
    with pytest.raises(UserError, match=r"^2 lines of the source file for ") as e:
        quickstart.locate(config)
    suggested = f"python -m jobs.prepare --suggest {config.data} --output visits.yaml"
    again = (
        f"--data {config.data} --output {config.output} --epochs 3 --source visits.yaml"
    )
    assert suggested in str(e.value)
    assert again in str(e.value)
    assert "\n" not in str(e.value)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[1:]] == [
        ["user:", "c1"],
        ["item:", "c2"],
    ]
    assert not (tmp_path / "out").exists()


def searches(folder: Path, at: str, split: str) -> quickstart.Config:
    """Run the quickstart on a search log without texts of items, with searches at the
    times `at`.
    """
    (folder / "visits").mkdir()
    shown = [
        f"u{user},q,{user},i{item},{int(item == user % 5)}\n"
        for user in range(100)
        for item in range(5)
    ]
    (folder / "visits/visits.csv").write_text(
        "user,query,n,item,clicked\n" + "".join(shown)
    )
    source = folder / "visits.yaml"
    source.write_text(
        f"files: visits.csv\nuser: user\nitem: item\nquery: query\ntime: {at}\nlabels: {{click: clicked = '1'}}\n"
        f"prepare: {{kind: search, core: 0, behaviour: click, split: {{kind: {split}}}}}\n"
    )
    return quickstart.Config(
        data=str(folder / "visits"), source=str(source), output=str(folder)
    )


def test_a_log_that_leaves_nothing_to_test_on_stops_before_it_trains(
    tmp_path: Path,
) -> None:
    config = searches(tmp_path, "{column: n, unit: order}", "leave_last_out")
    with pytest.raises(
        UserError, match="the split val and test is empty; see the warnings above"
    ):
        quickstart.run(config)
    assert not (tmp_path / "visits/runs").exists()


def test_searches_without_texts_are_ranked_by_the_models_that_read_none(
    ray_local: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart.run(
        searches(
            tmp_path, "{column: cast(n as bigint) + 1600000000, unit: s}", "temporal"
        )
    )
    printed = capsys.readouterr().out
    assert (
        "names no texts of items, which embeddings require; models that use "
        "embeddings are skipped" in printed
    )
    assert "[11/11] Compare" in printed
    assert (tmp_path / "visits/compare.html").is_file()


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
    assert (
        shown.splitlines()[-1].split()
        == f".venv/bin/python -m jobs.quickstart {options}".split()
    )


def test_runs_are_compared_where_they_were_logged(
    ray_local: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    jobs: list[tuple[str, dict[str, Any]]] = []
    run_step = quickstart.Steps.run

    def run(
        self: quickstart.Steps, title: str, job: str, options: dict[str, Any]
    ) -> None:
        jobs.append((job, options))
        if job in ("simulate", "prepare"):
            run_step(self, title, job, options)

    monkeypatch.setattr(quickstart.Steps, "run", run)
    quickstart.run(
        quickstart.Config(
            family="search",
            output=str(tmp_path),
            users=60,
            items=60,
            events=500,
            epochs=1,
        )
    )
    assert "ssh -L 8000:localhost:8000 HOST" in capsys.readouterr().out
    job, options = jobs[-1]
    assert job == "compare"
    assert options["tracking_uri"] == "http://server:5000"
