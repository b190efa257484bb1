"""Test jobs.quickstart: its flows on small simulated logs, and logs that it refuses."""

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


TINY_ACTIONS = merge_options(
    SMALL_ACTIONS, {"model": {"width": 16, "num_layers": 1, "num_heads": 2, "ffn": 16}}
)
TESTED_FLOWS = {
    "search": (ModelRun("qgs", ("qgs", "search/small")), "simulated_search", "gauc"),
    "actions": (
        ModelRun("genrank", ("attn_mvp", "actions/genrank"), TINY_ACTIONS),
        "simulated_feed",
        "mean/normalised_entropy",
    ),
}
"""One model, the log and the metric of comparison, by family. The flows of other models
differ only in the config."""
SIZES = {"users": 60, "items": 60, "events": 500, "epochs": 1}


def find_row(output: str, model: str) -> str:
    """Return the model's row in the last table of an output of the quickstart."""
    lines = output.split("] Compare ")[1].splitlines()
    return next(line for line in lines if line.startswith(f"{model} "))


@pytest.mark.parametrize("family", TESTED_FLOWS)
def test_a_simulated_log_becomes_a_table_of_models(
    ray_local: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    family: str,
) -> None:
    model, log, metric = TESTED_FLOWS[family]
    monkeypatch.setitem(FLOWS, family, replace(FLOWS[family], models=(model,)))
    config = quickstart.Config(family=family, output=str(tmp_path), **SIZES)

    quickstart.run(config)

    output = capsys.readouterr().out
    assert "No violations" in output
    assert "The log is simulated" in output
    assert "Beside the paper" not in output
    runs = tmp_path / log / "runs"
    file = runs / model.model / "best/evaluation-test.json"
    result = json.loads(file.read_text())
    assert result["examples"] > 0
    assert f"{result['metrics'][metric]:.4f}" in find_row(output, model.model)
    (run,) = select(f"sqlite:///{runs}/mlflow.db", [f"{family}/{log}"]).runs
    assert run.data.tags["simulated"] == "true"

    if family == "search":  # a second seed joins the first one's row
        quickstart.run(replace(config, seed=43))
        output = capsys.readouterr().out
        assert "events: up to date" in output
        row = find_row(output, model.model)
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
            "unheard has columns of users and items",
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
    folder = tmp_path / "unheard"
    options = {name: value.format(folder=folder) for name, value in options.items()}

    with pytest.raises(UserError, match=message) as error:
        quickstart.locate(quickstart.Config(**options))

    assert "\n" not in str(error.value)


def test_a_doubtful_mapping_is_printed_and_nothing_is_written(
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

    with pytest.raises(UserError, match=r"^2 lines of the source file for ") as error:
        quickstart.locate(config)

    message = str(error.value)
    suggest = f"python -m jobs.prepare --suggest {config.data} --output visits.yaml"
    repeat = (
        f"--data {config.data} --output {config.output} --epochs 3 --source visits.yaml"
    )
    assert suggest in message
    assert repeat in message
    assert "\n" not in message
    _, *doubtful_lines = capsys.readouterr().out.splitlines()
    columns = [line.split()[:2] for line in doubtful_lines]
    assert columns == [["user:", "c1"], ["item:", "c2"]]
    assert not (tmp_path / "out").exists()


def write_search_log(folder: Path, time: str, split: str) -> quickstart.Config:
    """Write a search log without texts of items, and its mapping.

    Args:
        folder: Folder of the log and of the output.
        time: The mapping's time, as YAML.
        split: Kind of the split.

    Returns:
        The quickstart's config for the log.
    """
    (folder / "visits").mkdir()
    lines = ["user,query,n,item,clicked"]
    for user in range(100):
        for item in range(5):
            lines.append(f"u{user},q,{user},i{item},{int(item == user % 5)}")
    (folder / "visits/visits.csv").write_text("\n".join(lines) + "\n")
    source = folder / "visits.yaml"
    source.write_text(
        f"files: visits.csv\nuser: user\nitem: item\nquery: query\ntime: {time}\nlabels: {{click: clicked = '1'}}\n"
        f"prepare: {{kind: search, core: 0, behaviour: click, split: {{kind: {split}}}}}\n"
    )
    return quickstart.Config(
        data=str(folder / "visits"), source=str(source), output=str(folder)
    )


def test_a_log_with_an_empty_test_split_is_refused_before_training(
    tmp_path: Path,
) -> None:
    config = write_search_log(tmp_path, "{column: n, unit: order}", "leave_last_out")
    with pytest.raises(
        UserError, match="the split val and test is empty; see the warnings above"
    ):
        quickstart.run(config)
    assert not (tmp_path / "visits/runs").exists()


def test_searches_without_texts_are_ranked_by_models_that_need_none(
    ray_local: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    time = "{column: cast(n as bigint) + 1600000000, unit: s}"

    quickstart.run(write_search_log(tmp_path, time, "temporal"))

    output = capsys.readouterr().out
    assert (
        "names no texts of items, which embeddings require; models that use "
        "embeddings are skipped" in output
    )
    assert "[11/11] Compare" in output
    assert (tmp_path / "visits/compare.html").is_file()


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ([], ""),
        (["DATA=a log"], "--data 'a log'"),
        (["DATA=shop", "SOURCE=shop.yaml"], "--data 'shop' --source 'shop.yaml'"),
    ],
)
def test_make_passes_folder_and_mapping_to_the_quickstart(
    variables: list[str], options: str
) -> None:
    output = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "quickstart", *variables],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    command = f".venv/bin/python -m jobs.quickstart {options}"
    assert output.splitlines()[-1].split() == command.split()


def test_runs_are_compared_in_the_store_of_the_environment(
    ray_local: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    jobs: list[tuple[str, dict[str, Any]]] = []
    run_step = quickstart.Steps.run

    def record_step(
        self: quickstart.Steps, title: str, job: str, options: dict[str, Any]
    ) -> None:
        jobs.append((job, options))
        if job in ("simulate", "prepare"):
            run_step(self, title, job, options)

    monkeypatch.setattr(quickstart.Steps, "run", record_step)

    quickstart.run(quickstart.Config(family="search", output=str(tmp_path), **SIZES))

    assert "ssh -L 8000:localhost:8000 HOST" in capsys.readouterr().out
    job, options = jobs[-1]
    assert job == "compare"
    assert options["tracking_uri"] == "http://server:5000"
