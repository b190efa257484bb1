"""Test that result pages are those of the kept runs, and that runs are kept whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from papers.pages import Config, run
from pipelines import tracking

RESULTS = Path(__file__).parents[2] / "docs/results"


@pytest.mark.exhaustive
def test_pages_are_those_of_the_kept_runs(tmp_path):
    run(Config(output=str(tmp_path)))

    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    stored = {path.name: path.read_text() for path in RESULTS.glob("*.md")}
    assert made == {
        name: stored[name]
        for name, text in stored.items()
        if "by `python -m papers.pages`." in text
    }


@pytest.mark.long
def test_kept_runs_have_metrics_and_no_path_of_the_machine(new_store, tmp_path):
    uri = new_store(tmp_path)
    for seed in (42, 43):
        config = {
            "model": {"name": "sasrec"},
            "fit": {"seed": seed},
            "tables": str(tmp_path / "a/tables"),
        }
        ref = tracking.open_run(
            uri,
            "retrieval/x",
            f"sasrec-{seed}",
            str(tmp_path),
            config=config,
            hashes={"items": "1"},
        )
        logger = tracking.Logger(ref)
        logger.log({"test/ndcg@10": seed / 1000}, 1)
        result = {"by_user": {"ndcg@10": {"users": str(seed)}}}
        logger.client.log_dict(ref.run_id, result, "evaluation-test.json")
        logger.end()

    run(Config("retrieval/x", uri, str(tmp_path / "x.jsonl")))

    text = (tmp_path / "x.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["metrics"]["test/ndcg_at_10"] for line in lines] == [0.042, 0.043]
    assert {line["params"]["tables"] for line in lines} == {"a/tables"}
    users = [line["by_user"]["evaluation-test.json"]["ndcg@10"] for line in lines]
    assert users == [{"users": "42"}, {"users": "43"}]
    assert str(tmp_path) not in text
