"""Models on the same users: the interval is that of theory, and who stands beside whom."""

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
from tests.fixtures.comparison_rows import evaluate_run


def test_the_interval_is_that_of_the_mean_of_many_users() -> None:
    generator = np.random.default_rng(3)
    counts = generator.integers(1, 4, 4000)
    differences = generator.normal(0.02, 0.5, (2, 4000))
    differences[1] -= 0.02
    found = bootstrap_intervals(differences, counts)
    for interval, difference in zip(found, differences, strict=True):
        mean = (difference * counts).sum() / counts.sum()
        error = (
            np.sqrt((counts**2 * (difference - mean) ** 2).sum()) / counts.sum()
        )  # of a ratio, by its first order
        assert interval.mean == pytest.approx(mean)
        assert interval.low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
        assert interval.high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)


def log(
    uri: str,
    folder: Path,
    name: str,
    seed: int,
    values: list[float],
    teacher: str = "",
    users: int = 0,
    fresh: str = "",
) -> None:
    """A run with a metric of every user, as `jobs.evaluate` leaves it; with `fresh`
    also on a log of that hash.
    """
    size = 8 * len(name)  # which are other steps too
    fit = {"seed": seed, "metric": "ndcg@10", "batch_size": size}
    config: dict[str, dict] = {
        "model": {"name": name, "teacher_hash": teacher},
        "fit": fit,
    }
    config["model"] = {key: value for key, value in config["model"].items() if value}
    ref = tracking.open_run(
        uri,
        "retrieval/x",
        f"{name}-{seed}",
        str(folder),
        config=config,
        hashes={"sequences": "s"},
    )
    logger = tracking.Logger(ref)
    logger.log(
        {
            "best/ndcg@10": 0.1,
            "train/steps": 6000 / size,
        },
        1,
    )
    logger.end()
    weights = f"w-{name}-{seed}"
    measured = PerUserValues.from_batch(
        torch.arange(users, users + len(values)), torch.tensor(values)
    )
    evaluate_run(
        ref,
        {"ndcg@10": float(np.mean(values))},
        weights=weights,
        by_user={"ndcg@10": measured.to_text()},
        hashes={"sequences": "s"},
    )
    if fresh:
        other = PerUserValues.from_batch(torch.arange(7), torch.full((7,), 0.99))
        evaluate_run(
            ref,
            {"ndcg@10": 0.99},
            weights=weights,
            by_user={"ndcg@10": other.to_text()},
            hashes={"sequences": fresh},
        )


@pytest.mark.long
def test_rows_stand_beside_their_teacher_and_the_best_on_the_same_users(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    half = [0.0, 1.0] * 300
    for seed in (1, 2):
        log(uri, tmp_path, "tiger", seed, half)
        log(
            uri,
            tmp_path,
            "sid_mlp",
            seed,
            [min(1.0, value + 0.25) for value in half],
            f"w-tiger-{seed}",
        )
        log(uri, tmp_path, "gdn", seed, half[1:] + half[:1], f"w-tiger-{seed}")
    log(uri, tmp_path, "sasrec", 3, half)
    log(uri, tmp_path, "popularity", 1, half, users=1)  # of other users
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
    assert cells["sasrec-3", "sid_mlp-*"][:3] == [
        "2",
        "600",
        "-0.1250",
    ]  # which share no seed
    assert (
        cells["sasrec-3", "sid_mlp-*"][-1]
        == "steps 125 / 107; batch 48 / 56; seeds 3 / 1, 2"
    )


def test_fewer_than_200_users_have_an_interval_and_no_verdict() -> None:
    pair, found = Pair("a", "b", (), ""), Interval(0.1, 0.05, 0.15)
    assert to_cells(pair, found, 0.5, 199, "ndcg@10")[4:8] == [
        "+0.1000",
        "+0.0500 to +0.1500",
        "+20.0%",
        "-",
    ]
    assert to_cells(pair, found, 0.5, 200, "ndcg@10")[7] == "better"


@pytest.mark.long
def test_an_evaluation_on_a_fresh_log_stands_apart(
    new_store: Callable[[Path], str], tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    half = [0.0, 1.0] * 300
    log(uri, tmp_path, "tiger", 1, half)
    log(
        uri,
        tmp_path,
        "sasrec",
        1,
        [min(1.0, value + 0.25) for value in half],
        fresh="ca83aebe",
    )
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
