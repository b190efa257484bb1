"""The requests of a search log, and `prepare` from raw files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from models.storage.tables import UserError, join, read_manifest, read_table, write_part
from pipelines.data.events.columns import Vocabulary, read_part
from pipelines.data.prepare import prepare
from pipelines.data.prepare_config import PrepareConfig
from pipelines.data.reading.log import load_source
from pipelines.data.reading.times import Time
from pipelines.data.schemas import events_schema
from pipelines.data.search.config import SearchConfig
from pipelines.data.search.features import IDS
from pipelines.data.search.sequences import SearchBuilder
from pipelines.data.sequences.builder import Lookups
from pipelines.data.settings import read_config
from tests.fixtures.audited import broken

SCHEMA = events_schema(
    {"click": "bool", "dwell": "float32", "buy": "bool"}, ["price"], ["city"]
)
LATE = events_schema(
    {"click": "bool", "dwell": "float32", "buy": "bool"}, ["price"], ["city"], ["click"]
)
CATALOGUE, QUERIES = ["a", "b", "c"], ["p", "q", "r"]
LOOKUPS = Lookups(
    *[Vocabulary.from_ids(pa.array(values)) for values in (CATALOGUE, QUERIES)]
)
HOUR, DAY = 3_600_000, 86_400_000
KEY = ("user_id", "timestamp_ms", "request_id", "position", "item_id")


def builder_for(
    split: tuple[int, int] | None, max_events: int, schema: pa.Schema = SCHEMA
) -> SearchBuilder:
    kind = {"kind": "leave_last_out"}
    if split:
        kind = {"kind": "temporal", "val_start_ms": split[0], "test_start_ms": split[1]}  # type: ignore[dict-item]
    return SearchBuilder(
        schema,
        kind,
        max_events,
        pa.schema([]),
        ["click", "buy"],
        clock=False,
        search=SearchConfig(page_size=2),
    )


def part_of(rows: list[dict], folder: str, schema: pa.Schema = SCHEMA) -> pa.Table:
    rows = sorted(rows, key=lambda row: tuple(row[name] for name in KEY))
    return read_part(
        join(
            folder, write_part(folder, pa.Table.from_pylist(rows, schema=schema)).path
        ),
        None,
        IDS,
    )


def test_an_empty_part_gives_an_empty_table(tmp_path: Path) -> None:
    events = part_of([], str(tmp_path))
    part = builder_for(None, 10).build(events, LOOKUPS)
    assert part.table is not None
    assert part.table.num_rows == 0
    assert part.count == Counter()


SOURCE = {
    "files": "log_*.jsonl",
    "user": "user",
    "request": "search",
    "query": "query",
    "item": "shown",
    "time": {"column": "ms", "unit": "ms"},
    "explode": ["shown"],
    "labels": {
        "buy": "coalesce(array_contains(bought, shown), false)",
        "click": {"column": "coalesce(array_contains(clicked, shown), false)"},
    },
    "items": {"files": "items.csv", "item": "item", "texts": ["title"]},
    "prepare": {
        "kind": "search",
        "core": 0,
        "behaviour": "click",
        "split": {"kind": "temporal", "val_fraction": 0.2, "test_fraction": 0.2},
        "search": {"windows_days": [1, 7], "delay_minutes": 30},
    },
}


def searches(count: int = 120, seed: int = 0) -> list[dict[str, Any]]:
    """A raw log of searches; some have no click, some only clicks, some no query, a few
    no results.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        day = int(rng.integers(20))
        shown = [f"i{n}" for n in rng.choice(15, rng.integers(1, 6), replace=False)] + [
            "new"
        ] * (day > 17)
        shown = [] if number % 40 == 7 else shown
        clicked = [item for item in shown if rng.random() < 0.4]
        rows.append(
            {
                "user": f"u{rng.integers(12)}",
                "search": f"s{number:04}",
                "ms": (18_000 + day) * DAY + int(rng.integers(24)) * HOUR,
                "query": ["red", "blue", "red lamp", None][rng.integers(4)],
                "shown": shown,
                "clicked": clicked,
                "bought": clicked[:1],
            }
        )
    return rows


def write_log(
    folder: Path, rows: list[dict[str, Any]], partitions: int | None = 3, **changes: Any
) -> tuple[Any, PrepareConfig, str]:
    """Raw files and their source: (source, config, input)."""
    raw = folder / "raw"
    raw.mkdir()
    (raw / "log_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (raw / "items.csv").write_text(
        "item,title\n" + "".join(f"i{n},title {n}\n" for n in range(10))
    )
    content = SOURCE | {"prepare": SOURCE["prepare"] | changes}
    (folder / "source.yaml").write_text(yaml.safe_dump(content))
    source, defaults = load_source(str(folder / "source.yaml"))
    return (
        source,
        read_config(defaults, {"partitions": partitions, "max_rejects": 0.1}),
        str(raw),
    )


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize(
    ("window", "partitions"), [("all", 3), ("train", None)]
)  # by Ray, and by the driver alone
def test_a_raw_log_becomes_tables_that_the_audit_proves(
    tmp_path: Path, window: str, partitions: int | None
) -> None:
    rows = searches()
    source, config, raw = write_log(tmp_path, rows, partitions, core_window=window)
    out = str(tmp_path / "out")
    statistics = prepare(source, raw, out, config, report=lambda line: None)
    assert broken(out) == {}

    assert len(read_manifest(join(out, "events")).files) > (1 if partitions else 0)
    assert read_table(join(out, "queries"), "queries")["query"].to_pylist() == [
        "blue",
        "red",
        "red lamp",
    ]
    items = read_table(join(out, "items"), "items")["item_id"].to_pylist()
    info = read_manifest(join(out, "sequences")).info
    assert (info["kind"], info["labels"], info["windows"]) == (
        "search",
        ["click", "buy"],
        ["1d", "7d"],
    )
    assert sum(statistics["requests_one_class"].values()) > 0
    empty = sum(
        not row["shown"] for row in rows
    )  # a search that showed nothing is a reject, with its reason
    assert sum(statistics["raw"]["reject_reasons"].values()) == empty > 0
    outside = sum(item not in items for row in rows for item in row["shown"])
    assert statistics["candidates_outside"] == outside
    assert (outside > 0) == (window == "train")

    said: list[str] = []
    assert prepare(source, raw, out, config, report=said.append) == statistics
    assert [
        line for line in said if "up to date" in line or line.startswith("warning: ")
    ] == said


def test_a_log_of_orders_has_no_windows(tmp_path: Path) -> None:
    rows = [row | {"ms": number} for number, row in enumerate(searches(60))]
    source, _, raw = write_log(tmp_path, rows)
    source = replace(source, time=Time("ms", "order"))
    config = read_config(
        SOURCE["prepare"] | {"split": {"kind": "leave_last_out"}}, {"max_rejects": 0.1}
    )
    prepare(source, raw, str(tmp_path / "out"), config, report=lambda line: None)
    info = read_manifest(str(tmp_path / "out" / "sequences")).info
    assert info["features"] == ["position", "page"]
    assert info["windows"] == []
    assert info["split"] == {"kind": "leave_last_out"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"behaviour": None}, "set behaviour to one of: buy, click"),
        ({"core": 5}, "use --core 0"),
        ({"ties": "log_order"}, "use --ties strict"),
        ({"kind": "serch"}, "one of retrieval, search"),
        (
            {"search": {"windows": [1]}},
            "prepare.search.windows'; the nearest key is 'prepare.search.windows_days'",
        ),
        ({"search": [1]}, "a mapping"),
        ({"split": "temporal"}, "a mapping"),
    ],
)
def test_settings_that_a_search_log_cannot_have(
    tmp_path: Path, changes: dict, words: str
) -> None:
    def attempt() -> None:
        source, config, raw = write_log(tmp_path, searches(5), **changes)
        prepare(source, raw, str(tmp_path / "out"), config, report=lambda line: None)

    with pytest.raises(UserError, match=words):
        attempt()


def results(**changes: Any) -> list[dict]:
    """Four results of one request, a second apart, clicks on the first and the third."""
    row = {"user_id": "u", "request_id": "r", "query": "p"} | changes
    return [
        row
        | {
            "timestamp_ms": 1000 * n,
            "item_id": "abca"[n],
            "position": n,
            "label_click": n % 2 == 0,
        }
        for n in range(4)
    ]


def built(
    rows: list[dict], folder: Path, builder: SearchBuilder | None = None
) -> tuple[list[dict], Counter[str]]:
    """Requests of the only user, and what was counted."""
    builder = builder or builder_for(None, 100)
    part = builder.build(part_of(rows, str(folder)), LOOKUPS)
    assert part.table is not None
    return part.table["requests"].to_pylist()[0], part.count


def test_results_with_times_of_their_own_are_one_request(tmp_path: Path) -> None:
    [request], count = built(results(), tmp_path)
    assert (request["timestamp_ms"], request["history_end"]) == (0, 0)
    assert request["candidates"] == [CATALOGUE.index(item) for item in "abca"]
    assert request["label_click"] == [True, False, True, False]
    assert (count["requests_spread"], count["max_spread_ms"]) == (1, 3000)


def test_a_request_between_the_results_of_another_sees_the_clicks_before_it(
    tmp_path: Path,
) -> None:
    between = [row | {"request_id": "s", "timestamp_ms": 1500} for row in results()[:1]]
    requests, _ = built(results() + between, tmp_path)
    assert [
        (r["timestamp_ms"], r["history_end"], len(r["candidates"])) for r in requests
    ] == [(0, 0, 4), (1500, 1, 1)]


def test_without_request_ids_the_log_is_cut_by_time(tmp_path: Path) -> None:
    requests, count = built(results(request_id=""), tmp_path)
    assert [r["history_end"] for r in requests] == [0, 1, 1, 2]
    assert count["requests_spread"] == 0


def test_a_request_id_that_comes_again_is_an_error(tmp_path: Path) -> None:
    again = [row | {"timestamp_ms": row["timestamp_ms"] + DAY} for row in results()]
    builder = builder_for(None, 100)
    limited = replace(builder, clock=True, search=SearchConfig(windows_days=[]))
    with pytest.raises(
        UserError,
        match=r"request 'r' of user 'u'.* 1,440\.\d minutes .*max_request_minutes 60;.*session",
    ):
        built(results() + again, tmp_path, limited)
    built(results(), tmp_path, limited)
    built(results() + again, tmp_path, builder)  # places of an order are no minutes


def test_a_click_is_in_histories_from_when_it_is_known(tmp_path: Path) -> None:
    """Shown at 0 and 2 s; the first is clicked at 9 s, the second at 3 s: requests at
    3, 4 and 10 s.
    """
    first, _, second, _ = (
        row | {"request_id": f"r{n}"} for n, row in enumerate(results())
    )
    clicks = [first | {"known_click": 9000}, second | {"known_click": 3000}]
    later = [
        first | {"request_id": f"s{n}", "timestamp_ms": n, "label_click": False}
        for n in (3000, 4000, 10_000)
    ]
    events = part_of(clicks + later, str(tmp_path), LATE)
    part = builder_for(None, 100, LATE).build(events, LOOKUPS)
    assert part.table is not None
    [user] = part.table.to_pylist()
    assert (user["timestamp_ms"], user["known_click"]) == (
        [2000, 0],
        [3000, 9000],
    )  # as they become known
    ends = {
        request["timestamp_ms"]: request["history_end"] for request in user["requests"]
    }
    assert ends == {0: 0, 2000: 0, 3000: 0, 4000: 1, 10_000: 2}
