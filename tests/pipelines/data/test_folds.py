"""The folds of a temporal split have the windows, requests and training data that a
slow reference finds in the raw events.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from models.loaded_model import LoadedModel
from models.retrieval.data import RetrievalDataset
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import (
    Manifest,
    UserError,
    join,
    read_manifest,
    read_table,
)
from models.training.fit_config import FitConfig
from pipelines.comparison.load import compare, find_best_run
from pipelines.comparison.runs import select
from pipelines.comparison.tables import tables as comparison_tables
from pipelines.data.prepare import prepare
from pipelines.data.reading.log import load_source, parse_log
from pipelines.data.retrieval.simulator import simulate_retrieval
from pipelines.data.sequences.splits import SplitConfig
from pipelines.data.settings import read_config
from pipelines.data.simulation import Settings
from pipelines.evaluation.ranking import evaluate
from pipelines.evaluation.record import record_result
from pipelines.training.settings import check_training
from tests.fixtures.audited_tables import Change, Row, copy_with_change, find_violations
from tests.fixtures.trainings import build_training, make_config, train
from tuning.grid import Grid, Scheduler
from tuning.sweep import TrialResult, find_best

BEGIN = 1_600_000_000_000
HOUR = 3_600_000
SOURCE = {
    "files": "log.jsonl",
    "user": "user",
    "item": "item",
    "time": {"column": "ms", "unit": "ms"},
}
SPLITS = ("train", "val", "test")
CUTS = ("val_start_ms", "test_start_ms", "test_end_ms")
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)


def prepare_log(folder: Path, rows: list[Row], **settings: Any) -> str:
    """Write a log and return the path of its tables."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = read_config({"core": 0, "duplicates": "keep", **settings})
    output = str(folder / "tables")
    prepare(parse_log(SOURCE), str(folder), output, config, report=lambda line: None)
    return output


def draw_rows(seed: int, count: int = 400, hours: int = 200) -> list[Row]:
    """Draw events of 12 users on 15 items, several of them at the same time."""
    rng = np.random.default_rng(seed)
    return [
        {
            "user": f"u{rng.integers(12):02}",
            "item": f"i{rng.integers(15):02}",
            "ms": BEGIN + int(rng.integers(hours)) * HOUR,
        }
        for _ in range(count)
    ]


def cut_slowly(rows: list[Row], last: dict[str, int], folds: int) -> list[list[int]]:
    """Return validation start, test start and test end of each fold, walking back from
    the end of the log window by window.

    Args:
        last: cuts of the last fold.
    """
    end = max(row["ms"] for row in rows) + 1
    length = end - last["test_start_ms"]
    val_length = last["test_start_ms"] - last["val_start_ms"]
    windows: list[list[int]] = []
    while len(windows) < folds:
        start = end - length
        windows.insert(0, [start - val_length, start, end])
        end = start
    return windows


def split_slowly(time: int, window: list[int]) -> str | None:
    """Return the split of a request in a fold, or None after the fold's end."""
    val_start, test_start, test_end = window
    if time < val_start:
        return "train"
    if time < test_start:
        return "val"
    return "test" if time < test_end else None


def read_examples(tables: str, split: str, fold: int) -> Counter:
    """Count the examples (user, history, target) that a model reads."""
    users = read_table(join(tables, "sequences"), "sequences")["user_id"].to_pylist()
    items = read_table(join(tables, "items"), "items")["item_id"].to_pylist()
    data = RetrievalDataset.load(
        join(tables, "sequences"), split, max_history=1000, fold=fold
    )
    examples: Counter = Counter()
    for row in data.rows():
        batch = data.collate(np.array([row]))
        history = [items[item] for item in batch.history[0].tolist()]
        user, target = users[int(batch.user_row[0])], items[int(batch.target[0])]
        examples[user, tuple(history), target] += 1
    return examples


def expect_examples(rows: list[Row], split: str, window: list[int]) -> Counter:
    """Count the examples that `read_examples` must return, event by event."""
    examples: Counter = Counter()
    for row in rows:
        if split_slowly(row["ms"], window) != split:
            continue
        earlier = [
            (other["ms"], other["item"])
            for other in rows
            if other["user"] == row["user"] and other["ms"] < row["ms"]
        ]
        if earlier:
            history = tuple(item for _, item in sorted(earlier))
            examples[row["user"], history, row["item"]] += 1
    return examples


@settings(max_examples=12, deadline=None, phases=NO_SHRINKING)
@given(
    seed=st.integers(0, 10**6),
    folds=st.integers(2, 4),
    val=st.sampled_from([0.05, 0.1, 0.15]),
    test=st.sampled_from([0.05, 0.1]),
)
def test_folds_have_the_windows_and_examples_of_a_slow_reference(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    folds: int,
    val: float,
    test: float,
) -> None:
    rows = draw_rows(seed)
    split = {"val_fraction": val, "test_fraction": test, "folds": folds}

    tables = prepare_log(tmp_path_factory.mktemp("log"), rows, split=split)

    assert find_violations(tables) == {}
    info = read_manifest(join(tables, "sequences")).info
    windows = cut_slowly(rows, info["split"], folds)
    assert read_windows(tables) == windows
    for number, window in enumerate(windows, 1):
        counts = Counter(split_slowly(row["ms"], window) for row in rows)
        recorded = info["requests_per_fold"][number - 1]
        assert recorded == {name: counts[name] for name in SPLITS}
        for name in SPLITS:
            expected = expect_examples(rows, name, window)
            assert read_examples(tables, name, number) == expected
        # the windows of training, validation and test of a fold exclude each other
        times = [row["ms"] for row in rows]
        train_end = max(t for t in times if split_slowly(t, window) == "train")
        assert train_end < window[0] < window[1] < window[2]


def read_manifest_of_split(folder: Path, split: Row) -> Manifest:
    """Prepare a log with a temporal split; return the manifest of its sequences."""
    tables = prepare_log(folder, draw_rows(1), split={"kind": "temporal", **split})
    return read_manifest(join(tables, "sequences"))


def test_one_fold_gives_the_tables_of_a_split_without_folds(tmp_path: Path) -> None:
    without_folds = read_manifest_of_split(tmp_path / "none", {})
    one_fold = read_manifest_of_split(tmp_path / "one", {"folds": 1})

    assert one_fold.config == without_folds.config
    assert one_fold.info["split"] == without_folds.info["split"]
    assert one_fold.hash == without_folds.hash
    assert "folds" not in without_folds.info["split"]
    assert "requests_per_fold" not in without_folds.info


def test_rows_of_sequences_with_folds_have_the_splits_of_the_last_fold(
    tmp_path: Path,
) -> None:
    without_folds = read_manifest_of_split(tmp_path / "none", {})
    two_folds = read_manifest_of_split(tmp_path / "two", {"folds": 2})

    assert two_folds.hash == without_folds.hash  # the last fold is the whole split
    assert two_folds.config != without_folds.config


def find_core(rows: list[Row]) -> list[Row]:
    """Return the 2-core of rows, dropping rare users and items until none is left."""
    while True:
        users = Counter(row["user"] for row in rows)
        items = Counter(row["item"] for row in rows)
        core = [
            row for row in rows if users[row["user"]] > 1 and items[row["item"]] > 1
        ]
        if len(core) == len(rows):
            return core
        rows = core


def test_the_core_of_the_training_window_is_that_of_the_first_fold(
    tmp_path: Path,
) -> None:
    rows = draw_rows(2, count=120)
    late = max(row["ms"] for row in rows) - HOUR
    rows += [{"user": f"u{n:02}", "item": "late", "ms": late} for n in range(8)]
    split = {"kind": "temporal", "val_fraction": 0.1, "test_fraction": 0.1, "folds": 3}

    tables = prepare_log(tmp_path, rows, core=2, core_window="train", split=split)

    assert find_violations(tables) == {}
    first_fold = read_manifest(join(tables, "sequences")).info["split"]["folds"][0]
    core = find_core([row for row in rows if row["ms"] < first_fold["val_start_ms"]])
    items = read_table(join(tables, "items"), "items")["item_id"].to_pylist()
    assert items == sorted({row["item"] for row in core})


# Violations: functions that change the info of the sequences.


def shift_window(rows: list[Row], info: Row) -> None:
    """End the first fold an hour after the next one begins."""
    info["split"]["folds"][0]["test_end_ms"] += HOUR


def shorten_training(rows: list[Row], info: Row) -> None:
    """Begin validation an hour later in all folds but the last one."""
    for fold in info["split"]["folds"][:-1]:
        fold["val_start_ms"] += HOUR


def end_before_the_log(rows: list[Row], info: Row) -> None:
    """End each fold an hour earlier."""
    for fold in info["split"]["folds"]:
        fold["test_end_ms"] -= HOUR


def miscount(rows: list[Row], info: Row) -> None:
    """Add one to the number of training requests of the first fold."""
    info["requests_per_fold"][0]["train"] += 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shift_window, "that of the next fold begins at"),
        (shorten_training, "in the last fold"),
        (end_before_the_log, "the log at"),
        (miscount, "their times give"),
    ],
)
def test_the_audit_finds_a_wrong_fold(
    tmp_path: Path, change: Change, words: str
) -> None:
    split = {"kind": "temporal", "folds": 3}
    tables = prepare_log(tmp_path / "log", draw_rows(3), split=split)

    violations = find_violations(copy_with_change(tables, tmp_path, change))

    assert list(violations) == ["folds"]
    assert any(words in example for example in violations["folds"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"folds": 0}, "folds"),
        ({"folds": 2, "kind": "leave_last_out"}, "windows of time"),
    ],
)
def test_invalid_settings_of_folds_are_refused(values: Row, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SplitConfig(**values)


def test_folds_need_clock_times() -> None:
    with pytest.raises(UserError, match="no clock times"):
        SplitConfig(folds=2).resolve(has_clock_times=False)


def test_folds_need_a_log_that_leaves_training_data_to_the_first(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match="fold 1 would have nothing to train on"):
        prepare_log(tmp_path, draw_rows(4), split={"folds": 20})


def test_a_fold_that_the_table_does_not_have_is_refused(tmp_path: Path) -> None:
    split = {"kind": "temporal", "folds": 2}
    tables = prepare_log(tmp_path, draw_rows(5), split=split)

    with pytest.raises(UserError, match=r"choose fit\.fold from 1 to 2"):
        RetrievalDataset.load(join(tables, "sequences"), "train", fold=3)


def test_a_fold_of_a_table_without_folds_is_refused(tmp_path: Path) -> None:
    tables = prepare_log(tmp_path, draw_rows(5), split={"kind": "temporal"})

    with pytest.raises(UserError, match="has no folds"):
        RetrievalDataset.load(join(tables, "sequences"), "train", fold=1)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the tables of a simulated log with three folds."""
    folder = tmp_path_factory.mktemp("simulated")
    raw, output = str(folder / "raw"), str(folder / "tables")
    simulate_retrieval(raw, Settings(60, 40, 1200, seed=3))
    source, _ = load_source("jobs/configs/sources/simulated.yaml")
    config = read_config({"core": 0, "split": {"folds": 3}})
    prepare(source, raw, output, config, report=lambda line: None)
    return output


def test_trainings_of_folds_are_evaluated_and_compared(
    simulated: str, tmp_path: Path, new_store: Callable[[Path], str]
) -> None:
    inputs, uri = Inputs(simulated), new_store(tmp_path / "store")
    rows, folds = read_log(simulated), read_windows(simulated)
    ndcg: dict[str, list[float]] = {"popularity": [], "item_knn": []}

    for fold, window in enumerate(folds, 1):
        for model, values in ndcg.items():
            run = train(
                model={"name": model},
                fit=FitConfig(fold=fold),
                inputs=inputs,
                storage=str(tmp_path / "runs"),
                name=f"{model}-{fold}",
                experiment="retrieval/folds",
                tracking_uri=uri,
                on_checkpoint=lambda about: None,
            )
            result, about = evaluate(run.checkpoint, inputs, split="test")
            record_result(result, about)
            values.append(result.metrics["ndcg@10"])
            test_examples = expect_examples(rows, "test", window)
            assert result.examples == sum(test_examples.values())
            assert about.learned["until"] == window[0]
            if model == "popularity":
                loaded = LoadedModel.load(run.checkpoint, inputs)
                expected = count_items(simulated, rows, until=window[0])
                assert loaded.model.counts.tolist() == expected

    comparison = compare(select(uri, ["retrieval/folds"]))
    assert sorted(row.model for row in comparison.rows) == sorted(ndcg)
    for row in comparison.rows:
        assert row.folds == ["1", "2", "3"]
        assert row.mean("test/ndcg@10") == pytest.approx(np.mean(ndcg[row.model]))
    assert find_best_run(comparison).fold == "3"
    text = "\n\n".join(table.text() for table in comparison_tables(comparison))
    assert "0 of fold 1, 0 of fold 2, 0 of fold 3" in text
    assert "folds: windows of time" in text
    # The mean difference is printed seed by seed, and on the same users, where each
    # fold has the same weight.
    difference = np.mean(ndcg["item_knn"]) - np.mean(ndcg["popularity"])
    assert text.count(f"{abs(difference):.4f}") == 2


def read_log(tables: str) -> list[Row]:
    """Return the events of tables as rows of a log."""
    events = read_table(join(tables, "events"), "events").to_pylist()
    return [
        {
            "user": event["user_id"],
            "item": event["item_id"],
            "ms": event["timestamp_ms"],
        }
        for event in events
    ]


def read_windows(tables: str) -> list[list[int]]:
    """Return validation start, test start and test end of each fold."""
    folds = read_manifest(join(tables, "sequences")).info["split"]["folds"]
    return [[fold[name] for name in CUTS] for fold in folds]


def count_items(tables: str, rows: list[Row], until: int) -> list[int]:
    """Return the number of events of each item of the catalogue before a time."""
    counts = Counter(row["item"] for row in rows if row["ms"] < until)
    items = read_table(join(tables, "items"), "items")["item_id"].to_pylist()
    return [counts[item] for item in items]


def test_the_best_trial_of_a_sweep_has_the_best_mean_over_folds() -> None:
    metric_by_dim = {4: (0.1, 0.2, 0.6), 8: (0.5, 0.5, 0.4)}  # mean 0.3 and 0.47
    results: list[TrialResult] = []
    for dim, metrics in metric_by_dim.items():
        for fold, metric in enumerate(metrics, 1):
            name, values = f"{dim}-{fold}", {"model.dim": dim, "fit.fold": fold}
            results.append(TrialResult(name, name, values, "finished", metric))

    best = find_best(results)

    assert best is not None
    assert best.name == "8-3"  # of the last fold, not the one with the largest metric


def test_a_grid_is_repeated_over_folds() -> None:
    grid = Grid("x", "ours", axes={"model.dim": [4, 8]})

    varied = grid.vary(False, {"fit.fold": [1, 2]})

    assert varied.axes == {"model.dim": [4, 8], "fit.fold": [1, 2]}


def test_a_grid_with_early_stopping_is_not_repeated_over_folds() -> None:
    grid = Grid("x", "ours", axes={"model.dim": [4, 8]}, scheduler=Scheduler("asha"))

    with pytest.raises(UserError, match="harder folds"):
        grid.vary(False, {"fit.fold": [1, 2]})


def test_by_default_the_last_fold_is_trained_on(simulated: str, tmp_path: Path) -> None:
    model, inputs = {"name": "popularity"}, Inputs(simulated)
    config = make_config(model, FitConfig(), inputs, str(tmp_path), "popularity")

    training = check_training(config)

    assert training.config.fit.fold == 3
    assert training.identity["split"]["folds"] == 3


def test_training_on_a_fold_does_not_start_from_a_model_of_a_later_fold(
    simulated: str, tmp_path: Path
) -> None:
    model = {"name": "sasrec", "dim": 8, "num_heads": 1, "max_history": 8}
    fit = FitConfig(max_epochs=1, fold=3)
    inputs, storage = Inputs(simulated), str(tmp_path)
    run = build_training(model, fit, inputs)
    checkpoint.save(join(storage, "later"), run.model, run.checkpoint())
    config = make_config(
        model,
        replace(fit, fold=2),
        inputs,
        storage,
        "x",
        init=join(storage, "later"),
    )

    with pytest.raises(UserError, match="was trained on requests before"):
        check_training(config)
