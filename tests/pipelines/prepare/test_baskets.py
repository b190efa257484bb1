"""Behaviours of one order or one time are a request with a set of targets."""

from __future__ import annotations

import random
from bisect import bisect
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.schemas import Inputs, SequencesInfo
from core.tables import open_table
from models.retrieval.requests import RETRIEVAL
from models.training import checkpoint
from models.training.fit_config import FitConfig
from pipelines.evaluation.config import EvaluateConfig
from pipelines.evaluation.inference import infer_all
from pipelines.evaluation.ranking import evaluate
from tests.fixtures.audited_tables import Row, copy_with_change, find_violations
from tests.fixtures.commands import (
    LOG,
    load_split,
    merge,
    prepare_log,
    read_rows,
    write_rows,
)
from tests.fixtures.trainings import SASREC, build_training

MAPPING = merge(LOG, {"prepare": {"duplicates": "keep"}})
KINDS: dict[str, Row] = {"request": {"request": "order"}, "equal_times": {}}


@pytest.fixture(scope="module")
def log() -> list[Row]:
    """Orders of up to six items, some of which are bought twice, up to an hour apart."""
    generator = random.Random(0)
    rows = []
    for order in range(120):
        begin = 1_600_000_000_000 + generator.randrange(200) * 60_000
        user = f"u{order % 12}"
        rows += [
            {
                "user": user,
                "item": f"i{generator.randrange(20)}",
                "ms": begin
                + generator.randrange(2) * (1000 if order % 2 else 3_600_000),
                "order": f"o{order}",
            }
            for _ in range(generator.randrange(1, 7))
        ]
    return rows


@pytest.fixture(scope="module", params=KINDS)
def tables(request, tmp_path_factory, log) -> tuple[str, Path]:
    """The kind of baskets, and the path of their tables."""
    folder = tmp_path_factory.mktemp(request.param)
    write_rows(folder / "log.jsonl", log)
    options = {"baskets": request.param} if request.param == "equal_times" else {}
    prepare_log(MAPPING | KINDS[request.param], folder, folder / "tables", **options)
    return request.param, folder / "tables"


def form_baskets(
    log: list[Row], kind: str, cuts: list[int]
) -> dict[tuple[str, int], list[set[str]]]:
    """Return the sets of items of the baskets of each user and time."""
    baskets = defaultdict[Any, list[Row]](list)
    for row in log:
        key = row["ms"] if kind == "equal_times" else row["order"]
        baskets[row["user"], key, bisect(cuts, row["ms"])].append(row)
    sets = defaultdict(list)
    for (user, *_), rows in baskets.items():
        time = min(row["ms"] for row in rows)
        sets[user, time].append({row["item"] for row in rows})
    return sets


def test_a_request_has_the_items_of_its_basket_and_earlier_behaviours_before_it(
    tables, log
):
    kind, path = tables
    ids = [row["item_id"] for row in read_rows(path, "items")]
    found = defaultdict(list)
    for user in read_rows(path, "sequences"):
        for request in user["requests"]:
            time = request["timestamp_ms"]
            items = [ids[item] for item in request["candidates"]]
            assert len(items) == len({*items})
            found[user["user_id"], time].append({*items})
            earlier = [row for row in log if row["user"] == user["user_id"]]
            before = sum(row["ms"] < time for row in earlier)
            assert request["history_end"] == before

    split = open_table(str(path / "sequences"), SequencesInfo).info.split
    cuts = [split.val_start_ms, split.test_start_ms]
    expected = form_baskets(log, kind, cuts)
    orders = {(row["order"], bisect(cuts, row["ms"])) for row in log}
    assert len(orders) > len({row["order"] for row in log})
    assert found.keys() == expected.keys()
    for key, baskets in expected.items():
        assert sorted(map(sorted, found[key])) == sorted(map(sorted, baskets))
    assert find_violations(str(path)) == {}


def test_training_learns_each_target_and_an_evaluation_ranks_each_basket_once(tables):
    _, path = tables
    for split in ("train", "val", "test"):
        expected: list[Any] = []
        for row, user in enumerate(read_rows(path, "sequences")):
            for request in user["requests"]:
                end, items = request["history_end"], request["candidates"]
                if request["split"] != split or not end:
                    continue
                history = user["item_index"][:end][-20:]
                repeats = not {*items}.isdisjoint(user["item_index"][:end])
                if split == "train":
                    expected += [(row, history, item) for item in items]
                else:
                    expected.append((row, history, sorted(items), repeats))
        found: list[Any] = []
        dataset = load_split(RETRIEVAL, path / "sequences", split)
        for batch in map(dataset.collate, dataset.evaluation_batches(7)):
            for index, row in enumerate(batch.user_row.tolist()):
                history = batch.history[index, : batch.history_length[index]].tolist()
                example = (row, history, int(batch.target[index]))
                if split != "train":
                    items = [
                        item for item in batch.targets[index].tolist() if item >= 0
                    ]
                    example = (row, history, sorted(items), bool(batch.repeats[index]))
                found.append(example)
        assert sorted(found) == sorted(expected)
        assert expected


def test_batch_inference_writes_a_row_per_basket_with_all_its_targets(tables, tmp_path):
    _, path = tables
    run = build_training(SASREC, FitConfig(batch_size=8), Inputs(str(path)))
    checkpoint.save(str(tmp_path / "sasrec"), run.model, run.checkpoint(epoch=1))
    config = EvaluateConfig(
        checkpoint=str(tmp_path / "sasrec"), tables=str(path), split="test"
    )
    infer_all(replace(config, batch_inference=str(tmp_path / "out"), k=10))

    ids = [row["item_id"] for row in read_rows(path, "items")]
    expected = [
        {
            "user_id": user["user_id"],
            "request": number,
            "timestamp_ms": request["timestamp_ms"],
            "targets": [ids[item] for item in request["candidates"]],
        }
        for user in read_rows(path, "sequences")
        for number, request in enumerate(user["requests"])
        if request["split"] == "test" and request["history_end"]
    ]
    rows = read_rows(tmp_path, "out")
    assert [{name: row[name] for name in expected[0]} for row in rows] == expected
    recalls = [
        len({*row["targets"]} & {*row["item_id"]}) / min(10, len(row["targets"]))
        for row in rows
    ]
    recall = sum(recalls) / len(recalls)
    assert evaluate(config)[0].metrics["recall@10"] == pytest.approx(recall)


def drop_a_target(rows: list[Row], info: Row) -> None:
    """Drop a target of a basket."""
    requests = [request for row in rows for request in row["requests"]]
    next(r for r in requests if len(r["candidates"]) > 2)["candidates"].pop()


def add_the_basket_to_its_history(rows: list[Row], info: Row) -> None:
    """Add the behaviours of a basket to its own history."""
    request = rows[0]["requests"][-1]
    request["history_end"] = len(rows[0]["item_index"])


@pytest.mark.parametrize(
    ("change", "rule"),
    [(drop_a_target, "targets"), (add_the_basket_to_its_history, "history")],
)
def test_the_audit_finds_a_wrong_basket(tables, tmp_path, change, rule):
    copied = copy_with_change(str(tables[1]), tmp_path, change)
    assert list(find_violations(copied)) == [rule]


def test_behaviours_that_share_a_time_are_counted(tmp_path, log, capsys):
    write_rows(tmp_path / "log.jsonl", log)
    prepare_log(MAPPING, tmp_path, tmp_path / "tables")
    times = Counter((row["user"], row["ms"]) for row in log)
    shared = sum(count for count in times.values() if count > 1)
    assert f"{shared} of {len(log)} behaviours share" in capsys.readouterr().out
