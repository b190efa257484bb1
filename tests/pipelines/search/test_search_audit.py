"""The audit passes the tables of a search log and finds each kind of planted violation, and only that one."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from models.tables import read_manifest, read_table
from pipelines.data.audit import audit, report
from pipelines.data.prepare import PrepareConfig, prepare
from pipelines.data.search_simulator import simulate_search
from pipelines.data.sources import load_source
from pipelines.data.tables import QUERIES, commit, write_part

SOURCE = Path(__file__).parents[3] / "jobs" / "configs" / "sources" / "simulated_search.yaml"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> str:
    """Tables of a small simulated log, in two parts."""
    folder = tmp_path_factory.mktemp("search")
    simulate_search(str(folder / "raw"), 60, 60, 400, 3, 0.5)
    source, defaults = load_source(str(SOURCE))
    config = PrepareConfig.of(defaults, {"partitions": 2, "max_events": 12, "search": {"windows_days": [1, 30]}})
    prepare(source, str(folder / "raw"), str(folder / "tables"), config, say=lambda line: None)
    return str(folder / "tables")


def broken(uri: str) -> list[str]:
    rules = audit(uri)
    assert report(rules)
    return [rule.name for rule in rules if rule.violations]


def rewrite(tables: str, folder: Path, name: str, change: Callable[[list[dict], dict], Any]) -> str:
    """A copy of the tables in which `change` has changed the rows and the info of one."""
    copied = folder / "tables"
    shutil.copytree(tables, copied)
    uri = str(copied / name)
    manifest, table = read_manifest(uri), read_table(uri)
    rows, info = table.to_pylist(), copy.deepcopy(manifest.info)
    change(rows, info)
    part = write_part(uri, pa.Table.from_pylist(rows, schema=table.schema))
    commit(uri, name, table.schema, [part], config=manifest.config, inputs=manifest.inputs, info=info)
    return str(copied)


def test_correct_tables_pass(prepared: str) -> None:
    rules = {rule.name: rule for rule in audit(prepared)}
    assert {name: rule.examples for name, rule in rules.items() if rule.violations} == {}
    info = read_manifest(prepared + "/sequences").info
    assert info["truncated_users"] > 0
    assert rules["targets"].rows == sum(info["requests"].values())
    assert rules["windows"].rows == sum(info["candidates"].values()) + info["interactions"]
    assert rules["queries"].rows == info["queries"] > 0


def some(rows: list[dict], least: int = 3) -> dict:
    """A user with so many behaviours and requests after them."""
    return next(row for row in rows if len(row["item_index"]) >= least and row["requests"][-1]["history_end"] >= least)


def future_in_history(rows: list[dict], info: dict) -> None:
    some(rows)["requests"][0]["history_end"] += 1


def other_candidate(rows: list[dict], info: dict) -> None:
    shown = some(rows)["requests"][0]
    shown["candidates"][0], shown["candidates"][1] = shown["candidates"][1], shown["candidates"][0]


def other_position(rows: list[dict], info: dict) -> None:
    some(rows)["requests"][0]["positions"][0] = 7


def other_label(rows: list[dict], info: dict) -> None:
    shown = some(rows)["requests"][0]
    shown["label_purchase"][2] = not shown["label_purchase"][2]


def other_query(rows: list[dict], info: dict) -> None:
    shown = some(rows)["requests"][0]
    shown["query_index"] = (shown["query_index"] + 1) % info["queries"]


def request_lost(rows: list[dict], info: dict) -> None:
    lost = some(rows)["requests"].pop()
    for name, count in (("requests", 1), ("candidates", 10)):
        info[name][lost["split"]] -= count
    clicks = set(lost["label_click"])
    info["requests_one_class"][lost["split"]] -= len(clicks) == 1


def other_behaviour(rows: list[dict], info: dict) -> None:
    some(rows)["label_click"][0] = False


def test_in_train(rows: list[dict], info: dict) -> None:
    shown = next(r for row in rows for r in row["requests"] if r["split"] == "test" and len(set(r["label_click"])) == 2)
    shown["split"] = "train"
    for name, count in (("requests", 1), ("candidates", 10)):
        info[name]["test"] -= count
        info[name]["train"] += count


test_in_train.__test__ = False  # type: ignore[attr-defined]


def one_class_not_counted(rows: list[dict], info: dict) -> None:
    info["requests_one_class"]["train"] -= 1


def count_of_the_future(rows: list[dict], info: dict) -> None:
    """One candidate's feature is as if one more click had been known."""
    place = info["features"].index("item_clicks_30d")
    some(rows)["requests"][0]["features"][place] += 0.5


def count_in_a_behaviour(rows: list[dict], info: dict) -> None:
    some(rows)["features"][0][info["features"].index("pair_seen")] = 5.0


def no_delay(rows: list[dict], info: dict) -> None:
    """Counts that end before they may, as if the log took no time to arrive."""
    info["search"]["delay_minutes"] = 0


def feature_missing(rows: list[dict], info: dict) -> None:
    some(rows)["requests"][0]["features"].pop()


def user_lost(rows: list[dict], info: dict) -> None:
    row = rows.pop()
    info["users"] -= 1
    info["interactions"] -= len(row["item_index"])
    for request in row["requests"]:
        info["requests"][request["split"]] -= 1
        info["candidates"][request["split"]] -= len(request["candidates"])
        info["requests_one_class"][request["split"]] -= len(set(request["label_click"])) == 1


PLANTED: list[tuple[Callable[[list[dict], dict], None], list[str]]] = [
    (future_in_history, ["history"]),
    (other_candidate, ["targets", "windows"]),
    (other_position, ["targets", "windows"]),
    (other_label, ["targets"]),
    (other_query, ["targets", "windows"]),
    (request_lost, ["targets"]),
    (other_behaviour, ["behaviours"]),
    (test_in_train, ["splits"]),
    (one_class_not_counted, ["counts"]),
    (count_of_the_future, ["windows"]),
    (count_in_a_behaviour, ["windows"]),
    (no_delay, ["windows"]),
    (feature_missing, ["windows"]),
    (user_lost, ["users"]),
]


@pytest.mark.parametrize(("plant", "expected"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_planted_violation_is_found(
    prepared: str, tmp_path: Path, plant: Callable[[list[dict], dict], None], expected: list[str]
) -> None:
    assert broken(rewrite(prepared, tmp_path, "sequences", plant)) == expected


def test_a_query_that_is_missing_is_found(prepared: str, tmp_path: Path) -> None:
    def drop(rows: list[dict], info: dict) -> None:
        rows.pop()

    uri = rewrite(prepared, tmp_path, "queries", drop)
    assert {"inputs", "queries", "counts"} <= set(broken(uri))
    assert read_table(uri + "/queries").schema.equals(QUERIES)
