"""The commands of the pages, run as they stand there, on small logs in the same
layouts.

What a page shows behind `$` is run in order, in this process, with the folders that the
page names. `SMALLER` is added to a command so that it takes seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import mlflow
import pandas
import pytest
from make_shop import write_shop
from pages import ROOT, Command, blocks, commands, jobs_of, section

from jobs import cli
from models.storage.tables import read_table
from pipelines.training import run as training

SMALLER = {
    "jobs.tokenize": "--encoder tfidf --pca 0 --rqkmeans.codebook_size 8",
    "jobs.encode": "--encoder tfidf",
    "jobs.train": "--fit.max_epochs 1 --ray.threads 1",
    "jobs.sweep": "--fit.max_epochs 1 --axes.model.alpha [0.5,0.7] --ray.threads 1",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that looks like a checkout without runs."""
    for name in ("jobs", "tuning"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    # Trainings are by this process: a worker of Ray takes ten seconds to start, and
    # test_train.py has one.
    here_alone = partial(
        training.run_training,
        trial=training.TrialContext(on_checkpoint=lambda about: None),
    )
    monkeypatch.setattr(training, "run_training", here_alone)
    before = os.environ.pop("MLFLOW_TRACKING_URI", None)
    yield tmp_path
    mlflow.set_tracking_uri(
        before
    )  # which a page may set, for the process and in its environment
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    if before is not None:
        os.environ["MLFLOW_TRACKING_URI"] = before


def follow(
    typed: list[Command],
    monkeypatch: pytest.MonkeyPatch,
    smaller: dict[str, str] = SMALLER,
) -> None:
    """Runs the commands."""
    for command in typed:
        if command.words[0] == "export":
            name, _, value = command.words[1].partition("=")
            monkeypatch.setenv(name, os.path.expandvars(value))
        for module, words in jobs_of(command):
            job = importlib.import_module(module)
            given = [*map(os.path.expandvars, words), *smaller.get(module, "").split()]
            options = cli.config_from_words(job, given)
            getattr(job, "main", job.run)(options)


def typed_of(page: str, *titles: str) -> list[Command]:
    """The commands behind `$` of these sections, of the whole page where none is named."""
    text = (ROOT / "docs" / page).read_text()
    parts = [section(text, title) for title in titles] or [text]
    return [command for part in parts for command in commands(part) if command.typed]


def industrial(folder: Path) -> None:
    """A small log in the layout of `amazon18_industrial`."""
    draw = random.Random(5)
    folder.mkdir()
    items = [f"B{number:03}" for number in range(40)]
    rows = [
        f"u{user},{item},{place}"
        for user in range(60)
        for place, item in enumerate(draw.sample(items, 7))
    ]
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
def test_retrieval_and_sweeps(
    here: Path,
    ray_local: None,
    new_store: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    industrial(here / "amazon18_industrial")
    new_store(here / "runs" / "industrial" / "runs")
    follow(typed_of("retrieval.md"), monkeypatch)
    sections = ("Sweep a grid", "Compare")
    follow(typed_of("sweeps_and_comparison.md", *sections), monkeypatch)
    printed = capsys.readouterr().out
    assert (here / "student.pt2").is_file()
    assert (here / "compare.html").is_file()
    assert "registered: version 1 of industrial" in printed
    for name in ("sasrec", "tiger"):
        found = json.loads(
            (
                here / "runs/industrial/runs" / name / "best/evaluation-test.json"
            ).read_text()
        )
        assert found["examples"] == 60


@pytest.mark.exhaustive
def test_search_and_serving(
    here: Path,
    ray_local: None,
    new_store: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new_store(here / "runs" / "search" / "runs")
    smaller = {**SMALLER, "jobs.simulate": "--users 60 --events 400"}
    shop = typed_of("search.md", "An example")  # which has a test of its own
    follow(
        [command for command in typed_of("search.md") if command not in shop],
        monkeypatch,
        smaller,
    )
    follow(typed_of("serving.md"), monkeypatch, smaller)
    printed = capsys.readouterr().out
    assert "No violations" in printed
    assert "registered: version 1 of searches" in printed
    names: dict[str, object] = {"mlflow": mlflow, "pandas": pandas}
    for text in (
        text
        for kind, text in blocks((ROOT / "docs/serving.md").read_text())
        if kind == "python"
    ):
        code, call = text.rsplit("model.predict", 1)
        exec(code, names)
        answer = eval("model.predict" + call.splitlines()[0], names)
        assert set(answer["item_id"][0]) == {"i033", "i142", "i198"}
        assert answer["score"].explode().between(0, 1).all()
        if "timestamp_ms" in call:
            counted = dict(zip(answer["item_id"][0], answer["score"][0], strict=True))
    answer = over_http(section((ROOT / "docs/serving.md").read_text(), "Over HTTP"))
    assert dict(zip(answer["item_id"], answer["score"], strict=True)) == pytest.approx(
        counted, abs=1e-6
    )


def over_http(text: str) -> dict[str, Any]:
    """The first row that the server of the page answers to the request of the page, on
    a port of its own.
    """
    lines = "".join(content for _, content in blocks(text)).split("$ ")
    serve, curl = (
        shlex.split(line)
        for name in ("mlflow ", "curl ")
        for line in lines
        if line.startswith(name)
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    assert (serve[-2:], curl[1]) == (["--port", "5001"], "localhost:5001/invocations")
    program = [sys.executable, "-m", *serve[:-1], port]
    body = curl[curl.index("--data") + 1]
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )  # as after activate
    with subprocess.Popen(
        program, start_new_session=True, env=os.environ | {"PATH": path}
    ) as server:
        try:
            wait_for(f"http://localhost:{port}/ping", server)
            header = {"Content-Type": "application/json"}
            with urlopen(
                Request(f"http://localhost:{port}/invocations", body.encode(), header)
            ) as answer:
                return dict(json.load(answer)["predictions"][0])
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    """Until it answers; RuntimeError where the server has ended."""
    while server.poll() is None:
        try:
            urlopen(address).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server has ended with {server.returncode}")


def test_new_items_of_a_feed(
    here: Path,
    ray_local: None,
    new_store: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new_store(here / "runs" / "feed" / "runs")
    smaller = {**SMALLER, "jobs.simulate": "--users 60 --items 200 --events 1200"}
    follow(typed_of("actions.md", "New items"), monkeypatch, smaller)
    (serve,) = (
        text
        for kind, text in blocks(
            section((ROOT / "docs/actions.md").read_text(), "New items")
        )
        if kind
    )
    names: dict[str, object] = {"mlflow": mlflow, "pandas": pandas}
    code, call = serve.split("model.predict")
    exec(code, names)
    answer = eval("model.predict" + call.splitlines()[0], names)
    assert set(answer["item_id"][0]) == {"new1", "new2"}
    assert answer["score"].explode().between(0, 1).all()


def test_an_own_log_with_its_own_features(
    here: Path,
    ray_local: None,
    new_store: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new_store(here / "runs" / "shop" / "runs")
    example = section((ROOT / "docs/search.md").read_text(), "An example")
    (here / "shop").mkdir()
    (serve,) = (text for kind, text in blocks(example) if kind == "python")
    (source,) = (text for kind, text in blocks(example) if kind == "yaml")
    write_shop("shop", searches=600)
    (here / "shop.yaml").write_text(source)
    follow(typed_of("search.md", "An example"), monkeypatch)
    printed = capsys.readouterr().out
    assert "No violations" in printed
    assert "gauc" in printed.lower()
    names: dict[str, object] = {"mlflow": mlflow, "pandas": pandas}
    code, call = serve.split("mlflow.pyfunc")
    exec(code, names)
    answer = eval("mlflow.pyfunc" + call.splitlines()[0], names)
    assert set(answer["item_id"][0]) == {"a2", "a14", "a26", "a3"}


def test_impressions_and_clicks_in_separate_events(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fifth user clicks the second result, a minute later, and all of them search
    again half a minute later.
    """
    (here / "ubi").mkdir()
    events, queries, begin = [], [], datetime(2026, 1, 1, tzinfo=UTC)
    for search in range(400):
        user, query = f"c{search // 2 % 50}", f"q{search}"
        at = begin + timedelta(hours=search // 2, seconds=30 * (search % 2))
        queries.append(
            {"query_id": query, "client_id": user, "user_query": f"word {search % 7}"}
        )

        def event(
            action: str, place: int, at: datetime, user: str = user, query: str = query
        ) -> dict[str, Any]:
            of = {
                "object": {"object_id": f"sku{place}"},
                "position": {"ordinal": place},
            }
            return {
                "action_name": action,
                "client_id": user,
                "query_id": query,
                "timestamp": at.isoformat(),
                "event_attributes": of,
            }

        events += [event("impression", place, at) for place in (1, 2, 3)]
        events += [event("click", 2, at + timedelta(minutes=1))] * (
            search // 2 % 5 == 0
        )
    for name, rows in (("events", events), ("queries", queries)):
        (here / f"ubi/ubi_{name}.ndjson").write_text("\n".join(map(json.dumps, rows)))
    text = section(
        (ROOT / "docs/own_log.md").read_text(),
        "Impressions and clicks in separate events",
    )
    code = {kind: content for kind, content in blocks(text) if kind}
    exec(code["python"], {})
    (here / "ubi.yaml").write_text(code["yaml"])
    follow(
        typed_of("own_log.md", "Impressions and clicks in separate events"), monkeypatch
    )
    found = read_table("runs/ubi/tables/sequences", "sequences").to_pylist()
    searches = [(row, request) for row in found for request in row["requests"]]
    assert len(searches) == 400
    for row, request in searches:
        clicks = int(row["user_id"][1:]) % 5 == 0
        assert request["positions"] == [0, 1, 2]
        assert request["label_click"] == [False, clicks, False]
        second = (
            request["timestamp_ms"] % 60_000 == 30_000
        )  # its user's first click of the hour is not known yet
        earlier = (
            sum(
                other["timestamp_ms"] < request["timestamp_ms"]
                for other in row["requests"]
            )
            - second
        )
        assert request["history_end"] == earlier * clicks


def test_a_date_in_three_columns(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "sales").mkdir()
    days = [
        (u, n, datetime(2025, 11, 28, tzinfo=UTC) + timedelta(days=3 * n))
        for n in range(30)
        for u in range(20)
    ]
    rows = [
        f"c{user},p{(user + n) % 9},{day.year},{day.month},{day.day}"
        for user, n, day in days
    ]
    (here / "sales/sales.csv").write_text(
        "\n".join(["customer,product,year,month,day", *rows])
    )
    source = f"""
files: sales.csv
user: customer
item: product
time: {three_columns()}
prepare: {{core: 0, ties: log_order, split: {{kind: temporal}}}}
"""
    (here / "days.yaml").write_text(source)
    prepare = importlib.import_module("jobs.prepare")
    options = ["--source", "days.yaml", "--input", "sales", "--output", "runs/days"]
    prepare.run(cli.config_from_words(prepare, options))
    times = read_table("runs/days/sequences", "sequences")["timestamp_ms"].to_pylist()
    assert (
        times
        == [[int(day.timestamp()) * 1000 for user, _, day in days if user == 0]] * 20
    )


def three_columns() -> str:
    """Return the time of the row "year, month and day in three columns" as YAML."""
    text = (ROOT / "docs/own_log.md").read_text()
    (row,) = (line for line in text.splitlines() if "in three columns" in line)
    column, pattern = re.findall(r"`((?:column|format): .*?)`", row)
    return "{" + f"{column}, {pattern}".replace("\\|", "|") + "}"
