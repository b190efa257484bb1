"""Figures of the papers from MLflow runs: one pair of rows, a line per seed, nothing where there is no pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from papers.plots import beams, condition, tokenizers
from pipelines import tracking
from pipelines.comparison.plots import plots
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


def test_tokenizers_and_beams(new_store: Callable[[Path], str], tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    for folder, kept in (("rqvae", 1.01), ("psid", 0.99)):
        for name, found in (("tiger", 0.05), ("sid_mlp", 0.05 * kept)):
            model = {"name": name, "beam": 50, "teacher_hash": f"tiger-{folder}" if name == "sid_mlp" else ""}
            opened = tracking.open_run(
                uri, "retrieval/x", f"{name}-{folder}", str(tmp_path), hashes={"trie": folder},
                config={"model": model, "sids": f"/somewhere/{folder}"},
            )  # fmt: skip
            logger = tracking.Logger(opened)
            logger.log({"test/ndcg@10": found, "test-beam-10/ndcg@10": 0.9 * found}, 1)
            logger.tag(**{tracking.WEIGHTS_TAG: f"{name}-{folder}"})
            logger.end()
    drawn = {plot.title: plot.svg for plot in plots(compare(select(uri, ["retrieval/x"])), (tokenizers, beams))}
    assert list(drawn) == ["Tokenizers", "Beams and accuracy"]
    assert all(text in drawn["Tokenizers"] for text in ("101.0%", "99.0%", "rqvae", "psid"))
    assert all(f"{name}-psid" in drawn["Beams and accuracy"] for name in ("tiger", "sid_mlp"))
