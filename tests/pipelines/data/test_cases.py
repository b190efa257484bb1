"""Small logs after public bug reports: the events that are right, or a refusal in one
line that says what to do. The forms of times are in test_times.py."""

from __future__ import annotations

import io
import json
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from models.storage.tables import UserError
from pipelines.data.reading.log import parse_log

CASES = Path(__file__).parents[3] / "../shared/cases"
T = 1_700_000_000_000
MS, S, ISO = (
    {"column": "t", "unit": "ms"},
    {"column": "t", "unit": "s"},
    {"column": "t"},
)


def read(folder: Path, mapping: dict[str, Any]) -> tuple[list[tuple], Counter[str]]:
    """(user, item, milliseconds) of the events, and the reasons of the rejects."""
    log, events, reasons = parse_log(mapping), [], Counter[str]()
    for number, file in enumerate(log.event_files(str(folder))):
        for block in log.read_events(str(folder), file, None, None, number):
            events += (
                pl.DataFrame(block.rows)
                .select("user_id", "item_id", "timestamp_ms")
                .rows()
            )
            reasons.update(block.rejects["reason"].to_pylist())
    return events, reasons


def parquet(int96: bool = False, **columns: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, use_deprecated_int96_timestamps=int96)
    return buffer.getvalue()


def csv_of(*lines: str, ends: str = "\n") -> bytes:
    return "".join(line + ends for line in lines).encode()


def table(*lines: str, head: str = "u,i,t", ends: str = "\n") -> dict[str, bytes]:
    return {"log.csv": csv_of(head, *lines, ends=ends)}


def times(*texts: str) -> dict[str, bytes]:
    return table(*(f'a,x{n},"{text}"' for n, text in enumerate(texts)))


def listed(text: str) -> dict[str, Any]:
    return {"time": None, "sequence": f"string_to_array({text}, ' ')"}


def at(*moments: datetime) -> list[tuple]:
    return [
        ("a", f"x{n}", round(moment.replace(tzinfo=UTC).timestamp() * 1000))
        for n, moment in enumerate(moments)
    ]


NOON = (
    datetime(2023, 11, 14, 22, 13, 37, 900_000),
    datetime(2023, 11, 14, 22, 13, 37, 100_000),
)
XY = [("a", "x", T), ("b", "y", T + 1)]
LINES = [f"a,x,{T}", f"b,y,{T + 1}"]
WORDS = [
    "NA",
    "N/A",
    "n/a",
    "#N/A",
    "\\N",
    "(null)",
    "nil",
    "NaT",
    "undefined",
    "-",
    "nan",
    "NULL",
    "None",
]
TABLE: list[tuple[str, dict[str, bytes], dict[str, Any], list[tuple] | str]] = [
    (
        "unsorted files",
        {f"log-{n}.csv": csv_of("u,i,t", f"a,x{n},{T + n}") for n in (10, 2)},
        {"files": "log-*.csv"},
        [("a", "x10", T + 10), ("a", "x2", T + 2)],
    ),
    (
        "Parquet types",
        {
            "log.parquet": parquet(
                u=pa.array(["a"]).dictionary_encode(),
                i=["x0"],
                t=pa.array([NOON[0]], pa.timestamp("ns", "America/New_York")),
            )
        },
        {"time": ISO},
        at(NOON[0]),
    ),
    (
        "int96",
        {
            "log.parquet": parquet(
                True, u=["a"], i=["x0"], t=pa.array([NOON[0]], pa.timestamp("ns"))
            )
        },
        {"time": ISO},
        at(NOON[0]),
    ),
    (
        "hive",
        {
            f"type={name}/p.parquet": parquet(u=["a"], i=["x"], t=[T])
            for name in ("buy", "view")
        },
        {"files": "*/*.parquet", "item": "i || type"},
        [("a", "xbuy", T), ("a", "xview", T)],
    ),
    (
        "local zone",
        times("2023-10-29 02:30:00", "2023-10-29 03:10:00"),
        {"time": {**ISO, "zone": "Europe/Berlin"}},
        at(datetime(2023, 10, 29, 0, 30), datetime(2023, 10, 29, 2, 10)),
    ),
    (
        "CRLF in quotes",
        {
            "log.csv": b'\xef\xbb\xbfu,i,t,c\r\na,x,%d,"one\r\ntwo, ""2"""\r\nb,y,%d,\r\n'
            % (T, T + 1)
        },
        {},
        XY,
    ),
    (
        "big JSON ids",
        {
            "log.jsonl": csv_of(
                *(json.dumps({"u": 2**64 - n, "i": 2**63 - n, "t": T}) for n in (1, 2))
            )
        },
        {},
        [(str(2**64 - n), str(2**63 - n), T) for n in (1, 2)],
    ),
    (
        "decimal ids",
        {
            "log.parquet": parquet(
                u=pa.array([2**64 - 1], pa.uint64()),
                i=pa.array([Decimal(2**63 + 1)], pa.decimal128(20, 0)),
                t=[T],
            )
        },
        {},
        [(str(2**64 - 1), str(2**63 + 1), T)],
    ),
    (
        "binary and float ids",
        {"log.parquet": parquet(u=[b"\xc3\xa4"], i=[12.0], t=[T])},
        {},
        [("ä", "12", T)],
    ),
    (
        "float ids of CSV",
        {
            "a.csv": csv_of("u,i,t", f"1.0,12,{T}"),
            "b.csv": csv_of("u,i,t", f"1,12.0,{T}"),
        },
        {"files": "*.csv"},
        [("1", "12", T)] * 2,
    ),
    (
        "nested sessions",
        {
            "log.jsonl": csv_of(
                json.dumps({"u": 18, "e": [{"aid": 3, "t": T}, {"aid": 4, "t": T + 1}]})
            )
        },
        {"explode": {"e": "e"}, "item": "e.aid", "time": {**MS, "column": "e.t"}},
        [("18", "3", T), ("18", "4", T + 1)],
    ),
    ("old times", table("a,x,-299992955200"), {}, []),
    (
        "float seconds",
        table("a,x,1700000000.612", "b,y,1700000001.0"),
        {"time": S},
        [("a", "x", T + 612), ("b", "y", T + 1000)],
    ),
    ("mixed units", table("a,x,1700000000", f"b,y,{T + 1}"), {}, XY[1:]),
    (
        "day and timeframe",
        table("a;x;100;2023-11-14", head="u;i;t;d"),
        {
            "delimiter": ";",
            "time": {
                "column": "extract(epoch from strptime(d, '%Y-%m-%d')) * 1000 + cast(t as bigint)",
                "unit": "ms",
            },
        },
        [("a", "x", 1_699_920_000_100)],
    ),
    (
        "parts in another order",
        {"p-1": csv_of("u,i,t", LINES[0]), "p-2": csv_of("t,x,i,u", f"{T + 1},,y,b")},
        {"files": "p-*", "format": "csv"},
        XY,
    ),
    ("a repeated header", table(LINES[0], "u,i,t", LINES[1]), {}, XY),
    (
        "history rows",
        table("a,x y,z", ends="\r\n", head="u,h,i"),
        listed("h"),
        [("a", "x", 0), ("a", "y", 1), ("a", "z", 2)],
    ),
    (
        "a history as a Python list",
        table("a,\"['x', 'y']\",z", head="u,h,i"),
        listed("regexp_replace(h, '[^0-9a-z ]', '', 'g')"),
        [("a", "x", 0), ("a", "y", 1), ("a", "z", 2)],
    ),
    (
        "a sequence per line",
        {"log.txt": b"u0 07 18 07\nu1 18\n"},
        {
            "format": "lines",
            "item": None,
            "user": "split_part(line, ' ', 1)",
            **listed("regexp_replace(line, '^\\S+\\s*', '')"),
        },
        [("u0", "07", 0), ("u0", "18", 1), ("u0", "07", 2), ("u1", "18", 0)],
    ),
    (
        "a list after a tab",
        {"log.tsv": b"u\ts\na\tx x y\n"},
        {**listed("s"), "item": None},
        [("a", "x", 0), ("a", "x", 1), ("a", "y", 2)],
    ),
    ("words for nothing", table(*(f"{w},x,{T}" for w in WORDS), *LINES), {}, XY),
    ("ragged rows", table(LINES[0], f"a,x, b,{T}", "a,x", LINES[1]), {}, XY),
    (
        "backslashes",
        table(*(f'{line},"7\\""' for line in LINES), head="u,i,t,n"),
        {"escape": "\\"},
        XY,
    ),
    (
        "backslashes before pairs",
        table(*(f'{x},"say \\"hi\\", \\\\"' for x in LINES), head="u,i,t,n"),
        {"escape": "\\"},
        XY,
    ),
    (
        "MySQL's nothing",
        {"log.tsv": b"u\ti\tt\n\\N\tx\t%d\nC:\\new\ty\t%d\n" % (T, T)},
        {"escape": "\\", "quote": ""},
        [("C:\\new", "y", T)],
    ),
    (
        "a stray quote beside escapes",
        table('"a, q,5,aa', *(f'{x},"e b"' for x in LINES), head="u,i,t,n"),
        {"escape": "\\"},
        XY,
    ),
    (
        "text among objects",
        {
            "log.jsonl": csv_of(
                *(json.dumps({"e": {"u": u, "i": i}, "t": t}) for u, i, t in XY),
                json.dumps({"e": "text", "t": T}),
            )
        },
        {"user": "e.u", "item": "e.i"},
        XY,
    ),
    (
        "two colons within quotes",
        {"log.csv": b'u::i::t\na::"x::y"::%d\n' % T},
        {"delimiter": "::"},
        [("a", "x::y", T)],
    ),
    (
        "a stray quote",
        table(f'a,q,{T},"open', *(f'{x},"a, b"' for x in LINES), head="u,i,t,n"),
        {},
        XY,
    ),
    (
        "odd JSON",
        {
            "log.jsonl": csv_of(
                *(
                    json.dumps({"u": u, "i": i, "t": t, "n": "\ud83d\0"})
                    for u, i, t in XY
                )
            )
        },
        {},
        XY,
    ),
    (
        "an id that is not UTF-8",
        {"log.csv": b"u,i,t\ncaf\xe9,x,%d\n" % T},
        {},
        "not utf-8 in line 2; set 'encoding'",
    ),
    (
        "not UTF-8 elsewhere",
        {"log.csv": b"u,i,t,n\n%s,caf\xe9\n" % LINES[0].encode()},
        {},
        XY[:1],
    ),
    (
        "columns of one name",
        table(*(f"{x},WRONG" for x in LINES), head="u,i,t,i"),
        {},
        XY,
    ),
    (
        "an index and a last comma",
        table(*(f"0,{x}," for x in LINES), head=",u,i,t,"),
        {},
        XY,
    ),
    ("plain, but named gz", {"log.csv.gz": csv_of("u,i,t", *LINES)}, {}, XY),
    ("unicode ids", table(f"\u00a0cafe\u0301\u200b,x,{T}"), {}, [("café", "x", T)]),
    (
        "numbers of JSON",
        {
            "log.jsonl": csv_of(
                *(f'{{"u": "a", "i": {i}, "t": {T}}}' for i in ("1", "1.0", '"1"'))
            )
        },
        {},
        [("a", "1", T)] * 3,
    ),
    (
        "a suffix in capitals",
        {"LOG.CSV": csv_of("u,i,t", *LINES, ends="\r\n")},
        {"files": "*.CSV"},
        XY,
    ),
    (
        "words of YAML",
        table(*LINES, head="no,i,t"),
        {"user": False},
        "write it in quotes",
    ),
    (
        "numbers",
        table(
            f"{LINES[0]}, 1e5 ",
            f"{LINES[1]},+5",
            f"c,z,{T},inf",
            f'c,z,{T},"12,5"',
            head="u,i,t,n",
        ),
        {"numbers": ["n"]},
        XY,
    ),
    (
        "RecBole",
        {
            "a.inter": b"user_id:token\titem_id:token\ttimestamp:float\na\tx\t1700000000.0\n",
            "a.item": b"i\n",
        },
        {
            "files": "*.inter",
            "format": "csv",
            "delimiter": "\t",
            "user": "user_id:token",
            "item": "item_id:token",
            "time": {"column": "timestamp:float", "unit": "s"},
        },
        XY[:1],
    ),
    (
        "unequal lists",
        {"log.parquet": parquet(u=["a", "b"], i=[["x"], ["y", "z"]], t=[[T], [T]])},
        {"explode": {"i": "i", "t": "t"}},
        XY[:1],
    ),
    (
        "decimals of seconds",
        times("14.11.2023 22:13:37.900", "14.11.2023 22:13:37.1"),
        {"time": {"column": "t", "format": "%d.%m.%Y %H:%M:%S.%f"}},
        at(*NOON),
    ),
    (
        "decimals after a comma",
        times("14.11.2023 22:13:37,900000", "14.11.2023 22:13:37,100"),
        {"time": {"column": "t", "format": "%d.%m.%Y %H:%M:%S,%f"}},
        at(*NOON),
    ),
    (
        "a format of Rust",
        times("x"),
        {"time": {"column": "t", "format": "%Y-%m-%d %H:%M:%S%.f"}},
        "use .%f for decimals of seconds",
    ),
]


@pytest.mark.parametrize(
    ("name", "files", "mapping", "right"), TABLE, ids=[case[0] for case in TABLE]
)
def test_a_small_log(
    tmp_path: Path,
    name: str,
    files: dict[str, bytes],
    mapping: dict[str, Any],
    right: list[tuple] | str,
) -> None:
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    keys = {"files": "log.*", "user": "u", "item": "i", "time": MS, **mapping}
    keys = {key: value for key, value in keys.items() if value is not None}
    if isinstance(right, str):
        with pytest.raises((UserError, ValueError)) as caught:
            read(tmp_path, keys)
        assert right in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        assert read(tmp_path, keys)[0] == right


HISTORY = {"history": None, **listed("history")}
LIST = {"explode": None, "item": None, **listed("items")}
PER_LINE = {
    "transforms": None,
    "format": "lines",
    "delimiter": None,
    "header": None,
    "explode": None,
    "item": None,
    "user": "split_part(line, ' ', 1)",
    **listed("regexp_replace(line, '^\\S+\\s*', '')"),
}
ITEMS = {"files": "items.csv", "item": "id", "texts": ["title", "brand"]}
DOTTED = {"time": {"column": "t", "format": "%d.%m.%Y %H:%M:%S.%f"}}
OVER: dict[str, dict[str, Any]] = {
    "C_hive": {"labels": {"buy": "type = 'buy'"}},
    "D2_utc_suffix": {"labels": {"purchase": "event_type = 'purchase'"}},
    "D2w": {"labels": {"purchase": "event_type = 'purchase'"}},
    "H_nested_sessions": {
        "explode": {"event": "events"},
        "item": "event.aid",
        "time": {"column": "event.ts", "unit": "ms"},
        "labels": {"order": "event.type = 'orders'"},
    },
    "G2b": {"transforms": None},
    "J5w": {"transforms": None},
    "PG3_regex_drop_offset": {"transforms": None},
    "J3w": {"time": S},
    "K_day_plus_timeframe": {
        "time": {
            "unit": "ms",
            "column": "extract(epoch from strptime(eventdate, '%Y-%m-%d')) * 1000 + cast(timeframe as bigint)",
        }
    },
    "N2_prefix_rows": HISTORY,
    "N_history_rows": HISTORY,
    "N_history_lists": {
        "files": "log.csv",
        "user": "user_id",
        "item": "item_id",
        **listed("regexp_replace(history_item_id, '[^0-9 ]', '', 'g')"),
    },
    "P2": PER_LINE,
    "P_sequence_per_line": PER_LINE,
    "P3_tab_list_order": LIST,
    "P4_tab_list_order_log": LIST,
    "V1_backslash_escape": {"escape": "\\", "items": {**ITEMS, "escape": "\\"}},
    "V1_minimal": {"escape": "\\", "quote": None},
    "V1e_backslash_pairs": {"escape": "\\"},
    "Z3_dot_f": DOTTED,
    "Z6_percent_3f": DOTTED,
    "E_crlf_quotes": {"quote": None, "items": ITEMS},
    "Y3_lists_unequal": {"explode": {"items": "items", "ts": "ts"}},
}
"""What differs in the new mappings."""
REFUSED = {
    "I_python_literal": "not JSON lines",
    "L4_truncated_gzip": "truncated",
    "V3b_bad_utf8_id": "line 202; set",
    "X1_yaml_words": "write it in quotes",
}
LOST: dict[str, dict[str, int]] = {
    "J2_old_times": {"t: before 1980": 400},
    "J_mixed_units": {"t: before 1980": 200},
    "Z5_comma_f": {"row: 4 columns, not 3": 1200},
    "V10_ragged": {"row: 5 columns, not 4": 2},
    "X4_numbers": {"x: not finite": 132, "x: not a number": 99},
    "V1d_stray_quote": {"row: its quotes": 1},
    "Y3_lists_unequal": {"items: lists of unequal length": 1},
    "L3_header_repeated": {"t: not a number of ms": 1},
    "G4_float_ids": {"i: missing": 1, "u: missing": 1},
    "G5_float_ids_csv": {"i: missing": 1, "u: missing": 1},
    "H_nested_sessions": {"event.aid: missing": 1},
    "Q_null_words": {"u: missing": 20},
}
"""Rejects by the beginning of their reason."""
GONE = {
    "J2_old_times": 400,
    "Z5_comma_f": 1200,
    "V10_ragged": 2,
    "X4_numbers": 231,
    "V1d_stray_quote": 1,
}
GONE["Y3_lists_unequal"] = 28
"""Events that are right and are lost with them."""


@pytest.mark.shared_data
@pytest.mark.skipif(
    not CASES.is_dir(), reason="the logs after bug reports are not there"
)
def test_every_case_beside_the_checkout() -> None:
    """Read each case and compare its events with its truth; `pytest -s` prints a table.

    Cases named d4_* run whole commands and have tests beside the code they are about.
    """
    names = sorted(
        path.name
        for path in CASES.iterdir()
        if path.is_dir() and not path.name.startswith("d4_")
    )
    assert len(names) >= 84
    for name in names:
        source = CASES / name / "src.yaml"
        mapping = (
            yaml.safe_load(source.read_text("utf-8-sig")) if source.exists() else {}
        )
        mapping |= {"prepare": None, "layout": None, **OVER.get(name, {})}
        mapping = {key: value for key, value in mapping.items() if value is not None}
        if name in REFUSED:
            with pytest.raises((UserError, ValueError)) as caught:
                read(CASES / name / "log", mapping)
            assert REFUSED[name] in str(caught.value)
            print(f"| {name} | refused | {str(caught.value).replace(str(CASES), '')} |")
            continue
        events, reasons = read(CASES / name / "log", mapping)
        known = LOST.get(name, {})
        counts = {
            begin: sum(n for reason, n in reasons.items() if reason.startswith(begin))
            for begin in known
        }
        assert (name, counts, sum(reasons.values())) == (
            name,
            known,
            sum(known.values()),
        )
        assert events or name in ("J2_old_times", "Z5_comma_f")
        truth = CASES / name / "truth.parquet"
        if truth.exists():
            right = Counter(pl.read_parquet(truth).select("u", "i", "t").rows())
            assert (name, sum((right - Counter(events)).values())) == (
                name,
                GONE.get(name, 0),
            )
            assert not Counter(events) - right
        read_right = f"{len(events)} events{', as its truth' if truth.exists() and not GONE.get(name) else ''}"
        print(
            f"| {name} | {read_right} | {'; '.join(f'{n} rejects: {why}' for why, n in reasons.items())} |"
        )
