"""Test the printed tables of jobs.compare, their Markdown, and the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from jobs import compare
from jobs.cli import config_from_words
from jobs.compare import Config, run
from pipelines import tracking
from pipelines.comparison.report import shorten
from tests.fixtures.logged_runs import evaluate_run, log_sweep, log_training

HOSTILE = "<img src=x>|[a](b)"
"""Name of a run that HTML and Markdown must not interpret."""


@pytest.fixture(scope="module")
def store(new_store, tmp_path_factory) -> str:
    """Log a sweep of alpha and heads, a baseline, a SASRec, and an unfinished run."""
    uri = new_store(tmp_path_factory.mktemp("compare"))
    sweep = log_sweep(uri, "alphas", ["model.alpha", "model.attention_heads"])
    for alpha in (0.3, 0.7):
        for heads in (4, 8):
            value = alpha / 10 + heads / 1e4
            model = {"name": "sid_mlp", "alpha": alpha, "attention_heads": heads}
            metrics = {"best/ndcg@10": value + 0.04, "test/ndcg@10": value}
            metrics["test/requests_per_s"] = 900.0 + 100 * heads
            point, parent = json.dumps(model), sweep.run_id
            tags = {tracking.PARENT_TAG: parent, tracking.POINT_TAG: point}
            name = f"alpha-{alpha}-{heads}"
            trial = log_training(uri, name, model, metrics, tags=tags)
    tracking.Logger(sweep).tag(**{tracking.BEST_TAG: trial.run_id})
    tracking.Logger(sweep).end()
    for name, model, value in (
        ("popular", "popularity", 0.1),
        (HOSTILE, "sasrec", 0.9),
    ):
        training = log_training(uri, name, {"name": model}, {"best/ndcg@10": value})
        values = np.random.default_rng(0).uniform(value, value + 0.1, 300)
        evaluate_run(training, values.tolist())
        evaluate_run(training, values.tolist(), options={"unseen": True})
    return uri


def test_only_the_best_rows_of_a_long_table_are_printed():
    frame = pl.DataFrame({"run": [str(number) for number in range(31)]})
    title, best, notes = shorten(("x", frame, ["first"] * 9))
    assert best["run"].to_list() == [str(number) for number in range(20)]
    assert "of 31 rows" in title
    assert len(notes) == 3
    assert shorten(("x", frame.head(20), []))[0] == "x"


def test_tables_are_printed_as_markdown(store, capsys):
    run(Config(experiment="retrieval/x", tracking_uri=store))

    output = capsys.readouterr().out
    assert output.index("img src=x") < output.index("alpha-0.7-8")  # best first
    assert "clears it" in output
    assert "0.9000" in output
    assert "0.6000" not in output  # validation at the best epoch alone
    assert re.search(r"\| sid_mlp +\| alpha-0.7-8 +\| 1 +\|", output)
    assert "<img" not in output
    assert "](" not in output


class Page(HTMLParser):
    """The tags, attributes and texts of an HTML page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags = [""]
        self.attributes: set[str] = set()
        self.texts: dict[str, list[str]] = {}
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.tags[-1], []).append(data)


@pytest.mark.long
@pytest.mark.parametrize("selection", ["--experiment retrieval/x", "--sweep alphas"])
def test_the_page_needs_no_other_file(store, tmp_path, selection):
    file = tmp_path / "new/page.html"
    words = [*selection.split(), "--tracking_uri", store, "--html", str(file)]
    run(config_from_words(compare, words))

    page = Page(file)

    assert not {"img", "iframe", "object"} & set(page.tags)
    assert "src" not in page.attributes
    assert page.tags.count("link") == 1
    scripts = "".join(page.texts["script"])
    assert scripts.count("plotly.js v") == 1
    # plotly reads tags in names too
    assert "<img" not in re.sub(r"/\*\*.*?\*/", "", scripts).split("Plotly.newPlot")[-1]
    headings = page.texts["h2"]
    (answer,) = (text for text in page.texts["p"] if "Best by" in text)
    if "--sweep" in selection:
        assert "alpha-0.7-8, val/ndcg@10 0.1108" in answer
        assert "Learning curves" in headings
        panels = re.findall(r'"text":"(\w+\\u002f[^"]+)"', scripts)
        assert {r"val\u002fndcg@10", r"train\u002floss"} <= set(panels)
    else:
        assert f"{HOSTILE}, val/ndcg@10 0.9000" in answer
        assert "Against popularity" in answer
        assert "clears it" in answer
        assert "test/ndcg@10 against the best model without training" in headings
        assert HOSTILE in page.texts["td"]
