"""Test the papers' plots of tokenizers and beams from MLflow runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from papers.plots import draw_beams, draw_tokenizers
from pipelines import tracking
from pipelines.comparison.load import compare
from pipelines.comparison.plots import plots
from pipelines.comparison.runs import select
from tests.fixtures.comparison_rows import evaluate_run


def test_plots_compare_tokenizers_and_beams(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    for folder, student_share in (("rqvae", 1.01), ("psid", 0.99)):
        for name, ndcg in (("tiger", 0.05), ("sid_mlp", 0.05 * student_share)):
            model = {
                "name": name,
                "beam": 50,
                "teacher_hash": f"tiger-{folder}" if name == "sid_mlp" else "",
            }
            opened = tracking.open_run(
                uri,
                "retrieval/x",
                f"{name}-{folder}",
                str(tmp_path),
                hashes={"trie": folder},
                config={"model": model, "sids": f"/somewhere/{folder}"},
            )
            tracking.Logger(opened).end()
            weights = f"{name}-{folder}"
            evaluate_run(opened, {"ndcg@10": ndcg}, weights=weights)
            evaluate_run(
                opened, {"ndcg@10": 0.9 * ndcg}, weights=weights, options={"beam": 10}
            )
    comparison = compare(select(uri, ["retrieval/x"]))

    drawn = plots(comparison, more=(draw_tokenizers, draw_beams))

    svg = {plot.title: plot.svg for plot in drawn}
    assert list(svg)[1:] == ["Tokenizers", "Beams and accuracy"]
    for text in ("101.0%", "99.0%", "rqvae", "psid"):
        assert text in svg["Tokenizers"]
    for name in ("tiger", "sid_mlp"):
        assert f"{name}-psid" in svg["Beams and accuracy"]
