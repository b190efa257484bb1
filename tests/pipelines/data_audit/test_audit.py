"""The audit passes correct tables and finds each kind of planted violation, and only that one."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs import audit as job
from models.tables import UserError, commit, sealed, unsealed, write_part
from pipelines.data.audit.rules import RULES, audit
from pipelines.data.kinds import KINDS
from pipelines.data.schemas import events_schema, items_schema, sequences_schema
from tests.audited import broken

LABELS = {"click": "bool"}


@dataclass
class Log:
    """A small log with its tables as plain rows, so that a test can plant one violation and write it."""

    parts: list[list[dict]]
    """Events per part."""
    catalogue: list[str] = field(default_factory=list)
    sequences: list[list[dict]] = field(default_factory=list)
    events_info: dict = field(default_factory=lambda: {"clock": True, "ties": "strict"})
    items_info: dict = field(default_factory=lambda: {"core": 0, "core_window": "all"})
    info: dict = field(default_factory=dict)
    inputs: dict = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> str:
        """Writes and commits the three tables."""
        events = events_schema(LABELS, self.numbers)
        hashes = {}
        for name, schema, parts, info in (
            ("events", events, self.parts, self.events_info),
            ("items", items_schema(), [[{"item_index": i, "item_id": x} for i, x in enumerate(self.catalogue)]], None),
            ("sequences", sequences_schema(events), self.sequences, self.info),
        ):
            uri = str(folder / name)
            Path(uri).mkdir(parents=True, exist_ok=True)
            written = [write_part(uri, pa.Table.from_pylist(rows, schema=schema)) for rows in parts]
            inputs = {**hashes, **self.inputs} if name == "sequences" else dict(hashes)
            info = self.items_info if info is None else info
            hashes[name] = commit(uri, name, schema, written, config={}, inputs=inputs, info=info).hash
        return str(folder)


def k_core(events: list[dict], core: int) -> tuple[set[str], set[str]]:
    """Users and items of the k-core, by removing one thing at a time."""
    events = list(events)
    while True:
        for key in ("user_id", "item_id"):
            names = [e[key] for e in events]
            few = sorted({name for name in names if names.count(name) < core})
            if few:
                events = [e for e in events if e[key] != few[0]]
                break
        else:
            return {e["user_id"] for e in events}, {e["item_id"] for e in events}


def tables_of(
    events: list[dict], parts: int = 2, core: int = 0, split: dict | None = None, ties: str = "strict", most: int = 1000
) -> Log:
    """Correct tables of `events`, by dicts and loops."""
    split = split or {"kind": "leave_last_out"}
    order = lambda e: (e["user_id"], e["timestamp_ms"], e["request_id"], e["position"], e["item_id"])  # noqa: E731
    events = sorted(events, key=order)
    names = sorted({e["user_id"] for e in events})
    owner = {name: i % parts for i, name in enumerate(names)}
    log = Log([[e for e in events if owner[e["user_id"]] == part] for part in range(parts)])
    users, items = k_core(events, core)
    log.catalogue = sorted(items)
    index = {item: i for i, item in enumerate(log.catalogue)}
    truncated = lost = 0
    for part in log.parts:
        rows = []
        for user in sorted({e["user_id"] for e in part} & users):
            mine = [e for e in part if e["user_id"] == user and e["item_id"] in index]
            truncated += len(mine) > most
            lost += max(len(mine) - most, 0)
            mine = mine[-most:]
            times = [e["timestamp_ms"] for e in mine]
            requests = []
            for i, event in enumerate(mine):
                if split["kind"] == "leave_last_out":
                    left = len(mine) - 1 - i
                    place = "train" if len(mine) < 3 or left > 1 else ("test", "val")[left]
                else:
                    starts = split["val_start_ms"], split["test_start_ms"]
                    place = ("train", "val", "test")[sum(times[i] >= start for start in starts)]
                requests.append(
                    {
                        "timestamp_ms": times[i],
                        "query": event["query"],
                        "history_end": i if ties == "log_order" else sum(t < times[i] for t in times),
                        "split": place,
                        "candidates": [index[event["item_id"]]],
                    }
                )
            extra = [k for k in event if k == "query" or k.startswith(("label_", "num_"))]
            row = {"user_id": user, "item_index": [index[e["item_id"]] for e in mine], "timestamp_ms": times}
            rows.append({**row, **{k: [e[k] for e in mine] for k in extra}, "requests": requests})
        log.sequences.append(rows)
    log.items_info |= {"core": core}
    log.info = {"kind": "retrieval", "split": split, "ties": ties, "max_events": most}
    log.info |= {"truncated_users": truncated, "truncated_events": lost}
    recount(log)
    return log


def recount(log: Log) -> None:
    """Counts in the manifest of sequences, from its rows."""
    rows = [row for part in log.sequences for row in part]
    splits = [r["split"] for row in rows for r in row["requests"]]
    log.info |= {
        "users": len(rows),
        "interactions": sum(len(row["item_index"]) for row in rows),
        "items": len(log.catalogue),
        "requests": {name: splits.count(name) for name in ("train", "val", "test")},
    }


def event(user: str, time: int, item: str, **more: object) -> dict:
    row = {"user_id": user, "request_id": "", "timestamp_ms": time, "item_id": item, "query": None, "position": 0}
    return {**row, "label_click": True, **more}


def small_log(seed: int = 0, users: int = 12, items: int = 9, events: int = 90) -> list[dict]:
    """Random events, many of them at the same time."""
    draw = random.Random(seed)
    rows = [
        event(f"u{draw.randrange(users):02}", draw.randrange(40) * 1000, f"i{draw.randrange(items)}", position=n)
        for n in range(events)
    ]
    return [{**row, "query": draw.choice([None, "red", "blue"])} for row in rows]


def test_what_kinds_are_without_are_rules() -> None:
    for kind in KINDS.values():
        assert set(kind.without) < set(RULES)


@pytest.mark.parametrize("ties", ["strict", "log_order"])
@pytest.mark.parametrize("split", [None, {"kind": "temporal", "val_start_ms": 25_000, "test_start_ms": 33_000}])
@pytest.mark.parametrize(("core", "most"), [(0, 1000), (4, 1000), (0, 5)])
def test_correct_tables_pass(tmp_path: Path, core: int, most: int, split: dict | None, ties: str) -> None:
    log = tables_of(small_log(), core=core, split=split, ties=ties, most=most)
    rules = {rule.name: rule for rule in audit(log.write(tmp_path))}
    assert {name: rule.examples for name, rule in rules.items() if rule.violations} == {}
    assert rules["events"].rows == sum(map(len, log.parts))
    assert rules["behaviours"].rows == rules["history"].rows == rules["splits"].rows == log.info["interactions"] > 0
    nothing = {*KINDS["retrieval"].without, "known"}
    assert list(rules) == [name for name in RULES if name not in nothing]
    assert nothing > {"tasks", "queries", "windows"}  # other kinds have what they are of
    assert ("core_window: all" in rules["catalogue"].note) == (core > 1 and split is not None)


def test_kept_repetitions_are_no_violation(tmp_path: Path) -> None:
    log = tables_of([event(f"u{u}", n // 3 * 1000, f"i{(u * n) % 7}") for u in range(40) for n in range(9)], most=8)
    distinct = sum(len({json.dumps(row) for row in part}) for part in log.parts)
    log.events_info["duplicates_kept"] = sum(map(len, log.parts)) - distinct
    assert broken(log.write(tmp_path)) == {}


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), parts=st.integers(1, 3), core=st.integers(0, 4), events=st.integers(30, 60))
@pytest.mark.long
def test_random_correct_tables_pass(
    tmp_path_factory: pytest.TempPathFactory, seed: int, parts: int, core: int, events: int
) -> None:
    log = tables_of(small_log(seed, users=6, items=5, events=events), parts=parts, core=core)
    if log.catalogue:
        assert broken(log.write(tmp_path_factory.mktemp("tables"))) == {}


def first(log: Log, least: int = 4) -> dict:
    """A user's row with at least so many behaviours at more than one time."""
    return next(r for part in log.sequences for r in part if len(set(r["timestamp_ms"])) >= least)


def tie_in_history(log: Log) -> None:
    rows = [row for part in log.sequences for row in part]
    row = next(r for r in rows if len(set(r["timestamp_ms"])) < len(r["timestamp_ms"]))
    i = next(i for i, r in enumerate(row["requests"]) if r["history_end"] < i)
    row["requests"][i]["history_end"] = i


def future_in_history(log: Log) -> None:
    first(log)["requests"][1]["history_end"] = 3


def history_out_of_bounds(log: Log) -> None:
    row = first(log)
    row["requests"][-1]["history_end"] = len(row["item_index"]) + 7


def history_missing(log: Log) -> None:
    first(log)["requests"][-1]["history_end"] = None


def shorter_label_list(log: Log) -> None:
    first(log)["label_click"].pop()


def other_label(log: Log) -> None:
    first(log)["label_click"][1] = False


def behaviours_out_of_order(log: Log) -> None:
    row = first(log)
    i = next(i for i in range(len(row["item_index"]) - 1) if row["item_index"][i] != row["item_index"][i + 1])
    row["item_index"][i], row["item_index"][i + 1] = row["item_index"][i + 1], row["item_index"][i]
    for n in (i, i + 1):
        row["requests"][n]["candidates"] = [row["item_index"][n]]


def behaviour_dropped(log: Log) -> None:
    """The user's last behaviour and its request vanish, a train request becomes test as it must."""
    row = next(r for part in log.sequences for r in part if len(r["item_index"]) > 5)
    for name in ("item_index", "timestamp_ms", "query", "label_click", "requests"):
        row[name].pop()
    row["requests"][-1]["split"], row["requests"][-2]["split"] = "test", "val"
    recount(log)


def candidate_outside(log: Log) -> None:
    first(log)["requests"][0]["candidates"] = [len(log.catalogue)]


def candidate_missing(log: Log) -> None:
    first(log)["requests"][0]["candidates"] = []


def other_target(log: Log) -> None:
    row = first(log)
    row["requests"][0]["candidates"] = [(row["item_index"][0] + 1) % len(log.catalogue)]


def test_in_train(log: Log) -> None:
    first(log)["requests"][-1]["split"] = "train"
    recount(log)


def wrong_count(log: Log) -> None:
    log.info["requests"] = {**log.info["requests"], "val": 999}


def user_twice_in_sequences(log: Log) -> None:
    log.sequences[1].append(copy.deepcopy(log.sequences[0][0]))
    recount(log)


def user_lost(log: Log) -> None:
    log.sequences[1].pop()
    recount(log)


def user_in_two_parts(log: Log) -> None:
    user = log.parts[0][-1]["user_id"]
    log.parts[1] = sorted([*log.parts[1], log.parts[0].pop()], key=lambda e: (e["user_id"], e["timestamp_ms"]))
    assert {e["user_id"] for e in log.parts[0]} & {e["user_id"] for e in log.parts[1]} == {user}


def duplicate_event(log: Log) -> None:
    """Both copies also stand in sequences, so that only the duplicate itself is wrong."""
    events = [e for part in log.parts for e in part]
    made = tables_of([*events, events[0]])
    log.parts, log.sequences, log.info = made.parts, made.sequences, made.info


def unsorted_events(log: Log) -> None:
    log.parts[0][0], log.parts[0][1] = log.parts[0][1], log.parts[0][0]


def negative_time(log: Log) -> None:
    events = [e for part in log.parts for e in part]
    events[0]["timestamp_ms"] = -5
    made = tables_of(events)
    log.parts, log.sequences, log.info = made.parts, made.sequences, made.info


def item_order(log: Log) -> None:
    """Two items change places, and every index with them."""
    log.catalogue[0], log.catalogue[1] = log.catalogue[1], log.catalogue[0]
    swap = {0: 1, 1: 0}
    for row in (row for part in log.sequences for row in part):
        row["item_index"] = [swap.get(i, i) for i in row["item_index"]]
        for r in row["requests"]:
            r["candidates"] = [swap.get(i, i) for i in r["candidates"]]


def other_core(log: Log) -> None:
    log.items_info["core"] = 8


def invented_item(log: Log) -> None:
    log.catalogue.append("z-never-seen")
    recount(log)


def other_inputs(log: Log) -> None:
    log.inputs = {"items": "0" * 64}


def kept_otherwise(log: Log) -> None:
    """Duplicates are kept, but not as many as the manifest says."""
    log.events_info = {**log.events_info, "duplicates_kept": 3}


def truncated_otherwise(log: Log) -> None:
    log.info["truncated_events"] = 7


PLANTED: list[tuple[Callable[[Log], None], list[str]]] = [
    (tie_in_history, ["history"]),
    (future_in_history, ["history"]),
    (history_out_of_bounds, ["history"]),
    (history_missing, ["history"]),
    (shorter_label_list, ["behaviours"]),
    (other_label, ["behaviours"]),
    (behaviours_out_of_order, ["behaviours"]),
    (behaviour_dropped, ["behaviours"]),
    (candidate_outside, ["targets"]),
    (candidate_missing, ["targets"]),
    (other_target, ["targets"]),
    (test_in_train, ["splits"]),
    (wrong_count, ["counts"]),
    (user_twice_in_sequences, ["users"]),
    (user_lost, ["users"]),
    (user_in_two_parts, ["users"]),
    (duplicate_event, ["duplicates"]),
    (unsorted_events, ["events"]),
    (negative_time, ["events"]),
    (item_order, ["catalogue"]),
    (invented_item, ["catalogue"]),
    (other_inputs, ["inputs"]),
]
PLANTED += [(kept_otherwise, ["duplicates"]), (truncated_otherwise, ["counts"])]
test_in_train.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(("plant", "expected"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_planted_violation_is_found(tmp_path: Path, plant: Callable[[Log], None], expected: list[str]) -> None:
    log = tables_of(small_log(3))
    plant(log)
    assert [*broken(log.write(tmp_path))] == expected


def test_wrong_core_is_found(tmp_path: Path) -> None:
    """Tables of the 2-core that claim to be of the 8-core: items and users are kept wrongly."""
    log = tables_of(small_log(3), core=2)
    other_core(log)
    assert [*broken(log.write(tmp_path))] == ["users", "catalogue"]


def test_item_dropped_by_core_is_found(tmp_path: Path) -> None:
    """One step of the k-core instead of the loop keeps what the loop drops."""
    events = [event("a", t, f"i{t % 2}") for t in range(4)] + [event("b", t, f"i{t % 2}") for t in range(4)]
    events += [event("c", t, "i9") for t in range(2)] + [event("a", 9, "i9")]  # i9: 3 events, two of a lost user
    log = tables_of(events, core=3)
    assert log.catalogue == ["i0", "i1"]
    assert broken(log.write(tmp_path / "right")) == {}
    log.catalogue.append("i9")
    recount(log)
    rules = {rule.name: rule for rule in audit(log.write(tmp_path / "wrong"))}
    assert rules["catalogue"].examples == ["item i9: in the catalogue, but not in the 3-core of the events"]


def test_wrong_temporal_split_is_found(tmp_path: Path) -> None:
    split = {"kind": "temporal", "val_start_ms": 25_000, "test_start_ms": 33_000}
    log = tables_of(small_log(), split=split)
    row = next(r for part in log.sequences for r in part if r["requests"][-1]["split"] == "test")
    row["requests"][-1]["split"] = "train"
    recount(log)
    assert [*broken(log.write(tmp_path))] == ["splits"]


def test_job_prints_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tables_of(small_log())
    uri = log.write(tmp_path)
    job.run(job.Config(tables=uri))
    assert "No violations" in capsys.readouterr().out
    row = first(log)
    future_in_history(log)
    log.write(tmp_path)
    with pytest.raises(UserError, match="1 violation of history"):
        job.run(job.Config(tables=uri))
    assert f"history: user {row['user_id']}, request 1" in capsys.readouterr().out


def damage(folder: Path, kind: str) -> None:
    part = next((folder / "sequences").glob("*.parquet"))
    manifest = folder / "sequences" / "manifest.json"
    if kind == "truncated":
        part.write_bytes(part.read_bytes()[:-20])
    elif kind == "replaced":
        content = bytearray(part.read_bytes())
        content[50] ^= 255
        part.write_bytes(bytes(content))
    elif kind == "missing":
        part.unlink()
    elif kind == "foreign":
        schema = pa.schema([("user_id", pa.string())])
        written = write_part(str(folder / "sequences"), pa.table({"user_id": ["a"]}, schema=schema))
        info = unsealed(manifest.read_text())["info"]
        commit(str(folder / "sequences"), "sequences", schema, [written], config={}, inputs={}, info=info)
    elif kind == "no manifest":
        manifest.unlink()
    elif kind == "damaged manifest":
        manifest.write_text(manifest.read_text()[:100])
    else:
        info = {
            "no cut times": {"split": {"kind": "temporal"}},
            "cut times of text": {"split": {"kind": "temporal", "val_start_ms": "a", "test_start_ms": "b"}},
            "other behaviour": {"behaviour": "purchase"},
        }[kind]
        content = unsealed(manifest.read_text())
        content["info"] |= info
        manifest.write_text(sealed(content))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("truncated", "bytes, its manifest says"),
        ("replaced", "its SHA-256 is"),
        ("missing", "missing"),
        ("no cut times", "no known split"),
        ("cut times of text", "no known split"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, kind: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    uri = tables_of(small_log()).write(tmp_path)
    damage(tmp_path, kind)
    with pytest.raises(UserError):
        job.run(job.Config(tables=uri))
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no manifest", "is not a table"),
        ("damaged manifest", "manifest.json is damaged"),
        ("foreign", "is not what jobs.prepare writes"),
        ("other behaviour", "is not what jobs.prepare writes: .*label_purchase"),
    ],
)
def test_folder_that_is_no_table_is_refused(tmp_path: Path, kind: str, says: str) -> None:
    uri = tables_of(small_log()).write(tmp_path)
    damage(tmp_path, kind)
    with pytest.raises(UserError, match=says):
        job.run(job.Config(tables=uri))
