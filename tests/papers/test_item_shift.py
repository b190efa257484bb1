"""The temporal item shift: exact against counting by hand, whole and in shards; refused without a clock."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_tables import write

from models import checkpoint, registry
from models.fit import FitConfig
from models.inputs import Inputs
from models.retrieval.data import Catalogue, Examples
from models.setup import set_up
from models.tables import UserError
from papers.item_shift import Config, means, measure, new_items, run
from pipelines.data.schemas import events_schema, items_schema, sequences_schema

ITEMS = 30


def write_log(
    folder: Path, log: list[list[tuple[int, int]]], clock: bool = True
) -> str:
    """TABLES of users with their (time, item)s in order; the last two are val and test."""
    tables = str(folder / "tables")
    names = [f"item-{i:03d}" for i in range(ITEMS)]
    content = pa.table(
        {"item_index": np.arange(ITEMS, dtype=np.int32), "item_id": names},
        items_schema(),
    )
    items = write(f"{tables}/items", "items", content, {"core": 1, "texts": []}, {})
    rows = []
    for user, behaviours in enumerate(log):
        splits = (["train"] * len(behaviours) + ["val", "test"])[-len(behaviours) :]
        requests = [
            {
                "timestamp_ms": time,
                "query": None,
                "history_end": i,
                "split": split,
                "candidates": [item],
            }
            for i, ((time, item), split) in enumerate(
                zip(behaviours, splits, strict=True)
            )
        ]
        rows.append(
            {
                "user_id": f"u{user}",
                "item_index": [i for _, i in behaviours],
                "timestamp_ms": [time for time, _ in behaviours],
                "query": [None] * len(behaviours),
                "requests": requests,
            }
        )
    content = pa.Table.from_pylist(rows, sequences_schema(events_schema()))
    info = {"kind": "retrieval", "users": len(log), "items": ITEMS, "clock": clock}
    write(f"{tables}/sequences", "sequences", content, info, {"items": items.hash})
    return tables


def drifting_log(users: int = 80) -> list[list[tuple[int, int]]]:
    """Items come up one after the other as time goes by."""
    rng = np.random.default_rng(3)
    log = []
    for _ in range(users):
        times = np.sort(rng.integers(0, 1000, 6))
        log.append(
            [
                (int(t), int(rng.integers(t * ITEMS // 2000, t * ITEMS // 1000 + 1)))
                for t in times
            ]
        )
    return log


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint of SASRec, and the tables."""
    folder = tmp_path_factory.mktemp("shift")
    tables = write_log(folder, drifting_log())
    setup = set_up(
        {"name": "sasrec", "dim": 16, "num_layers": 1, "max_history": 1},
        FitConfig(batch_size=8),
        Inputs(tables),
    )
    checkpoint.save(folder / "sasrec", setup.model, setup.checkpoint(epoch=1, step=4))
    return folder, tables


@settings(max_examples=30)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 40), st.integers(0, ITEMS - 1)),
            min_size=1,
            max_size=6,
        ).map(sorted),
        min_size=1,
        max_size=12,
    )
)
def test_new_items_are_those_counted_by_hand(
    tmp_path_factory: pytest.TempPathFactory, log: list[list[tuple[int, int]]]
) -> None:
    tables = write_log(tmp_path_factory.mktemp("log"), log)
    times = [time for user in log for time, _ in user]
    found = new_items(f"{tables}/sequences", ITEMS)
    assert list(found) == ["temporal80", "temporal90"]
    for percent in (80, 90):
        # the first moment by which that share of all interactions has happened
        cut = min(
            t
            for t in times
            if 100 * sum(other <= t for other in times) >= percent * len(times)
        )
        new = {
            item
            for item in range(ITEMS)
            if all(t > cut for user in log for t, i in user if i == item)
        }
        assert set(np.flatnonzero(found[f"temporal{percent}"])) == new


def test_the_command_measures_what_ranking_by_hand_gives(
    world: tuple[Path, str], capsys: pytest.CaptureFixture
) -> None:
    folder, tables = world
    found = run(Config(str(folder / "sasrec"), tables, batch_size=7))
    printed = capsys.readouterr().out
    model, _ = registry.load(folder / "sasrec", Catalogue.load(tables))
    examples = Examples.load(f"{tables}/sequences", "test", max_history=1)
    log = drifting_log()
    times = sorted(time for user in log for time, _ in user)
    first: dict[int, int] = {}
    for time, item in sorted(pair for user in log for pair in user):
        first.setdefault(item, time)
    sizes = []
    for percent in (80, 90):
        cut = times[math.ceil(len(times) * percent / 100) - 1]
        ranks = []
        for row in range(len(examples)):
            batch = examples.collate(np.array([row]))
            target = int(batch["target"])
            if first[target] > cut:
                ranks.append(model.recommend(batch, ITEMS)[0][0].tolist().index(target))
        name = f"temporal{percent}"
        sizes.append(len(ranks))
        assert found[f"{name}/examples"] == len(ranks)
        assert found[f"{name}/recall@10"] == pytest.approx(
            sum(r < 10 for r in ranks) / len(ranks)
        )
        expected = sum(1 / math.log2(r + 2) for r in ranks if r < 10) / len(ranks)
        assert found[f"{name}/ndcg@10"] == pytest.approx(expected)
        assert f"{name}  {len(ranks)} requests, recall@10" in printed
    assert 80 > sizes[0] > sizes[1] > 0  # both subsets are proper ones
    assert json.loads(
        (folder / "sasrec/item_shift-test.json").read_text()
    ) == pytest.approx(found)


def test_an_empty_subset_has_no_metrics() -> None:
    class Ranks:
        def recommend(self, batch: dict, k: int) -> tuple[torch.Tensor, None]:
            return torch.arange(k).expand(len(batch["target"]), k), None

    subsets = {
        "temporal80": np.arange(ITEMS) >= 28,
        "temporal90": np.zeros(ITEMS, bool),
    }
    found = means(
        measure(Ranks(), {"target": torch.tensor([0, 1, 29])}, subsets), subsets
    )
    assert (found["temporal80/examples"], found["temporal80/recall@20"]) == (1, 0)
    assert {name for name in found if name.startswith("temporal90")} == {
        "temporal90/examples"
    }


def test_a_log_without_clock_is_refused(
    world: tuple[Path, str], tmp_path: Path
) -> None:
    tables = write_log(tmp_path, drifting_log(5), clock=False)
    with pytest.raises(UserError, match="without clock times"):
        run(Config(str(world[0] / "sasrec"), tables))
