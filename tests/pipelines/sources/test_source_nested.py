"""Fields of objects in JSON lines and Parquet, against json.loads and a walk along the keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pipelines.data.sources import readers
from pipelines.data.sources.mapping import Items, Mapping, Users
from pipelines.data.sources.readers import Reading, read_frames

from jobs import audit, prepare
from models.tables import UserError

FIELDS = ("user.id", "item.sku", "item", "item.price", "geo.city.name", "a.b", "late.x", "odd.y", "never.z.z")
LISTS = ("shown.sku", "shown.by.score", "basket.lines.sku", "tags.all")


def plain(**changes: Any) -> Mapping:
    given = {"files": "log.*", "user": "user.id", "item": "item.sku", "time": {"column": "ts", "unit": "order"}}
    return Mapping(**{**given, **changes})


def as_text(value: Any) -> str | None:
    """A value of JSON as text columns have it."""
    if isinstance(value, bool | dict | list):
        return json.dumps(value, ensure_ascii=False)
    return None if value is None else str(value)


def expected(row: dict, name: str, listed: bool = False) -> Any:
    """The column at the top, else the field at the end of the keys, null where they lead to nothing."""
    if row.get(name) is not None:
        return row[name]
    value: Any = row
    keys = name.split(".")
    for number, key in enumerate(keys):
        if listed and isinstance(value, list):
            return [expected(each, ".".join(keys[number:])) if isinstance(each, dict) else None for each in value]
        value = value.get(key) if isinstance(value, dict) else None
    return value


def odd_rows(count: int, seed: int) -> list[dict]:
    """Rows of a tracker that is not careful: types change, objects are empty lists, null, text or not there."""
    rng = np.random.default_rng(seed)

    def some(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    rows = []
    for n in range(count):
        line = some({"sku": f"s{n}", "by": {"score": n}}, {"sku": n}, {"sku": None}, {}, None)
        row = {
            "ts": n,
            "user": some({"id": n % 7}, {"id": f"u{n % 7}"}, {"id": None}, None, {}),
            "item": some({"sku": n, "price": 3.5}, {"sku": "é", "more": {"sku": 1}}, {"price": "7"}, {}, None),
            "geo": some({"city": {"name": "Oslo"}}, {"city": None}, {"city": []}, [], "", {"city": "Oslo"}, 7),
            "a.b": some("top", None),
            "a": some({"b": "field"}, {"c": 1}),
            "shown": some([line, {"sku": "x"}], [], None, [line]),
            "basket": some({"lines": [line]}, {"lines": []}, None, {"lines": "none"}),
            "tags": some({"all": ["x", 7, None]}, {"all": []}, {}),
            "odd": {"y": True},
            "never": None,
        }
        rows.append({key: value for key, value in row.items() if rng.random() < 0.9} | {"ts": n})
    return [*rows, {"ts": count, "late": {"x": 5}}]


@pytest.mark.parametrize("block", [300, 3000, 8 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_fields_are_what_json_loads_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, seed: int
) -> None:
    """Whatever the types within a file or a block of it; a whole object is its text, beside its fields."""
    monkeypatch.setattr(readers, "TEXT_BLOCK", block)
    rows = odd_rows(250, seed)
    lines = [json.dumps(row, ensure_ascii=bool(n % 2)) for n, row in enumerate(rows)]
    (tmp_path / "log.jsonl").write_text("\n".join([*lines[:9], "oops", "", *lines[9:]]))
    reading = Reading((*FIELDS, *LISTS), lists=frozenset(LISTS), required=())
    frames = list(read_frames(str(tmp_path), "log.jsonl", reading))
    assert [why[:4] for frame in frames for _, why, _ in frame.broken] == ["row:"]
    found = [row for frame in frames for row in frame.rows.to_dicts()]
    assert [row.pop(readers.ROW) for row in found] == [n for n in range(252) if n != 9]
    assert len(found) == len(rows)
    for row, mine in zip(rows, found, strict=True):
        for name in FIELDS:
            assert mine[name] == as_text(expected(row, name)), (name, row)
        for name in LISTS:
            value = expected(row, name, listed=True)
            assert mine[name] == ([as_text(each) for each in value] if isinstance(value, list) else None), (name, row)


def test_fields_of_many_files_of_different_types(tmp_path: Path) -> None:
    """Files of one log, in JSON lines and Parquet: ids that are numbers in one and text in another, a field that begins
    late, is null or not in a whole file. All give the same events."""
    files = {
        "1": [{"ts": n, "user": {"id": n}, "item": {"sku": "a", "price": 1}, "device": None} for n in range(200)],
        "2": [{"ts": n, "user": {"id": f"u{n}"}, "item": {"sku": 7}} for n in range(150)],
        "3": [{"ts": n, "user": {"id": "x"}, "item": {"sku": "b", "price": None}, "device": {}} for n in range(9)],
        "4": [{"ts": 1, "user": {"id": "x"}, "item": {"sku": "b", "price": 2.5}, "device": {"type": "phone"}}],
    }
    files["2"][149]["item"]["price"] = "3.25"
    found = {}
    for kind in ("jsonl", "parquet"):
        folder = tmp_path / kind
        folder.mkdir()
        for name, rows in files.items():
            if kind == "jsonl":
                (folder / f"log.{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            else:
                table = pa.Table.from_pylist([{**row, "unread": {"text": "x" * 100}} for row in rows])
                pq.write_table(table if name != "3" else table.drop_columns("device"), folder / f"log.{name}.parquet")
        source = plain(numbers={"price": "item.price"}, categories={"device": "device.type"})
        blocks = [b for file in source.event_files(str(folder)) for b in source.read_events(str(folder), file)]
        assert not any(block.rejects.num_rows for block in blocks)
        found[kind] = pa.concat_tables(block.events for block in blocks)
    assert found["jsonl"].equals(found["parquet"])
    names = {"user_id": "user.id", "item_id": "item.sku", "num_price": "item.price", "cat_device": "device.type"}
    for name, path in names.items():
        values = [expected(row, path) for rows in files.values() for row in rows]
        if name == "num_price":
            values = [None if value is None else float(value) for value in values]
        else:
            values = [as_text(value) for value in values]
        assert found["parquet"][name].to_pylist() == values


def test_lists_of_objects_are_exploded(tmp_path: Path) -> None:
    rows = [
        {"ts": n, "user": {"id": "a"}, "cart": {"lines": [{"sku": k, "n": k + n} for k in range(3)]}} for n in range(4)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    columns = ["cart.lines.sku", "cart.lines.n"]
    changes = {"item": columns[0], "explode": {"columns": columns}, "numbers": {"n": columns[1]}}
    changes |= {"transforms": {"cart.lines.sku": {"pad": 3}}}
    for file in ("log.jsonl", "log.parquet"):
        (block,) = plain(**changes).read_events(str(tmp_path), file)
        assert block.events["item_id"].to_pylist() == [f"{k:03}" for _ in range(4) for k in range(3)]
        assert block.events["num_n"].to_pylist() == [k + n for n in range(4) for k in range(3)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_items_and_users_are_of_fields(tmp_path: Path, kind: str) -> None:
    rows = [
        {"about": {"id": n, "title": f"T{n}", "tags": [{"name": "x"}, {"name": "y"}], "a": {"b": "c"}}, "n": n}
        for n in range(3)
    ]
    if kind == "jsonl":
        (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "items.parquet")
    texts = {"title": "about.title", "tags": "about.tags.name"}
    items = Items("items.*", "about.id", texts=texts, lists=["about.tags.name"], transforms={"about.id": {"pad": 2}})
    (block,) = plain(items=items).read_items(str(tmp_path), f"items.{kind}")
    assert block.rows.to_pylist()[2] == {"item_id": "02", "text_title": "T2", "text_tags": "x y"}
    users = Users("items.*", "about.id", {"b": "about.a.b"}).read(str(tmp_path))
    assert users.rows.to_pylist()[1] == {"user: ": "1", "user: b": "c"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_wrong_path_is_answered_with_those_that_are_there(tmp_path: Path, kind: str) -> None:
    rows = [{"ts": 1, "user": {"id": 1, "type": "x"}, "item": {"sku": "a", "by.x": 1}, "a.b": 2, "l": [{"x": 1}]}] * 3
    if kind == "jsonl":
        (tmp_path / "log.jsonl").write_text("\n".join([*map(json.dumps, rows), "oops", ""]))
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    present = "a.b, item.sku, l.x, ts, user.id, user.type"
    for wrong, near in {
        "item.skuu": "item.sku",
        "sku": "item.sku",
        "userid": "user.id",
        "item.by.x": "item.sku",
    }.items():
        with pytest.raises(UserError) as caught:
            list(plain(item=wrong).read_events(str(tmp_path), f"log.{kind}"))
        said = str(caught.value)
        assert f"has no column '{wrong}'; the nearest is '{near}' of " in said
        assert sorted(said.split("' of ")[1].split("; correct")[0].split(", ")) == present.split(", ")
        assert "\n" not in said
    (block,) = plain(categories={"x": "user.typ"}).read_events(str(tmp_path), f"log.{kind}")
    assert block.missing["user.typ"].startswith("the nearest is 'user.type' of ")


def test_a_path_through_a_list_says_so(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"ts": 1, "user": {"id": 1}, "item": [{"sku": "a"}]}))
    with pytest.raises(UserError, match=r"no column 'item.sku'; its values are in lists; name it in 'explode', or"):
        list(plain().read_events(str(tmp_path), "log.jsonl"))
    with pytest.raises(UserError, match=r"no column 'user.id'; its values are in no lists; take it out of 'explode'"):
        list(plain(item="user.id", explode={"columns": ["user.id"]}).read_events(str(tmp_path), "log.jsonl"))


def test_only_wanted_fields_of_parquet_are_read(tmp_path: Path) -> None:
    rows = [{"ts": n, "user": {"id": n, "bio": "x" * 100}, "l": [{"a": 1, "b": {"c": 2, "d": 3}}]} for n in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    with pq.ParquetFile(tmp_path / "log.parquet") as parquet:
        leaves = readers._leaves(parquet, [("ts",), ("user", "id"), ("l", None, "b", "d")])
    assert leaves == ["l.list.element.b.d", "ts", "user.id"] or leaves == ["ts", "user.id", "l.list.element.b.d"]


def test_a_list_of_paths_needs_names() -> None:
    with pytest.raises(ValueError, match=r"'numbers' lists 'item.price', and a name has no dot; write {price: item.pr"):
        plain(numbers=["item.price"])


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """An object with its fields at the top, by their dotted names; of a list of objects a list of each field."""
    if isinstance(value, dict):
        return {key: v for name, each in value.items() for key, v in flat(each, f"{path}.{name}".strip(".")).items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        found = [flat(each, path) for each in value]
        return {key: [each.get(key) for each in found] for key in dict.fromkeys(k for each in found for k in each)}
    return {path: value}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_nested_log_gives_the_tables_of_a_flat_one(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log of a web tracker, several files with items and users of their own, beside the same log with the dotted
    names at the top: one mapping for both."""
    rng = np.random.default_rng(3)
    events = [
        {
            "ts": 1_700_000_000_000 + n * 600_000,
            "user": {"id": f"u{rng.integers(30)}"},
            "context": {"page": {"id": f"p{n}"}, **({"device": {"type": "phone"}} if n % 3 else {})},
            "items": [
                {"sku": int(k), "price": round(float(k) / 3, 2), "clicked": bool(k % 2)}
                for k in rng.choice(40, int(rng.integers(1, 5)), replace=False)
            ],
        }
        for n in range(600)
    ]
    described = [{"id": n, "about": {"title": f"T {n}", "brand": {"name": f"B{n % 3}"}}} for n in range(40)]
    members = [{"user": {"id": f"u{n}", "geo": {"city": ["Oslo", "Lima"][n % 2]}}} for n in range(30)]
    mapping = {
        "layout": "mapping",
        "files": "log.*",
        "user": "user.id",
        "item": "items.sku",
        "explode": {"columns": ["items.sku", "items.price", "items.clicked"]},
        "time": {"column": "ts", "unit": "ms"},
        "request": "context.page.id",
        "labels": {"click": {"column": "items.clicked"}},
        "numbers": {"price": "items.price"},
        "categories": {"device": "context.device.type"},
        "transforms": {"items.sku": {"pad": 3}},
        "items": {
            "files": "items.*",
            "item": "id",
            "texts": {"title": "about.title"},
            "attributes": {"brand": "about.brand.name"},
            "transforms": {"id": {"pad": 3}, "about.title": {"lower": True}},
        },
        "users": {"files": "members.*", "user": "user.id", "attributes": {"city": "user.geo.city"}},
        "prepare": {"core": 0, "behaviour": "click"},
    }
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(mapping))
    files = {"log.1": events[:250], "log.2": events[250:], "items": described, "members": members}
    said, tables = {}, {}
    for shape in ("nested", "flat"):
        raw, output = tmp_path / shape, str(tmp_path / f"tables-{shape}")
        raw.mkdir()
        for name, rows in files.items():
            written = [flat(row) for row in rows] if shape == "flat" else rows
            if kind == "jsonl":
                (raw / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
            else:
                pq.write_table(
                    pa.Table.from_pylist(written, pa.table(pl.DataFrame(written, infer_schema_length=None)).schema),
                    raw / f"{name}.parquet",
                )
        config = prepare.Config(source=str(tmp_path / "shop.yaml"), input=str(raw), output=output)
        capsys.readouterr()
        prepare.run(replace(config, dry_run=True))
        said[shape] = capsys.readouterr().out.split("next:")[0]
        prepare.run(config)
        audit.run(audit.Config(tables=output))
        names = sorted(path.parent.name for path in Path(output).glob("*/manifest.json"))
        assert {"events", "items", "sequences"} <= set(names)
        tables[shape] = {
            name: pl.read_parquet(f"{output}/{name}/*.parquet")
            for name in names
            if any(Path(output, name).glob("*.parquet"))
        }
    assert said["nested"] == said["flat"]
    assert "item_id       items.sku" in said["nested"]
    assert tables["nested"].keys() == tables["flat"].keys()
    for name, table in tables["nested"].items():
        assert table.equals(tables["flat"][name]), name
    assert len(tables["nested"]["events"]) == sum(len(event["items"]) for event in events)
    assert tables["nested"]["items"]["text_title"].null_count() == 0
