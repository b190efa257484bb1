"""Folds of a temporal split: windows, requests and training data equal those of a slow
reference that reads the raw events.
"""

from __future__ import annotations

import copy
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
from models.storage.tables import UserError, join, read_manifest, read_table
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
from tests.fixtures.audited import broken, rewrite
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
Row = dict[str, Any]


def make_tables(folder: Path, rows: list[Row], **given: Any) -> str:
    """TABLES of a log."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = read_config({"core": 0, "duplicates": "keep", **given})
    output = str(folder / "tables")
    prepare(parse_log(SOURCE), str(folder), output, config, report=lambda line: None)
    return output


def draw_rows(seed: int, count: int = 400, hours: int = 200) -> list[Row]:
    """Events of a few users, several of them at the same time."""
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
    """Validation start, test start and test end of each fold, walked back from the
    log's end window by window.
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
    val_start, test_start, test_end = window
    if time < val_start:
        return "train"
    if time < test_start:
        return "val"
    return "test" if time < test_end else None


def read_examples(tables: str, split: str, fold: int) -> Counter:
    """User, history and target of each request that a model is given."""
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
    """What `read_examples` must return, from the events alone, event by event."""
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
    tables = make_tables(tmp_path_factory.mktemp("log"), rows, split=split)
    assert broken(tables) == {}
    info = read_manifest(join(tables, "sequences")).info
    windows = cut_slowly(rows, info["split"], folds)
    cuts = [[fold[name] for name in CUTS] for fold in info["split"]["folds"]]
    assert cuts == windows
    for number, window in enumerate(windows, 1):
        counts = Counter(split_slowly(row["ms"], window) for row in rows)
        recorded = info["requests_per_fold"][number - 1]
        assert recorded == {name: counts[name] for name in SPLITS}
        for name in SPLITS:
            expected = expect_examples(rows, name, window)
            assert read_examples(tables, name, number) == expected
        # the windows of training, validation and test of a fold exclude each other
        train_end = max(
            r["ms"] for r in rows if split_slowly(r["ms"], window) == "train"
        )
        assert train_end < window[0] < window[1] < window[2]


def test_one_fold_leaves_the_tables_as_they_are(tmp_path: Path) -> None:
    rows = draw_rows(1)
    manifests = {}
    for name, split in (("plain", {}), ("one", {"folds": 1}), ("two", {"folds": 2})):
        tables = make_tables(tmp_path / name, rows, split={"kind": "temporal", **split})
        manifests[name] = read_manifest(join(tables, "sequences"))
    plain, one, two = manifests.values()
    assert one.config == plain.config
    assert one.info["split"] == plain.info["split"]
    assert one.hash == plain.hash
    assert "folds" not in plain.info["split"]
    assert "requests_per_fold" not in plain.info
    # the rows of a table with folds are those of its last one
    assert two.hash == plain.hash
    assert two.config != plain.config


def test_the_core_of_the_training_window_is_that_of_the_first_fold(
    tmp_path: Path,
) -> None:
    rows = draw_rows(2, count=120)
    late = max(row["ms"] for row in rows) - HOUR
    rows += [{"user": f"u{n:02}", "item": "late", "ms": late} for n in range(8)]
    split = {"kind": "temporal", "val_fraction": 0.1, "test_fraction": 0.1, "folds": 3}
    options = {"core": 2, "core_window": "train", "split": split}
    tables = make_tables(tmp_path, rows, **options)
    assert broken(tables) == {}
    cut = read_manifest(join(tables, "sequences")).info["split"]["folds"][0]
    left = [row for row in rows if row["ms"] < cut["val_start_ms"]]
    while True:
        users = Counter(row["user"] for row in left)
        items = Counter(row["item"] for row in left)
        kept = [
            row for row in left if users[row["user"]] > 1 and items[row["item"]] > 1
        ]
        if len(kept) == len(left):
            break
        left = kept
    items_table = read_table(join(tables, "items"), "items")
    assert items_table["item_id"].to_pylist() == sorted({row["item"] for row in left})


def shift_window(rows: list[Row], info: Row) -> None:
    info["split"]["folds"][0]["test_end_ms"] += HOUR


def shorten_training(rows: list[Row], info: Row) -> None:
    for fold in info["split"]["folds"][:-1]:
        fold["val_start_ms"] += HOUR


def end_before_the_log(rows: list[Row], info: Row) -> None:
    for fold in info["split"]["folds"]:
        fold["test_end_ms"] -= HOUR


def miscount(rows: list[Row], info: Row) -> None:
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
def test_the_audit_finds_a_wrong_fold(tmp_path: Path, change: Any, words: str) -> None:
    split = {"kind": "temporal", "folds": 3}
    tables = make_tables(tmp_path / "log", draw_rows(3), split=split)
    copied = rewrite(tables, tmp_path, copy.copy(change))
    found = broken(copied)
    assert list(found) == ["folds"]
    assert any(words in example for example in found["folds"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"folds": 0}, "folds"),
        ({"folds": 2, "kind": "leave_last_out"}, "windows of time"),
    ],
)
def test_settings_of_folds_are_refused(values: Row, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SplitConfig(**values)


def test_folds_need_a_clock_and_a_log_that_is_long_enough(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no clock times"):
        SplitConfig(folds=2).resolve(clock=False)
    with pytest.raises(UserError, match="fold 1 would have nothing to train on"):
        make_tables(tmp_path, draw_rows(4), split={"folds": 20})


def test_a_table_names_the_folds_that_it_has(tmp_path: Path) -> None:
    split = {"kind": "temporal", "folds": 2}
    tables = make_tables(tmp_path / "two", draw_rows(5), split=split)
    with pytest.raises(UserError, match=r"choose fit\.fold from 1 to 2"):
        RetrievalDataset.load(join(tables, "sequences"), "train", fold=3)
    plain = make_tables(tmp_path / "plain", draw_rows(5), split={"kind": "temporal"})
    with pytest.raises(UserError, match="has no folds"):
        RetrievalDataset.load(join(plain, "sequences"), "train", fold=1)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """TABLES of a simulated log with three folds."""
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
    where = {"inputs": inputs, "storage": str(tmp_path / "runs"), "tracking_uri": uri}
    items = read_table(join(simulated, "items"), "items")["item_id"].to_pylist()
    events = read_table(join(simulated, "events"), "events").to_pylist()
    rows = [
        {"user": e["user_id"], "item": e["item_id"], "ms": e["timestamp_ms"]}
        for e in events
    ]
    cuts = read_manifest(join(simulated, "sequences")).info["split"]["folds"]
    values: dict[str, list[float]] = {"popularity": [], "item_knn": []}
    for number, cut in enumerate(cuts, 1):
        window = [cut[name] for name in CUTS]
        for model, ndcg in values.items():
            trained = train(
                model={"name": model},
                fit=FitConfig(fold=number),
                name=f"{model}-{number}",
                experiment="retrieval/folds",
                on_checkpoint=lambda about: None,
                **where,
            )
            result, about = evaluate(trained.checkpoint, inputs, split="test")
            record_result(result, about)
            ndcg.append(result.metrics["ndcg@10"])
            test = expect_examples(rows, "test", window)
            assert result.examples == sum(test.values())
            assert about.learned["until"] == window[0]
            if model == "popularity":
                counts = Counter(row["item"] for row in rows if row["ms"] < window[0])
                learned = LoadedModel.load(trained.checkpoint, inputs).model.counts
                assert learned.tolist() == [counts[item] for item in items]
    comparison = compare(select(uri, ["retrieval/folds"]))
    assert {row.model: row.folds for row in comparison.rows} == {
        model: ["1", "2", "3"] for model in values
    }
    for row in comparison.rows:
        assert row.mean("test/ndcg@10") == pytest.approx(np.mean(values[row.model]))
    text = "\n\n".join(table.text() for table in comparison_tables(comparison))
    assert "0 of fold 1, 0 of fold 2, 0 of fold 3" in text
    assert "folds: windows of time" in text
    differences = np.subtract(values["item_knn"], values["popularity"])
    # seed by seed, and on the same users, where folds weigh the same
    assert text.count(f"{abs(differences.mean()):.4f}") == 2
    assert find_best_run(comparison).fold == "3"


def test_the_best_settings_of_a_sweep_are_best_over_all_folds() -> None:
    values = {4: (0.1, 0.2, 0.6), 8: (0.5, 0.5, 0.4)}  # mean 0.3 and 0.47
    results = [
        TrialResult(
            f"{dim}-{fold}",
            f"{dim}-{fold}",
            {"model.dim": dim, "fit.fold": fold},
            "finished",
            value,
        )
        for dim, of_folds in values.items()
        for fold, value in enumerate(of_folds, 1)
    ]
    best = find_best(results)
    assert best is not None
    assert best.name == "8-3"  # of the last fold, not the one with the largest value


def test_any_grid_can_be_repeated_over_folds_but_not_stopped_early() -> None:
    grid = Grid("x", "ours", axes={"model.dim": [4, 8]})
    varied = grid.vary(False, {"fit.fold": [1, 2]})
    assert varied.axes == {"model.dim": [4, 8], "fit.fold": [1, 2]}
    early = replace(grid, scheduler=Scheduler("asha"))
    with pytest.raises(UserError, match="harder folds"):
        early.vary(False, {"fit.fold": [1, 2]})


def test_by_default_the_last_fold_is_trained_on(simulated: str, tmp_path: Path) -> None:
    config = make_config(
        {"name": "popularity"},
        FitConfig(),
        Inputs(simulated),
        str(tmp_path),
        "popularity",
    )
    training = check_training(config)
    assert training.config.fit.fold == 3
    assert training.identity["split"]["folds"] == 3


def test_a_later_fold_s_model_is_no_origin(simulated: str, tmp_path: Path) -> None:
    model = {"name": "sasrec", "dim": 8, "num_heads": 1, "max_history": 8}
    fit = FitConfig(max_epochs=1, fold=3)
    inputs, storage = Inputs(simulated), str(tmp_path)
    run = build_training(model, fit, inputs)
    checkpoint.save(join(storage, "later"), run.model, run.checkpoint())
    options = {"init": join(storage, "later")}
    config = make_config(model, replace(fit, fold=2), inputs, storage, "x", **options)
    with pytest.raises(UserError, match="was trained on requests before"):
        check_training(config)
