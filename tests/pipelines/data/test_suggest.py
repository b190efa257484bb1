"""A suggested mapping makes tables, and asks about doubtful guesses."""

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
from tests.fixtures.log_layouts import MAKERS

N = 120


def user(n: int) -> str:
    return f"u{n % 9}"


def item(n: int) -> str:
    return f"i{n % 14}"


def ms(n: int) -> int:
    return 1_700_000_000_000 + n * 60_000


def table(names: str, *columns: Callable[[int], object], by: str = ",") -> str:
    """Return CSV of users, items and further columns, functions of the row."""
    rows = [
        by.join(str(column(n)) for column in (user, item, *columns)) for n in range(N)
    ]
    return "\n".join([names, *rows]) + "\n"


def parquet(**columns: Any) -> bytes:
    pl.DataFrame(columns).write_parquet(file := io.BytesIO())
    return file.getvalue()


def checked(
    folder: Path, files: dict[str, str | bytes], kind: str | None = None
) -> tuple[str, Any]:
    """Suggest a mapping for files, and check that their first rows are accepted."""
    for name, content in files.items():
        (folder / name).write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    text = suggest(str(folder), kind).text
    assert "Not right yet" not in text
    (folder / "made.yaml").write_text(text)
    log, _ = load_source(str(folder / "made.yaml"))
    blocks = list(log.read_events(str(folder), log.event_files(str(folder))[0]))
    assert sum(block.rejects.num_rows for block in blocks) == 0
    return text, yaml.safe_load(text)


@pytest.mark.parametrize(
    ("write", "time", "said"),
    [
        (ms, {"unit": "ms"}, f"# {ms(0)} | {ms(1)}"),
        (lambda n: f"{ms(n) / 1000:.3f}", {"unit": "s"}, ""),
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
def test_times(
    tmp_path: Path,
    write: Callable[[int], object],
    time: dict[str, str] | None,
    said: str,
) -> None:
    text, made = checked(tmp_path, {"log.csv": table("user_id,item_id,when", write)})
    assert (made["user"], made["item"]) == ("user_id", "item_id")
    assert made["time"] == ({"column": "when", **time} if time else {"unit": "order"})
    assert made["prepare"]["split"] == {
        "kind": "temporal" if time else "leave_last_out"
    }
    assert said in text


LISTS = [
    {
        "uid": f"u{n}",
        "shown": [n % 5, n % 7 + 5],
        "clicked": [n % 5] * (n % 2),
        "ts": ms(n),
    }
    for n in range(N)
]
SEARCHES = table(
    "user_id,clicked_ids,ts,query,search_id,shown_ids",
    ms,
    lambda n: f"red {n % 4}",
    lambda n: f"s{n}",
    lambda n: f"{item(n)} {item(n + 1)} {item(n + 2)}",
)
OUTCOMES = table(
    "user_id,item_id,t,is_click,watch_time,quantity,price,device,event_type",
    ms,
    lambda n: n % 2,
    lambda n: n * 3,
    lambda n: n % 4,
    lambda n: n / 8,
    lambda n: "ab"[n % 2],
    lambda n: ("view", "purchase")[n % 2],
)
INT32 = parquet(
    user_id=[n % 9 for n in range(N)],
    impression_id=list(range(N)),
    t=[ms(n) for n in range(N)],
    article_id=[
        None if n % 2 else n % 14 for n in range(N)
    ],  # the page it was on, if any
    article_ids_inview=pl.Series(
        [[n % 14, (n + 1) % 14] for n in range(N)], dtype=pl.List(pl.Int32)
    ),
    article_ids_clicked=pl.Series(
        [[n % 14] for n in range(N)], dtype=pl.List(pl.Int32)
    ),
)
CASES: list[tuple[dict[str, str | bytes], dict[str, Any], str]] = [
    (
        {
            "log.csv": table(
                "user;item;day;clock",
                lambda n: f"{n % 28 + 1}.10.2023",
                lambda n: "10:30",
                by=";",
            )
        },
        {
            "delimiter": ";",
            "time": {"column": "day || ' ' || clock", "format": "%d.%m.%Y %H:%M"},
        },
        "",
    ),
    (
        {"log.csv": table("no,y,on", ms)},
        {"user": "no", "item": "y", "time": {"column": "on", "unit": "ms"}},
        "",
    ),
    (
        {"log.csv": table("user id,item (nr),t,price (€)", ms, lambda n: n + 0.5)},
        {"user": "user id", "item": '"item (nr)"', "numbers": None},
        """# numbers: {price: '"price (€)"'}""",
    ),
    (
        {"log.csv": table("session_id,item_id,t,user_id", ms, lambda n: "NA")},
        {"user": "session_id"},
        "",
    ),
    (
        {"log.csv": table("user_id,item_id,t,customer", ms, lambda n: f"c{n % 5}")},
        {"user": "user_id"},
        "or user: customer?",
    ),
    (
        {"log.csv": table("row,item_id,t,member", ms, lambda n: "abc"[n % 3])},
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
        {"log.csv": table("Kunde;Artikel;Zeit;Preis", ms, lambda n: f"{n},50", by=";")},
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
        {"log.jsonl": "\n".join(map(json.dumps, LISTS))},
        {
            "user": "uid",
            "explode": ["shown"],
            "labels": {"clicked": "coalesce(array_contains(clicked, shown), false)"},
        },
        "",
    ),
    (
        {
            "log.csv": ",user_id,item_id,t\n"
            + "".join(f"{n},{user(n)},{item(n)},{ms(n)}\n" for n in range(N))
        },
        {"user": "user_id", "item": "item_id"},
        "",
    ),  # as pandas writes a frame
    (
        {"log.parquet": INT32},
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
            "log.csv": table(
                "user_id,item_id,t,queryId,searchstring",
                ms,
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
            "a.inter": table(
                "user_id:token\titem_id:token\ttimestamp:float",
                lambda n: ms(n) / 1000,
                by="\t",
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
            "log-1.csv": table("user,item,t", ms),
            "log-2.csv.gz": gzip.compress(table("user,item,t", ms).encode()),
        },
        {"files": "log-*.csv*"},
        "# 2 files",
    ),
    (
        {"log.csv": table("Käufer,Artikel,t", ms).encode("utf-16")},
        {"encoding": "utf-16", "user": "Käufer"},
        "",
    ),
    (
        {"log.csv": table("Käufer,Artikel,t", ms).encode("cp1252")},
        {"encoding": "cp1252"},
        "# is it this one?",
    ),
    (
        {"log.csv": table("u,i,t,note", ms, lambda n: r'"a \"b\", c"')},
        {"escape": "\\"},
        "",
    ),
]


OUTCOME = (
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
@pytest.mark.parametrize("name", OUTCOME)
def test_no_outcome_is_a_feature_and_what_may_be_one_is_asked(
    tmp_path: Path, name: str, kind: str
) -> None:
    columns = [
        ms,
        lambda n: n % 2,
        lambda n: n % 7 * 1.5,
        lambda n: n * 0.3,
        lambda n: n % 2,
        lambda n: "ab"[n % 2],
    ]
    log = table(f"user_id,item_id,time,is_liked,{name},bm25,is_mobile,city", *columns)
    goods = "item_id,average_rating,size\n" + "".join(
        f"i{n},{n / 3},{n * 2.5}\n" for n in range(14)
    )
    text, made = checked(tmp_path, {"log.csv": log, "items.csv": goods}, kind)
    assert set(made["labels"]) == {"is_liked", name}
    assert not {"numbers", "categories"} & set(made)
    for asked in (
        "  # is_mobile: is_mobile ",
        "# numbers: [bm25] ",
        "# categories: [city] ",
        "  # left out: [average_rating]",
    ):
        assert f"\n{asked}" in text
    assert made["items"]["numbers"] == ["size"]
    assert made["prepare"]["kind"] == kind


def test_a_kind_that_the_log_cannot_have_is_said(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(table("user_id,item_id,bought", lambda n: n % 2))
    assert (
        "# Not right yet: the log has only an order of events, but a log of actions"
        in suggest(str(tmp_path), "actions").text
    )
    (tmp_path / "log.csv").write_text(table("user_id,item_id,time", ms))
    assert "# Not right yet: kind is search, which needs the bool label" in (
        suggest(str(tmp_path), "search").text
    )


@pytest.mark.parametrize(("files", "expected", "said"), CASES)
def test_small_folders(
    tmp_path: Path, files: dict[str, str | bytes], expected: dict[str, Any], said: str
) -> None:
    text, made = checked(tmp_path, files)
    assert {key: made.get(key) for key in expected} == expected
    assert said in text


def test_a_user_with_gaps_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        table("row,item_id,t,member", ms, lambda n: f"m{n}" if n % 3 else "")
    )
    assert (
        "rows without a user are rejected; another column?"
        in suggest(str(tmp_path)).text
    )


def test_no_time_is_a_feature(tmp_path: Path) -> None:
    """Times of births and updates are not the time of events."""
    days = [
        lambda n: f"2023-01-{n % 9 + 1:02d}",
        lambda n: f"2024-01-{n % 9 + 1:02d} 10:00",
        lambda n: n % 24,
        ms,
    ]
    _, made = checked(
        tmp_path,
        {"log.csv": table("user,item,birth_date,order_time,hour,updated_at", *days)},
    )
    assert made["time"] == {"column": "order_time", "unit": "iso"}
    assert not {"labels", "numbers", "categories"} & set(made)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("hm", None), ("movielens_1m", None), ("movielens_1m", "actions")],
)
def test_what_is_guessed_of_a_real_layout_makes_tables(
    tmp_path: Path, name: str, kind: str | None
) -> None:
    raw, source, tables = (
        MAKERS[name](tmp_path / "raw"),
        str(tmp_path / "guessed.yaml"),
        str(tmp_path / "tables"),
    )
    prepare.run_suggestion(
        prepare.Suggestion(suggest=str(raw), kind=kind, output=source)
    )
    statistics: Any = prepare.run(
        cli.config_from_words(
            prepare, ["--source", source, "--input", str(raw), "--output", tables]
        )
    )
    audit.run(audit.Config(tables=tables))
    assert (statistics["raw"]["rejects"], statistics["clock"]) == (0, True)
    matched = read_manifest(f"{tables}/items").info["matched"]
    assert matched["ids_matched"] == matched["ids"]
    with pytest.raises(UserError, match="exists; name another file"):
        prepare.run_suggestion(prepare.Suggestion(suggest=str(raw), output=source))


def test_a_folder_that_is_no_log_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^.* holds no file that can be read as a log: it is empty$"
    ):
        suggest(str(tmp_path))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "readme.md").write_text("hello, you\nand\nothers")
    (tmp_path / "weather.csv").write_text("station,temperature\nOslo,3.5\nRoma,20.25\n")
    with pytest.raises(
        UserError,
        match=r"^.*broken.parquet: .*readme.md: it has no columns; .*, but station, temperature$",
    ):
        suggest(str(tmp_path))
