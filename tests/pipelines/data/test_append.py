"""A log that grows by files: tables that are appended to are those of all files at once, up to the items' numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.tables import has_manifest, read_manifest, read_table
from pipelines.data.log import log_of
from pipelines.data.prepare import prepare
from pipelines.data.settings import read_config
from tests.audited import broken
from tests.pipelines.data.test_random_logs import ACTIONS, BEGIN, HOUR, ROWS, SEARCH, SOURCE, STEADY

Row = dict[str, Any]
DAYS = (8, 12, 17)
"""Hours at which the files of a log end."""
LAST = {"kind": "temporal", "val_days": 2 / 24, "test_days": 2 / 24}
"""Cuts that move with the log."""
NOTHING = {"user": None, "item": "a", "ms": BEGIN}

logs = st.lists(st.tuples(ROWS, st.integers(0, 2)), min_size=1, max_size=3)
"""Rows, and the file that they come with at the earliest."""
few = settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])


def files_of(log: list[tuple[list[Row], int]], twice: int) -> list[list[Row]]:
    """The rows of each file, some of which come late, and `twice` of the first file once more in the last."""
    every = [*((row, 0) for row in STEADY), *((row, late) for rows, late in log for row in rows)]
    hour = [(row["ms"] - BEGIN) // HOUR for row, _ in every]
    at = [max(late, sum(h >= end for end in DAYS)) for (_, late), h in zip(every, hour, strict=True)]
    files = [[NOTHING, *(row for (row, _), day in zip(every, at, strict=True) if day == number)] for number in range(3)]
    return [*files[:2], [*files[2], *files[0][:twice]]]


def source_of(requests: bool, late: bool, **items: Any) -> Any:
    labels = SOURCE["labels"] | (
        {"click": {"column": "click", "time": {"column": f"ms + late * {HOUR // 2}", "unit": "ms"}}} if late else {}
    )
    source = SOURCE | {"files": "log_*.jsonl", "labels": labels, "items": SOURCE["items"] | items}
    return log_of(source | ({"request": "request"} if requests else {}))


def write(folder: Path, number: int, rows: list[Row]) -> None:
    (folder / "items.csv").write_text("item,author\na,x\nb,x\nc,y\nd,\nnever,z\n")
    (folder / f"log_{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(source: Any, folder: Path, out: str, config: Row, append: bool) -> list[str]:
    lines: list[str] = []
    made = read_config({"min_matched": 0, "max_rejects": 1, **config})
    prepare(source, str(folder), str(folder / out), made, say=lines.append, append=append)
    return lines


def content(tables: Path) -> Row:
    """All that tables say, with items by their ids."""
    names = [name for name in ("events", "rejects", "items", "queries", "sequences") if has_manifest(str(tables / name))]
    rows = {name: read_table(str(tables / name)).to_pylist() for name in names}
    ids = [row["item_id"] for row in rows["items"]]
    assert [row["item_index"] for row in rows["items"]] == [*range(len(ids))]
    for row in rows["sequences"]:
        row["item_index"] = [ids[item] for item in row["item_index"]]
        for request in row.get("requests", ()):
            request["candidates"] = [ids[item] for item in request["candidates"]]
    rows["items"] = sorted(({**row, "item_index": 0} for row in rows["items"]), key=lambda row: row["item_id"])
    rows["rejects"].sort(key=str)
    infos = {name: read_manifest(str(tables / name)).info for name in names}
    for info in infos.values():
        info.pop("split_made_from", None)
        info.pop("items_hash", None)
    statistics = json.loads((tables / "statistics.json").read_text())
    return {"rows": rows, "infos": infos, "statistics": {**statistics, "hashes": None}}


def check(folder: Path, files: list[list[Row]], source: Any, config: Row) -> None:
    """Appends one file after the other and compares with all at once."""
    known: list[str] = []
    for number, rows in enumerate(files):
        write(folder, number, rows)
        make(source, folder, "grown", config, append=True)
        ids = read_table(str(folder / "grown/items"))["item_id"].to_pylist()
        assert ids[: len(known)] == known
        known = ids
    make(source, folder, "whole", config, append=False)
    grown, whole = content(folder / "grown"), content(folder / "whole")
    assert grown["rows"] == whole["rows"]
    assert grown["infos"] == whole["infos"]
    assert grown["statistics"] == whole["statistics"]
    assert broken(str(folder / "grown")) == {}


RETRIEVAL = st.fixed_dictionaries(
    {
        "kind": st.just("retrieval"), "core": st.integers(0, 3), "ties": st.sampled_from(["strict", "log_order"]),
        "behaviour": st.sampled_from([None, "click"]), "max_events": st.sampled_from([12, 100]),
        "split": st.sampled_from([LAST, {"kind": "leave_last_out"}]),
        "duplicates": st.sampled_from(["drop", "keep"]), "core_window": st.sampled_from(["all", "train"]),
    }
).filter(lambda given: given["core_window"] == "all" or given["split"] == LAST)  # fmt: skip


@few
@given(logs, st.integers(0, 9), RETRIEVAL, st.booleans(), st.booleans(), st.booleans())
def test_retrieval(
    tmp_path_factory: pytest.TempPathFactory, log: Any, twice: int, config: Row, requests: bool, late: bool, every: bool
) -> None:
    late = late and config["behaviour"] is not None and config["ties"] == "strict"
    source = source_of(requests, late, keep="all" if every else "used")
    if config["ties"] == "log_order":
        source = log_of({key: value for key, value in source.config.items() if key != "position"})
    check(tmp_path_factory.mktemp("log"), files_of(log, twice), source, config)
