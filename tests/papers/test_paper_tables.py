"""Models of actions beside the interleaved baseline, from runs as MLflow gives them."""

from __future__ import annotations

from papers.tables import parameter_tables, relative_tables
from pipelines.comparison.rows import Row, Run
from pipelines.comparison.tables import task_tables


def row(model: str, by_seed: dict[str, tuple[float, float]], parts: dict[str, float]) -> Row:
    runs = [
        Run(
            id=f"{model}{seed}", name=f"{model}-{seed}", seed=seed, finished=True, weights="", teacher="",
            metrics={
                "test/eval_loss": loss,
                **{f"test/{task}/normalised_entropy": entropy for task in ("mean", "like")},
                **{f"parameters/{part}": number for part, number in parts.items()},
            },
        )
        for seed, (loss, entropy) in by_seed.items()
    ]  # fmt: skip
    return Row(model, "", runs)


def test_changes_are_relative_to_the_baseline_of_the_same_seed():
    rows = [
        row("attn_mvp", {"1": (1.8, 0.72), "2": (1.9, 0.76)}, {"items": 10, "pool": 3, "total": 13}),
        row("interleaved", {"1": (2.0, 0.8), "2": (1.9, 0.8), "3": (9.0, 0.1)}, {"items": 10, "total": 10}),
        row("lac", {"4": (1.0, 0.5)}, {"items": 10, "first": 1, "total": 11}),
    ]
    (tasks,), (relative,), (parameters,) = task_tables(rows), relative_tables(rows), parameter_tables(rows)
    assert tasks.header == ["model", "run", "like"]
    assert tasks.cells[0] == ["attn_mvp", "attn_mvp-*", "0.7400 ± 0.0283"]
    assert relative.header == ["model", "run", "seeds", "eval loss", "mean NE", "like NE"]
    assert relative.cells == [["attn_mvp", "attn_mvp-*", "2", "-5.00% ± 7.07%", "-7.50% ± 3.54%", "-7.50% ± 3.54%"]]
    assert parameters.header == ["model", "items", "pool", "first", "total"]
    assert parameters.cells == [
        ["attn_mvp", "10", "3", "-", "13"], ["interleaved", "10", "-", "-", "10"], ["lac", "10", "-", "1", "11"]
    ]  # fmt: skip


def test_other_families_have_none_of_it():
    runs = [Run("a", "a", "1", True, "", "", {"test/ndcg@10": 0.1, "test/gauc": 0.5, "test/normalised_entropy": 0.9})]
    rows = [Row("sasrec", "", runs)]
    assert [*task_tables(rows), *relative_tables(rows), *parameter_tables(rows)] == []
