"""Test jobs.train: its note on the result, and its configs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jobs import cli
from jobs import train as job
from pipelines.steps import describe_no_gain

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("metrics", "note"),
    [
        ({"ndcg@10": 0.1}, "ease 0.2000"),
        ({"ndcg@10": 0.2}, ""),
        ({"mean/rig": -0.01, "mean/normalised_entropy": 1.01}, "1.0100"),
        ({"gauc": 0.501, "auc": 0.6}, "gauc 0.5010"),
        ({"gauc": 0.6, "normalised_entropy": 1.06}, "1.0600"),
        ({"gauc": math.nan, "normalised_entropy": math.nan}, ""),
    ],
)
def test_a_note_reports_a_model_no_better_than_without_training(
    metrics: dict[str, float], note: str
) -> None:
    text = describe_no_gain(metrics, "ndcg@10", ("ease", 0.2))
    assert note in text
    assert bool(note) == bool(text)


def test_the_shipped_configs_are_valid() -> None:
    for path in (ROOT / "jobs/configs").glob("*/*.yaml"):
        words = ["--tables", "t", "--storage", "s", "--name", "n", "--config"]
        if path.parent.name != "sources":
            assert cli.config_from_words(job, [*words, str(path)]).model.name
