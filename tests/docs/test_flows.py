"""Run the commands of the pages on small logs in the same layouts.

The commands behind `$` run in their order, in this process, with the folders that the
page names. `SMALLER` adds options so that a command takes seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import pandas
import pytest
from make_shop import write_shop
from pages import ROOT, Command, parse_jobs, read_blocks, read_commands, read_section

from jobs import cli
from pipelines.training import run as training

SMALLER = {
    "jobs.tokenize": "--encoder tfidf --pca 0 --tokenizer.codebook_size 8",
    "jobs.encode": "--encoder tfidf",
    "jobs.train": "--fit.max_epochs 1 --ray.threads 1",
    "jobs.sweep": "--fit.max_epochs 1 --axes.model.alpha [0.5,0.7] --ray.threads 1",
}


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Iterator[Path]:
    """Work in a folder that looks like a checkout without runs."""
    for name in ("jobs", "tuning"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    # Trainings run in this process: a Ray worker takes ten seconds to start, and
    # test_train.py has one.
    train_in_process = partial(
        training.run_training,
        trial=training.TrialContext(on_checkpoint=lambda saved: None),
    )
    monkeypatch.setattr(training, "run_training", train_in_process)
    uri = os.environ.pop("MLFLOW_TRACKING_URI", None)
    yield tmp_path
    # A page may set the URI of the process and of its environment.
    mlflow.set_tracking_uri(uri)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    if uri is not None:
        os.environ["MLFLOW_TRACKING_URI"] = uri


def run_commands(
    commands: list[Command],
    monkeypatch: pytest.MonkeyPatch,
    smaller: dict[str, str] = SMALLER,
) -> None:
    """Run commands in this process, with further options by module."""
    for command in commands:
        if command.words[0] == "export":
            name, _, value = command.words[1].partition("=")
            monkeypatch.setenv(name, os.path.expandvars(value))
        for module, words in parse_jobs(command):
            job = importlib.import_module(module)
            words = [*map(os.path.expandvars, words)]
            options = cli.config_from_words(
                job, [*words, *smaller.get(module, "").split()]
            )
            getattr(job, "main", job.run)(options)


def read_page(page: str, section: str | None = None) -> str:
    """Return the text of a page below docs/, or of one of its sections."""
    text = (ROOT / "docs" / page).read_text()
    return read_section(text, section) if section else text


def read_prompts(page: str, *sections: str) -> list[Command]:
    """Return the commands behind `$` of the sections, or of the whole page."""
    commands = []
    for section in sections or (None,):
        commands += read_commands(read_page(page, section))
    return [command for command in commands if command.has_prompt]


def evaluate_call(code: str, call: str, names: dict[str, object] | None = None) -> Any:
    """Run a page's code that loads a model, and return the answer of its `call`.

    Args:
        code: Code block of a page; the last line that contains `call` is evaluated.
        call: Name of the called method.
        names: Variables of the page's earlier code blocks, to which the block's own are
            added.
    """
    names = {} if names is None else names
    names |= {"mlflow": mlflow, "pandas": pandas}
    loading, arguments = code.rsplit(call, 1)
    exec(loading, names)
    return eval(call + arguments.splitlines()[0], names)


def write_industrial_log(folder: Path) -> None:
    """Write a small log in the layout of `amazon18_industrial`."""
    draw = random.Random(5)
    folder.mkdir()
    items = [f"B{number:03}" for number in range(40)]
    rows = []
    for user in range(60):
        for order, item in enumerate(draw.sample(items, 7)):
            rows.append(f"u{user},{item},{order}")
    (folder / "interactions.csv").write_text(
        "\n".join(["user_id,item_id,order", *rows]) + "\n"
    )
    kinds = ("drill", "lamp", "cable", "valve")
    titles = [
        f"{item},{kinds[i % 4]} model {i},brand{i % 3},a {kinds[i % 4]}"
        for i, item in enumerate(items)
    ]
    (folder / "items.csv").write_text(
        "\n".join(["item_id,title,brand,description", *titles]) + "\n"
    )


@pytest.mark.exhaustive
def test_the_pages_of_retrieval_and_of_sweeps(
    checkout, ray_local, new_store, monkeypatch, capsys
):
    write_industrial_log(checkout / "amazon18_industrial")
    new_store(checkout / "runs" / "industrial" / "runs")
    run_commands(read_prompts("retrieval.md"), monkeypatch)
    sections = ("Sweep a grid", "Compare")
    run_commands(read_prompts("sweeps_and_comparison.md", *sections), monkeypatch)

    output = capsys.readouterr().out
    assert (checkout / "compare.html").is_file()
    assert "registered: version 1 of industrial" in output
    runs = checkout / "runs/industrial/runs"
    for name in ("sasrec", "tiger"):
        result = json.loads((runs / name / "best/evaluation-test.json").read_text())
        assert result["examples"] == 60


@pytest.mark.exhaustive
def test_the_pages_of_search_and_of_serving(
    checkout, ray_local, new_store, monkeypatch, capsys
):
    new_store(checkout / "runs" / "search" / "runs")
    smaller = {**SMALLER, "jobs.simulate": "--users 60 --events 400"}
    shop = read_prompts("search.md", "An example")  # has its own test
    search = [command for command in read_prompts("search.md") if command not in shop]

    run_commands(search, monkeypatch, smaller)
    run_commands(read_prompts("serving.md"), monkeypatch, smaller)

    output = capsys.readouterr().out
    assert "No violations" in output
    assert "registered: version 1 of searches" in output
    names: dict[str, object] = {}
    for language, code in read_blocks(read_page("serving.md")):
        if language != "python":
            continue
        answer = evaluate_call(code, "model.predict", names)
        assert set(answer["item_id"][0]) == {"i033", "i142", "i198"}
        assert answer["score"].explode().between(0, 1).all()


def test_commands_of_new_items_of_a_feed_run_and_new_items_get_probabilities(
    checkout, ray_local, new_store, monkeypatch
):
    new_store(checkout / "runs" / "feed" / "runs")
    smaller = {**SMALLER, "jobs.simulate": "--users 60 --items 200 --events 1200"}
    run_commands(read_prompts("actions.md", "New items"), monkeypatch, smaller)

    blocks = read_blocks(read_page("actions.md", "New items"))
    (code,) = [content for language, content in blocks if language]
    answer = evaluate_call(code, "model.predict")
    assert set(answer["item_id"][0]) == {"new1", "new2"}
    assert answer["score"].explode().between(0, 1).all()


def test_the_page_of_a_search_log_with_custom_features(
    checkout, ray_local, new_store, monkeypatch, capsys
):
    new_store(checkout / "runs" / "shop" / "runs")
    blocks = dict(read_blocks(read_page("search.md", "An example")))
    (checkout / "shop").mkdir()
    write_shop("shop", searches=600)
    (checkout / "shop.yaml").write_text(blocks["yaml"])

    run_commands(read_prompts("search.md", "An example"), monkeypatch)

    assert "gauc" in capsys.readouterr().out.lower()
