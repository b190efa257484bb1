"""Test the comparison of models on the same users: its intervals and its pairs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.metrics.per_user_metrics import PerUserValues
from pipelines import tracking
from pipelines.comparison.load import compare
from pipelines.comparison.over_users import (
    Interval,
    Pair,
    bootstrap_intervals,
    over_users_tables,
    to_cells,
)
from pipelines.comparison.runs import select
from pipelines.comparison.tables import tables
from tests.fixtures.comparison_rows import (
    evaluate_run,
)


def test_the_bootstrap_interval_is_the_normal_one_for_many_users() -> None:
    generator = np.random.default_rng(3)
    counts = generator.integers(1, 4, 4000)
    differences = generator.normal(0.02, 0.5, (2, 4000))
    differences[1] -= 0.02

    intervals = bootstrap_intervals(differences, counts)

    for interval, difference in zip(intervals, differences, strict=True):
        mean = (difference * counts).sum() / counts.sum()
        # Standard error of a ratio, to first order.
        error = np.sqrt((counts**2 * (difference - mean) ** 2).sum()) / counts.sum()
        assert interval.mean == pytest.approx(mean)
        assert interval.low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
        assert interval.high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)


def log_run(
    uri: str,
    folder: Path,
    name: str,
    seed: int,
    values: list[float],
    teacher: str = "",
    first_user: int = 0,
    other_log: str = "",
) -> None:
    """Log a run with a metric of every user, as `jobs.evaluate` does.

    Args:
        uri: The MLflow store.
        folder: Folder of the run.
        name: Name of the model; its length sets the batch size and the steps.
        seed: Seed of the training.
        values: NDCG@10 of consecutive users.
        teacher: Hash of the teacher's weights.
        first_user: Number of the first user.
        other_log: Hash of another log on which the run is also evaluated.
    """
    batch_size = 8 * len(name)
    fit = {"seed": seed, "metric": "ndcg@10", "batch_size": batch_size}
    model = {"name": name}
    if teacher:
        model["teacher_hash"] = teacher
    config: dict[str, dict] = {"model": model, "fit": fit}
    ref = tracking.open_run(
        uri,
        "retrieval/x",
        f"{name}-{seed}",
        str(folder),
        config=config,
        hashes={"sequences": "s"},
    )
    logger = tracking.Logger(ref)
    logger.log({"best/ndcg@10": 0.1, "train/steps": 6000 / batch_size}, 1)
    logger.end()
    weights = f"w-{name}-{seed}"
    measured = PerUserValues.from_batch(
        torch.arange(first_user, first_user + len(values)), torch.tensor(values)
    )
    evaluate_run(
        ref,
        {"ndcg@10": float(np.mean(values))},
        weights=weights,
        by_user={"ndcg@10": measured.to_text()},
        hashes={"sequences": "s"},
    )
    if other_log:
        other = PerUserValues.from_batch(torch.arange(7), torch.full((7,), 0.99))
        evaluate_run(
            ref,
            {"ndcg@10": 0.99},
            weights=weights,
            by_user={"ndcg@10": other.to_text()},
            hashes={"sequences": other_log},
        )


@pytest.mark.long
def test_rows_are_compared_with_their_teacher_and_the_best_on_the_same_users(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    values = [0.0, 1.0] * 300
    better_values = [min(1.0, value + 0.25) for value in values]
    shifted_values = values[1:] + values[:1]
    for seed in (1, 2):
        teacher = f"w-tiger-{seed}"
        log_run(uri, tmp_path, "tiger", seed, values)
        log_run(uri, tmp_path, "sid_mlp", seed, better_values, teacher)
        log_run(uri, tmp_path, "gdn", seed, shifted_values, teacher)
    log_run(uri, tmp_path, "sasrec", 3, values)
    log_run(uri, tmp_path, "popularity", 1, values, first_user=1)  # other users

    (table,) = over_users_tables(compare(select(uri, ["retrieval/x"])))

    cells = {(line[0], line[1]): line[2:] for line in table.cells}
    assert set(cells) == {
        ("sid_mlp-*", "tiger-*"),
        ("gdn-*", "tiger-*"),
        ("tiger-*", "sid_mlp-*"),
        ("gdn-*", "sid_mlp-*"),
        ("sasrec-3", "sid_mlp-*"),
    }
    assert cells["sid_mlp-*", "tiger-*"][:3] == ["2", "600", "+0.1250"]
    assert cells["sid_mlp-*", "tiger-*"][-2:] == [
        "better",
        "steps 107 / 150; batch 56 / 40",
    ]
    assert cells["gdn-*", "tiger-*"][2] == "+0.0000"
    assert cells["gdn-*", "tiger-*"][-2] == "noise"
    assert cells["tiger-*", "sid_mlp-*"][0] == "4"
    assert cells["tiger-*", "sid_mlp-*"][-2] == "worse"
    # These two share no seed.
    assert cells["sasrec-3", "sid_mlp-*"][:3] == ["2", "600", "-0.1250"]
    assert (
        cells["sasrec-3", "sid_mlp-*"][-1]
        == "steps 125 / 107; batch 48 / 56; seeds 3 / 1, 2"
    )


def test_fewer_than_200_users_have_an_interval_and_no_verdict() -> None:
    pair, interval = Pair("a", "b", (), ""), Interval(0.1, 0.05, 0.15)
    assert to_cells(pair, interval, 0.5, 199, "ndcg@10")[4:8] == [
        "+0.1000",
        "+0.0500 to +0.1500",
        "+20.0%",
        "-",
    ]
    assert to_cells(pair, interval, 0.5, 200, "ndcg@10")[7] == "better"


@pytest.mark.long
def test_an_evaluation_on_another_log_has_its_own_row_and_no_pair(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    values = [0.0, 1.0] * 300
    better_values = [min(1.0, value + 0.25) for value in values]
    log_run(uri, tmp_path, "tiger", 1, values)
    log_run(uri, tmp_path, "sasrec", 1, better_values, other_log="ca83aebe")

    comparison = compare(select(uri, ["retrieval/x"]))

    assert [row.name for row in comparison.rows] == [
        "sasrec-1",
        "tiger-1",
        "sasrec-1 [log ca83aebe]",
    ]
    (table,) = over_users_tables(comparison)
    assert [line[:2] for line in table.cells] == [["tiger-1", "sasrec-1"]]
    notes = tables(comparison)[0].notes
    assert any(note.startswith("[log ...]: evaluated on another log") for note in notes)
    assert not any("these options" in note for note in notes)
