"""Small logs from public bug reports give the right events, or an error of one line that
names the remedy. Formats of times are tested in test_times.py.
"""

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
FIRST_MS = 1_700_000_000_000
MS = {"column": "t", "unit": "ms"}
SECONDS = {"column": "t", "unit": "s"}
ISO = {"column": "t"}


def read_events(
    folder: Path, mapping: dict[str, Any]
) -> tuple[list[tuple], Counter[str]]:
    """Return (user, item, milliseconds) of each event, and the reasons of the rejects."""
    log = parse_log(mapping)
    events: list[tuple] = []
    reasons = Counter[str]()
    for number, file in enumerate(log.event_files(str(folder))):
        for block in log.read_events(str(folder), file, None, None, number):
            rows = pl.DataFrame(block.rows)
            events += rows.select("user_id", "item_id", "timestamp_ms").rows()
            reasons.update(block.rejects["reason"].to_pylist())
    return events, reasons


def format_parquet(int96: bool = False, **columns: Any) -> bytes:
    """Return columns as a Parquet file, with times as int96 if `int96`."""
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, use_deprecated_int96_timestamps=int96)
    return buffer.getvalue()


def join_lines(*lines: str, line_end: str = "\n") -> bytes:
    """Return lines as the bytes of a file."""
    return "".join(line + line_end for line in lines).encode()


def make_csv_log(
    *lines: str, header: str = "u,i,t", line_end: str = "\n"
) -> dict[str, bytes]:
    """Return a log of one CSV file."""
    return {"log.csv": join_lines(header, *lines, line_end=line_end)}


def make_log_of_times(*texts: str) -> dict[str, bytes]:
    """Return a log of user `a` with items `x0`, `x1`, ... at some times."""
    return make_csv_log(*(f'a,x{n},"{text}"' for n, text in enumerate(texts)))


def expect_times(*moments: datetime) -> list[tuple]:
    """Return the events of `make_log_of_times` at some moments in UTC."""
    return [
        ("a", f"x{n}", round(moment.replace(tzinfo=UTC).timestamp() * 1000))
        for n, moment in enumerate(moments)
    ]


def sequence_key(expression: str) -> dict[str, Any]:
    """Return the keys of a mapping that reads sequences of items between spaces."""
    return {"time": None, "sequence": f"string_to_array({expression}, ' ')"}


MOMENTS = (
    datetime(2023, 11, 14, 22, 13, 37, 900_000),
    datetime(2023, 11, 14, 22, 13, 37, 100_000),
)
TWO_EVENTS = [("a", "x", FIRST_MS), ("b", "y", FIRST_MS + 1)]
TWO_LINES = [f"a,x,{FIRST_MS}", f"b,y,{FIRST_MS + 1}"]
NULL_TEXTS = [
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
# A name, the files of a log, keys of its mapping, and its events or its error.
SMALL_LOGS: list[tuple[str, dict[str, bytes], dict[str, Any], list[tuple] | str]] = [
    (
        "unsorted files",
        {
            f"log-{n}.csv": join_lines("u,i,t", f"a,x{n},{FIRST_MS + n}")
            for n in (10, 2)
        },
        {"files": "log-*.csv"},
        [("a", "x10", FIRST_MS + 10), ("a", "x2", FIRST_MS + 2)],
    ),
    (
        "Parquet types",
        {
            "log.parquet": format_parquet(
                u=pa.array(["a"]).dictionary_encode(),
                i=["x0"],
                t=pa.array([MOMENTS[0]], pa.timestamp("ns", "America/New_York")),
            )
        },
        {"time": ISO},
        expect_times(MOMENTS[0]),
    ),
    (
        "int96",
        {
            "log.parquet": format_parquet(
                True, u=["a"], i=["x0"], t=pa.array([MOMENTS[0]], pa.timestamp("ns"))
            )
        },
        {"time": ISO},
        expect_times(MOMENTS[0]),
    ),
    (
        "hive",
        {
            f"type={name}/p.parquet": format_parquet(u=["a"], i=["x"], t=[FIRST_MS])
            for name in ("buy", "view")
        },
        {"files": "*/*.parquet", "item": "i || type"},
        [("a", "xbuy", FIRST_MS), ("a", "xview", FIRST_MS)],
    ),
    (
        "local zone",
        make_log_of_times("2023-10-29 02:30:00", "2023-10-29 03:10:00"),
        {"time": {**ISO, "zone": "Europe/Berlin"}},
        expect_times(datetime(2023, 10, 29, 0, 30), datetime(2023, 10, 29, 2, 10)),
    ),
    (
        "CRLF in quotes",
        {
            "log.csv": b'\xef\xbb\xbfu,i,t,c\r\na,x,%d,"one\r\ntwo, ""2"""\r\nb,y,%d,\r\n'
            % (FIRST_MS, FIRST_MS + 1)
        },
        {},
        TWO_EVENTS,
    ),
    (
        "big JSON ids",
        {
            "log.jsonl": join_lines(
                *(
                    json.dumps({"u": 2**64 - n, "i": 2**63 - n, "t": FIRST_MS})
                    for n in (1, 2)
                )
            )
        },
        {},
        [(str(2**64 - n), str(2**63 - n), FIRST_MS) for n in (1, 2)],
    ),
    (
        "decimal ids",
        {
            "log.parquet": format_parquet(
                u=pa.array([2**64 - 1], pa.uint64()),
                i=pa.array([Decimal(2**63 + 1)], pa.decimal128(20, 0)),
                t=[FIRST_MS],
            )
        },
        {},
        [(str(2**64 - 1), str(2**63 + 1), FIRST_MS)],
    ),
    (
        "binary and float ids",
        {"log.parquet": format_parquet(u=[b"\xc3\xa4"], i=[12.0], t=[FIRST_MS])},
        {},
        [("ä", "12", FIRST_MS)],
    ),
    (
        "float ids of CSV",
        {
            "a.csv": join_lines("u,i,t", f"1.0,12,{FIRST_MS}"),
            "b.csv": join_lines("u,i,t", f"1,12.0,{FIRST_MS}"),
        },
        {"files": "*.csv"},
        [("1", "12", FIRST_MS)] * 2,
    ),
    (
        "nested sessions",
        {
            "log.jsonl": join_lines(
                json.dumps(
                    {
                        "u": 18,
                        "e": [{"aid": 3, "t": FIRST_MS}, {"aid": 4, "t": FIRST_MS + 1}],
                    }
                )
            )
        },
        {"explode": {"e": "e"}, "item": "e.aid", "time": {**MS, "column": "e.t"}},
        [("18", "3", FIRST_MS), ("18", "4", FIRST_MS + 1)],
    ),
    ("old times", make_csv_log("a,x,-299992955200"), {}, []),
    (
        "float seconds",
        make_csv_log("a,x,1700000000.612", "b,y,1700000001.0"),
        {"time": SECONDS},
        [("a", "x", FIRST_MS + 612), ("b", "y", FIRST_MS + 1000)],
    ),
    (
        "mixed units",
        make_csv_log("a,x,1700000000", f"b,y,{FIRST_MS + 1}"),
        {},
        TWO_EVENTS[1:],
    ),
    (
        "day and timeframe",
        make_csv_log("a;x;100;2023-11-14", header="u;i;t;d"),
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
        {
            "p-1": join_lines("u,i,t", TWO_LINES[0]),
            "p-2": join_lines("t,x,i,u", f"{FIRST_MS + 1},,y,b"),
        },
        {"files": "p-*", "format": "csv"},
        TWO_EVENTS,
    ),
    (
        "a repeated header",
        make_csv_log(TWO_LINES[0], "u,i,t", TWO_LINES[1]),
        {},
        TWO_EVENTS,
    ),
    (
        "history rows",
        make_csv_log("a,x y,z", line_end="\r\n", header="u,h,i"),
        sequence_key("h"),
        [("a", "x", 0), ("a", "y", 1), ("a", "z", 2)],
    ),
    (
        "a history as a Python list",
        make_csv_log("a,\"['x', 'y']\",z", header="u,h,i"),
        sequence_key("regexp_replace(h, '[^0-9a-z ]', '', 'g')"),
        [("a", "x", 0), ("a", "y", 1), ("a", "z", 2)],
    ),
    (
        "a sequence per line",
        {"log.txt": b"u0 07 18 07\nu1 18\n"},
        {
            "format": "lines",
            "item": None,
            "user": "split_part(line, ' ', 1)",
            **sequence_key("regexp_replace(line, '^\\S+\\s*', '')"),
        },
        [("u0", "07", 0), ("u0", "18", 1), ("u0", "07", 2), ("u1", "18", 0)],
    ),
    (
        "a list after a tab",
        {"log.tsv": b"u\ts\na\tx x y\n"},
        {**sequence_key("s"), "item": None},
        [("a", "x", 0), ("a", "x", 1), ("a", "y", 2)],
    ),
    (
        "words for missing values",
        make_csv_log(*(f"{w},x,{FIRST_MS}" for w in NULL_TEXTS), *TWO_LINES),
        {},
        TWO_EVENTS,
    ),
    (
        "ragged rows",
        make_csv_log(TWO_LINES[0], f"a,x, b,{FIRST_MS}", "a,x", TWO_LINES[1]),
        {},
        TWO_EVENTS,
    ),
    (
        "backslashes",
        make_csv_log(*(f'{line},"7\\""' for line in TWO_LINES), header="u,i,t,n"),
        {"escape": "\\"},
        TWO_EVENTS,
    ),
    (
        "backslashes before pairs",
        make_csv_log(
            *(f'{x},"say \\"hi\\", \\\\"' for x in TWO_LINES), header="u,i,t,n"
        ),
        {"escape": "\\"},
        TWO_EVENTS,
    ),
    (
        "MySQL's mark of missing values",
        {"log.tsv": b"u\ti\tt\n\\N\tx\t%d\nC:\\new\ty\t%d\n" % (FIRST_MS, FIRST_MS)},
        {"escape": "\\", "quote": ""},
        [("C:\\new", "y", FIRST_MS)],
    ),
    (
        "a stray quote beside escapes",
        make_csv_log(
            '"a, q,5,aa', *(f'{x},"e b"' for x in TWO_LINES), header="u,i,t,n"
        ),
        {"escape": "\\"},
        TWO_EVENTS,
    ),
    (
        "text where other rows have objects",
        {
            "log.jsonl": join_lines(
                *(
                    json.dumps({"e": {"u": u, "i": i}, "t": t})
                    for u, i, t in TWO_EVENTS
                ),
                json.dumps({"e": "text", "t": FIRST_MS}),
            )
        },
        {"user": "e.u", "item": "e.i"},
        TWO_EVENTS,
    ),
    (
        "two colons within quotes",
        {"log.csv": b'u::i::t\na::"x::y"::%d\n' % FIRST_MS},
        {"delimiter": "::"},
        [("a", "x::y", FIRST_MS)],
    ),
    (
        "a stray quote",
        make_csv_log(
            f'a,q,{FIRST_MS},"open',
            *(f'{x},"a, b"' for x in TWO_LINES),
            header="u,i,t,n",
        ),
        {},
        TWO_EVENTS,
    ),
    (
        "lone surrogates in JSON",
        {
            "log.jsonl": join_lines(
                *(
                    json.dumps({"u": u, "i": i, "t": t, "n": "\ud83d\0"})
                    for u, i, t in TWO_EVENTS
                )
            )
        },
        {},
        TWO_EVENTS,
    ),
    (
        "an id that is not UTF-8",
        {"log.csv": b"u,i,t\ncaf\xe9,x,%d\n" % FIRST_MS},
        {},
        "not utf-8 in line 2; set 'encoding'",
    ),
    (
        "not UTF-8 elsewhere",
        {"log.csv": b"u,i,t,n\n%s,caf\xe9\n" % TWO_LINES[0].encode()},
        {},
        TWO_EVENTS[:1],
    ),
    (
        "columns of one name",
        make_csv_log(*(f"{x},WRONG" for x in TWO_LINES), header="u,i,t,i"),
        {},
        TWO_EVENTS,
    ),
    (
        "an index and a last comma",
        make_csv_log(*(f"0,{x}," for x in TWO_LINES), header=",u,i,t,"),
        {},
        TWO_EVENTS,
    ),
    (
        "an uncompressed file named gz",
        {"log.csv.gz": join_lines("u,i,t", *TWO_LINES)},
        {},
        TWO_EVENTS,
    ),
    (
        "unicode ids",
        make_csv_log(f"\u00a0cafe\u0301\u200b,x,{FIRST_MS}"),
        {},
        [("café", "x", FIRST_MS)],
    ),
    (
        "numbers of JSON",
        {
            "log.jsonl": join_lines(
                *(
                    f'{{"u": "a", "i": {i}, "t": {FIRST_MS}}}'
                    for i in ("1", "1.0", '"1"')
                )
            )
        },
        {},
        [("a", "1", FIRST_MS)] * 3,
    ),
    (
        "a suffix in capitals",
        {"LOG.CSV": join_lines("u,i,t", *TWO_LINES, line_end="\r\n")},
        {"files": "*.CSV"},
        TWO_EVENTS,
    ),
    (
        "words of YAML",
        make_csv_log(*TWO_LINES, header="no,i,t"),
        {"user": False},
        "write it in quotes",
    ),
    (
        "numbers",
        make_csv_log(
            f"{TWO_LINES[0]}, 1e5 ",
            f"{TWO_LINES[1]},+5",
            f"c,z,{FIRST_MS},inf",
            f'c,z,{FIRST_MS},"12,5"',
            header="u,i,t,n",
        ),
        {"numbers": ["n"]},
        TWO_EVENTS,
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
        TWO_EVENTS[:1],
    ),
    (
        "unequal lists",
        {
            "log.parquet": format_parquet(
                u=["a", "b"], i=[["x"], ["y", "z"]], t=[[FIRST_MS], [FIRST_MS]]
            )
        },
        {"explode": {"i": "i", "t": "t"}},
        TWO_EVENTS[:1],
    ),
    (
        "decimals of seconds",
        make_log_of_times("14.11.2023 22:13:37.900", "14.11.2023 22:13:37.1"),
        {"time": {"column": "t", "format": "%d.%m.%Y %H:%M:%S.%f"}},
        expect_times(*MOMENTS),
    ),
    (
        "decimals after a comma",
        make_log_of_times("14.11.2023 22:13:37,900000", "14.11.2023 22:13:37,100"),
        {"time": {"column": "t", "format": "%d.%m.%Y %H:%M:%S,%f"}},
        expect_times(*MOMENTS),
    ),
    (
        "a format code of Rust",
        make_log_of_times("x"),
        {"time": {"column": "t", "format": "%Y-%m-%d %H:%M:%S%.f"}},
        "use .%f for decimals of seconds",
    ),
]


@pytest.mark.parametrize(
    ("name", "files", "keys", "expected"),
    SMALL_LOGS,
    ids=[log[0] for log in SMALL_LOGS],
)
def test_a_small_log_gives_its_events_or_an_error_in_one_line(
    tmp_path: Path,
    name: str,
    files: dict[str, bytes],
    keys: dict[str, Any],
    expected: list[tuple] | str,
) -> None:
    for file, content in files.items():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    mapping = {"files": "log.*", "user": "u", "item": "i", "time": MS, **keys}
    mapping = drop_unset_keys(mapping)

    if isinstance(expected, str):
        with pytest.raises((UserError, ValueError)) as caught:
            read_events(tmp_path, mapping)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        events, _ = read_events(tmp_path, mapping)
        assert events == expected


def drop_unset_keys(mapping: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping less its keys that are None."""
    return {key: value for key, value in mapping.items() if value is not None}


HISTORY_COLUMN = {"history": None, **sequence_key("history")}
LIST_COLUMN = {"explode": None, "item": None, **sequence_key("items")}
SEQUENCE_PER_LINE = {
    "transforms": None,
    "format": "lines",
    "delimiter": None,
    "header": None,
    "explode": None,
    "item": None,
    "user": "split_part(line, ' ', 1)",
    **sequence_key("regexp_replace(line, '^\\S+\\s*', '')"),
}
ITEMS = {"files": "items.csv", "item": "id", "texts": ["title", "brand"]}
GERMAN_TIMES = {"time": {"column": "t", "format": "%d.%m.%Y %H:%M:%S.%f"}}
CHANGED_KEYS: dict[str, dict[str, Any]] = {
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
    "J3w": {"time": SECONDS},
    "K_day_plus_timeframe": {
        "time": {
            "unit": "ms",
            "column": "extract(epoch from strptime(eventdate, '%Y-%m-%d')) * 1000 + cast(timeframe as bigint)",
        }
    },
    "N2_prefix_rows": HISTORY_COLUMN,
    "N_history_rows": HISTORY_COLUMN,
    "N_history_lists": {
        "files": "log.csv",
        "user": "user_id",
        "item": "item_id",
        **sequence_key("regexp_replace(history_item_id, '[^0-9 ]', '', 'g')"),
    },
    "P2": SEQUENCE_PER_LINE,
    "P_sequence_per_line": SEQUENCE_PER_LINE,
    "P3_tab_list_order": LIST_COLUMN,
    "P4_tab_list_order_log": LIST_COLUMN,
    "V1_backslash_escape": {"escape": "\\", "items": {**ITEMS, "escape": "\\"}},
    "V1_minimal": {"escape": "\\", "quote": None},
    "V1e_backslash_pairs": {"escape": "\\"},
    "Z3_dot_f": GERMAN_TIMES,
    "Z6_percent_3f": GERMAN_TIMES,
    "E_crlf_quotes": {"quote": None, "items": ITEMS},
    "Y3_lists_unequal": {"explode": {"items": "items", "ts": "ts"}},
}
"""Changes of the reported mappings to today's keys; None removes a key."""
ERRORS = {
    "I_python_literal": "not JSON lines",
    "L4_truncated_gzip": "truncated",
    "V3b_bad_utf8_id": "line 202; set",
    "X1_yaml_words": "write it in quotes",
}
REJECTS: dict[str, dict[str, int]] = {
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
"""Number of rejects by the beginning of their reason, where there are any."""
LOST_EVENTS = {
    "J2_old_times": 400,
    "Z5_comma_f": 1200,
    "V10_ragged": 2,
    "X4_numbers": 231,
    "V1d_stray_quote": 1,
    "Y3_lists_unequal": 28,
}
"""Number of true events that are lost with the rejects."""
WITHOUT_EVENTS = ("J2_old_times", "Z5_comma_f")


@pytest.mark.shared_data
def test_every_reported_log_gives_its_true_events_or_its_error() -> None:
    """Read each log beside the checkout; `pytest -s` prints a table.

    Logs named d4_* run whole commands and are tested in test_command_cases.py and
    test_suggest_doubts.py.
    """
    names = [path.name for path in sorted(CASES.iterdir()) if path.is_dir()]
    names = [name for name in names if not name.startswith("d4_")]
    assert len(names) >= 84
    for name in names:
        folder, mapping = CASES / name / "log", load_case_mapping(name)
        if name in ERRORS:
            with pytest.raises((UserError, ValueError)) as caught:
                read_events(folder, mapping)
            assert ERRORS[name] in str(caught.value)
            print(f"| {name} | refused | {str(caught.value).replace(str(CASES), '')} |")
        else:
            events, reasons = read_events(folder, mapping)
            check_rejects(name, reasons)
            assert events or name in WITHOUT_EVENTS, name
            check_true_events(name, events)
            counts = [f"{count} rejects: {reason}" for reason, count in reasons.items()]
            print(f"| {name} | {len(events)} events | {'; '.join(counts)} |")


def load_case_mapping(name: str) -> dict[str, Any]:
    """Load the mapping of a reported log with its changes to today's keys."""
    path = CASES / name / "src.yaml"
    mapping = yaml.safe_load(path.read_text("utf-8-sig")) if path.exists() else {}
    mapping |= {"prepare": None, "layout": None, **CHANGED_KEYS.get(name, {})}
    return drop_unset_keys(mapping)


def check_rejects(name: str, reasons: Counter[str]) -> None:
    """Check the number of rejects by reason, and that there are no others."""
    expected = REJECTS.get(name, {})
    counts = dict.fromkeys(expected, 0)
    for reason, count in reasons.items():
        for start in expected:
            if reason.startswith(start):
                counts[start] += count
    assert counts == expected, name
    assert sum(reasons.values()) == sum(expected.values()), name


def check_true_events(name: str, events: list[tuple]) -> None:
    """Compare events with the true ones, if they are recorded for the log."""
    path = CASES / name / "truth.parquet"
    if not path.exists():
        return
    truth = Counter(pl.read_parquet(path).select("u", "i", "t").rows())
    missing, false = truth - Counter(events), Counter(events) - truth
    assert sum(missing.values()) == LOST_EVENTS.get(name, 0), name
    assert not false, name
