"""Figure 3 of QGS from MLflow runs: one pair of rows, a line per seed, nothing where there is no pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipelines import tracking
from pipelines.comparison.condition_plot import condition
from pipelines.comparison.rows import compare
from pipelines.comparison.runs import select


def run_of(uri: str, folder: Path, name: str, condition: str, seed: int, losses: list[float], layers: int = 2) -> None:
    model = {"name": "qgs", "query_condition": condition, "num_layers": layers}
    run = tracking.open_run(
        uri, "search/small", name, str(folder), config={"model": model, "fit": {"seed": seed}}, hashes={"items": "x"}
    )
    logger = tracking.Logger(run)
    for step, loss in enumerate(losses):
        logger.log({"train/infonce": loss, "train/loss": 9.0}, step)
    logger.log({"best/gauc": 0.7, "test/gauc": 0.7}, len(losses))
    logger.end()


def test_the_pair_that_differs_in_the_condition_alone_is_drawn(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    for seed in (1, 2):
        run_of(uri, tmp_path, f"with-{seed}", "query", seed, [3.0, 1.0 + seed])
    run_of(uri, tmp_path, "deeper", "none", 1, [5.0, 5.0], layers=4)
    assert condition(compare(select(uri, ["search/small"]))) == []
    run_of(uri, tmp_path, "without", "none", 1, [4.0, 3.5])
    ((name, _, caption, figure),) = condition(compare(select(uri, ["search/small"])))
    assert name == "condition"
    assert "train/infonce" in caption
    (axes,) = figure.axes
    lines = [np.asarray(line.get_xydata()).tolist() for line in axes.lines]
    assert lines == [[[0, 4.0], [1, 3.5]], [[0, 3.0], [1, 2.0]], [[0, 3.0], [1, 3.0]]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["item only", "query-conditioned"]
