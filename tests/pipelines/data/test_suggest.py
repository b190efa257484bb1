"""A suggested mapping reads the log that it was suggested for, and asks about choices
that are in doubt.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from jobs import audit, cli, prepare
from models.storage.tables import UserError, read_manifest
from pipelines.data.reading.log import load_source
from pipelines.data.suggestion.suggest import suggest
from tests.fixtures.log_layouts import LOG_WRITERS

NUM_ROWS = 120


def format_user(row: int) -> str:
    """Return the user of a row."""
    return f"u{row % 9}"


def format_item(row: int) -> str:
    """Return the item of a row."""
    return f"i{row % 14}"


def time_ms(row: int) -> int:
    """Return the time of a row in milliseconds."""
    return 1_700_000_000_000 + row * 60_000


def format_csv(
    names: str, *columns: Callable[[int], object], delimiter: str = ","
) -> str:
    """Return CSV of users, items and further columns, which are functions of the row."""
    lines = [names]
    for row in range(NUM_ROWS):
        values = [column(row) for column in (format_user, format_item, *columns)]
        lines.append(delimiter.join(map(str, values)))
    return "\n".join(lines) + "\n"


def format_parquet(**columns: Any) -> bytes:
    """Return columns as a Parquet file."""
    file = io.BytesIO()
    pl.DataFrame(columns).write_parquet(file)
    return file.getvalue()


def suggest_mapping(
    folder: Path, files: dict[str, str | bytes], kind: str | None = None
) -> tuple[str, Any]:
    """Return the text of the mapping suggested for some files, and the mapping.

    Checks that the mapping rejects none of the first rows.
    """
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    text = suggest(str(folder), kind).text
    assert "Not right yet" not in text
    (folder / "source.yaml").write_text(text)
    log, _ = load_source(str(folder / "source.yaml"))
    blocks = list(log.read_events(str(folder), log.event_files(str(folder))[0]))
    assert sum(block.rejects.num_rows for block in blocks) == 0
    return text, yaml.safe_load(text)


@pytest.mark.parametrize(
    ("write", "time", "comment"),
    [
        (time_ms, {"unit": "ms"}, f"# {time_ms(0)} | {time_ms(1)}"),
        (lambda n: f"{time_ms(n) / 1000:.3f}", {"unit": "s"}, ""),
        (lambda n: f"2019-10-{n % 28 + 1:02d} 00:00:00 UTC", {"unit": "iso"}, ""),
        (lambda n: f"2019-10-{n % 28 + 1:02d} 01:02:03.5+00", {"unit": "iso"}, ""),
        (lambda n: f"201910{n % 28 + 1:02d}", {"format": "%Y%m%d"}, ""),
        (lambda n: f"{n % 28 + 1:02d}.12.2023 13:05", {"format": "%d.%m.%Y %H:%M"}, ""),
        (
            lambda n: f"12/{n % 28 + 1}/2023 1:05 PM",
            {"format": "%m/%d/%Y %I:%M %p"},
            "",
        ),
        (lambda n: f"{n % 28 + 1} Feb 2023", {"format": "%d %b %Y"}, ""),
        (
            lambda n: f"{n * 5 % 12 + 1}/{n * 7 % 12 + 1}/2023",
            {"format": "%m/%d/%Y"},
            "day or month first?",
        ),
        (lambda n: "x", None, "time: {unit: order}"),
    ],
)
def test_the_unit_or_format_of_times_is_recognized(
    tmp_path: Path,
    write: Callable[[int], object],
    time: dict[str, str] | None,
    comment: str,
) -> None:
    log = format_csv("user_id,item_id,when", write)

    text, mapping = suggest_mapping(tmp_path, {"log.csv": log})

    assert (mapping["user"], mapping["item"]) == ("user_id", "item_id")
    if time:
        assert mapping["time"] == {"column": "when", **time}
        assert mapping["prepare"]["split"] == {"kind": "temporal"}
    else:
        assert mapping["time"] == {"unit": "order"}
        assert mapping["prepare"]["split"] == {"kind": "leave_last_out"}
    assert comment in text


ROWS_WITH_LISTS = [
    {
        "uid": f"u{n}",
        "shown": [n % 5, n % 7 + 5],
        "clicked": [n % 5] * (n % 2),
        "ts": time_ms(n),
    }
    for n in range(NUM_ROWS)
]
SEARCHES = format_csv(
    "user_id,clicked_ids,ts,query,search_id,shown_ids",
    time_ms,
    lambda n: f"red {n % 4}",
    lambda n: f"s{n}",
    lambda n: f"{format_item(n)} {format_item(n + 1)} {format_item(n + 2)}",
)
OUTCOMES = format_csv(
    "user_id,item_id,t,is_click,watch_time,quantity,price,device,event_type",
    time_ms,
    lambda n: n % 2,
    lambda n: n * 3,
    lambda n: n % 4,
    lambda n: n / 8,
    lambda n: "ab"[n % 2],
    lambda n: ("view", "purchase")[n % 2],
)
IMPRESSIONS = format_parquet(
    user_id=[n % 9 for n in range(NUM_ROWS)],
    impression_id=list(range(NUM_ROWS)),
    t=[time_ms(n) for n in range(NUM_ROWS)],
    # the article on whose page the list was shown, if any
    article_id=[None if n % 2 else n % 14 for n in range(NUM_ROWS)],
    article_ids_inview=pl.Series(
        [[n % 14, (n + 1) % 14] for n in range(NUM_ROWS)], dtype=pl.List(pl.Int32)
    ),
    article_ids_clicked=pl.Series(
        [[n % 14] for n in range(NUM_ROWS)], dtype=pl.List(pl.Int32)
    ),
)
FRAME_OF_PANDAS = ",user_id,item_id,t\n" + "".join(
    f"{row},{format_user(row)},{format_item(row)},{time_ms(row)}\n"
    for row in range(NUM_ROWS)
)
# Files of a folder, keys of the suggested mapping, and a comment in its text.
FOLDERS: list[tuple[dict[str, str | bytes], dict[str, Any], str]] = [
    (
        {
            "log.csv": format_csv(
                "user;item;day;clock",
                lambda n: f"{n % 28 + 1}.10.2023",
                lambda n: "10:30",
                delimiter=";",
            )
        },
        {
            "delimiter": ";",
            "time": {"column": "day || ' ' || clock", "format": "%d.%m.%Y %H:%M"},
        },
        "",
    ),
    (
        {"log.csv": format_csv("no,y,on", time_ms)},
        {"user": "no", "item": "y", "time": {"column": "on", "unit": "ms"}},
        "",
    ),
    (
        {
            "log.csv": format_csv(
                "user id,item (nr),t,price (€)", time_ms, lambda n: n + 0.5
            )
        },
        {"user": "user id", "item": '"item (nr)"', "numbers": None},
        """# numbers: {price: '"price (€)"'}""",
    ),
    (
        {
            "log.csv": format_csv(
                "session_id,item_id,t,user_id", time_ms, lambda n: "NA"
            )
        },
        {"user": "session_id"},
        "",
    ),
    (
        {
            "log.csv": format_csv(
                "user_id,item_id,t,customer", time_ms, lambda n: f"c{n % 5}"
            )
        },
        {"user": "user_id"},
        "or user: customer?",
    ),
    (
        {
            "log.csv": format_csv(
                "row,item_id,t,member", time_ms, lambda n: "abc"[n % 3]
            )
        },
        {"user": "member"},
        "of only 3 values?",
    ),
    (
        {"log.csv": OUTCOMES},
        {
            "labels": {
                "is_click": "is_click",
                "watch_time": {"column": "watch_time", "type": "float32"},
                "quantity": {"column": "quantity", "type": "float32"},
                "view": "event_type = 'view'",
                "purchase": "event_type = 'purchase'",
            },
            "numbers": None,
            "categories": None,
            "prepare": {
                "kind": "retrieval",
                "core": 5,
                "behaviour": "is_click",
                "split": {"kind": "temporal"},
            },
        },
        "# numbers: [price]",
    ),
    (
        {
            "log.csv": format_csv(
                "Kunde;Artikel;Zeit;Preis", time_ms, lambda n: f"{n},50", delimiter=";"
            )
        },
        {"user": "Kunde"},
        "# numbers: {Preis: 'cast(replace(Preis, '','', ''.'') as double)'}",
    ),
    (
        {"log.csv": SEARCHES},
        {
            "explode": {"shown": "string_to_array(shown_ids, ' ')"},
            "item": "shown",
            "query": "query",
            "labels": {
                "clicked_ids": "coalesce(array_contains(string_to_array(clicked_ids, ' '), shown), false)"
            },
            "prepare": {
                "kind": "search",
                "core": 0,
                "behaviour": "clicked_ids",
                "split": {"kind": "temporal"},
            },
        },
        "",
    ),
    (
        {"log.jsonl": "\n".join(map(json.dumps, ROWS_WITH_LISTS))},
        {
            "user": "uid",
            "explode": ["shown"],
            "labels": {"clicked": "coalesce(array_contains(clicked, shown), false)"},
        },
        "",
    ),
    ({"log.csv": FRAME_OF_PANDAS}, {"user": "user_id", "item": "item_id"}, ""),
    (
        {"log.parquet": IMPRESSIONS},
        {
            "user": "user_id",
            "explode": {"shown": "article_ids_inview"},
            "request": "impression_id",
            "labels": {
                "article_ids_clicked": "coalesce(array_contains(article_ids_clicked, shown), false)"
            },
        },
        "",
    ),
    (
        {
            "log.csv": format_csv(
                "user_id,item_id,t,queryId,searchstring",
                time_ms,
                lambda n: n // 4,
                lambda n: f"red {n % 5}",
            )
        },
        {"request": "queryId", "query": "searchstring"},
        "",
    ),
    (
        {"log.tsv": "user\titems\n" + "".join(f"u{n}\ti{n} i2\n" for n in range(40))},
        {"sequence": "string_to_array(items, ' ')"},
        "",
    ),
    (
        {
            "a.inter.json": json.dumps(
                {f"u{n}": ["a1"] * (n % 4 + 1) for n in range(40)}
            )
        },
        {"format": "keyed", "user": "key", "sequence": "value"},
        "",
    ),
    (
        {
            "a.inter": format_csv(
                "user_id:token\titem_id:token\ttimestamp:float",
                lambda n: time_ms(n) / 1000,
                delimiter="\t",
            ),
            "a.item": "item_id:token\ttitle:token_seq\n"
            + "".join(f"i{n}\tthing {n}\n" for n in range(14)),
        },
        {
            "format": "csv",
            "delimiter": "\t",
            "user": "user_id:token",
            "time": {"column": "timestamp:float", "unit": "s"},
            "items": {
                "files": "a.item",
                "format": "csv",
                "delimiter": "\t",
                "item": "item_id:token",
                "texts": {"title": "title:token_seq"},
            },
        },
        "",
    ),
    (
        {
            "log-1.csv": format_csv("user,item,t", time_ms),
            "log-2.csv.gz": gzip.compress(format_csv("user,item,t", time_ms).encode()),
        },
        {"files": "log-*.csv*"},
        "# 2 files",
    ),
    (
        {"log.csv": format_csv("Käufer,Artikel,t", time_ms).encode("utf-16")},
        {"encoding": "utf-16", "user": "Käufer"},
        "",
    ),
    (
        {"log.csv": format_csv("Käufer,Artikel,t", time_ms).encode("cp1252")},
        {"encoding": "cp1252"},
        "# is it this one?",
    ),
    (
        {"log.csv": format_csv("u,i,t,note", time_ms, lambda n: r'"a \"b\", c"')},
        {"escape": "\\"},
        "",
    ),
]


OUTCOME_NAMES = (
    "bought",
    "is_clicked",
    "clicks",
    "rating",
    "dwell_ms",
    "revenue",
    "purchase_amount",
    "conversions",
    "skipped",
)


@pytest.mark.parametrize("kind", ["retrieval", "search", "actions"])
@pytest.mark.parametrize("name", OUTCOME_NAMES)
def test_an_outcome_is_a_label_and_possible_features_are_asked_about(
    tmp_path: Path, name: str, kind: str
) -> None:
    log = format_csv(
        f"user_id,item_id,time,is_liked,{name},bm25,is_mobile,city",
        time_ms,
        lambda row: row % 2,
        lambda row: row % 7 * 1.5,
        lambda row: row * 0.3,
        lambda row: row % 2,
        lambda row: "ab"[row % 2],
    )
    items = [f"i{n},{n / 3},{n * 2.5}" for n in range(14)]
    item_file = "\n".join(["item_id,average_rating,size", *items]) + "\n"
    files: dict[str, str | bytes] = {"log.csv": log, "items.csv": item_file}

    text, mapping = suggest_mapping(tmp_path, files, kind)

    assert set(mapping["labels"]) == {"is_liked", name}
    assert not {"numbers", "categories"} & set(mapping)
    assert "\n  # is_mobile: is_mobile " in text
    assert "\n# numbers: [bm25] " in text
    assert "\n# categories: [city] " in text
    assert "\n  # left out: [average_rating]" in text
    assert mapping["items"]["numbers"] == ["size"]
    assert mapping["prepare"]["kind"] == kind


def test_a_log_without_clock_times_does_not_suit_actions(tmp_path: Path) -> None:
    log = format_csv("user_id,item_id,bought", lambda row: row % 2)
    (tmp_path / "log.csv").write_text(log)

    text = suggest(str(tmp_path), "actions").text

    reason = "the log has only an order of events, but a log of actions"
    assert f"# Not right yet: {reason}" in text


def test_a_log_without_a_label_does_not_suit_search(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(format_csv("user_id,item_id,time", time_ms))

    text = suggest(str(tmp_path), "search").text

    assert "# Not right yet: kind is search, which needs the bool label" in text


@pytest.mark.parametrize(("files", "expected", "comment"), FOLDERS)
def test_the_mapping_of_a_small_folder_has_these_keys(
    tmp_path: Path,
    files: dict[str, str | bytes],
    expected: dict[str, Any],
    comment: str,
) -> None:
    text, mapping = suggest_mapping(tmp_path, files)

    assert {key: mapping.get(key) for key in expected} == expected
    assert comment in text


def test_a_column_of_users_with_gaps_is_in_doubt(tmp_path: Path) -> None:
    log = format_csv(
        "row,item_id,t,member", time_ms, lambda row: f"m{row}" if row % 3 else ""
    )
    (tmp_path / "log.csv").write_text(log)

    text = suggest(str(tmp_path)).text

    assert "rows without a user are rejected; another column?" in text


def test_times_of_births_and_updates_are_neither_event_times_nor_features(
    tmp_path: Path,
) -> None:
    log = format_csv(
        "user,item,birth_date,order_time,hour,updated_at",
        lambda row: f"2023-01-{row % 9 + 1:02d}",
        lambda row: f"2024-01-{row % 9 + 1:02d} 10:00",
        lambda row: row % 24,
        time_ms,
    )

    _, mapping = suggest_mapping(tmp_path, {"log.csv": log})

    assert mapping["time"] == {"column": "order_time", "unit": "iso"}
    assert not {"labels", "numbers", "categories"} & set(mapping)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("hm", None), ("movielens_1m", None), ("movielens_1m", "actions")],
)
def test_the_mapping_suggested_for_a_public_layout_prepares_tables(
    tmp_path: Path, name: str, kind: str | None
) -> None:
    raw = str(LOG_WRITERS[name](tmp_path / "raw"))
    source, tables = str(tmp_path / "source.yaml"), str(tmp_path / "tables")
    prepare.run_suggestion(prepare.Suggestion(suggest=raw, kind=kind, output=source))

    words = ["--source", source, "--input", raw, "--output", tables]
    statistics: Any = prepare.run(cli.config_from_words(prepare, words))

    audit.run(audit.Config(tables=tables))
    assert statistics["raw"]["rejects"] == 0
    assert statistics["clock"]
    matched = read_manifest(f"{tables}/items").info["matched"]
    assert matched["ids_matched"] == matched["ids"]


def test_a_suggestion_does_not_overwrite_a_mapping_file(tmp_path: Path) -> None:
    (tmp_path / "source.yaml").write_text("mine")
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "log.csv").write_text(format_csv("user_id,item_id,time", time_ms))
    suggestion = prepare.Suggestion(
        suggest=str(raw), output=str(tmp_path / "source.yaml")
    )

    with pytest.raises(UserError, match="exists; name another file"):
        prepare.run_suggestion(suggestion)

    assert (tmp_path / "source.yaml").read_text() == "mine"


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    error = r"^.* holds no file that can be read as a log: it is empty$"
    with pytest.raises(UserError, match=error):
        suggest(str(tmp_path))


def test_a_folder_without_a_log_is_refused_with_the_reason_for_each_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "readme.md").write_text("hello, you\nand\nothers")
    (tmp_path / "weather.csv").write_text("station,temperature\nOslo,3.5\nRoma,20.25\n")

    error = r"^.*broken.parquet: .*readme.md: it has no columns; .*, but station, temperature$"
    with pytest.raises(UserError, match=error):
        suggest(str(tmp_path))
