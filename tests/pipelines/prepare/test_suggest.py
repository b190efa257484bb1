"""A suggested mapping names the columns of users, items and times, or asks about them."""

from __future__ import annotations

import gzip
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from core.errors import UserError
from jobs import cli, prepare
from pipelines.prepare.reading.log import parse_log
from pipelines.prepare.reading.rows import read_events
from pipelines.prepare.suggest.suggest import suggest

ROOT = Path(__file__).parents[3]
SHARED = ROOT / "../shared"
SALES = "customer,article,at\n" + "".join(
    f"c{n % 7},a{n % 5},{1_700_000_000 + n}\n" for n in range(40)
)


def suggest_and_read(
    folder: Path, files: dict[str, str | bytes], kind: str | None = None
) -> tuple[Any, list[str], pl.DataFrame]:
    """Return the mapping suggested for files, its doubtful keys and the events read."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    suggestion = suggest(str(folder), kind)
    mapping = yaml.safe_load(suggestion.text)
    log = parse_log({k: v for k, v in mapping.items() if k != "prepare"})
    [file, *_] = log.event_files(str(folder))
    blocks = list(read_events(log, str(folder), file))
    assert sum(block.rejects.height for block in blocks) == 0
    keys = [line.split(":")[0].strip() for line in suggestion.doubts]
    return mapping, keys, pl.concat([block.rows for block in blocks])


LOGS = yaml.safe_load((Path(__file__).parent / "cases/suggested.yaml").read_text())


@pytest.mark.parametrize("name", LOGS)
def test_columns_are_recognized_or_in_doubt(tmp_path, name):
    log = LOGS[name]

    mapping, doubts, events = suggest_and_read(tmp_path, {log["file"]: log["rows"]})

    item = mapping.get("sequence", mapping.get("item"))
    time = mapping.get("time", {})
    notation = time.get("format", time.get("unit", ""))
    assert [mapping["user"], item, notation, " ".join(doubts)] == log["expected"]
    assert mapping.get("request") == log.get("request")
    if "labels" in log:
        assert sorted(mapping["labels"]) == log["labels"]
        assert mapping["query"] == "query"
        assert mapping["prepare"]["kind"] == "search"
        assert "click" in mapping["prepare"]["behaviour"]
    assert len(events) >= 10


@pytest.mark.shared_data
def test_a_coordinate_is_no_item():
    suggestion = suggest(str(SHARED / "cases/d4_suggest_coordinate_as_item/log"))

    assert "item: c5" in suggestion.text
    assert len(suggestion.doubts) == 2


def test_texts_are_in_the_file_with_the_column_of_items(tmp_path):
    items = "ARTICLE;Title;stars;picture\n" + "".join(
        f"a{n};thing {n};{n};http://x/{n}\n" for n in range(5)
    )
    codes = "article,c1\n" + "".join(f"a{n},{n}\n" for n in range(5))
    files: dict[str, str | bytes] = {"sales.csv": SALES, "a.csv": codes, "b.csv": items}

    mapping, doubts, _ = suggest_and_read(tmp_path, files)

    expected = {
        "files": "b.csv",
        "delimiter": ";",
        "item": "ARTICLE",
        "texts": ["Title"],
    }
    assert mapping["items"] == expected
    assert doubts == []


def test_a_file_of_items_decides_between_two_columns(tmp_path):
    log = LOGS["Amazon 2023"]
    meta = '{"parent_asin": "B00", "title": "Car"}\n{"parent_asin": "B01", "title": "Bus"}\n'

    mapping, doubts, _ = suggest_and_read(
        tmp_path, {log["file"]: log["rows"], "meta.jsonl": meta}
    )

    assert (mapping["item"], doubts) == ("parent_asin", [])


def test_outcomes_are_labels_and_nothing_is_a_feature(tmp_path):
    log = LOGS["KuaiRand"]

    mapping, _, _ = suggest_and_read(tmp_path, {log["file"]: log["rows"]}, "actions")

    assert " ".join(mapping["labels"]) == "is_click is_like long_view play_time_ms"
    assert mapping["labels"]["play_time_ms"]["type"] == "float32"
    assert not {"numbers", "categories"} & set(mapping)
    assert mapping["prepare"] == {
        "kind": "actions",
        "core": 0,
        "split": {"by": "temporal"},
    }


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252"])
def test_an_encoding_is_detected(tmp_path, encoding):
    content = SALES.replace("c1", "é").encode(encoding)

    mapping, _, events = suggest_and_read(tmp_path, {"log.csv": content})

    assert mapping["encoding"] == encoding
    assert "é" in events["user_id"].to_list()


@pytest.mark.parametrize(
    ("name", "next_name"),
    [
        ("sales_2024-01-05.csv", "sales_2024-01-06.csv"),
        ("log.3.csv.gz", "log.4.csv.gz"),
        ("dt=2024-01-05/events.csv", "dt=2024-01-06/events.csv"),
    ],
)
def test_the_pattern_matches_the_file_of_the_next_day(tmp_path, name, next_name):
    content = SALES.encode()
    if name.endswith(".gz"):
        content = gzip.compress(content)

    mapping, doubts, _ = suggest_and_read(
        tmp_path, {name: content, "notes-2.txt": "no log"}
    )

    assert fnmatchcase(next_name, mapping["files"])
    assert not fnmatchcase("notes-2.txt", mapping["files"])
    assert doubts == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (SALES.replace("article", "thing"), "item"),
        (SALES.replace("c1,", ","), "user"),
        (
            "user_id,customer_id,item_id,at\n1,2,3,1700000000\n2,3,4,1700000001\n",
            "user",
        ),
        (
            "user,item,created_at,viewed_at\n1,3,1700000000,1700000009\n2,4,1700000001,1700000002\n",
            "time",
        ),
        ("user,item,birth_date\n1,3,2001-01-01\n2,4,2002-02-02\n", "time"),
    ],
)
def test_a_doubt_is_a_question_in_the_file(tmp_path, text, key):
    (tmp_path / "log.csv").write_text(text)

    [line] = suggest(str(tmp_path)).doubts

    assert line.startswith(f"{key}: ")
    assert line.endswith("?")


def test_the_command_writes_a_new_file(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/log.csv").write_text(SALES)
    output = tmp_path / "source.yaml"
    words = ["--suggest", str(tmp_path / "raw"), "--output", str(output)]

    prepare.main(cli.config_from_words(prepare, words))

    assert yaml.safe_load(output.read_text())["user"] == "customer"
    with pytest.raises(UserError, match="exists"):
        prepare.main(cli.config_from_words(prepare, words))


@pytest.mark.parametrize(
    "text", ["", "station,temperature\nOslo,3.5\nRoma,20.25\n", "hello\n"]
)
def test_a_folder_without_a_log_is_refused(tmp_path, text):
    (tmp_path / "weather.csv").write_text(text)

    with pytest.raises(UserError, match="users and items"):
        suggest(str(tmp_path))


def test_a_dry_run_prints_the_first_rows(tmp_path, capsys):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/log.csv").write_text(SALES + "c1,a1,soon\n")
    source, output = tmp_path / "source.yaml", str(tmp_path / "tables")
    words = ["--source", str(source), "--input", str(tmp_path / "raw"), "--dry-run"]
    words += ["--output", output, "--max_rejects", "0.1"]
    mapping = (
        "files: log.csv\nuser: customer\nitem: article\ntime: {column: at, unit: s}\n"
    )

    source.write_text(mapping)
    prepare.main(cli.config_from_words(prepare, words))

    printed = " ".join(capsys.readouterr().out.split())
    assert "41 rows, 1 rejected" in printed
    assert "timestamp_ms at 2023-11-14 22:13:20 |" in printed
    source.write_text(mapping.replace("customer", "custmer"))
    with pytest.raises(UserError, match="customer"):
        prepare.main(cli.config_from_words(prepare, words))
    assert not Path(output).exists()
